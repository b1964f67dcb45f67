"""What a model asks for when a request does not say: ``generation_config.json``.

Needs the standard library only. Used by the server (lesson 10).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["GenerationConfig"]


@dataclass(frozen=True)
class GenerationConfig:
    """Defaults of a model. Greedy, unless its ``generation_config.json`` says otherwise.

    vLLM takes these defaults from the same file, but falls back to a temperature of 1. A lab wants
    answers that repeat, so the fallback here is 0.

    Parameters
    ----------
    eos_token_ids
        Tokens that end an answer; the first is the model's own end token.
    temperature, top_p
        Used by requests that leave them out.

    Examples
    --------
    >>> GenerationConfig.from_dict({"eos_token_id": [1, 7], "temperature": 0.6})
    GenerationConfig(eos_token_ids=(1, 7), temperature=0.6, top_p=1.0)
    """

    eos_token_ids: tuple[int, ...] = ()
    temperature: float = 0.0
    top_p: float = 1.0

    @classmethod
    def from_dict(
        cls, body: dict[str, Any], *, eos_token_id: int | None = None
    ) -> GenerationConfig:
        """Read the content of the file; ``eos_token_id`` counts when the file names none.

        Raises
        ------
        ValueError
            If a value is of the wrong kind or out of range.
        """
        eos = body.get("eos_token_id", eos_token_id)
        eos_ids = () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
        if not all(type(token_id) is int and token_id >= 0 for token_id in eos_ids):
            raise ValueError(f"eos_token_id must be a token id or a list of them, got {eos!r}")
        # Greedy decoding is written as do_sample=false; the temperature then has no meaning.
        sampled = body.get("do_sample", True)
        temperature = _number(body, "temperature", 0.0) if sampled else 0.0
        top_p = _number(body, "top_p", 1.0) if sampled else 1.0
        if temperature < 0:
            raise ValueError(f"temperature must be at least 0, got {temperature}")
        if not 0 < top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], got {top_p}")
        return cls(eos_ids, temperature, top_p)

    @classmethod
    def load(cls, folder: str | Path, *, eos_token_id: int | None = None) -> GenerationConfig:
        """Read ``generation_config.json`` of a model folder; without one the defaults hold.

        Raises
        ------
        ValueError
            If the file is not JSON or holds what :meth:`from_dict` refuses.
        """
        file = Path(folder) / "generation_config.json"
        if not file.is_file():
            return cls.from_dict({}, eos_token_id=eos_token_id)
        try:
            body = json.loads(file.read_text(encoding="utf-8"))
            if not isinstance(body, dict):
                raise ValueError("expected a JSON object")
            return cls.from_dict(body, eos_token_id=eos_token_id)
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error


def _number(body: dict[str, Any], name: str, default: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} must be a number, got {value!r}")
    return float(value)

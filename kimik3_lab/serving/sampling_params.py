"""How output tokens are chosen, and when a request ends.

Needs the standard library only. Lesson 10 sends these with each request. Names are vLLM's, see
``vllm/sampling_params.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["SamplingParams", "checked_token_ids"]


@dataclass(frozen=True)
class SamplingParams:
    """How output tokens are chosen and when a request ends.

    Parameters
    ----------
    max_tokens : int
        Most output tokens, at least 1.
    temperature : float
        0 takes the most probable token; otherwise logits are divided by it.
    top_p : float
        In (0, 1]: only the smallest set of tokens with at least this probability is drawn from.
    seed : int or None
        Makes the draws repeatable, whatever else is in the batch. In [0, 2**63).
    ignore_eos : bool
        Go on after the end-of-sequence token, for benchmarks of a fixed length.
    stop_token_ids : sequence of int
        Further tokens that end the request; the token itself is kept in the output.

    Raises
    ------
    ValueError
        If a value is out of range.

    Examples
    --------
    >>> SamplingParams(max_tokens=4).greedy
    True
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    ignore_eos: bool = False
    stop_token_ids: Sequence[int] = ()

    def __post_init__(self) -> None:
        if type(self.max_tokens) is not int or self.max_tokens < 1:
            raise ValueError(f"max_tokens must be an integer of at least 1, got {self.max_tokens}")
        if not (math.isfinite(self.temperature) and self.temperature >= 0.0):
            raise ValueError(
                f"temperature must be a number of at least 0 (0 is greedy), got {self.temperature}"
            )
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must lie in (0, 1], got {self.top_p}")
        if self.seed is not None and (type(self.seed) is not int or not 0 <= self.seed < 2**63):
            raise ValueError(f"seed must be None or an integer in [0, 2**63), got {self.seed!r}")
        object.__setattr__(
            self, "stop_token_ids", checked_token_ids("stop_token_ids", self.stop_token_ids)
        )

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is taken and nothing is drawn."""
        return self.temperature == 0.0


def checked_token_ids(name: str, ids: Iterable[int]) -> tuple[int, ...]:
    """Return ``ids`` as a tuple, refusing what cannot be a token id."""
    ids = tuple(ids)
    for token_id in ids:
        if type(token_id) is not int or token_id < 0:
            raise ValueError(f"{name} must be non-negative integers, got {token_id!r}")
    return ids

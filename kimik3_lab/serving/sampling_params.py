"""How output tokens are chosen, and when a request ends.

Needs the standard library only. Lesson 10 sends these with each request. Names are vLLM's, see
``vllm/sampling_params.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kimik3_lab.serving.knobs import require_number

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
    top_k : int
        Only the ``top_k`` most probable tokens are drawn from; 0 for all.
    min_p : float
        In [0, 1]: tokens less probable than ``min_p`` times the most probable one are not drawn.
    logprobs : int or None
        Report the logarithm of each output token's probability, and this many of the most probable
        tokens beside it; 0 for the token alone, None for no report.

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
    top_k: int = 0
    min_p: float = 0.0
    logprobs: int | None = None

    def __post_init__(self) -> None:
        if type(self.max_tokens) is not int or self.max_tokens < 1:
            raise ValueError(f"max_tokens must be an integer of at least 1, got {self.max_tokens}")
        for name in ("temperature", "top_p", "min_p"):
            require_number(name, getattr(self, name))
        if self.temperature < 0.0:
            raise ValueError(
                f"temperature must be a number of at least 0 (0 is greedy), got {self.temperature}"
            )
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must lie in (0, 1], got {self.top_p}")
        if self.seed is not None and (type(self.seed) is not int or not 0 <= self.seed < 2**63):
            raise ValueError(f"seed must be None or an integer in [0, 2**63), got {self.seed!r}")
        if type(self.top_k) is not int or self.top_k < 0:
            raise ValueError(f"top_k must be a positive integer, or 0 for all, got {self.top_k!r}")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p must lie in [0, 1], got {self.min_p}")
        if self.logprobs is not None and (type(self.logprobs) is not int or self.logprobs < 0):
            raise ValueError(
                f"logprobs must be None or the number of top tokens to report, got "
                f"{self.logprobs!r}"
            )
        object.__setattr__(
            self, "stop_token_ids", checked_token_ids("stop_token_ids", self.stop_token_ids)
        )

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is taken and nothing is drawn."""
        return self.temperature == 0.0


def checked_token_ids(name: str, ids: Iterable[int]) -> tuple[int, ...]:
    """Return ``ids`` as a tuple, refusing what cannot be a token id."""
    if isinstance(ids, str) or not isinstance(ids, Iterable):
        raise ValueError(f"{name} must be a sequence of token ids, got {ids!r}")
    ids = tuple(ids)
    # A prompt may have a million tokens: look at all of them in one go, and for the bad one later.
    if ids and (set(map(type, ids)) != {int} or min(ids) < 0):
        bad = next(i for i in ids if type(i) is not int or i < 0)
        raise ValueError(f"{name} must be non-negative integers, got {bad!r}")
    return ids

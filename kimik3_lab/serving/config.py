"""The knobs of the scheduler and of the cache, checked when they are set.

Needs the standard library only. Lessons 07 to 10 turn these knobs. Names are vLLM's, see
``vllm/config/scheduler.py`` and ``vllm/config/cache.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

__all__ = ["Batching", "CacheConfig", "SchedulerConfig"]

Batching = Literal["continuous", "static"]


def _require_at_least(least: int, name: str, value: int, why: str) -> None:
    """Refuse a knob that is no integer or too small, naming the knob."""
    if type(value) is not int:
        raise ValueError(f"{name} must be an integer, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}: {why}")


@dataclass(frozen=True)
class SchedulerConfig:
    """What one engine step may hold.

    Parameters
    ----------
    max_num_seqs : int
        Most requests in the running list; also the number of KDA state slots an executor needs.
    max_num_batched_tokens : int
        Token budget of one step. A prompt that does not fit is cut (chunked prefill). vLLM refuses
        a budget below ``max_num_seqs``; here it is allowed, so that a lesson can show what
        happens: the requests at the end of the running list wait.
    max_model_len : int
        Most tokens of one request, prompt and output together.
    batching : {"continuous", "static"}
        ``"continuous"`` fills a free seat in the next step, as vLLM does. ``"static"`` is the
        contrast: a batch is drawn only when nothing runs, and nobody joins before all of it ended.
    long_prefill_token_threshold : int
        Most prompt tokens that one request may take of a step; 0 means no such limit. The rule is
        that of vLLM 0.27.1, which also applies it to a request that is alone.

    Raises
    ------
    ValueError
        If a knob cannot work; the message names it.

    Examples
    --------
    >>> SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=512, max_model_len=2048).batching
    'continuous'
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    batching: Batching = "continuous"
    long_prefill_token_threshold: int = 0

    def __post_init__(self) -> None:
        for least, name, why in (
            (1, "max_num_seqs", "it is the number of requests that may run together"),
            (1, "max_num_batched_tokens", "it is the token budget of a step, and a step needs one"),
            (2, "max_model_len", "a request needs one prompt token and one output token"),
            (0, "long_prefill_token_threshold", "0 switches it off"),
        ):
            _require_at_least(least, name, getattr(self, name), why)
        if self.batching not in get_args(Batching):
            raise ValueError(
                f"batching must be one of {', '.join(get_args(Batching))}, got {self.batching!r}"
            )


@dataclass(frozen=True)
class CacheConfig:
    """The memory for the cache, counted in blocks.

    Parameters
    ----------
    num_blocks : int
        Blocks in the pool. Block 0 is the null block, so ``num_blocks - 1`` can hold tokens.
    block_size : int
        Tokens that a block holds.

    Raises
    ------
    ValueError
        If a knob cannot work; the message names it.

    Examples
    --------
    >>> CacheConfig(num_blocks=65).num_usable_tokens
    1024
    """

    num_blocks: int
    block_size: int = 16

    def __post_init__(self) -> None:
        _require_at_least(
            2, "num_blocks", self.num_blocks, "block 0 is the null block and holds no tokens"
        )
        _require_at_least(1, "block_size", self.block_size, "it is the tokens that a block holds")

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that can hold tokens: all but the null block."""
        return self.num_blocks - 1

    @property
    def num_usable_tokens(self) -> int:
        """Tokens that fit when every block is full."""
        return self.num_usable_blocks * self.block_size

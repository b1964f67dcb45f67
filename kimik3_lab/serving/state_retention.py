"""Which KDA states are worth a hash, so that somebody may start from them later.

Needs the standard library only. Lesson 07 thins them out. vLLM decides this in
``MambaManager.reachable_block_mask`` and ``_cache_partial_tail_block``.

A state takes a whole block and serves one prefix only, so keeping all of them drives everything
else out of the cache. Worth keeping are those where a request with the same prompt would resume,
those where another sequence was seen to leave the prefix, and, as an insurance, one every so often.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kimik3_lab.serving.cache_config import CacheConfig
from kimik3_lab.serving.prefill_checkpoint import (
    get_mamba_prefill_checkpoint_position,
    round_down,
)
from kimik3_lab.serving.request import Request

__all__ = ["StateRetention"]


@dataclass(frozen=True, slots=True)
class StateRetention:
    """The rules of a cache configuration.

    Parameters
    ----------
    config : CacheConfig
        In "align" mode.
    drops_eagle_block : bool
        Whether the drafter has the last block of a hit computed anew.
    keeps_junctions : bool
        Whether the state at a junction inside a block is kept.

    Examples
    --------
    >>> config = CacheConfig(99, 16, num_kda_groups=1, enable_prefix_caching=True,
    ...                      retention_interval=64)
    >>> sorted(StateRetention(config).columns(0, 12, [150]))  # every fourth, and 144 tokens
    [3, 7, 8, 11]
    """

    config: CacheConfig
    drops_eagle_block: bool = False
    keeps_junctions: bool = False

    def columns(self, first: int, stop: int, boundaries: Iterable[int]) -> set[int] | None:
        """Columns of ``range(first, stop)`` whose state gets its hash; None for all of them.

        ``boundaries`` are places where a later request can resume.
        """
        interval, size = self.config.retention_interval, self.config.block_size
        if interval is None or (interval and interval // size <= 1):
            return None
        keep: set[int] = set()
        if interval:
            stride = interval // size
            keep.update(range(first + (stride - 1 - first) % stride, stop, stride))
        exact = self.config.exact_prompt_boundaries
        alignment = self.config.hit_alignment if exact else self.config.scheduler_block_size
        keep.update(round_down(boundary, alignment) // size - 1 for boundary in boundaries)
        return keep & set(range(first, stop))

    def keeps_checkpoint(self, request: Request, position: int) -> bool:
        """Whether the state that a chunk exports at ``position`` gets a hash (#56794)."""
        at_prompt_end = position == get_mamba_prefill_checkpoint_position(
            request.num_prompt_tokens, self.config.hit_alignment, self.drops_eagle_block
        )
        if at_prompt_end or position == request.shared_prefix_boundary:
            return True
        column, rest = divmod(position, self.config.block_size)
        return rest == 0 and self.columns(column - 1, column, ()) != set()

    def keeps_chunk_end(self, request: Request, num_tokens: int) -> bool:
        """Whether the state after ``num_tokens`` tokens, where a chunk ends, is a prompt's last."""
        unit, prompt = self.config.hash_block_size, request.num_prompt_tokens
        exact = self.config.exact_prompt_boundaries
        if num_tokens <= 0 or num_tokens % unit:
            return False
        if not exact:
            return num_tokens % self.config.block_size != 0 and num_tokens == prompt - prompt % unit
        drops = self.drops_eagle_block
        if num_tokens == get_mamba_prefill_checkpoint_position(prompt, unit, drops):
            return True
        # Only while the prompt is computed: later on, the running state is not yet what its hash
        # would promise.
        return (
            self.keeps_junctions
            and num_tokens == request.shared_prefix_boundary
            and request.num_computed_tokens < num_tokens <= prompt
        )

"""What the blocks of a cache are filled with.

Needs the standard library only. Lesson 07 plots it over a run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kimik3_lab.serving.kv_cache_manager import KVCacheManager
from kimik3_lab.serving.request import Request

__all__ = ["FragmentationStats", "measure_fragmentation"]


@dataclass(frozen=True, slots=True)
class FragmentationStats:
    """What the blocks that requests hold are filled with, at one moment.

    Attributes
    ----------
    num_blocks : int
        Blocks that can hold something, held or not.
    num_held : int
        Blocks that requests hold; a shared one counts once.
    num_attention_slots, num_filled_slots : int
        Places for rows in the held attention blocks, and those that have a row.
    num_states, num_scratch_states : int
        State blocks: those of a prefix, and those that drafts write. A shared one counts for each
        request.
    num_cached_free : int
        Blocks that nobody holds and that can still be found.
    """

    num_blocks: int
    num_held: int
    num_attention_slots: int
    num_filled_slots: int
    num_states: int
    num_scratch_states: int
    num_cached_free: int

    @property
    def internal_fragmentation(self) -> float:
        """Share of the places in held attention blocks that hold no row, in [0, 1]."""
        if not self.num_attention_slots:
            return 0.0
        return 1.0 - self.num_filled_slots / self.num_attention_slots


def measure_fragmentation(
    manager: KVCacheManager, running: Iterable[Request]
) -> FragmentationStats:
    """Count what the blocks are filled with that ``running`` requests hold.

    Rows of tokens in flight count as filled. Linear in the blocks of the pool.

    Examples
    --------
    >>> from kimik3_lab.serving.cache_config import CacheConfig
    >>> manager, request = KVCacheManager(CacheConfig(num_blocks=9)), Request("a", [5] * 20)
    >>> _ = manager.allocate_slots(request, 20)
    >>> request.num_computed_tokens = 20
    >>> measure_fragmentation(manager, [request]).internal_fragmentation  # 20 of 32 places
    0.375
    """
    scratch = num_states = 0
    rows: dict[int, int] = {}  # by block id; the fullest request of a shared block counts
    for request in running:
        for attention in manager.coordinator.attention:
            size = attention.block_size
            for index, block in enumerate(attention.req_to_blocks.get(request.request_id, ())):
                filled = max(min(request.num_computed_tokens - index * size, size), 0)
                rows[block.block_id] = max(rows.get(block.block_id, 0), filled)
        for states in manager.coordinator.states:
            held = states.req_to_blocks.get(request.request_id, ())
            num_held = sum(not block.is_null for block in held)
            num_scratch = min(states.num_speculative_blocks, num_held)
            scratch += num_scratch
            num_states += num_held - num_scratch
    usable, pool = manager.config.num_usable_blocks, manager.block_pool
    return FragmentationStats(
        num_blocks=usable,
        num_held=usable - pool.get_num_free_blocks(),
        num_attention_slots=len(rows) * manager.config.scheduler_block_size,
        num_filled_slots=sum(rows.values()),
        num_states=num_states,
        num_scratch_states=scratch,
        num_cached_free=pool.num_cached_free_blocks,
    )

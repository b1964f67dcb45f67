"""One cache out of several groups: a hit is what all of them agree on.

Needs the standard library only. Lesson 07 reconciles two groups by hand. Names are vLLM's, see
``vllm/v1/core/kv_cache_coordinator.py``.
"""

from __future__ import annotations

from typing import NamedTuple

from kimik3_lab.serving.aligned_mamba_manager import AlignedMambaManager
from kimik3_lab.serving.block_pool import BlockPool, KVCacheBlock
from kimik3_lab.serving.cache_config import CacheConfig
from kimik3_lab.serving.mamba_manager import MambaManager
from kimik3_lab.serving.prefill_checkpoint import cdiv, replay_boundaries, round_down
from kimik3_lab.serving.request import Request
from kimik3_lab.serving.single_type_manager import FullAttentionManager, SingleTypeKVCacheManager

__all__ = ["CacheHit", "KVCacheCoordinator"]


class CacheHit(NamedTuple):
    """What was found for a request.

    ``blocks`` has a list for each group; ``num_tokens`` is the prefix that all groups have;
    ``longest`` is what the attention groups alone would have given.
    """

    blocks: tuple[list[KVCacheBlock], ...]
    num_tokens: int
    longest: int

    @property
    def shared_prefix_boundary(self) -> int:
        """Where a KDA state would have been of use: the end of a longer prefix that is shared."""
        return self.longest if self.longest > self.num_tokens else 0


class KVCacheCoordinator:
    """The groups of one cache (``HybridKVCacheCoordinator`` and its kin).

    Parameters
    ----------
    config : CacheConfig
        Groups and rules.
    block_pool : BlockPool
        Where all blocks come from.
    num_speculative_blocks : int
        Scratch states of a request in each state group.
    drops_eagle_block : bool
        Whether the drafter has the last block of a hit computed anew.
    keeps_junctions : bool
        Whether the state at a junction inside a block is kept.
    """

    def __init__(
        self,
        config: CacheConfig,
        block_pool: BlockPool,
        *,
        num_speculative_blocks: int = 0,
        drops_eagle_block: bool = False,
        keeps_junctions: bool = False,
    ) -> None:
        self.config = config
        self.drops_eagle_block = drops_eagle_block
        size, attention = config.scheduler_block_size, range(config.num_attention_groups)
        self.attention = [
            FullAttentionManager(config, block_pool, i, size, drops_eagle_block=drops_eagle_block)
            for i in attention
        ]
        self.states: list[MambaManager] = [
            AlignedMambaManager(
                config,
                block_pool,
                i,
                num_speculative_blocks=num_speculative_blocks,
                drops_eagle_block=drops_eagle_block,
                keeps_junctions=keeps_junctions,
            )
            if config.mamba_cache_mode == "align"
            else MambaManager(config, block_pool, i, num_speculative_blocks=num_speculative_blocks)
            for i in range(len(attention), config.num_groups)
        ]
        self.managers: list[SingleTypeKVCacheManager] = [*self.attention, *self.states]

    def find_longest_cache_hit(self, request: Request, max_length: int) -> CacheHit:
        """Find the longest prefix of at most ``max_length`` tokens that every group has.

        Attention first: whatever is shorter than its hit is a hit too. Then the state groups may
        only go down to a place where a state was kept. An EAGLE drafter lets attention look one
        unit further, because it drops that unit again; states get no such margin.
        """
        hashes, limit = request.block_hashes, max_length
        if self.drops_eagle_block and len(self.managers) > 1:
            known = len(hashes) * self.config.hash_block_size
            limit += self.config.hit_alignment
            limit = min(limit, known if self.config.exact_prompt_boundaries else max_length)
        ids = range(len(self.managers))
        attention, states = ids[: len(self.attention)], ids[len(self.attention) :]
        blocks, length = self.attention[0].find_longest_cache_hit(hashes, limit, attention)
        longest = length
        if states:
            found, length = self.states[0].find_longest_cache_hit(hashes, length, states)
            for hit in blocks:
                del hit[cdiv(length, self.config.scheduler_block_size) :]
            blocks += found
        return CacheHit(tuple(blocks), length, longest)

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Make findable what is final of the first ``num_computed_tokens`` tokens."""
        config = self.config
        boundaries = [request.num_prompt_tokens - 1]
        if config.exact_prompt_boundaries:
            size, drops = config.scheduler_block_size, self.drops_eagle_block
            boundaries = list(replay_boundaries(request.num_prompt_tokens, size, drops))
        if request.shared_prefix_boundary:
            boundaries.append(request.shared_prefix_boundary)
        for manager in self.managers:
            num_tokens = num_computed_tokens
            if len(self.managers) > 1 and not config.partial_hash_hits:
                num_tokens = round_down(num_computed_tokens, config.scheduler_block_size)
            if self.drops_eagle_block and num_tokens and manager in self.attention and self.states:
                # The block behind the boundary is matched and then dropped.
                num_tokens = min(num_computed_tokens, num_tokens + manager.block_size)
            manager.cache_blocks(request, num_tokens, boundaries)

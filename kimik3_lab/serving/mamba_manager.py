"""KDA states of one group: one block holds one state.

Needs the standard library only. Lesson 07 compares states and rows. Names are vLLM's, see
``MambaManager`` in ``vllm/v1/core/single_type_kv_cache_manager.py``, cache mode "none".

Without prefix caching a request has one state from begin to end, and K more if each draft token is
given one. :mod:`~kimik3_lab.serving.aligned_mamba_manager` is what prefix caching makes of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from kimik3_lab.serving.block_pool import BlockPool, KVCacheBlock
from kimik3_lab.serving.cache_config import CacheConfig
from kimik3_lab.serving.single_type_manager import SingleTypeKVCacheManager

__all__ = ["MambaManager"]


class MambaManager(SingleTypeKVCacheManager):
    """States of KDA layers, without prefix caching.

    Parameters
    ----------
    config, block_pool, group_id, drops_eagle_block
        See :class:`~kimik3_lab.serving.single_type_manager.SingleTypeKVCacheManager`.
    num_speculative_blocks : int
        Scratch states of a request.
    """

    def __init__(
        self,
        config: CacheConfig,
        block_pool: BlockPool,
        group_id: int,
        *,
        num_speculative_blocks: int = 0,
        drops_eagle_block: bool = False,
    ) -> None:
        super().__init__(
            config, block_pool, group_id, config.block_size, drops_eagle_block=drops_eagle_block
        )
        self.num_speculative_blocks = num_speculative_blocks

    def find_longest_cache_hit(
        self, block_hashes: Sequence[bytes], max_length: int, group_ids: Sequence[int]
    ) -> tuple[list[list[KVCacheBlock]], int]:
        """Find nothing: no state is kept. Returns an empty list for each group, and 0."""
        return [[] for _ in group_ids], 0

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        hit: Sequence[KVCacheBlock] = (),
        num_hit_tokens: int = 0,
        *,
        query_start: int = 0,
        prefill_end: int = 0,
        only_ask: bool = False,
    ) -> int:
        """Count the free blocks that computing up to ``num_tokens`` needs.

        Parameters
        ----------
        hit, num_hit_tokens
            See :class:`~kimik3_lab.serving.single_type_manager.SingleTypeKVCacheManager`.
        query_start : int
            Where the chunk begins.
        prefill_end : int
            Chunks that end before it export no state.
        only_ask : bool
            Whether the chunk will not be allocated: admission asks for the whole prompt.
        """
        return 1 + self.num_speculative_blocks - len(self.req_to_blocks.get(request_id, ()))

    def allocate_new_blocks(self, request_id: str, num_tokens: int) -> list[KVCacheBlock]:
        """Give a request its states at its first step; return what is new."""
        blocks = self.req_to_blocks.setdefault(request_id, [])
        new_blocks = self.block_pool.get_new_blocks(1 + self.num_speculative_blocks - len(blocks))
        blocks += new_blocks
        return new_blocks

    def get_prefill_checkpoint(self, request_id: str) -> int:
        """Where the chunk of this step exports a state; 0 if it does not."""
        return 0

    def quiet_until(self, request_id: str, num_lookahead_tokens: int) -> int:
        """See :meth:`SingleTypeKVCacheManager.quiet_until`: nothing ever changes."""
        return 1 << 62

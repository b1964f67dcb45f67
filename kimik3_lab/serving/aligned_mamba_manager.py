"""KDA states of one group, kept on block boundaries so that others can start from them.

Needs the standard library only. Lesson 07 follows a table step by step. Names are vLLM's, see
``MambaManager`` in ``vllm/v1/core/single_type_kv_cache_manager.py``, cache mode "align"; K is the
number of draft tokens if each has a state of its own, else 0.

Column ``p`` of the table belongs to the state after ``(p + 1) * block_size``
tokens, and most columns are empty::

    [ null, ..., null, last, checkpoint?, running, scratch x K ]

The *running* state is the one that is written; its column follows the last token. When the tokens
cross into the next column, a new block becomes the running state, the worker copies the state over,
and the *last* one stays behind under the hash of its prefix until the step after. Scratch blocks
move along. A *checkpoint* is the column that a kernel exports a state into on its way through a
prompt; its hash is that of the place where the state was taken, not that of its column.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kimik3_lab.serving.block_pool import BlockHashWithGroupId, BlockPool, KVCacheBlock
from kimik3_lab.serving.cache_config import CacheConfig
from kimik3_lab.serving.mamba_manager import MambaManager
from kimik3_lab.serving.prefill_checkpoint import (
    cdiv,
    get_mamba_prefill_checkpoint_position,
    is_mamba_prefill_checkpoint_valid,
    round_down,
)
from kimik3_lab.serving.request import Request
from kimik3_lab.serving.single_type_manager import SingleTypeKVCacheManager, num_unheld
from kimik3_lab.serving.state_retention import StateRetention

__all__ = ["AlignedMambaManager"]


class AlignedMambaManager(MambaManager):
    """States of KDA layers, with prefix caching.

    Parameters
    ----------
    config, block_pool, group_id, num_speculative_blocks, drops_eagle_block
        See :class:`~kimik3_lab.serving.mamba_manager.MambaManager`.
    keeps_junctions : bool
        Whether the state at a junction inside a block is kept.
    """

    def __init__(
        self,
        config: CacheConfig,
        block_pool: BlockPool,
        group_id: int,
        *,
        num_speculative_blocks: int = 0,
        drops_eagle_block: bool = False,
        keeps_junctions: bool = False,
    ) -> None:
        super().__init__(
            config,
            block_pool,
            group_id,
            num_speculative_blocks=num_speculative_blocks,
            drops_eagle_block=drops_eagle_block,
        )
        self._retention = StateRetention(config, drops_eagle_block, keeps_junctions)
        # Blocks that got a hash in this step hold nothing yet: nobody may start from them.
        self.cached_blocks_this_step: set[BlockHashWithGroupId | None] = set()
        self._has_table: set[str] = set()
        self._last_state_index: dict[str, int] = {}
        self._num_retired: dict[str, int] = {}
        self._chunk_end: dict[str, int] = {}
        self._checkpoints: dict[str, tuple[int, int]] = {}  # position, index

    def new_step_starts(self) -> None:
        """See :meth:`SingleTypeKVCacheManager.new_step_starts`."""
        super().new_step_starts()
        self.cached_blocks_this_step.clear()

    # -- lookup --------------------------------------------------------------------------------

    def find_longest_cache_hit(
        self, block_hashes: Sequence[bytes], max_length: int, group_ids: Sequence[int]
    ) -> tuple[list[list[KVCacheBlock]], int]:
        """Find the latest state within ``max_length`` tokens that all ``group_ids`` have kept.

        From the right: one state is enough, whatever is missing before it. The drafter has no KDA
        layers, so nothing is dropped for it.

        Returns
        -------
        list of lists of KVCacheBlock, int
            For each group null blocks up to the state's column, then its block; and the tokens that
            the state has read.
        """
        unit, step = self.config.hash_block_size, self.config.hit_alignment
        longest = min(max_length, len(block_hashes) * unit)
        for num_tokens in range(round_down(longest, step), 0, -step):
            block_hash = block_hashes[num_tokens // unit - 1]
            found = self.block_pool.get_cached_block(block_hash, group_ids)
            if found is not None:
                column = cdiv(num_tokens, self.block_size) - 1
                return [[self.block_pool.null_block] * column + [b] for b in found], num_tokens
        return [[] for _ in group_ids], 0

    # -- allocation ----------------------------------------------------------------------------

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
        """See :meth:`kimik3_lab.serving.mamba_manager.MambaManager.get_num_blocks_to_allocate`.

        The answer is more than there are if the hit is on a block of this very step.
        """
        if hit and hit[-1].block_hash in self.cached_blocks_this_step:
            return self.block_pool.num_blocks + 1
        held = len(self.req_to_blocks.get(request_id, ()))
        partial = request_id in self._partial_hits or self.ends_inside_a_block(hit, num_hit_tokens)
        missing = cdiv(num_tokens, self.block_size) + self.num_speculative_blocks - held - len(hit)
        missing = max(missing, 0) + partial
        position = self._checkpoint_position(request_id, query_start, num_tokens, prefill_end)
        if not only_ask:
            self._checkpoints.pop(request_id, None)
            if position:
                index = cdiv(num_tokens, self.block_size) - 2
                self._checkpoints[request_id] = position, index
        if missing > 0:
            most = 1 + partial + (position > 0)
            if request_id not in self._has_table:
                most += self.num_speculative_blocks
            missing = min(missing, most) if self.config.exact_state_count else most
        return missing + num_unheld(hit)

    def _checkpoint_position(self, request_id: str, start: int, end: int, prefill_end: int) -> int:
        """Where a chunk exports a state; 0 if it does not."""
        config = self.config
        if config.prefill_checkpoints == "split" or end < prefill_end:
            return 0
        position = get_mamba_prefill_checkpoint_position(
            end, config.hit_alignment, self.drops_eagle_block
        )
        if not is_mamba_prefill_checkpoint_valid(
            start,
            end,
            position,
            config.hash_block_size,
            self.block_size,
            config.checkpoint_alignment,
        ):
            return 0
        index = cdiv(end, self.block_size) - 2
        blocks = self.req_to_blocks.get(request_id, [])
        # Its column must be empty, or scratch that this chunk leaves behind.
        scratch = len(blocks) - self.num_speculative_blocks
        is_free = (
            index >= len(blocks)
            or blocks[index].is_null
            or (request_id in self._has_table and index >= scratch)
        )
        return position if is_free else 0

    def allocate_new_blocks(self, request_id: str, num_tokens: int) -> list[KVCacheBlock]:
        """Prepare the table for computing up to ``num_tokens``; return what is new in it."""
        blocks = self.req_to_blocks.setdefault(request_id, [])
        scratch = self.num_speculative_blocks
        self._chunk_end[request_id] = num_tokens
        partial = self._partial_hits.pop(request_id, None)
        has_checkpoint = request_id in self._checkpoints
        num_required = cdiv(num_tokens, self.block_size) + scratch
        has_table = request_id in self._has_table
        self._has_table.add(request_id)
        num_before = len(blocks)
        if num_required <= num_before and partial is None and not has_checkpoint:
            return []
        if has_table:
            self._last_state_index[request_id] = num_before - 1 - scratch
        elif num_before:
            self._last_state_index[request_id] = num_before - 1  # the state of the hit
        # Columns before the running state stay empty, except that of a checkpoint.
        null_end = num_required - scratch - 1 - has_checkpoint
        blocks += [self.block_pool.null_block] * (null_end - num_before)
        if has_table:
            for index in range(num_before - scratch, min(num_before, null_end)):
                blocks.append(blocks[index])
                blocks[index] = self.block_pool.null_block
        num_new = max(num_required - len(blocks), 0) + (partial is not None)
        new_blocks = self.block_pool.get_new_blocks(num_new)
        returned = blocks[num_before:]
        if partial is not None:
            copy = new_blocks.pop(0)
            if has_table:
                self._keep_own_tail(request_id, *partial, copy)
            else:
                self.use_private_copy(request_id, *partial, copy)
                returned.insert(0, copy)
        blocks += new_blocks
        return returned + new_blocks

    def _keep_own_tail(
        self, request_id: str, index: int, source: KVCacheBlock, copy: KVCacheBlock
    ) -> None:
        """Keep the state at the end of a request's prompt, which it is about to overwrite.

        The worker's table of a running request only grows, so the request goes on in its block and
        the cache takes the copy.
        """
        self.block_pool.move_hashes(source, copy)
        self.pending_copies.append((source, copy))
        source.ref_cnt += 1
        self.cached_blocks_this_step.add(copy.block_hash)

    def get_prefill_checkpoint(self, request_id: str) -> int:
        """See :meth:`kimik3_lab.serving.mamba_manager.MambaManager.get_prefill_checkpoint`."""
        position, _ = self._checkpoints.get(request_id, (0, 0))
        return position

    # -- what is behind ------------------------------------------------------------------------

    def remove_skipped_blocks(self, request_id: str, num_processed_tokens: int) -> None:
        """Free the states before the one that the next token continues."""
        blocks = self.req_to_blocks.get(request_id)
        if blocks is None:
            return
        behind = min((num_processed_tokens - 1) // self.block_size, len(blocks))
        retired = self._num_retired.get(request_id, 0)
        if behind > retired:
            self._retire(blocks, retired, behind)
            if self.config.free_state_gaps:
                self._num_retired[request_id] = behind
        last = self._last_state_index.get(request_id)
        if last is not None and last < cdiv(num_processed_tokens, self.block_size) - 1:
            self._retire(blocks, last, last + 1)

    def _retire(self, blocks: list[KVCacheBlock], first: int, stop: int) -> None:
        """Replace the states in ``range(first, stop)`` by the null block, the latest first."""
        behind = []
        for index in range(stop - 1, first - 1, -1):
            if not blocks[index].is_null:
                behind.append(blocks[index])
                blocks[index] = self.block_pool.null_block
            elif not self.config.free_state_gaps:
                break
        self.block_pool.free_blocks(behind)

    def quiet_until(self, request_id: str, num_lookahead_tokens: int) -> int:
        """See :meth:`SingleTypeKVCacheManager.quiet_until`."""
        blocks = self.req_to_blocks[request_id]
        running = len(blocks) - 1 - self.num_speculative_blocks
        last = self._last_state_index.get(request_id, running)
        first = self._num_retired.get(request_id, 0)
        if not self.config.free_state_gaps:
            first = max(running - 1, 0)
        to_free = [blocks[last]] if last < running else []
        to_free += blocks[first:running]
        if any(not block.is_null for block in to_free):
            return 0
        if request_id in self._partial_hits or request_id in self._checkpoints:
            return 0
        room = (running + 1) * self.block_size
        return min(room, SingleTypeKVCacheManager.quiet_until(self, request_id, 0))

    # -- hashes --------------------------------------------------------------------------------

    def cache_blocks(
        self, request: Request, num_tokens: int, reachable_boundaries: Iterable[int]
    ) -> None:
        """See :meth:`SingleTypeKVCacheManager.cache_blocks`; also states between boundaries."""
        request_id = request.request_id
        first = self.num_cached_block.get(request_id, 0)
        if request_id in self._checkpoints and self.config.hash_written_states_only:
            # The chunk has passed these columns by, all but that of its checkpoint.
            first = max(first, self._checkpoints[request_id][1] + 1)
            self.num_cached_block[request_id] = first
        super().cache_blocks(request, num_tokens, reachable_boundaries)
        stop = self.num_cached_block.get(request_id, 0)
        if request_id in self._checkpoints:
            self._cache_checkpoint(request)
        elif self._retention.keeps_chunk_end(request, num_tokens):
            # Its tokens may be cut to those that are known; then the state is already beyond them.
            ends_there = self._chunk_end.get(request_id) == num_tokens
            if ends_there or not self.config.hash_written_states_only:
                self._cache_chunk_end(request, num_tokens)
        for block in self.req_to_blocks[request_id][first:stop]:
            if block.block_hash is not None:
                self.cached_blocks_this_step.add(block.block_hash)

    def retained_blocks(
        self, first: int, stop: int, reachable_boundaries: Iterable[int]
    ) -> set[int] | None:
        """See :meth:`kimik3_lab.serving.state_retention.StateRetention.columns`."""
        return self._retention.columns(first, stop, reachable_boundaries)

    def _cache_checkpoint(self, request: Request) -> None:
        """Give an exported state the hash of the place where it was taken."""
        position, index = self._checkpoints[request.request_id]
        block = self.req_to_blocks[request.request_id][index]
        if not self._retention.keeps_checkpoint(request, position):
            self.block_pool.remove_hashes(block)  # of its column, which it does not belong to
        elif block.block_hash_num_tokens != position:
            self.block_pool.remove_hashes(block)
            self.cache_partial_block(request, block, position)
            self.cached_blocks_this_step.add(block.block_hash)

    def _cache_chunk_end(self, request: Request, num_tokens: int) -> None:
        """Give the state that a chunk ends with the hash of its last token.

        If that lies inside a block, the next chunk would write over it: note that it is shared, so
        that a copy takes its place in the cache.
        """
        blocks = self.req_to_blocks[request.request_id]
        index = cdiv(num_tokens, self.block_size) - 1
        hashed = len(request.block_hashes) * self.config.hash_block_size
        if index >= len(blocks) or blocks[index].is_null or num_tokens > hashed:
            return
        block = blocks[index]
        if self.config.keep_known_keys and block.block_hash_num_tokens == num_tokens:
            return
        self.cache_partial_block(request, block, num_tokens)
        block_hash = request.block_hashes[num_tokens // self.config.hash_block_size - 1]
        self.cached_blocks_this_step.add((block_hash, self.group_id))
        if num_tokens % self.block_size:
            self._partial_hits[request.request_id] = index, block
            self.num_cached_block[request.request_id] = index

    # -- the end -------------------------------------------------------------------------------

    def free(self, request_id: str) -> None:
        """See :meth:`SingleTypeKVCacheManager.free`."""
        super().free(request_id)
        self._has_table.discard(request_id)
        for kept in (self._last_state_index, self._num_retired, self._chunk_end, self._checkpoints):
            kept.pop(request_id, None)

"""The block tables of one group: what requests hold, and which of it can be found again.

Needs the standard library only. Lesson 07 watches the tables. Names are vLLM's, see
``vllm/v1/core/single_type_kv_cache_manager.py``.

:class:`FullAttentionManager` keeps rows of MLA layers: dense tables that only grow.
:class:`~kimik3_lab.serving.mamba_manager.MambaManager` keeps KDA states.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kimik3_lab.serving.block_pool import BlockPool, KVCacheBlock
from kimik3_lab.serving.cache_config import CacheConfig
from kimik3_lab.serving.prefill_checkpoint import cdiv, round_down
from kimik3_lab.serving.request import Request

__all__ = ["FullAttentionManager", "SingleTypeKVCacheManager"]


class SingleTypeKVCacheManager:
    """What the groups have in common (``vllm.v1.core.single_type_kv_cache_manager``).

    Parameters
    ----------
    config : CacheConfig
        Sizes and rules.
    block_pool : BlockPool
        Shared by all groups.
    group_id : int
        Number of the group, part of its hashes.
    block_size : int
        Tokens that one block of this group stands for.
    drops_eagle_block : bool
        Whether a hit loses its last block to the drafter.
    """

    def __init__(
        self,
        config: CacheConfig,
        block_pool: BlockPool,
        group_id: int,
        block_size: int,
        *,
        drops_eagle_block: bool = False,
    ) -> None:
        self.config = config
        self.block_pool = block_pool
        self.group_id = group_id
        self.block_size = block_size
        self.drops_eagle_block = drops_eagle_block
        self.req_to_blocks: dict[str, list[KVCacheBlock]] = {}
        # Blocks at the front of a table whose hash has been dealt with.
        self.num_cached_block: dict[str, int] = {}
        # Blocks to be copied before the next forward pass, because a request is going to write
        # into a block that others may find: (source, target). Both ends are held meanwhile.
        self.pending_copies: list[tuple[KVCacheBlock, KVCacheBlock]] = []
        # Blocks that got a hash in this step: they are written in its forward pass.
        self._hashed_this_step: set[int] = set()
        # Requests whose hit ends inside a block: its index and the shared block.
        self._partial_hits: dict[str, tuple[int, KVCacheBlock]] = {}

    # -- a request begins ----------------------------------------------------------------------

    def ends_inside_a_block(self, hit: Sequence[KVCacheBlock], num_tokens: int) -> bool:
        """Whether a hit of ``num_tokens`` ends inside a block, which must then be copied."""
        return bool(hit) and num_tokens % self.block_size != 0

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        hit: Sequence[KVCacheBlock] = (),
        num_hit_tokens: int = 0,
    ) -> int:
        """Count the free blocks that ``num_tokens`` tokens need.

        Blocks of the hit that nobody holds are among them: they stand in the queue until then. The
        answer is more than there are if the hit is to be copied from a block of this very step.
        """
        held = len(self.req_to_blocks.get(request_id, ())) + len(hit)
        copies = self.ends_inside_a_block(hit, num_hit_tokens)
        if (
            copies
            and self.config.defer_unwritten_copies
            and hit[-1].block_id in self._hashed_this_step
        ):
            return self.block_pool.num_blocks + 1
        missing = max(cdiv(num_tokens, self.block_size) - held, 0)
        return missing + num_unheld(hit) + copies

    def add_computed_blocks(
        self, request_id: str, hit: Sequence[KVCacheBlock], num_hit_tokens: int
    ) -> None:
        """Begin the table of a new request with the blocks of its hit, and hold them."""
        self.block_pool.touch(hit)
        self.req_to_blocks[request_id] = list(hit)
        self.num_cached_block[request_id] = len(hit)
        if self.ends_inside_a_block(hit, num_hit_tokens):
            index = num_hit_tokens // self.block_size
            self._partial_hits[request_id] = index, hit[-1]
            self.num_cached_block[request_id] = index

    def allocate_new_blocks(self, request_id: str, num_tokens: int) -> list[KVCacheBlock]:
        """Extend the table until it has room for ``num_tokens`` tokens; return what is new."""
        blocks = self.req_to_blocks.setdefault(request_id, [])
        new_blocks = []
        if request_id in self._partial_hits:
            index, shared = self._partial_hits.pop(request_id)
            new_blocks.append(self.copy_on_write(request_id, index, shared))
        missing = cdiv(num_tokens, self.block_size) - len(blocks)
        if missing > 0:
            extension = self.block_pool.get_new_blocks(missing)
            blocks += extension
            new_blocks += extension
        return new_blocks

    def copy_on_write(self, request_id: str, index: int, shared: KVCacheBlock) -> KVCacheBlock:
        """Give a request a block of its own in the place of ``shared``.

        Both are held by the pending copy: the shared one keeps the hold of the hit, the new one
        gets a second.
        """
        (private,) = self.block_pool.get_new_blocks(1)
        self.use_private_copy(request_id, index, shared, private)
        return private

    def use_private_copy(
        self, request_id: str, index: int, shared: KVCacheBlock, private: KVCacheBlock
    ) -> None:
        """Put ``private`` in the place of ``shared``, to be filled by a copy."""
        self.req_to_blocks[request_id][index] = private
        self.pending_copies.append((shared, private))
        private.ref_cnt += 1

    # -- a request goes on ---------------------------------------------------------------------

    def remove_skipped_blocks(self, request_id: str, num_processed_tokens: int) -> None:
        """Free what is no longer read; attention reads all."""

    def cache_blocks(
        self, request: Request, num_tokens: int, reachable_boundaries: Iterable[int]
    ) -> None:
        """Make the full blocks of the first ``num_tokens`` tokens findable.

        ``reachable_boundaries`` are the places where later requests can resume, for groups that
        keep only some blocks.
        """
        first = self.num_cached_block.get(request.request_id, 0)
        unit = self.config.hash_block_size
        stop = min(num_tokens, len(request.block_hashes) * unit) // self.block_size
        if first >= stop:
            return
        keep = self.retained_blocks(first, stop, reachable_boundaries)
        hashes_per_block = self.block_size // unit
        blocks = self.req_to_blocks[request.request_id]
        for index in range(first, stop):
            block = blocks[index]
            if block.is_null or (keep is not None and index not in keep):
                continue
            self.block_pool.remove_hashes(block)  # of a shorter prefix
            block_hash = request.block_hashes[(index + 1) * hashes_per_block - 1]
            num_hashed = (index + 1) * self.block_size
            self.block_pool.insert(block_hash, self.group_id, block, num_hashed)
            self._hashed_this_step.add(block.block_id)
        self.num_cached_block[request.request_id] = stop

    def retained_blocks(
        self, first: int, stop: int, reachable_boundaries: Iterable[int]
    ) -> set[int] | None:
        """Which blocks of ``range(first, stop)`` get their hash; None for all."""
        return None

    def cache_partial_block(self, request: Request, block: KVCacheBlock, num_tokens: int) -> None:
        """Make a block findable under a prefix that ends inside it, or at its end."""
        block_hash = request.block_hashes[num_tokens // self.config.hash_block_size - 1]
        pool = self.block_pool
        is_new = not pool.has_hash(block_hash, self.group_id, block)
        if is_new:
            self._hashed_this_step.add(block.block_id)
            if block.block_hash_num_tokens < num_tokens:
                pool.remove_hashes(block)
        pool.insert(block_hash, self.group_id, block, num_tokens)

    def quiet_until(self, request_id: str, num_lookahead_tokens: int) -> int:
        """Tokens up to which a running request needs nothing from this manager.

        That is no rule of vLLM, but spares most requests of a step the work of finding out.
        """
        room = len(self.req_to_blocks[request_id]) * self.block_size - num_lookahead_tokens
        if not self.block_pool.enable_caching:
            return room
        cached = self.num_cached_block.get(request_id, 0)
        return min(room, (cached + 1) * self.block_size - 1)

    def new_step_starts(self) -> None:
        """Hear that the scheduler begins a step."""
        self._hashed_this_step.clear()

    # -- a request ends --------------------------------------------------------------------------

    def free(self, request_id: str) -> None:
        """Give the blocks of a request back, the last ones first.

        The tail of a sequence is the part least likely to be wanted again, so it goes to the queue
        before the rest and is overwritten first.
        """
        blocks = self.req_to_blocks.pop(request_id, [])
        self.num_cached_block.pop(request_id, None)
        self._partial_hits.pop(request_id, None)
        self.block_pool.free_blocks(reversed(blocks))


class FullAttentionManager(SingleTypeKVCacheManager):
    """Rows of MLA layers, a block for every ``block_size`` tokens."""

    def find_longest_cache_hit(
        self, block_hashes: Sequence[bytes], max_length: int, group_ids: Sequence[int]
    ) -> tuple[list[list[KVCacheBlock]], int]:
        """Find the longest prefix of at most ``max_length`` tokens that all ``group_ids`` have.

        Returns
        -------
        list of lists of KVCacheBlock, int
            The blocks of each group, and the tokens of the hit, a multiple of
            ``config.hit_alignment``.
        """
        size, unit = self.block_size, self.config.hash_block_size
        alignment, per_block = self.config.hit_alignment, size // unit
        hit: list[list[KVCacheBlock]] = []  # by block, then by group
        # From the left: where one block is missing, all later ones are of no use.
        for index in range(min(max_length // size, len(block_hashes) // per_block)):
            block_hash = block_hashes[(index + 1) * per_block - 1]
            found = self.block_pool.get_cached_block(block_hash, group_ids)
            if found is None:
                break
            hit.append(found)
        length = len(hit) * size
        if alignment < size:  # go on inside the next block, the longest prefix first
            first = len(hit) * per_block
            last = min(first + per_block - 1, max_length // unit, len(block_hashes))
            for index in range(last - 1, first - 1, -1):
                found = self.block_pool.get_cached_block(block_hashes[index], group_ids)
                if found is not None:
                    hit.append(found)
                    length = (index + 1) * unit
                    break
        if self.drops_eagle_block and length > 0:
            length -= min(alignment, size)
        length = round_down(length, alignment)
        del hit[cdiv(length, size) :]
        return [[blocks[i] for blocks in hit] for i in range(len(group_ids))], length

    def cache_blocks(
        self, request: Request, num_tokens: int, reachable_boundaries: Iterable[int]
    ) -> None:
        """See :meth:`SingleTypeKVCacheManager.cache_blocks`; also the tail of the prompt."""
        super().cache_blocks(request, num_tokens, reachable_boundaries)
        unit = self.config.hash_block_size
        if self.block_size == unit:
            return
        limit = request.num_prompt_tokens
        if self.config.exact_prompt_boundaries and not self.drops_eagle_block:
            limit -= 1  # the last token is always computed
        boundary = min(limit // unit, len(request.block_hashes)) * unit
        if 0 < boundary <= num_tokens and boundary % self.block_size:
            blocks = self.req_to_blocks[request.request_id]
            index = boundary // self.block_size
            if index < len(blocks):
                self.cache_partial_block(request, blocks[index], boundary)


def num_unheld(blocks: Iterable[KVCacheBlock]) -> int:
    """Blocks that nobody holds: taking them costs free blocks."""
    return sum(block.ref_cnt == 0 and not block.is_null for block in blocks)

"""The pool of cache blocks: a queue of free ones, reference counts, and a map from hashes.

Needs the standard library only. Lesson 07 opens it up. Names are vLLM's, see
``vllm/v1/core/block_pool.py`` and ``KVCacheBlock`` in ``vllm/v1/core/kv_cache_utils.py``.

The pool deals in numbers. What lies behind a block id, rows of the MLA layers for ``block_size``
tokens or the states of the KDA layers after them, belongs to the executor.

A block that nobody holds keeps its hash, and with it its content, until it is handed out again. So
the queue of free blocks is also the prefix cache: what has a hash goes to its end and is reused
last, what has none goes to the front (#42656).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["BlockHashWithGroupId", "BlockPool", "KVCacheBlock"]

#: A hash names tokens; the same tokens have another block in each group.
BlockHashWithGroupId = tuple[bytes, int]


@dataclass(slots=True, eq=False)
class KVCacheBlock:
    """A block: its id, how many requests hold it, and the prefix under which it can be found.

    ``block_hash_num_tokens`` is the length of that prefix. A block may have further, shorter
    prefixes to be found under; the pool keeps those.
    """

    block_id: int
    ref_cnt: int = 0
    block_hash: BlockHashWithGroupId | None = None
    block_hash_num_tokens: int = 0
    is_null: bool = False


class BlockPool:
    """Hands out blocks, takes them back and finds them by hash (``vllm.v1.core.block_pool``).

    Block 0 is the null block: it is never handed out and stands in block tables where nothing is
    stored, so that a padded table always names a readable block.

    Parameters
    ----------
    num_blocks : int
        Blocks in all, the null block included.
    enable_caching : bool
        Whether blocks get hashes.
    uncached_reuse : {"lifo", "fifo"}
        See :class:`~kimik3_lab.serving.cache_config.CacheConfig`; without caching only.

    Examples
    --------
    >>> pool = BlockPool(4, enable_caching=True)
    >>> block, _ = pool.get_new_blocks(2)
    >>> pool.insert(b"hash", 0, block, num_tokens=16)
    >>> pool.free_blocks([block])
    >>> pool.get_num_free_blocks(), pool.get_cached_block(b"hash", (0,)) == [block]
    (2, True)
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        enable_caching: bool = False,
        uncached_reuse: Literal["lifo", "fifo"] = "fifo",
    ) -> None:
        self.num_blocks = num_blocks
        self.enable_caching = enable_caching
        self.blocks = [KVCacheBlock(block_id) for block_id in range(num_blocks)]
        self.null_block = self.blocks[0]
        self.null_block.is_null = True
        self.num_evictions = 0  # blocks that lost a hash because they were handed out again
        self._unhashed_first = enable_caching or uncached_reuse == "lifo"
        # In the order in which they will be taken. An ordered dict is a queue from whose middle an
        # entry can be taken in constant time, as from vLLM's FreeKVCacheBlockQueue.
        self._free = OrderedDict((block.block_id, block) for block in self.blocks[1:])
        # Several blocks may hold the same tokens, because two requests computed them in one step.
        self._by_hash: dict[BlockHashWithGroupId, dict[int, KVCacheBlock]] = {}
        self._further_hashes: dict[int, set[BlockHashWithGroupId]] = {}

    # -- free blocks -------------------------------------------------------------------------

    def get_num_free_blocks(self) -> int:
        """Blocks that can be taken now."""
        return len(self._free)

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Take ``num_blocks`` blocks from the front of the queue; what they held is forgotten.

        Raises
        ------
        ValueError
            If fewer are free. Ask :meth:`get_num_free_blocks` first.
        """
        if num_blocks > len(self._free):
            raise ValueError(f"{num_blocks} blocks wanted, {len(self._free)} are free")
        taken = [self._free.popitem(last=False)[1] for _ in range(num_blocks)]
        for block in taken:
            if block.block_hash is not None:
                self.remove_hashes(block)
                self.num_evictions += 1
            block.ref_cnt = 1
        return taken

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Hold blocks that were found by hash; those that nobody held leave the queue."""
        for block in blocks:
            if block.is_null:
                continue
            if block.ref_cnt == 0:
                del self._free[block.block_id]
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """Give blocks back, the one to be reused first at the front.

        Raises
        ------
        ValueError
            If a block is not held by anyone, which would hand it out twice later on.
        """
        unhashed = []
        for block in ordered_blocks:
            if block.is_null:
                continue
            if block.ref_cnt < 1:
                raise ValueError(f"block {block.block_id} is given back but nobody holds it")
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                self._free[block.block_id] = block
                if block.block_hash is None:
                    unhashed.append(block)
        if self._unhashed_first:
            for block in reversed(unhashed):
                self._free.move_to_end(block.block_id, last=False)

    def get_usage(self) -> float:
        """Share of the usable blocks that are held by requests, in [0, 1]."""
        return 1.0 - len(self._free) / (self.num_blocks - 1)

    # -- blocks by hash ----------------------------------------------------------------------

    @property
    def num_cached_free_blocks(self) -> int:
        """Blocks that can be found by hash and that nobody holds. Linear in the free blocks."""
        return sum(block.block_hash is not None for block in self._free.values())

    def get_cached_block(
        self, block_hash: bytes, group_ids: Sequence[int]
    ) -> list[KVCacheBlock] | None:
        """Find the block of each group under ``block_hash``; None if a group has none."""
        found = []
        for group_id in group_ids:
            blocks = self._by_hash.get((block_hash, group_id))
            if blocks is None:
                return None
            found.append(next(iter(blocks.values())))
        return found

    def insert(
        self, block_hash: bytes, group_id: int, block: KVCacheBlock, num_tokens: int
    ) -> None:
        """Make ``block`` findable under the hash of a prefix of ``num_tokens`` tokens.

        What it could be found under before stays, if that was a prefix of the same sequence: the
        rows of a page are never overwritten, so a page that holds the first 32 tokens holds the
        first 16 as well. A state does not; there remove the old hashes first.
        """
        key = block_hash, group_id
        blocks = self._by_hash.setdefault(key, {})
        if block.block_id in blocks:
            return
        blocks[block.block_id] = block
        if block.block_hash is None:
            block.block_hash, block.block_hash_num_tokens = key, num_tokens
        else:
            self._further_hashes.setdefault(block.block_id, set()).add(key)

    def has_hash(self, block_hash: bytes, group_id: int, block: KVCacheBlock) -> bool:
        """Whether ``block`` can be found under ``block_hash``."""
        return block.block_id in self._by_hash.get((block_hash, group_id), ())

    def remove_hashes(self, block: KVCacheBlock) -> list[BlockHashWithGroupId]:
        """Make a block unfindable. Returns its hashes, the longest prefix's first."""
        if block.block_hash is None:
            return []
        keys = [block.block_hash, *self._further_hashes.pop(block.block_id, ())]
        for key in keys:
            blocks = self._by_hash[key]
            del blocks[block.block_id]
            if not blocks:
                del self._by_hash[key]
        block.block_hash, block.block_hash_num_tokens = None, 0
        return keys

    def move_hashes(self, source: KVCacheBlock, target: KVCacheBlock) -> None:
        """Let ``target``, a copy of ``source``, be found in its place."""
        num_tokens = source.block_hash_num_tokens
        for block_hash, group_id in self.remove_hashes(source):
            self.insert(block_hash, group_id, target, num_tokens)

    def reset_prefix_cache(self) -> bool:
        """Forget all hashes. Refused with False while a request holds blocks."""
        if len(self._free) != self.num_blocks - 1:
            return False
        self.forget_all_hashes()
        return True

    def forget_all_hashes(self) -> None:
        """Let nothing be found any more, whoever holds it: what was computed is in doubt."""
        for block in self.blocks:
            self.remove_hashes(block)

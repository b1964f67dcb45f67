"""The pool of cache blocks: a free list, reference counts, and a null block.

Needs the standard library only. Lesson 07 opens it up. Names are vLLM's, see
``vllm/v1/core/block_pool.py`` and ``KVCacheBlock`` in ``vllm/v1/core/kv_cache_utils.py``.

The pool deals in numbers. What lies behind a block id, the latent rows of the MLA layers for
``block_size`` tokens, belongs to the executor.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["BlockPool", "KVCacheBlock"]


@dataclass(slots=True, eq=False)
class KVCacheBlock:
    """A block: its id and how many requests hold it."""

    block_id: int
    ref_cnt: int = 0


class BlockPool:
    """Hands out blocks and takes them back (``vllm.v1.core.block_pool.BlockPool``).

    Block 0 is the null block: it is never handed out and stands in block tables where nothing is
    stored, so that a padded table always names a readable block.

    Parameters
    ----------
    num_blocks : int
        Blocks in all, the null block included.

    Examples
    --------
    >>> pool = BlockPool(4)
    >>> blocks = pool.get_new_blocks(2)
    >>> [block.block_id for block in blocks], pool.get_num_free_blocks()
    ([1, 2], 1)
    >>> pool.free_blocks(blocks)
    >>> pool.get_usage()
    0.0
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.blocks = [KVCacheBlock(block_id) for block_id in range(num_blocks)]
        self.null_block = self.blocks[0]
        # In the order in which they will be taken. An ordered dict is a queue from whose middle an
        # entry can be taken in constant time, as from vLLM's FreeKVCacheBlockQueue.
        self._free = OrderedDict((block.block_id, block) for block in self.blocks[1:])

    def get_num_free_blocks(self) -> int:
        """Blocks that can be taken now."""
        return len(self._free)

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Take ``num_blocks`` blocks, those free for the longest time first.

        Raises
        ------
        ValueError
            If fewer are free. Ask :meth:`get_num_free_blocks` first.
        """
        if num_blocks > len(self._free):
            raise ValueError(f"{num_blocks} blocks wanted, {len(self._free)} are free")
        taken = [self._free.popitem(last=False)[1] for _ in range(num_blocks)]
        for block in taken:
            block.ref_cnt = 1
        return taken

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """Give blocks back; the first one given back is the first to be taken again.

        Raises
        ------
        ValueError
            If a block is not held by anyone, which would hand it out twice later on.
        """
        for block in ordered_blocks:
            if block is self.null_block:
                continue
            if block.ref_cnt < 1:
                raise ValueError(f"block {block.block_id} is given back but nobody holds it")
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                self._free[block.block_id] = block

    def get_usage(self) -> float:
        """Share of the usable blocks that are taken, in [0, 1]."""
        return 1.0 - len(self._free) / (self.num_blocks - 1)

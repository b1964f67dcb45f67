"""Which blocks belong to which request.

Needs the standard library only. Lesson 07 adds prefix caching here; lesson 08 watches the blocks
run out. Names are vLLM's, see ``vllm/v1/core/kv_cache_manager.py``.
"""

from __future__ import annotations

from kimik3_lab.serving.block_pool import BlockPool, KVCacheBlock
from kimik3_lab.serving.config import CacheConfig
from kimik3_lab.serving.request import Request

__all__ = ["KVCacheManager", "cdiv"]


def cdiv(a: int, b: int) -> int:
    """Divide and round up.

    >>> cdiv(17, 16)
    2
    """
    return -(-a // b)


class KVCacheManager:
    """Gives each request the blocks its tokens need, from one :class:`BlockPool`.

    Parameters
    ----------
    cache_config : CacheConfig
        Size of the pool and of a block.

    Examples
    --------
    >>> manager = KVCacheManager(CacheConfig(num_blocks=4, block_size=16))
    >>> request = Request("r0", [5] * 20)
    >>> manager.allocate_slots(request, 20)
    [1, 2]
    >>> manager.allocate_slots(request, 52) is None  # two more blocks, only one is free
    True
    >>> manager.free(request)
    >>> manager.block_pool.get_num_free_blocks()
    3
    """

    def __init__(self, cache_config: CacheConfig) -> None:
        self.block_size = cache_config.block_size
        self.block_pool = BlockPool(cache_config.num_blocks)
        self.req_to_blocks: dict[str, list[KVCacheBlock]] = {}

    def allocate_slots(
        self, request: Request, num_new_tokens: int, *, full_sequence_must_fit: bool = False
    ) -> list[int] | None:
        """Make room for the next ``num_new_tokens`` tokens of ``request``.

        Parameters
        ----------
        request : Request
            Its ``num_computed_tokens`` says where the new tokens begin.
        num_new_tokens : int
            Tokens to make room for.
        full_sequence_must_fit : bool
            Refuse unless all tokens known so far would fit, though only the new ones get blocks.
            Admission asks for this: a prompt cut into chunks must not get stuck half-way.

        Returns
        -------
        list of int or None
            Ids of the blocks added to the request's table, often none. None if there are too few
            free blocks; then nothing has changed.
        """
        held = self.req_to_blocks.get(request.request_id, [])
        end = request.num_computed_tokens + num_new_tokens
        wanted = cdiv(end, self.block_size) - len(held)
        if wanted <= 0:
            return []
        must_fit = max(end, request.num_tokens) if full_sequence_must_fit else end
        if cdiv(must_fit, self.block_size) - len(held) > self.block_pool.get_num_free_blocks():
            return None
        blocks = self.block_pool.get_new_blocks(wanted)
        self.req_to_blocks.setdefault(request.request_id, []).extend(blocks)
        return [block.block_id for block in blocks]

    def get_block_ids(self, request_id: str) -> list[int]:
        """Block table of a request, in the order of its tokens."""
        return [block.block_id for block in self.req_to_blocks.get(request_id, [])]

    def free(self, request: Request) -> None:
        """Give back all blocks of ``request``, the last ones first.

        The order follows vLLM: with prefix caching the tail of a sequence is the part least likely
        to be wanted again, so it should be overwritten first.
        """
        self.block_pool.free_blocks(reversed(self.req_to_blocks.pop(request.request_id, [])))

    @property
    def usage(self) -> float:
        """Share of the usable blocks that are taken, in [0, 1]."""
        return self.block_pool.get_usage()

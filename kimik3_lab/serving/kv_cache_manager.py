"""Which blocks belong to which request, in all groups.

Needs the standard library only. Lesson 07 opens it up; lesson 08 watches the blocks run out. Names
are vLLM's, see ``vllm/v1/core/kv_cache_manager.py``.
"""

from __future__ import annotations

from collections.abc import Iterable

from kimik3_lab.serving.block_hash import BlockHasher
from kimik3_lab.serving.block_pool import BlockPool, KVCacheBlock
from kimik3_lab.serving.cache_config import CacheConfig
from kimik3_lab.serving.cache_stats import PrefixCacheStats
from kimik3_lab.serving.kv_cache_coordinator import CacheHit, KVCacheCoordinator
from kimik3_lab.serving.mamba_manager import MambaManager
from kimik3_lab.serving.prefill_checkpoint import cdiv
from kimik3_lab.serving.request import Request

__all__ = ["KVCacheManager", "cdiv"]

#: Ids of new blocks, a list for each group.
BlockIds = tuple[list[int], ...]


class KVCacheManager:
    """Gives each request the blocks its tokens need, from one :class:`BlockPool`.

    Parameters
    ----------
    config : CacheConfig
        Size of the pool and of a block, groups and rules.
    max_model_len : int, optional
        No slots are asked for behind it.
    num_lookahead_tokens : int
        Slots behind the scheduled tokens that a drafter writes, in attention groups.
    num_speculative_blocks : int
        Scratch states of a request in each state group.
    drops_eagle_block : bool
        Whether the drafter has the last block of a hit computed anew.
    keeps_junctions : bool
        Whether the state at a junction inside a block is kept.
    num_hash_lookahead_tokens : int
        Tokens behind a block that its hash covers.
    watermark : float
        Share of all blocks that admission leaves free.

    Examples
    --------
    >>> manager = KVCacheManager(CacheConfig(num_blocks=4, block_size=16))
    >>> request = Request("r0", [5] * 20)
    >>> manager.allocate_slots(request, 20)
    ([1, 2],)
    >>> manager.allocate_slots(request, 52) is None  # two more blocks, only one is free
    True
    >>> manager.free(request)
    >>> manager.block_pool.get_num_free_blocks()
    3
    """

    def __init__(
        self,
        config: CacheConfig,
        *,
        max_model_len: int = 1 << 62,
        num_lookahead_tokens: int = 0,
        num_speculative_blocks: int = 0,
        drops_eagle_block: bool = False,
        keeps_junctions: bool = False,
        num_hash_lookahead_tokens: int = 0,
        watermark: float = 0.0,
    ) -> None:
        self.config = config
        self.max_model_len = max_model_len
        self.num_lookahead_tokens = num_lookahead_tokens
        self.watermark_blocks = int(watermark * config.num_blocks)
        self.block_pool = BlockPool(
            config.num_blocks,
            enable_caching=config.enable_prefix_caching,
            uncached_reuse=config.uncached_reuse,
        )
        self.block_hasher = BlockHasher(config.hash_block_size, num_hash_lookahead_tokens)
        self.coordinator = KVCacheCoordinator(
            config,
            self.block_pool,
            num_speculative_blocks=num_speculative_blocks,
            drops_eagle_block=drops_eagle_block,
            keeps_junctions=keeps_junctions,
        )
        self.managers = self.coordinator.managers
        self.no_new_blocks: BlockIds = tuple([] for _ in self.managers)
        self._no_hit: tuple[list[KVCacheBlock], ...] = tuple([] for _ in self.managers)
        self.prefix_cache_stats = PrefixCacheStats()
        # To spare most requests of a step the work of finding out that nothing is to be done:
        # tokens up to which a request needs no block, and those that fill its next one.
        self._quiet_until: dict[str, int] = {}
        self._next_full_block: dict[str, int] = {}

    def new_step_starts(self) -> None:
        """Hear that the scheduler begins a step."""
        for manager in self.managers:
            manager.new_step_starts()

    def get_computed_blocks(self, request: Request) -> CacheHit | None:
        """Look up how much of a waiting request is cached; None without prefix caching.

        The last token is never part of the hit: it has to be computed, for its logits.
        """
        if not self.config.enable_prefix_caching:
            return None
        self.block_hasher.update(request)
        return self.coordinator.find_longest_cache_hit(request, request.num_tokens - 1)

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        hit: CacheHit | None = None,
        *,
        full_sequence_must_fit: bool = False,
        keep_watermark: bool = False,
    ) -> BlockIds | None:
        """Make room for the next ``num_new_tokens`` tokens of ``request``.

        Parameters
        ----------
        request : Request
            Its ``num_computed_tokens`` says where the new tokens begin, behind those of the hit.
        num_new_tokens : int
            Tokens to make room for, drafts included.
        hit : CacheHit, optional
            What :meth:`get_computed_blocks` has found for a request without blocks.
        full_sequence_must_fit : bool
            Refuse unless all tokens known so far would fit, though only the new ones get blocks.
            Admission asks for this: a prompt cut into chunks must not get stuck half-way.
        keep_watermark : bool
            Refuse if fewer blocks than the watermark would be left.

        Returns
        -------
        tuple of lists of int, or None
            Ids of the blocks added to each table of the request, often none. None if there are too
            few free blocks; then nothing has changed but that states behind were freed.
        """
        request_id, start = request.request_id, request.num_computed_tokens
        if start + num_new_tokens <= self._quiet_until.get(request_id, 0):
            return self.no_new_blocks
        hit_blocks = hit.blocks if hit is not None else self._no_hit
        num_hit_tokens = hit.num_tokens if hit is not None else 0
        start = min(start + num_hit_tokens, self.max_model_len)
        reserve = self.watermark_blocks if keep_watermark else 0
        if full_sequence_must_fit:
            known = min(request.num_tokens, self.max_model_len)
            needed = self._num_blocks(request, start, known, known, hit_blocks, only_ask=True)
            if needed + reserve > self.block_pool.get_num_free_blocks():
                return None
        end = start + num_new_tokens
        slots = min(end + self.num_lookahead_tokens, self.max_model_len)
        processed = max(0, start - request.num_in_flight_tokens)
        for states in self.coordinator.states:
            states.remove_skipped_blocks(request_id, processed)
        needed = self._num_blocks(request, start, end, slots, hit_blocks)
        if needed + reserve > self.block_pool.get_num_free_blocks():
            return None
        if hit is not None:
            # All groups first take hold of what was found, so that none of them is handed a block
            # that another has just found (#33775).
            for manager, blocks in zip(self.managers, hit_blocks, strict=True):
                manager.add_computed_blocks(request_id, blocks, num_hit_tokens)
        new_blocks = tuple(
            [
                block.block_id
                for block in manager.allocate_new_blocks(
                    request_id, end if isinstance(manager, MambaManager) else slots
                )
            ]
            for manager in self.managers
        )
        # Drafts may be rejected, so they get no hash.
        if self.config.enable_prefix_caching:
            self._cache_blocks(request, min(end, request.num_tokens))
        self._quiet_until[request_id] = min(
            manager.quiet_until(request_id, self.num_lookahead_tokens) for manager in self.managers
        )
        return new_blocks

    def _num_blocks(
        self,
        request: Request,
        start: int,
        end: int,
        slots: int,
        hit_blocks: tuple[list[KVCacheBlock], ...],
        *,
        only_ask: bool = False,
    ) -> int:
        """Free blocks that all groups together need for computing tokens ``start`` to ``end``."""
        request_id, num_hit_tokens = request.request_id, start if any(hit_blocks) else 0
        # Under dense retention every chunk may leave a checkpoint, else only that which ends the
        # prompt.
        prefill_end = request.prefill_end if self.config.retention_interval == 0 else 0
        needed = 0
        for manager, hit in zip(self.managers, hit_blocks, strict=True):
            if isinstance(manager, MambaManager):
                needed += manager.get_num_blocks_to_allocate(
                    request_id,
                    end,
                    hit,
                    num_hit_tokens,
                    query_start=start,
                    prefill_end=prefill_end,
                    only_ask=only_ask,
                )
            else:
                needed += manager.get_num_blocks_to_allocate(request_id, slots, hit, num_hit_tokens)
        return needed

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Make findable what has become final between two steps: blocks that are full by now."""
        if num_computed_tokens >= self._next_full_block.get(request.request_id, 1 << 62):
            self._cache_blocks(request, num_computed_tokens)

    def _cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        self.block_hasher.update(request)
        self.coordinator.cache_blocks(request, num_computed_tokens)
        self._next_full_block[request.request_id] = min(
            (manager.num_cached_block.get(request.request_id, 0) + 1) * manager.block_size
            for manager in self.managers
        )

    def forget_uncomputed(self, request: Request, num_computed_tokens: int) -> None:
        """Take back the hashes of blocks behind ``num_computed_tokens``: nobody computes them."""
        for manager in self.managers:
            for block in manager.req_to_blocks.get(request.request_id, ()):
                if block.block_hash_num_tokens > num_computed_tokens:
                    self.block_pool.remove_hashes(block)

    def forget_copies(self, copies: Iterable[tuple[int, int]]) -> None:
        """Take back the hashes of blocks whose copy was not made."""
        for _, target in copies:
            self.block_pool.remove_hashes(self.block_pool.blocks[target])

    def record_admission(self, request: Request) -> None:
        """Count the lookup of a request that has just been given its hit and its first blocks."""
        if self.config.enable_prefix_caching:
            self.prefix_cache_stats.record(
                num_tokens=request.num_tokens,
                num_hits=request.num_computed_tokens,
                preempted=request.num_preemptions > 0,
            )

    def take_kv_cache_block_copies(self) -> list[tuple[int, int]]:
        """Take the copies to be made before the next forward pass, as (source, target) ids.

        Both ends were held until now. They may be given back: who is handed one of them in a later
        step also computes later.
        """
        pairs = [pair for manager in self.managers for pair in manager.pending_copies]
        for manager in self.managers:
            manager.pending_copies.clear()
        self.block_pool.free_blocks(block for pair in pairs for block in pair)
        return [(source.block_id, target.block_id) for source, target in pairs]

    def get_prefill_checkpoints(self, scheduled: Iterable[Request]) -> dict[str, int]:
        """Where the chunks of a step export a state: its tokens, by request."""
        positions = {}
        for request in scheduled:
            for states in self.coordinator.states[:1]:  # the others export at the same place
                position = states.get_prefill_checkpoint(request.request_id)
                if position:
                    positions[request.request_id] = position
        return positions

    def get_block_ids(self, request_id: str) -> BlockIds:
        """Block table of a request in each group, in the order of its tokens."""
        return tuple(
            [block.block_id for block in manager.req_to_blocks.get(request_id, ())]
            for manager in self.managers
        )

    def get_num_common_prefix_blocks(self, request_id: str) -> list[int]:
        """Blocks at the front of a table that all requests with blocks share, for each group.

        States are no rows that attention could share, so theirs is 0.
        """
        counts = [0] * len(self.managers)
        for group_id, manager in enumerate(self.coordinator.attention):
            for block in manager.req_to_blocks.get(request_id, ()):
                if block.ref_cnt != len(manager.req_to_blocks):
                    break
                counts[group_id] += 1
        return counts

    def free(self, request: Request) -> None:
        """Give back all blocks of ``request``, the last ones of each table first."""
        self._quiet_until.pop(request.request_id, None)
        self._next_full_block.pop(request.request_id, None)
        for manager in self.managers:
            manager.free(request.request_id)

    def reset_prefix_cache(self) -> bool:
        """Forget all that is cached. Refused with False while a request holds blocks."""
        return self.block_pool.reset_prefix_cache()

    @property
    def usage(self) -> float:
        """Share of the usable blocks that are taken, in [0, 1]."""
        return self.block_pool.get_usage()

"""Wrong rules for scheduler and cache, each of a kind that real engines have had.

A mutant replaces one function. The proofs of :mod:`test_scheduler_world` must find out every one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
from wrong_methods import Patch, wrap

from kimik3_lab.serving.aligned_mamba_manager import AlignedMambaManager
from kimik3_lab.serving.block_hash import NONE_HASH, BlockHasher
from kimik3_lab.serving.block_pool import BlockPool
from kimik3_lab.serving.budget import TokenBudget
from kimik3_lab.serving.chunking import Chunking
from kimik3_lab.serving.kv_cache_coordinator import KVCacheCoordinator
from kimik3_lab.serving.kv_cache_manager import KVCacheManager
from kimik3_lab.serving.request import RequestStatus
from kimik3_lab.serving.request_book import RequestBook
from kimik3_lab.serving.request_queue import FCFSRequestQueue
from kimik3_lab.serving.scheduler import Scheduler
from kimik3_lab.serving.single_type_manager import FullAttentionManager, SingleTypeKVCacheManager

__all__ = ["MUTANTS"]

MUTANTS: dict[str, Patch] = {}


def mutant(text: str) -> Callable[[Patch], Patch]:
    def register(patch: Patch) -> Patch:
        MUTANTS[text] = patch
        return patch

    return register


# -- the pool ----------------------------------------------------------------------------------


@mutant("a block that is found is not held")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockPool, "touch", lambda self, blocks: None)


@mutant("the first block of a table is never given back")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    def free(original: Any, self: Any, request_id: str) -> None:
        del self.req_to_blocks.get(request_id, [])[:1]
        original(self, request_id)

    wrap(monkeypatch, SingleTypeKVCacheManager, "free", free)


@mutant("a block keeps its hash when it is handed out again")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    def get_new_blocks(original: Any, self: Any, count: int) -> Any:
        kept = {key: dict(blocks) for key, blocks in self._by_hash.items()}
        taken = original(self, count)
        ids = {block.block_id for block in taken}
        for key, blocks in kept.items():
            for block_id, block in blocks.items():
                if block_id in ids:
                    self._by_hash.setdefault(key, {})[block_id] = block
        return taken

    wrap(monkeypatch, BlockPool, "get_new_blocks", get_new_blocks)


@mutant("found blocks cost nothing, though they stand in the queue of free ones (#33775)")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in list(sys.modules.values()):
        if module.__name__.startswith("kimik3_lab.serving.") and hasattr(module, "num_unheld"):
            monkeypatch.setattr(module, "num_unheld", lambda blocks: 0)


# -- hashes ------------------------------------------------------------------------------------


@mutant("a block's hash covers its own tokens only, not what came before")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    from kimik3_lab.serving import block_hash

    original = block_hash.hash_block_tokens
    monkeypatch.setattr(
        block_hash, "hash_block_tokens", lambda parent, *rest: original(NONE_HASH, *rest)
    )


@mutant("the salt is no part of the hash")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    def update(original: Any, self: Any, request: Any) -> Any:
        salt, request.cache_salt = request.cache_salt, None
        try:
            return original(self, request)
        finally:
            request.cache_salt = salt

    wrap(monkeypatch, BlockHasher, "update", update)


@mutant("the hash does not cover the token that the drafter has seen")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(original: Any, self: Any, size: int, ahead: int = 0) -> None:
        original(self, size, 0)

    wrap(monkeypatch, BlockHasher, "__init__", init)


# -- hits --------------------------------------------------------------------------------------


@mutant("the whole prompt may be a hit (nano-vllm#144)")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(original: Any, self: Any, request: Any, max_length: int) -> Any:
        return original(self, request, max_length + 1)

    wrap(monkeypatch, KVCacheCoordinator, "find_longest_cache_hit", find)


@mutant("a hit is as long as attention's, whether or not a state was kept there (ATOM#1759)")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(original: Any, self: Any, hashes: Any, max_length: int, ids: Any) -> Any:
        found, length = original(self, hashes, max_length, ids)
        if length == 0 and max_length >= self.block_size:
            held = [b for b in self.block_pool.blocks[1:] if b.block_hash is not None]
            if held:
                column = max_length // self.block_size - 1
                null = self.block_pool.null_block
                return [[null] * column + [held[0]] for _ in ids], max_length - max_length % (
                    self.block_size
                )
        return found, length

    wrap(monkeypatch, AlignedMambaManager, "find_longest_cache_hit", find)


@mutant("a state that is being computed can be found already")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    def blocks(original: Any, self: Any, *arguments: Any, **keywords: Any) -> Any:
        self.cached_blocks_this_step.clear()
        return original(self, *arguments, **keywords)

    wrap(monkeypatch, AlignedMambaManager, "get_num_blocks_to_allocate", blocks)


@mutant("a page hit inside a block is written into without a copy")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    def copy(self: Any, request_id: str, index: int, shared: Any, private: Any) -> None:
        self.req_to_blocks[request_id][index] = private
        self.block_pool.free_blocks([shared])

    monkeypatch.setattr(SingleTypeKVCacheManager, "use_private_copy", copy)


@mutant("the tail of a prompt is overwritten by its own request")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    def keep(self: Any, request_id: str, index: int, source: Any, copy: Any) -> None:
        self.block_pool.free_blocks([copy])

    monkeypatch.setattr(AlignedMambaManager, "_keep_own_tail", keep)


@mutant("an exported state has the hash of its column, not of its position")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    def cache(self: Any, request: Any) -> None:
        _, index = self._checkpoints[request.request_id]
        block = self.req_to_blocks[request.request_id][index]
        self.block_pool.remove_hashes(block)
        self.cache_partial_block(request, block, (index + 1) * self.block_size)

    monkeypatch.setattr(AlignedMambaManager, "_cache_checkpoint", cache)


@mutant("blocks are found that a failed step did not compute")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVCacheManager, "forget_uncomputed", lambda self, *arguments: None)


@mutant("pages are hashed before they are full")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    def cache(original: Any, self: Any, request: Any, num_tokens: int, boundaries: Any) -> None:
        room = len(self.req_to_blocks[request.request_id]) * self.block_size
        original(self, request, min(num_tokens + self.block_size, room), boundaries)

    wrap(monkeypatch, FullAttentionManager, "cache_blocks", cache)


@mutant("hashes stay of a request that was struck out of the step (vLLM up to 0.33.0)")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    import world_configs

    # Only then may a victim stand before the request that needs its blocks.
    wrong = {"forget_unscheduled_hashes": False, "policy": "priority"}
    monkeypatch.setattr(world_configs, "SOUND_SCHEDULER", wrong)


@mutant("a column is hashed as full though no chunk ended there (vLLM up to 0.33.0)")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    import world_configs

    wrong = world_configs.SOUND_CACHE | {"hash_written_states_only": False}
    monkeypatch.setattr(world_configs, "SOUND_CACHE", wrong)


# -- requests ----------------------------------------------------------------------------------


@mutant("a preempted request goes on where it was")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    def preempt(original: Any, self: Any, request: Any) -> None:
        computed = request.num_computed_tokens
        original(self, request)
        request.num_computed_tokens = computed

    wrap(monkeypatch, RequestBook, "_preempt", preempt)


@mutant("a preempted request goes to the end of the queue")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FCFSRequestQueue, "prepend_request", FCFSRequestQueue.add_request)


@mutant("rejected drafts stay computed")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RequestBook, "_reject", staticmethod(lambda request, count: None))


@mutant("a request that ends keeps its blocks")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    def free(original: Any, self: Any, request: Any) -> None:
        if request.status is not RequestStatus.FINISHED_ABORTED:
            original(self, request)

    wrap(monkeypatch, KVCacheManager, "free", free)


@mutant("output in flight of a preempted request counts twice")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    def preempt(original: Any, self: Any, request: Any) -> None:
        original(self, request)
        request.num_stale_output_tokens = 0

    wrap(monkeypatch, RequestBook, "_preempt", preempt)


# -- steps -------------------------------------------------------------------------------------


@mutant("only half of what is handed out is taken off the budget")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    def spend(original: Any, self: Any, num_tokens: int) -> None:
        original(self, num_tokens // 2)

    wrap(monkeypatch, TokenBudget, "spend", spend)


@mutant("draft slots are not taken off the rows")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(original: Any, self: Any, config: Any) -> None:
        original(self, config)
        self._draft_slots = 0
        self.remaining = min(self._tokens, self._rows)

    wrap(monkeypatch, TokenBudget, "__init__", init)


@mutant("tokens in flight are scheduled again")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    def running(original: Any, self: Any, request: Any, budget: int) -> int:
        in_flight = request.num_output_placeholders > 0
        return min(original(self, request, budget) + in_flight, budget)

    wrap(monkeypatch, Chunking, "running", running)


@mutant("the last in the queue is served first")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FCFSRequestQueue, "add_request", FCFSRequestQueue.prepend_request)


@mutant("who was passed over once is forgotten")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    def update(original: Any, self: Any, output: Any) -> None:
        original(self, output)
        if len(self.running) > 2:
            self.running.pop(1)

    wrap(monkeypatch, Scheduler, "_update_after_schedule", update)


@mutant("a seat too many is given away")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(original: Any, self: Any, *arguments: Any, **keywords: Any) -> None:
        original(self, *arguments, **keywords)
        self._num_seats += 1

    wrap(monkeypatch, Scheduler, "__init__", init)

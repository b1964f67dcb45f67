"""The block pool and the manager on top of it."""

from __future__ import annotations

import pytest

from kimik3_lab.serving.block_pool import BlockPool
from kimik3_lab.serving.config import CacheConfig
from kimik3_lab.serving.kv_cache_manager import KVCacheManager, cdiv
from kimik3_lab.serving.request import Request


def ids(blocks: list) -> list[int]:
    return [block.block_id for block in blocks]


def test_the_null_block_is_never_handed_out_nor_taken_back() -> None:
    pool = BlockPool(5)
    blocks = pool.get_new_blocks(4)
    assert ids(blocks) == [1, 2, 3, 4]
    assert pool.null_block.block_id == 0
    pool.free_blocks([pool.null_block])
    assert pool.get_num_free_blocks() == 0
    assert pool.get_usage() == 1.0


def test_blocks_are_reused_in_the_order_in_which_they_came_back() -> None:
    pool = BlockPool(5)
    a = pool.get_new_blocks(2)
    b = pool.get_new_blocks(1)
    pool.free_blocks(reversed(a))
    pool.free_blocks(b)
    assert ids(pool.get_new_blocks(4)) == [4, 2, 1, 3]


def test_too_many_blocks_change_nothing() -> None:
    pool = BlockPool(3)
    with pytest.raises(ValueError, match="3 blocks wanted, 2 are free"):
        pool.get_new_blocks(3)
    assert pool.get_num_free_blocks() == 2


def test_a_block_given_back_twice_is_an_error_and_not_handed_out_twice() -> None:
    pool = BlockPool(3)
    blocks = pool.get_new_blocks(1)
    pool.free_blocks(blocks)
    with pytest.raises(ValueError, match="block 1"):
        pool.free_blocks(blocks)
    assert sorted(ids(pool.get_new_blocks(2))) == [1, 2]


def test_a_shared_block_comes_back_with_its_last_holder() -> None:
    pool = BlockPool(3)
    (block,) = pool.get_new_blocks(1)
    block.ref_cnt += 1
    pool.free_blocks([block])
    assert pool.get_num_free_blocks() == 1
    pool.free_blocks([block])
    assert pool.get_num_free_blocks() == 2


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 31, 32, 33, 48])
def test_a_request_gets_exactly_the_blocks_its_tokens_need(num_tokens: int) -> None:
    manager = KVCacheManager(CacheConfig(num_blocks=9, block_size=16))
    request = Request("r", [5] * num_tokens)
    for token in range(num_tokens):
        assert manager.allocate_slots(request, 1) is not None
        request.num_computed_tokens = token + 1
    table = manager.get_block_ids("r")[0]
    assert len(table) == cdiv(num_tokens, 16)
    assert len(set(table)) == len(table)
    manager.free(request)
    assert manager.block_pool.get_num_free_blocks() == 8
    assert manager.get_block_ids("r") == ([],)


def test_a_failed_allocation_changes_nothing() -> None:
    manager = KVCacheManager(CacheConfig(num_blocks=4, block_size=4))
    request = Request("r", [5] * 16)
    assert manager.allocate_slots(request, 6) == ([1, 2],)
    request.num_computed_tokens = 6
    assert manager.allocate_slots(request, 10) is None
    assert manager.get_block_ids("r") == ([1, 2],)
    assert manager.usage == pytest.approx(2 / 3)
    assert manager.allocate_slots(request, 6) == ([3],)


def test_admission_looks_at_the_whole_prompt_and_takes_only_the_chunk() -> None:
    manager = KVCacheManager(CacheConfig(num_blocks=4, block_size=4))
    long, short = Request("long", [5] * 13), Request("short", [5] * 12)
    assert manager.allocate_slots(long, 4, full_sequence_must_fit=True) is None
    assert manager.allocate_slots(short, 4, full_sequence_must_fit=True) == ([1],)
    assert manager.block_pool.get_num_free_blocks() == 2

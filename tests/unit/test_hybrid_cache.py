"""Tables and hits of a cache with pages and states, followed block by block."""

from __future__ import annotations

import pytest

from kimik3_lab.serving import CacheConfig, Request
from kimik3_lab.serving.block_hash import NONE_HASH, BlockHasher, hash_block_tokens
from kimik3_lab.serving.block_pool import BlockPool
from kimik3_lab.serving.fragmentation import measure_fragmentation
from kimik3_lab.serving.kv_cache_manager import KVCacheManager


def hybrid(num_blocks: int = 99, block_size: int = 4, **knobs: object) -> CacheConfig:
    knobs.setdefault("num_kda_groups", 1)
    return CacheConfig(num_blocks, block_size, enable_prefix_caching=True, **knobs)


def compute(manager: KVCacheManager, request: Request, *chunks: int) -> None:
    """Let a request take its chunks, each in a step of its own, as the scheduler would."""
    for chunk in chunks:
        manager.new_step_starts()
        hit = None
        if request.request_id not in manager.managers[0].req_to_blocks:
            hit = manager.get_computed_blocks(request)
        assert manager.allocate_slots(request, chunk, hit) is not None
        request.num_computed_tokens += chunk + (hit.num_tokens if hit else 0)
        manager.take_kv_cache_block_copies()


def hit_tokens(manager: KVCacheManager, tokens: list[int]) -> int:
    found = manager.get_computed_blocks(Request("probe", tokens))
    assert found is not None
    return found.num_tokens


# -- hashes and the pool -----------------------------------------------------------------------


def test_a_hash_stands_for_a_whole_prefix() -> None:
    def hashes(tokens: list[int], **knobs: object) -> list[bytes]:
        return BlockHasher(2, **knobs).update(Request("a", tokens))

    assert len(hashes([1, 2, 3, 4, 5])) == 2
    assert hashes([1, 2, 3, 4])[1] == hashes([1, 2, 3, 4, 9, 9])[1]
    assert hashes([1, 2, 3, 4])[1] != hashes([8, 2, 3, 4])[1]
    assert hashes([1, 2])[0] == hash_block_tokens(NONE_HASH, [1, 2])
    salted = BlockHasher(2).update(Request("a", [1, 2, 3, 4], cache_salt="mine"))
    assert not set(salted) & set(hashes([1, 2, 3, 4]))


def test_a_hash_with_lookahead_covers_the_next_token() -> None:
    def hashes(tokens: list[int]) -> list[bytes]:
        return BlockHasher(2, num_lookahead_tokens=1).update(Request("a", tokens))

    assert len(hashes([1, 2])) == 0
    assert hashes([1, 2, 3]) == hashes([1, 2, 3, 4])
    assert hashes([1, 2, 3]) != hashes([1, 2, 9])


def test_hashes_grow_with_the_output() -> None:
    request, hasher = Request("a", [1, 2, 3], max_tokens=9), BlockHasher(2)
    assert len(hasher.update(request)) == 1
    request.append_output_token_ids([4, 5], 99)
    assert hasher.update(request) == hasher.update(Request("b", [1, 2, 3, 4, 5]))


def test_cached_blocks_are_reused_last_and_can_be_found_until_then() -> None:
    pool = BlockPool(5, enable_caching=True)
    blocks = pool.get_new_blocks(4)
    pool.insert(b"h", 0, blocks[1], 4)
    pool.free_blocks(blocks)
    assert [b.block_id for b in pool.get_new_blocks(3)] == [1, 3, 4]
    assert pool.get_cached_block(b"h", [0]) == [blocks[1]]
    assert pool.get_cached_block(b"h", [1]) is None
    pool.get_new_blocks(1)
    assert pool.get_cached_block(b"h", [0]) is None
    assert pool.num_evictions == 1


def test_a_touched_block_is_not_handed_out() -> None:
    pool = BlockPool(3, enable_caching=True)
    (block,) = pool.get_new_blocks(1)
    pool.insert(b"h", 0, block, 4)
    pool.free_blocks([block])
    pool.touch([block, pool.null_block])
    assert (block.ref_cnt, pool.get_num_free_blocks()) == (1, 1)
    assert pool.get_new_blocks(1) != [block]


def test_two_blocks_with_the_same_content_serve_in_turn() -> None:
    pool = BlockPool(3, enable_caching=True)
    first, second = pool.get_new_blocks(2)
    pool.insert(b"h", 0, first, 4)
    pool.insert(b"h", 0, second, 4)
    assert pool.get_cached_block(b"h", [0]) == [first]
    pool.remove_hashes(first)
    assert pool.get_cached_block(b"h", [0]) == [second]


def test_the_cache_is_reset_only_while_nobody_holds_blocks() -> None:
    manager = KVCacheManager(CacheConfig(9, 4, enable_prefix_caching=True))
    request = Request("a", [5] * 9)
    compute(manager, request, 9)
    assert not manager.reset_prefix_cache()
    manager.free(request)
    assert hit_tokens(manager, [5] * 9) == 8
    assert manager.reset_prefix_cache()
    assert hit_tokens(manager, [5] * 9) == 0


# -- attention -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "hit"), [(31, 16), (32, 16), (33, 32), (48, 32), (49, 48)])
def test_the_last_token_is_never_part_of_a_hit(length: int, hit: int) -> None:
    manager = KVCacheManager(CacheConfig(99, 16, enable_prefix_caching=True))
    compute(manager, Request("a", list(range(length))), length)
    assert hit_tokens(manager, list(range(length))) == hit


def test_a_hit_is_shared_and_counts_what_nobody_holds() -> None:
    manager = KVCacheManager(CacheConfig(6, 4, enable_prefix_caching=True))
    first = Request("a", [5] * 12)
    compute(manager, first, 12)
    second = Request("b", [5] * 8 + [6] * 4)
    found = manager.get_computed_blocks(second)
    assert found is not None and found.num_tokens == 8
    assert manager.allocate_slots(second, 4, found) == ([4],)
    assert manager.get_block_ids("b") == ([1, 2, 4],)
    assert manager.block_pool.blocks[1].ref_cnt == 2
    assert manager.get_num_common_prefix_blocks("a") == [2]
    manager.free(first)
    manager.free(second)
    # Free, but found: taking them costs blocks of the queue all the same.
    third = Request("c", [5] * 8 + [7] * 13)
    found = manager.get_computed_blocks(third)
    assert found is not None and found.num_tokens == 8
    assert manager.allocate_slots(third, 13, found) is None
    assert manager.allocate_slots(third, 12, found) is not None


def test_drafts_get_no_hash_until_they_are_verified() -> None:
    manager = KVCacheManager(CacheConfig(99, 4, enable_prefix_caching=True))
    request = Request("a", [5] * 6, max_tokens=99)
    compute(manager, request, 6)
    request.append_output_token_ids([6], 99)
    assert manager.allocate_slots(request, 4) is not None  # one token and three drafts: to 10
    request.num_computed_tokens = 10
    assert hit_tokens(manager, [5] * 6 + [6, 7, 7, 7, 7]) == 4
    request.append_output_token_ids([7, 7], 99)
    manager.cache_blocks(request, 9)
    assert hit_tokens(manager, [5] * 6 + [6, 7, 7, 7, 7]) == 8


# -- states --------------------------------------------------------------------------------------


def table(manager: KVCacheManager, request_id: str, group: int = 1) -> list[int]:
    return manager.get_block_ids(request_id)[group]


def test_the_running_state_moves_on_and_the_last_one_stays_for_a_step() -> None:
    manager = KVCacheManager(hybrid())
    request = Request("a", list(range(20)), max_tokens=9)
    compute(manager, request, 8)
    # The state after 8 tokens lies in column 1; column 0 was never a chunk's end.
    assert table(manager, "a") == [0, 3]
    compute(manager, request, 8)
    assert table(manager, "a") == [0, 3, 0, 6]
    compute(manager, request, 4)
    assert table(manager, "a") == [0, 0, 0, 6, 8]
    assert hit_tokens(manager, list(range(20))) == 16
    assert hit_tokens(manager, list(range(15))) == 8


def test_a_hit_is_where_all_groups_agree() -> None:
    manager = KVCacheManager(hybrid(num_kda_groups=2))
    tokens = list(range(40))
    compute(manager, Request("a", tokens), 24, 16)
    found = manager.get_computed_blocks(Request("b", tokens[:30] + [99] * 5))
    assert found is not None
    # Pages reach to 28, states were kept at 24 and 40 only.
    assert (found.num_tokens, found.longest, found.shared_prefix_boundary) == (24, 28, 28)
    assert [len(blocks) for blocks in found.blocks] == [6, 6, 6]
    assert [block.is_null for block in found.blocks[1]] == [True] * 5 + [False]


def test_a_state_of_this_step_is_not_started_from_yet() -> None:
    manager = KVCacheManager(hybrid())
    compute(manager, Request("a", list(range(20))), 8)
    follower = Request("b", [*range(8), 99])
    found = manager.get_computed_blocks(follower)
    assert found is not None and found.num_tokens == 8
    assert manager.allocate_slots(follower, 1, found) is None
    manager.new_step_starts()
    assert manager.allocate_slots(follower, 1, found) is not None


def test_scratch_states_move_along() -> None:
    manager = KVCacheManager(hybrid(), num_speculative_blocks=2)
    request = Request("a", list(range(7)), max_tokens=99)
    compute(manager, request, 4, 3)
    running, *scratch = table(manager, "a")[-3:]
    assert len({running, *scratch}) == 3
    request.append_output_token_ids([7], 99)
    compute(manager, request, 3)  # across the boundary at 8
    assert len(table(manager, "a")) == 5
    assert table(manager, "a")[1] == running
    assert set(table(manager, "a")[2:]) > {scratch[1]}


def test_recovery_records_need_no_scratch() -> None:
    slots = KVCacheManager(hybrid(), num_speculative_blocks=4)
    records = KVCacheManager(hybrid(), num_speculative_blocks=0)
    for manager in (slots, records):
        compute(manager, Request("a", [5] * 3), 3)
    difference = records.block_pool.get_num_free_blocks() - slots.block_pool.get_num_free_blocks()
    assert difference == 4


def test_without_prefix_caching_a_request_has_one_state() -> None:
    manager = KVCacheManager(CacheConfig(99, 4, num_kda_groups=2), num_speculative_blocks=1)
    request = Request("a", [5] * 40)
    compute(manager, request, 10, 10, 20)
    assert [len(ids) for ids in manager.get_block_ids("a")] == [10, 2, 2]


# -- hits inside a block -------------------------------------------------------------------------


def test_a_hit_inside_a_block_is_copied_before_it_is_extended() -> None:
    manager = KVCacheManager(hybrid(block_size=8, prefix_match_unit=2))
    first = Request("a", list(range(13)))
    compute(manager, first, 8, 4, 1)  # stops at the last unit that leaves a token
    pages_of_first, states_of_first = manager.get_block_ids("a")
    second = Request("b", [*range(12), 99])
    manager.new_step_starts()
    found = manager.get_computed_blocks(second)
    assert found is not None and found.num_tokens == 12
    assert manager.allocate_slots(second, 1, found) is not None
    pages, states = manager.get_block_ids("b")
    assert pages[0] == pages_of_first[0] and pages[1] != pages_of_first[1]
    copies = manager.take_kv_cache_block_copies()
    assert (pages_of_first[1], pages[1]) in copies
    assert states[1] in [target for _, target in copies]
    # The first request went on in its block, so the cache keeps a copy of the state at 12.
    assert states_of_first[1] not in [source for source, _ in copies]


def test_a_copy_holds_both_ends_until_it_is_handed_over() -> None:
    manager = KVCacheManager(hybrid(block_size=8, prefix_match_unit=2))
    first = Request("a", list(range(13)))
    compute(manager, first, 8, 4, 1)
    manager.free(first)
    free = manager.block_pool.get_num_free_blocks()
    second = Request("b", [*range(12), 99])
    manager.new_step_starts()
    assert manager.allocate_slots(second, 1, manager.get_computed_blocks(second)) is not None
    manager.free(second)
    assert manager.block_pool.get_num_free_blocks() == free - 4  # two copies, two ends each
    assert len(manager.take_kv_cache_block_copies()) == 2
    assert manager.block_pool.get_num_free_blocks() == free


# -- exported states -----------------------------------------------------------------------------


def internal(block_size: int = 16, **knobs: object) -> CacheConfig:
    return hybrid(
        block_size=block_size, prefill_checkpoints="internal", checkpoint_alignment=16, **knobs
    )


def test_an_exported_state_is_found_where_it_was_taken() -> None:
    manager = KVCacheManager(internal())
    request = Request("a", list(range(100)))
    compute(manager, request, 100)
    assert manager.get_prefill_checkpoints([request]) == {"a": 96}
    assert [block > 0 for block in table(manager, "a")] == [False] * 5 + [True] * 2
    assert hit_tokens(manager, list(range(100))) == 96
    assert hit_tokens(manager, list(range(90))) == 0  # there is no other state


def test_an_exported_state_inside_a_block_has_the_hash_of_its_place() -> None:
    manager = KVCacheManager(internal(32, prefix_match_unit=16))
    request = Request("a", list(range(119)))
    compute(manager, request, 119)
    assert manager.get_prefill_checkpoints([request]) == {"a": 112}
    # It stands in the column of tokens 64 to 96, but what it has read is 112 tokens.
    assert hit_tokens(manager, list(range(119))) == 112
    assert hit_tokens(manager, list(range(97))) == 0


def test_a_request_that_is_preempted_finds_its_own_blocks_again() -> None:
    manager = KVCacheManager(hybrid())
    request = Request("a", list(range(20)), max_tokens=9)
    compute(manager, request, 16, 4)
    manager.free(request)
    request.num_computed_tokens = 0
    manager.new_step_starts()
    found = manager.get_computed_blocks(request)
    assert found is not None and found.num_tokens == 16


# -- rules that vLLM does not have (yet) -----------------------------------------------------------


@pytest.mark.parametrize(("mended", "hit"), [(True, 32), (False, 64)])
def test_a_state_that_was_passed_by_gets_no_hash(mended: bool, hit: int) -> None:
    # Recorded with vLLM 0.33.0: three prompts one after another, block 64, unit 16.
    manager = KVCacheManager(internal(64, prefix_match_unit=16, hash_written_states_only=mended))
    prompts = [list(range(40)), list(range(200)), [*range(64), *range(500, 520)]]
    compute(manager, Request("a", prompts[0]), 32, 8)
    compute(manager, Request("b", prompts[1]), 168)  # resumes at 32 and exports at 192 only
    assert hit_tokens(manager, prompts[1]) == 192
    # The state after 64 tokens was never computed.
    assert hit_tokens(manager, prompts[2]) == hit


@pytest.mark.parametrize("mended", [True, False])
def test_a_copy_waits_for_the_rows_that_this_step_writes(mended: bool) -> None:
    config = hybrid(
        block_size=8, prefix_match_unit=2, retention_interval=0, defer_unwritten_copies=mended
    )
    manager = KVCacheManager(config)
    tokens = list(range(30))
    first = Request("a", tokens[:15])
    compute(manager, first, 8, 6, 1)  # leaves a state after 14 tokens
    manager.free(first)
    compute(manager, Request("b", tokens), 2)  # a hit of 14; its rows 14 and 15 fill the block
    third = Request("c", tokens)
    found = manager.get_computed_blocks(third)
    # Pages reach to 16 now, states to 14: the block that "b" fills in this step is to be copied.
    assert found is not None
    assert (found.num_tokens, found.longest) == (14, 16)
    assert found.blocks[0][1].block_id == manager.get_block_ids("b")[0][1]
    assert (manager.allocate_slots(third, 2, found) is None) is mended
    if mended:
        manager.new_step_starts()
        assert manager.allocate_slots(third, 2, manager.get_computed_blocks(third)) is not None


# -- what is in the blocks -----------------------------------------------------------------------


def test_fragmentation_counts_places_and_states() -> None:
    manager = KVCacheManager(hybrid(num_kda_groups=3), num_speculative_blocks=2)
    requests = [Request("a", [5] * 6), Request("b", [5] * 4 + [6] * 3)]
    compute(manager, requests[0], 4, 2)
    compute(manager, requests[1], 3)
    stats = measure_fragmentation(manager, requests)
    assert requests[1].num_computed_tokens == 7  # four of them found
    # Three blocks of pages with 4 + 2 + 3 rows: the first is shared.
    assert (stats.num_attention_slots, stats.num_filled_slots) == (12, 9)
    assert stats.internal_fragmentation == pytest.approx(0.25)
    assert stats.num_scratch_states == 12
    assert stats.num_states == 12  # two for each request and group: its running one, and the last
    assert stats.num_held == 98 - manager.block_pool.get_num_free_blocks()

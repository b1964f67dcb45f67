"""Bugs that real engines had with cached blocks: each first shown with the wrong rule, then not.

Bare numbers are issues and pull requests of vllm-project/vllm.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from known_bugs_support import finish, hits, prefix, request, step

from kimik3_lab.serving import CacheConfig, Scheduler, SchedulerConfig
from kimik3_lab.serving.aligned_mamba_manager import AlignedMambaManager
from kimik3_lab.serving.block_pool import BlockPool
from kimik3_lab.serving.kv_cache_coordinator import KVCacheCoordinator
from kimik3_lab.serving.kv_cache_groups import group_layers
from kimik3_lab.serving.kv_cache_manager import KVCacheManager

GOLDEN = Path(__file__).resolve().parents[2] / "data" / "golden" / "vllm_scheduler"


def hybrid(block_size: int = 16, num_blocks: int = 400, **options: Any) -> CacheConfig:
    options = {"num_kda_groups": 1, "enable_prefix_caching": True} | options
    return CacheConfig(num_blocks, block_size, **options)


def scheduler(cache: CacheConfig, *, seqs: int = 4, budget: int = 512, **options: Any) -> Scheduler:
    return Scheduler(SchedulerConfig(seqs, budget, 4096, **options), cache)


@pytest.mark.parametrize(
    ("length", "right"), [(31, 16), (32, 16), (33, 32), (47, 32), (48, 32), (49, 48)]
)
@pytest.mark.parametrize("interval", [0, None])
def test_a_prompt_that_ends_on_a_block_boundary(
    length: int, right: int, interval: int | None
) -> None:
    """#50235, #50409: the one state that was kept lay where no repetition can resume."""
    wrong = scheduler(hybrid(retention_interval=interval, exact_prompt_boundaries=False))
    ours = scheduler(hybrid(retention_interval=interval))
    prompt = prefix(length)
    assert hits(wrong, prompt, prompt) == [0, 0 if length % 16 == 0 else right]
    assert hits(ours, prompt, prompt) == [0, right]


def test_a_state_that_this_step_computes_is_not_there_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """#29387; sglang#30243 and #31474 published slots that nobody had written."""

    def second_hit() -> int | None:
        one = scheduler(hybrid())
        one.add_request(request("a", prefix(32, 1)))
        one.add_request(request("b", prefix(32, 1)))
        first = step(one)  # cuts a's prompt at 32, where its state will be kept
        assert first.num_scheduled_tokens["a"] == 32
        new = {r.req_id: r.num_computed_tokens for r in first.scheduled_new_reqs}
        return new.get("b")

    assert second_hit() is None  # b waits one step

    original = AlignedMambaManager.get_num_blocks_to_allocate

    def forgetful(self: AlignedMambaManager, *arguments: Any, **keywords: Any) -> int:
        self.cached_blocks_this_step.clear()
        return original(self, *arguments, **keywords)

    monkeypatch.setattr(AlignedMambaManager, "get_num_blocks_to_allocate", forgetful)
    assert second_hit() == 32


def test_a_failed_step_leaves_nothing_to_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the kind of sglang#30243: blocks get their hash when they are planned."""

    def hit_after_failure() -> int:
        one = scheduler(hybrid(num_kda_groups=0))
        one.add_request(request("a", prefix(40)))
        one.fail_step(one.schedule())
        return hits(one, prefix(40))[0]

    assert hit_after_failure() == 0
    monkeypatch.setattr(KVCacheManager, "forget_uncomputed", lambda *_: None)
    assert hit_after_failure() == 32


def test_a_hit_ends_where_a_state_was_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """ROCm/ATOM#1759, #47491, #43090: attention's hit without a state is wrong at full speed."""
    prompts = prefix(70), prefix(40, 30)
    cache = hybrid(retention_interval=0)
    assert hits(scheduler(cache), *prompts) == [0, 0]  # the only state is at 64

    def any_state(self: AlignedMambaManager, hashes: Any, max_length: int, group_ids: Any) -> Any:
        column = max_length // self.block_size
        null = self.block_pool.null_block
        return [[null] * column for _ in group_ids], column * self.block_size

    monkeypatch.setattr(AlignedMambaManager, "find_longest_cache_hit", any_state)
    assert hits(scheduler(cache), *prompts) == [0, 32]


def test_a_shared_prefix_is_found_although_prompts_end_differently() -> None:
    """#45238: the kept state lies in tokens of one request only, and the hit rate drops to 0."""
    prompts = [prefix(64, 40, token) for token in (901, 902, 903)]
    found = hits(scheduler(hybrid(retention_interval=0)), *prompts)
    # The second request shows where the prompts part and keeps a state there.
    assert found == [0, 0, 64]


def recorded(version: str, number: int) -> list[dict[str, Any]]:
    """Return what vLLM itself does with a scenario of ``known_bugs``."""
    name = f"known_bugs_{version}.json.gz"
    content = json.loads(gzip.decompress((GOLDEN / name).read_bytes()))
    trace: list[dict[str, Any]] = content["scenarios"][number]["trace"]
    return trace


def test_a_struck_out_request_leaves_no_hashes() -> None:
    """#57580 (open): a victim of the same step was never computed, but can be found."""

    def resumed_at(forget: bool) -> int:
        config = SchedulerConfig(
            4, 64, 4096, policy="priority", long_prefill_token_threshold=32,
            forget_unscheduled_hashes=forget, scheduler_reserve_full_isl=False,
        )  # fmt: skip
        one = Scheduler(config, CacheConfig(10, 16, enable_prefix_caching=True))
        one.add_request(request("other", prefix(0, 1, 901), max_tokens=1, priority=5))
        one.add_request(request("low", prefix(130), priority=9))
        step(one)
        one.add_request(request("high", prefix(0, 15), max_tokens=6, priority=0))
        for output in finish(one):
            for cached in output.scheduled_cached_reqs:
                if cached.resumed_from_preemption:
                    assert cached.req_id == "low"
                    return cached.num_computed_tokens
        raise AssertionError("nobody was preempted")

    assert resumed_at(forget=False) == 112
    assert resumed_at(forget=True) == 96  # three steps of 32; the fourth was struck out


@pytest.mark.parametrize("version", ["0.27.1", "0.32.0", "0.33.0"])
def test_vllm_resumes_where_nothing_was_computed(version: str) -> None:
    rows = recorded(version, 0)
    (struck,) = [row["step"] for row in rows if row["preempted"]]
    computed = sum(row["scheduled"].get("low", 0) for row in rows[:struck])
    assert computed == 96
    again = next(row for row in rows[struck + 1 :] if "low" in row["scheduled"])
    assert 130 - again["scheduled"]["low"] == 112 or again["computed"]["low"] == 112 + 18


def test_a_column_that_no_chunk_ended_at_has_no_hash() -> None:
    """Found by the proofs in vLLM 0.32.0 and 0.33.0: a partial hit, then an exported state.

    The hit's own copy of the state, at 32, was given the hash of its full column, 64.
    """

    def third_hit(written_only: bool) -> int:
        cache = hybrid(
            64, 100, prefix_match_unit=16, prefill_checkpoints="internal",
            hash_written_states_only=written_only,
        )  # fmt: skip
        one = scheduler(cache, budget=1024)
        return hits(one, prefix(40), prefix(200), prefix(64, 20))[2]

    assert third_hit(written_only=False) == 64  # reads the state after 32 tokens
    assert third_hit(written_only=True) == 32


@pytest.mark.parametrize("version", ["0.32.0", "0.33.0"])
def test_vllm_takes_a_state_for_one_of_another_place(version: str) -> None:
    rows = recorded(version, 1)
    begun = {
        i: (row["prefix_hit"].get(i, 0), row["scheduled"][i])
        for row in rows
        for i in row["new_req_blocks"]
    }
    assert begun["b"] == (32, 168)  # one chunk from 32 to 200, which exports the state at 192
    assert begun["c"][0] == 64


def test_blocks_that_were_found_are_held_before_any_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """#33775: one group's new blocks were another group's hit."""

    def tables() -> list[int]:
        one = scheduler(hybrid(num_blocks=9, retention_interval=0))
        hits(one, prefix(33))
        one.add_request(request("b", prefix(33, 30)))
        output = step(one)
        return [i for group in output.scheduled_new_reqs[0].block_ids for i in group if i]

    held = tables()
    assert len(held) == len(set(held))

    from kimik3_lab.serving.single_type_manager import SingleTypeKVCacheManager

    original = SingleTypeKVCacheManager.add_computed_blocks

    def late(self: Any, request_id: str, blocks: Any, num_tokens: int) -> None:
        original(self, request_id, blocks, num_tokens)
        for block in blocks:  # found, but not held: still in the queue
            if not block.is_null and block.ref_cnt == 1:
                block.ref_cnt = 0
                self.block_pool._free[block.block_id] = block
                self.block_pool._free.move_to_end(block.block_id, last=False)

    monkeypatch.setattr(SingleTypeKVCacheManager, "add_computed_blocks", late)
    held = tables()
    assert len(held) > len(set(held))


def test_an_admission_that_fails_holds_nothing() -> None:
    """sgl-project/sglang#16067: the slot copied for a request that was then refused was lost."""
    one = scheduler(hybrid(64, 16, prefix_match_unit=16, retention_interval=0))
    hits(one, prefix(70))
    one.add_request(request("long", prefix(0, 400), max_tokens=3))
    step(one)
    one.add_request(request("copies", prefix(70, 300)))
    manager = one.kv_cache_manager
    output = one.schedule()
    assert one.num_waiting == 1  # its hit was found, there are not enough blocks for the rest
    assert not output.kv_cache_block_copies
    assert not any("copies" in group.req_to_blocks for group in manager.managers)
    one.abort("copies")
    one.abort("long")
    assert manager.block_pool.get_num_free_blocks() == 15


def test_a_block_that_is_handed_out_again_loses_its_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    """ovg-project/kvcached#362: a stale hash makes others read the new owner's rows."""

    def found_again() -> int:
        one = scheduler(CacheConfig(4, 16, enable_prefix_caching=True), budget=64)
        return hits(one, prefix(20), prefix(0, 40), prefix(20))[2]

    assert found_again() == 0
    monkeypatch.setattr(BlockPool, "remove_hashes", lambda self, block: [])
    assert found_again() == 16


def test_a_repeated_prompt_leaves_a_token_to_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """nano-vllm#144: a prompt of whole blocks was found whole, and the step computed nothing."""

    def computed() -> int:
        one = scheduler(CacheConfig(20, 16, enable_prefix_caching=True))
        hits(one, prefix(32))
        one.add_request(request("again", prefix(32)))
        return one.schedule().num_scheduled_tokens.get("again", 0)

    assert computed() == 16
    original = KVCacheCoordinator.find_longest_cache_hit
    monkeypatch.setattr(
        KVCacheCoordinator,
        "find_longest_cache_hit",
        lambda self, one, limit: original(self, one, limit + 1),
    )
    assert computed() == 0


def test_a_resumed_request_computes_only_what_was_not_found() -> None:
    """nano-vllm#211, #233: the chunk was worked out before the hit was known."""
    one = scheduler(CacheConfig(1 + 8, 16, enable_prefix_caching=True), budget=64)
    for name, token in (("a", 901), ("b", 902)):
        one.add_request(request(name, prefix(0, 50, token), max_tokens=30))
    for output in finish(one):
        for cached in output.scheduled_cached_reqs:
            if cached.resumed_from_preemption:
                left = len(cached.all_token_ids) - cached.num_computed_tokens
                assert output.num_scheduled_tokens[cached.req_id] <= left
                assert cached.num_computed_tokens >= 48
    assert one.num_preemptions == 1


@pytest.mark.parametrize("dcp_world_size", [2, 8])
def test_states_stay_on_their_own_grid_under_context_parallelism(dcp_world_size: int) -> None:
    """#53598, sglang#34760: pages grow with the ranks, states do not."""
    cache = hybrid(16, 400, dcp_world_size=dcp_world_size)
    one = scheduler(cache)
    prompt = prefix(16 * dcp_world_size * 2 + 5)
    assert hits(one, prompt, prompt)[1] % 16 == 0
    one.add_request(request("again", prompt))
    new = one.schedule().scheduled_new_reqs[0]
    pages, states = new.block_ids
    hit = new.num_computed_tokens
    assert hit > 0
    assert len(pages) == -(-len(prompt) // (16 * dcp_world_size))
    assert states[hit // 16 - 1] != 0  # the state's column is counted in blocks of 16
    assert all(block == 0 for block in states[: hit // 16 - 1])


@pytest.mark.parametrize(("attention_layers", "pads", "share"), [(24, 3, 4.35), (29, 18, 26.09)])
def test_layers_that_fill_up_a_group(attention_layers: int, pads: int, share: float) -> None:
    """vllm-ascend#14314: five layers of a drafter cost eighteen layers of padding."""
    groups = group_layers({"mla": attention_layers, "kda": 69})
    assert groups.num_padding_layers["kda"] == pads
    assert round(100 * pads / 69, 2) == share


def test_a_benchmark_does_not_measure_the_cache() -> None:
    """#54227, guidellm#186: the second run of the same prompts was 2.3 times as fast."""
    one = scheduler(CacheConfig(200, 16, enable_prefix_caching=True))
    prompts = [prefix(0, 40, token) for token in (901, 902)]
    assert hits(one, *prompts) == [0, 0]
    assert hits(one, *prompts) == [32, 32]  # the same seed again: what it measures is the cache
    assert one.kv_cache_manager.reset_prefix_cache()
    assert hits(one, *prompts) == [0, 0]
    assert hits(one, prefix(0, 40, 903)) == [0]  # another seed
    without = scheduler(CacheConfig(200, 16))
    assert hits(without, *prompts, *prompts) == [0, 0, 0, 0]

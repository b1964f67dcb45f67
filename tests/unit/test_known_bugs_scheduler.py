"""Bugs that real engines had with who computes what: first the wrong rule, then ours.

Bare numbers are issues and pull requests of vllm-project/vllm.
"""

from __future__ import annotations

from typing import Any

import pytest
from known_bugs_support import finish, prefix, request, step

from kimik3_lab.serving import (
    CacheConfig,
    ModelRunnerOutput,
    Request,
    Scheduler,
    SchedulerConfig,
)
from kimik3_lab.serving.async_scheduler import AsyncScheduler
from kimik3_lab.serving.request_book import RequestBook

DSPARK = {"speculative_method": "dspark", "num_speculative_tokens": 4}


def scheduler(
    seqs: int, budget: int, *, num_blocks: int = 200, block_size: int = 16, **options: Any
) -> Scheduler:
    return Scheduler(
        SchedulerConfig(seqs, budget, 4096, **options), CacheConfig(num_blocks, block_size)
    )


def test_target_and_drafter_have_a_budget_each() -> None:
    """#52922, #52996: their passes run one after the other; one budget for both is too strict."""

    def first_step(rule: str, lengths: list[int]) -> list[int]:
        one = scheduler(8, 16, token_budget=rule, **DSPARK)
        for number, length in enumerate(lengths):
            one.add_request(request(str(number), prefix(length)))
        return list(one.schedule().num_scheduled_tokens.values())

    assert first_step("adaptive", [8, 8]) == [8, 2]
    assert first_step("lookahead_cap", [8, 8]) == [8, 8]
    assert first_step("lookahead_cap", [1] * 5) == [1] * 4  # 16 // 4 drafting requests


def test_a_negative_budget_is_refused_with_the_knobs() -> None:
    """#50708: 2,048 - 15 * 256 is below zero, and nobody was told why nothing ran."""
    options: dict[str, Any] = {"speculative_method": "dspark", "num_speculative_tokens": 16}
    with pytest.raises(ValueError, match="-1792") as refusal:
        SchedulerConfig(256, 2048, 4096, token_budget="static", **options)
    for knob in ("max_num_batched_tokens", "max_num_seqs", "num_speculative_tokens"):
        assert knob in str(refusal.value)
    one = scheduler(256, 2048, token_budget="adaptive", **options)
    one.add_request(request("a", prefix(3000)))
    assert one.schedule().num_scheduled_tokens == {"a": 2033}


def test_a_victim_before_the_current_request_costs_nobody_a_step() -> None:
    """#49097: [A (passed over), B, C], A is the victim while B is served: C lost its turn."""

    def served(exact: bool) -> list[str]:
        one = scheduler(
            4, 32, num_blocks=1 + 5, block_size=4, policy="priority", watermark=0.0,
            exact_preemption_index=exact, scheduler_reserve_full_isl=False,
        )  # fmt: skip
        for name, rank in (("A", 9), ("B", 0), ("C", 0)):
            one.add_request(request(name, prefix(4 if name == "A" else 3), 8, priority=rank))
        order = ["B", "C", "A"]
        one.running.sort(key=lambda r: order.index(r.request_id))
        step(one)
        # A stands first and has nothing to do in this step: its token is still on its way.
        a, b, c = (one.requests[name] for name in "ABC")
        one.running[:] = [a, b, c]
        a.num_computed_tokens = a.num_tokens
        manager = one.kv_cache_manager
        while manager.block_pool.get_num_free_blocks():
            manager.block_pool.get_new_blocks(1)
        b.append_output_token_ids([7], 4096)
        output = one.schedule()
        assert output.preempted_req_ids == {"A"}
        return list(output.num_scheduled_tokens)

    assert served(exact=True) == ["B", "C"]
    assert served(exact=False) == ["B"]


def test_a_request_that_preempts_itself_does_not_end_the_step() -> None:
    """vLLM 0.33.0 mends what 0.32.0 did: those behind it may still fit."""

    def served(go_on: bool) -> list[str]:
        one = scheduler(
            3, 32, num_blocks=1 + 3, block_size=4, policy="priority",
            continue_after_self_preemption=go_on, scheduler_reserve_full_isl=False,
        )  # fmt: skip
        for name, rank, length in (("A", 0, 4), ("B", 9, 4), ("C", 0, 3)):
            one.add_request(request(name, prefix(length, token=900), 4, priority=rank))
        step(one)
        one.running[:] = [one.requests[name] for name in "BAC"]
        output = one.schedule()
        assert output.preempted_req_ids == {"B"}
        return list(output.num_scheduled_tokens)

    assert served(go_on=True) == ["A", "C"]
    assert served(go_on=False) == []


def test_output_in_flight_does_not_undo_a_preemption(monkeypatch: pytest.MonkeyPatch) -> None:
    """#48245: what came back after a preemption was booked on counters that had been set to 0."""

    def after() -> tuple[int, int, int]:
        config = SchedulerConfig(
            2, 64, 4096, async_scheduling=True, speculative_method="ngram", num_speculative_tokens=2
        )
        one = AsyncScheduler(config, CacheConfig(20, 16))
        one.add_request(request("a", prefix(5), 9))
        plans = [one.schedule(), one.schedule()]
        one.update_from_output(plans[0], ModelRunnerOutput(["a"], [[7]]))
        victim = one.running.pop()
        one._preempt(victim)
        assert not one.schedule().num_scheduled_tokens  # not before its output is here
        one.update_from_output(plans[1], ModelRunnerOutput(["a"], [[7]]))  # two drafts were wrong
        return (
            victim.num_output_tokens,
            victim.num_computed_tokens,
            victim.num_output_placeholders,
        )

    assert after() == (2, 0, 0)  # the token is delivered, the counters stay
    original = RequestBook._preempt

    def forgetful(self: RequestBook, victim: Request) -> None:
        original(self, victim)
        victim.num_stale_output_tokens = 0
        self.waiting.pop_request()

    monkeypatch.setattr(RequestBook, "_preempt", forgetful)
    assert after()[1] < 0


def test_rejected_drafts_are_taken_back() -> None:
    """Counted as computed when they are planned: without the way back a token would be missing."""
    one = scheduler(1, 64, speculative_method="ngram", num_speculative_tokens=4)
    one.add_request(request("a", prefix(5), max_tokens=9))
    step(one, {"a": [1, 2, 3, 4]})
    output = one.schedule()
    assert output.num_scheduled_tokens == {"a": 5}
    assert output.scheduled_spec_decode_tokens == {"a": [1, 2, 3, 4]}
    assert one.requests["a"].num_computed_tokens == 10
    one.update_from_output(output, ModelRunnerOutput(["a"], [[1, 9]]))  # one of four is right
    assert one.requests["a"].num_computed_tokens == 7
    assert one.schedule().num_scheduled_tokens == {"a": 1}


def test_a_block_that_no_budget_can_hold_does_not_block_the_queue() -> None:
    """#40707, #45414: every chunk was rounded down to nothing, for ever."""
    cache = CacheConfig(60, 16, num_kda_groups=1, enable_prefix_caching=True)
    small = Scheduler(SchedulerConfig(2, 12, 4096), cache)  # less than a block: goes on inside it
    small.add_request(request("a", prefix(40)))
    counts = [o.num_scheduled_tokens["a"] for o in finish(small)]
    assert counts[:4] == [12, 4, 12, 4]
    # With drafts a block fits the budget, but not what is left beside them: refused.
    drafting = {
        "speculative_method": "pard",
        "num_speculative_tokens": 4,
        "token_budget": "adaptive",
    }
    with pytest.raises(ValueError, match=r"block_size=16.*max_num_batched_tokens"):
        Scheduler(SchedulerConfig(2, 16, 4096, **drafting), cache)


def test_the_starvation_corner_of_0_27_1() -> None:
    """Fifteen decodes left 889 of 1,024 tokens, a block was 896: a new prompt got nothing."""
    drafting = {"speculative_method": "dspark", "num_speculative_tokens": 8}
    cache = CacheConfig(2000, 896, num_kda_groups=1, enable_prefix_caching=True)

    def first_chunk(rule: str) -> int:
        config = SchedulerConfig(1024, 8192, 16_000, token_budget=rule, **drafting)
        one = Scheduler(config, cache)
        names = [f"d{i}" for i in range(15)]
        for name in names:
            one.add_request(request(name, prefix(0, 5, 500 + len(name)), 400))
        while any(r.num_output_tokens == 0 for r in one.requests.values()):
            step(one)
        one.update_draft_token_ids({name: [1] * 8 for name in names})
        one.add_request(request("prompt", prefix(8000)))
        return one.schedule().num_scheduled_tokens.get("prompt", 0)

    assert first_chunk("static") == 0
    assert first_chunk("adaptive") == 7168  # 7,945 tokens left, in whole blocks
    assert first_chunk("lookahead_cap") == 7168


@pytest.mark.parametrize("latest", [False, True])
def test_equals_do_not_take_each_other_s_blocks_for_ever(latest: bool) -> None:
    """Up to 0.33 the first of two equals was the victim: each lost to the other in turn."""
    one = scheduler(
        4, 64, num_blocks=6, block_size=8, policy="priority", long_prefill_token_threshold=3,
        scheduler_reserve_full_isl=False, preempt_latest_of_equals=latest,
    )  # fmt: skip
    for name in "ab":  # 4 blocks each, of 5; neither priority nor arrival_time tells them apart
        one.add_request(request(name, prefix(31)))
    if latest:
        finish(one, limit=60)
        assert one.num_preemptions < 10
        return
    for _ in range(300):
        step(one)
    assert one.num_preemptions > 50
    assert not any(r.num_output_tokens for r in one.requests.values())

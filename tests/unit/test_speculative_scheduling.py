"""Drafts, priorities, placeholders: rules that lessons 08 and 09 look at one at a time."""

from __future__ import annotations

import pytest

from kimik3_lab.serving import (
    CacheConfig,
    ModelRunnerOutput,
    Request,
    RequestStatus,
    SamplingParams,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
)
from kimik3_lab.serving.async_scheduler import AsyncScheduler, make_scheduler


def make(
    seqs: int = 4, budget: int = 64, *, cache: CacheConfig | None = None, **knobs: object
) -> Scheduler:
    config = SchedulerConfig(seqs, budget, knobs.pop("max_model_len", 1024), **knobs)
    return make_scheduler(config, cache or CacheConfig(1000))


def add(
    scheduler: Scheduler, name: str, length: int, max_tokens: int = 20, token: int = 9, **knobs: int
) -> None:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    scheduler.add_request(Request(name, [token] * length, params, **knobs))


def answer(scheduler: Scheduler, output: SchedulerOutput, accept: int = 0, k: int = 0) -> None:
    ids = list(output.num_scheduled_tokens)
    tokens = []
    for request in output.scheduled:
        drafts = output.scheduled_spec_decode_tokens.get(request.request_id, ())
        count = 0 if request.is_prefill_chunk else 1 + min(accept, len(drafts))
        tokens.append([7] * count)
    scheduler.update_from_output(output, ModelRunnerOutput(ids, tokens))
    if k:
        scheduler.update_draft_token_ids({i: [8] * k for i in ids})


def ngram(k: int, **knobs: object) -> dict[str, object]:
    return {"speculative_method": "ngram", "num_speculative_tokens": k, **knobs}


# -- drafts --------------------------------------------------------------------------------------


def test_accepted_drafts_move_a_request_on_and_rejected_ones_do_not() -> None:
    scheduler = make(**ngram(4))
    add(scheduler, "a", 10)
    answer(scheduler, scheduler.schedule(), k=4)
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"a": 5}
    assert output.scheduled_spec_decode_tokens == {"a": [8, 8, 8, 8]}
    request = scheduler.requests["a"]
    assert request.num_computed_tokens == 15
    answer(scheduler, output, accept=2)
    assert (request.num_tokens, request.num_computed_tokens) == (14, 13)


def test_drafts_that_find_no_room_are_dropped() -> None:
    scheduler = make(seqs=2, budget=7, **ngram(4))
    add(scheduler, "a", 3)
    add(scheduler, "b", 4)
    answer(scheduler, scheduler.schedule(), k=4)
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"a": 5, "b": 2}
    assert {i: len(d) for i, d in output.scheduled_spec_decode_tokens.items()} == {"a": 4, "b": 1}
    assert scheduler.requests["b"].spec_token_ids == []


def test_drafts_do_not_run_past_the_context() -> None:
    scheduler = make(max_model_len=16, **ngram(4))
    add(scheduler, "a", 12)
    answer(scheduler, scheduler.schedule(), k=4)
    assert scheduler.schedule().num_scheduled_tokens == {"a": 3}  # to 15: the last is not computed


def test_drafts_for_a_prompt_are_of_no_use() -> None:
    scheduler = make(budget=8, **ngram(4))
    add(scheduler, "a", 20)
    answer(scheduler, scheduler.schedule(), k=4)
    output = scheduler.schedule()
    assert output.scheduled_spec_decode_tokens == {}
    scheduler.update_draft_token_ids({"a": [8], "nobody": [8]})
    assert scheduler.requests["a"].spec_token_ids == []


def test_a_drafter_with_a_cache_of_its_own_gets_lookahead_slots() -> None:
    def free(method: str, k: int) -> int:
        scheduler = make(
            cache=CacheConfig(100, 4), speculative_method=method, num_speculative_tokens=k
        )
        add(scheduler, "a", 8)
        scheduler.schedule()
        return scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    assert free("ngram", 4) - free("dspark", 4) == 1
    assert free("ngram", 4) - free("dflash", 4) == 2  # five slots: K + 1


@pytest.mark.parametrize(("rule", "beside", "alone"), [("beside_decodes", 5, 1), ("any", 5, 5)])
def test_a_last_token_is_padded_with_placeholders(rule: str, beside: int, alone: int) -> None:
    cache = CacheConfig(100, 4, enable_prefix_caching=True)
    scheduler = make(cache=cache, pad_spec_decode=rule, **ngram(4))
    add(scheduler, "first", 9, max_tokens=1)
    answer(scheduler, scheduler.schedule())
    add(scheduler, "again", 9)
    output = scheduler.schedule()  # eight tokens found, one left, nobody else runs
    assert output.num_scheduled_tokens == {"again": alone}
    answer(scheduler, output, k=4)
    add(scheduler, "third", 9)
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"again": 5, "third": beside}
    assert output.scheduled_spec_decode_tokens["third"] == [-1] * 4
    answer(scheduler, output)
    assert scheduler.requests["third"].num_computed_tokens == 9


def test_tokens_behind_an_end_are_dropped() -> None:
    scheduler = make(**ngram(4))
    add(scheduler, "a", 4, max_tokens=3)
    answer(scheduler, scheduler.schedule(), k=4)
    request = scheduler.requests["a"]
    answer(scheduler, scheduler.schedule(), accept=4)
    assert request.output_token_ids == [7, 7, 7]
    assert request.status is RequestStatus.FINISHED_LENGTH_CAPPED


# -- the threshold for long prompts --------------------------------------------------------------


def test_the_threshold_is_for_others_and_not_for_who_is_alone() -> None:
    for when_alone, chunk in ((True, 16), (False, 60)):
        scheduler = make(long_prefill_token_threshold=16, threshold_when_alone=when_alone)
        add(scheduler, "a", 60)
        assert scheduler.schedule().num_scheduled_tokens == {"a": chunk}
    scheduler = make(long_prefill_token_threshold=16, long_prefill_token_threshold_adaptive=True)
    add(scheduler, "a", 60)
    add(scheduler, "b", 60)
    assert scheduler.schedule().num_scheduled_tokens == {"a": 32, "b": 32}


def test_prompts_are_held_back_while_others_decode() -> None:
    scheduler = make(prefill_schedule_interval=3)
    add(scheduler, "a", 4)
    steps = []
    for step in range(6):
        if step == 1:
            add(scheduler, "b", 4)
        output = scheduler.schedule()
        steps.append(sorted(output.num_scheduled_tokens))
        answer(scheduler, output)
    assert steps == [["a"], ["a"], ["a"], ["a", "b"], ["a", "b"], ["a", "b"]]


# -- priority ------------------------------------------------------------------------------------


def priority(num_blocks: int, **knobs: object) -> Scheduler:
    return make(cache=CacheConfig(num_blocks, 4), policy="priority", **knobs)


def steps_until_a_preemption(scheduler: Scheduler) -> SchedulerOutput:
    for _ in range(20):
        output = scheduler.schedule()
        if output.preempted_req_ids:
            return output
        answer(scheduler, output)
    raise AssertionError("nobody was preempted")


def test_the_most_urgent_is_admitted_first_and_the_least_urgent_gives_way() -> None:
    scheduler = priority(5)
    add(scheduler, "low", 4, 9, priority=5)
    add(scheduler, "high", 4, 9, priority=1)
    output = scheduler.schedule()
    assert list(output.num_scheduled_tokens) == ["high", "low"]
    answer(scheduler, output)
    add(scheduler, "middle", 1, 9, priority=3)
    output = steps_until_a_preemption(scheduler)  # "high" needs a third block
    assert output.preempted_req_ids == {"low"}
    assert list(output.num_scheduled_tokens) == ["high"]
    assert [request.request_id for request in scheduler.waiting] == ["middle", "low"]


def test_a_victim_that_was_scheduled_already_is_struck_out() -> None:
    scheduler = priority(5)
    add(scheduler, "low", 4, 9, priority=5)
    answer(scheduler, scheduler.schedule())
    add(scheduler, "high", 7, 6, priority=1)
    output = steps_until_a_preemption(scheduler)
    assert scheduler.requests["low"].num_tokens == 7  # it had room for its next token
    assert output.preempted_req_ids == {"low"}
    assert output.num_scheduled_tokens == {"high": 1}
    assert [data.req_id for data in output.scheduled_cached_reqs] == ["high"]
    assert output.total_num_scheduled_tokens == 1


@pytest.mark.parametrize(("exact", "scheduled"), [(True, ["B", "C"]), (False, ["B"])])
def test_nobody_is_passed_over_because_a_victim_stood_before(
    exact: bool, scheduled: list[str]
) -> None:
    # #49097: A has nothing to do in this step, B needs a block, A is the victim, C comes next.
    scheduler = priority(5, exact_preemption_index=exact)
    add(scheduler, "A", 4, 9, priority=9)
    answer(scheduler, scheduler.schedule())
    add(scheduler, "B", 4, 9, priority=1)
    add(scheduler, "C", 3, 9, priority=1)
    output = scheduler.schedule()
    assert list(output.num_scheduled_tokens) == ["A", "B", "C"]
    # The token of A is not there yet.
    scheduler.update_from_output(output, ModelRunnerOutput(["A", "B", "C"], [[], [7], [7]]))
    output = scheduler.schedule()
    assert output.preempted_req_ids == {"A"}
    assert list(output.num_scheduled_tokens) == scheduled


@pytest.mark.parametrize(("forget", "found"), [(True, 8), (False, 12)])
def test_hashes_of_a_victim_that_nobody_computes_are_taken_back(forget: bool, found: int) -> None:
    # vLLM #57580: what the step had scheduled for the victim stayed findable.
    cache = CacheConfig(7, 4, enable_prefix_caching=True)
    scheduler = make(cache=cache, policy="priority", forget_unscheduled_hashes=forget, **ngram(2))
    add(scheduler, "low", 7, 9, priority=5)
    answer(scheduler, scheduler.schedule())
    add(scheduler, "high", 5, 9, token=3, priority=1)
    low = scheduler.requests["low"]
    while low.num_tokens < 12:
        answer(scheduler, scheduler.schedule())
    # Its twelfth token fills a block, and its drafts begin another; "high" finds none.
    scheduler.update_draft_token_ids({"low": [8, 8]})
    assert scheduler.schedule().preempted_req_ids == {"low"}
    hit = scheduler.kv_cache_manager.get_computed_blocks(
        Request("probe", [*low.all_token_ids, 1, 1])
    )
    assert hit is not None
    assert hit.num_tokens == found


# -- asynchronous scheduling ---------------------------------------------------------------------


def test_steps_are_planned_ahead_with_placeholders() -> None:
    scheduler = make(async_scheduling=True, **ngram(3))
    assert isinstance(scheduler, AsyncScheduler)
    add(scheduler, "a", 5, max_tokens=9)
    first = scheduler.schedule()
    second = scheduler.schedule()  # before the first has answered
    assert second.num_scheduled_tokens == {"a": 4}
    assert second.scheduled_spec_decode_tokens == {"a": [-1, -1, -1]}
    request = scheduler.requests["a"]
    assert request.num_output_placeholders == 1 + 4
    answer(scheduler, first)
    assert (request.num_output_tokens, request.num_output_placeholders) == (1, 4)
    third = scheduler.schedule()
    answer(scheduler, second, accept=1)
    assert request.num_output_tokens == 3
    assert request.num_output_placeholders == 4
    answer(scheduler, third, accept=3)
    assert request.num_output_tokens == 7
    assert request.num_computed_tokens == request.num_tokens - 1


def test_no_step_is_planned_for_a_request_that_is_sure_to_end() -> None:
    scheduler = make(async_scheduling=True)
    add(scheduler, "a", 5, max_tokens=2)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert second.num_scheduled_tokens == {"a": 1}
    answer(scheduler, first)
    third = scheduler.schedule()
    assert third.num_scheduled_tokens == {}
    answer(scheduler, second)
    assert not scheduler.has_requests()


def test_a_token_in_flight_is_delivered_after_a_preemption_and_moves_no_counter() -> None:
    scheduler = make(2, cache=CacheConfig(4, 4), async_scheduling=True)
    add(scheduler, "a", 4, max_tokens=8)
    add(scheduler, "b", 4, max_tokens=8)
    first = scheduler.schedule()
    second = scheduler.schedule()  # "a" takes the last block, "b" loses its own
    assert second.preempted_req_ids == {"b"}
    victim = scheduler.requests["b"]
    assert victim.num_stale_output_tokens == 4
    answer(scheduler, first)
    assert victim.output_token_ids == [7]
    assert (victim.num_computed_tokens, victim.num_output_placeholders) == (0, 0)
    assert victim.num_stale_output_tokens == 0
    answer(scheduler, second)
    for _ in range(40):
        answer(scheduler, scheduler.schedule())
    assert not scheduler.has_requests()
    assert victim.num_output_tokens == 8

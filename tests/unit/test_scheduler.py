"""The scheduler's rules, one at a time, on requests small enough to follow by hand."""

from __future__ import annotations

import pytest

from kimik3_lab.serving import (
    CacheConfig,
    EngineCoreOutput,
    ModelRunnerOutput,
    Request,
    RequestStatus,
    SamplingParams,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
)


def make(
    seqs: int = 4,
    budget: int = 64,
    *,
    max_model_len: int = 1024,
    num_blocks: int = 1000,
    block_size: int = 16,
    **knobs: object,
) -> Scheduler:
    return Scheduler(
        SchedulerConfig(seqs, budget, max_model_len, **knobs), CacheConfig(num_blocks, block_size)
    )


def add(scheduler: Scheduler, *lengths: int, max_tokens: int = 4, prefix: str = "r") -> None:
    for i, length in enumerate(lengths):
        scheduler.add_request(Request(f"{prefix}{i}", [9] * length, max_tokens=max_tokens))


def result_of(scheduler: Scheduler, output: SchedulerOutput, token: int = 7) -> ModelRunnerOutput:
    """What a model would return: a token for each request that has caught up."""
    ids = list(output.num_scheduled_tokens)
    live = [scheduler.requests.get(i) for i in ids]
    return ModelRunnerOutput(
        ids, [[token] if r and r.num_computed_tokens >= r.num_tokens else [] for r in live]
    )


def step(scheduler: Scheduler) -> tuple[SchedulerOutput, list[EngineCoreOutput]]:
    output = scheduler.schedule()
    return output, scheduler.update_from_output(output, result_of(scheduler, output))


def run(scheduler: Scheduler, steps: int = 500) -> list[dict[str, int]]:
    trace = []
    while scheduler.has_requests():
        trace.append(step(scheduler)[0].num_scheduled_tokens)
        assert len(trace) < steps
    return trace


def free_blocks(scheduler: Scheduler) -> int:
    return scheduler.kv_cache_manager.block_pool.get_num_free_blocks()


# -- budget, seats, chunks ---------------------------------------------------------------------


def test_chunked_prefill_mixes_with_decode() -> None:
    # Followed by hand: budget 512, 4 seats. vLLM 0.27.1 and 0.33.0 schedule the same.
    scheduler = make(4, 512)
    add(scheduler, 700, 30, 300, 5, 8)
    assert run(scheduler) == [
        {"r0": 512},
        {"r0": 188, "r1": 30, "r2": 294},
        {"r0": 1, "r1": 1, "r2": 6, "r3": 5},
        {"r0": 1, "r1": 1, "r2": 1, "r3": 1},
        {"r0": 1, "r1": 1, "r2": 1, "r3": 1},
        {"r2": 1, "r3": 1, "r4": 8},
        {"r4": 1},
        {"r4": 1},
        {"r4": 1},
    ]


def test_only_a_caught_up_request_has_news() -> None:
    scheduler = make(2, 8)
    add(scheduler, 12, 4, max_tokens=2)
    output, news = step(scheduler)
    assert (output.num_scheduled_tokens, news) == ({"r0": 8}, [])
    _, news = step(scheduler)
    assert [(n.request_id, n.new_token_ids, n.finish_reason) for n in news] == [
        ("r0", [7], None),
        ("r1", [7], None),
    ]
    _, news = step(scheduler)
    assert [(n.request_id, n.finish_reason, n.finished) for n in news] == [
        ("r0", "length", True),
        ("r1", "length", True),
    ]


def test_a_request_is_sent_whole_once_and_then_by_its_changes() -> None:
    scheduler = make(2, 20, block_size=16)
    add(scheduler, 30)
    first, _ = step(scheduler)
    (new,) = first.scheduled_new_reqs
    assert (new.req_id, new.prompt_token_ids, new.block_ids) == ("r0", [9] * 30, ([1, 2],))
    assert (new.num_computed_tokens, first.scheduled_cached_reqs) == (0, [])
    second, _ = step(scheduler)
    (cached,) = second.scheduled_cached_reqs
    assert (cached.num_computed_tokens, cached.new_block_ids) == (20, ([],))
    assert not cached.resumed_from_preemption
    assert second.scheduled_new_reqs == []
    assert second.total_num_scheduled_tokens == 10
    run(scheduler)
    add(scheduler, 1, prefix="later")
    assert scheduler.schedule().finished_req_ids == {"r0"}
    assert scheduler.schedule().finished_req_ids == set()


def test_long_prefill_token_threshold_leaves_room_for_others() -> None:
    scheduler = make(4, 64, long_prefill_token_threshold=16)
    add(scheduler, 40, 40, 4)
    assert [step(scheduler)[0].num_scheduled_tokens for _ in range(3)] == [
        {"r0": 16, "r1": 16, "r2": 4},
        {"r0": 16, "r1": 16, "r2": 1},
        {"r0": 8, "r1": 8, "r2": 1},
    ]


def test_seats_are_limited_and_taken_in_order() -> None:
    scheduler = make(2, 64)
    add(scheduler, 1, 1, 1, max_tokens=2)
    assert run(scheduler) == [{"r0": 1, "r1": 1}, {"r0": 1, "r1": 1}, {"r2": 1}, {"r2": 1}]


def test_a_budget_below_the_seats_makes_the_last_wait_but_loses_nobody() -> None:
    scheduler = make(4, 1)
    add(scheduler, 2, 2, max_tokens=2)
    assert run(scheduler) == [{"r0": 1}] * 3 + [{"r1": 1}] * 3


def test_an_unanswered_step_is_not_scheduled_again() -> None:
    scheduler = make()
    add(scheduler, 3)
    first = scheduler.schedule()
    assert scheduler.schedule().num_scheduled_tokens == {}
    scheduler.update_from_output(first, ModelRunnerOutput(["r0"], [[7]]))
    assert scheduler.schedule().num_scheduled_tokens == {"r0": 1}


# -- blocks and preemption ---------------------------------------------------------------------


def test_the_last_running_request_is_preempted_and_computed_anew() -> None:
    # Three blocks of 4 for two requests of 4 + 4 tokens: one of them must go.
    scheduler = make(2, 64, num_blocks=4, block_size=4)
    add(scheduler, 4, 4)
    step(scheduler)
    output, _ = step(scheduler)
    assert output.num_scheduled_tokens == {"r0": 1}
    assert output.preempted_req_ids == {"r1"}
    victim = scheduler.requests["r1"]
    assert victim.status is RequestStatus.PREEMPTED
    assert (victim.num_computed_tokens, victim.output_token_ids) == (0, [7])
    assert victim.num_preemptions == scheduler.make_stats().num_preemptions == 1
    add(scheduler, 1, prefix="late")

    while "r0" in scheduler.requests:
        output, _ = step(scheduler)
        assert output.preempted_req_ids == set()
    output, _ = step(scheduler)
    (resumed,) = output.scheduled_cached_reqs
    assert resumed.resumed_from_preemption
    assert (resumed.req_id, resumed.all_token_ids) == ("r1", [9, 9, 9, 9, 7])
    assert (resumed.num_computed_tokens, len(resumed.new_block_ids[0])) == (0, 2)
    assert output.num_scheduled_tokens == {"r1": 5, "late0": 1}
    assert victim.output_token_ids == [7, 7]
    run(scheduler)
    assert free_blocks(scheduler) == 3


def test_nobody_is_admitted_in_a_step_that_preempts() -> None:
    scheduler = make(3, 64, num_blocks=4, block_size=4)
    add(scheduler, 4, 4)
    step(scheduler)
    add(scheduler, 1, prefix="small")
    output, _ = step(scheduler)
    assert output.preempted_req_ids == {"r1"}
    assert output.scheduled_new_reqs == []
    assert free_blocks(scheduler) == 1  # small0 would have fitted
    assert [request.request_id for request in scheduler.waiting] == ["r1", "small0"]


def test_a_request_that_is_last_itself_gives_way() -> None:
    scheduler = make(2, 64, num_blocks=4, block_size=4)
    add(scheduler, 5, 4)
    step(scheduler)
    output, _ = step(scheduler)  # r0 has room, r1 needs a second block
    assert output.num_scheduled_tokens == {"r0": 1}
    assert output.preempted_req_ids == {"r1"}


def test_a_prompt_that_does_not_fit_whole_is_not_begun_and_not_overtaken() -> None:
    scheduler = make(4, 8, num_blocks=7, block_size=4)
    add(scheduler, 8, 20, 1, max_tokens=2)
    assert step(scheduler)[0].num_scheduled_tokens == {"r0": 8}
    # r1 needs 5 blocks and 4 are free, although its first chunk needs 2; r2 would fit.
    assert step(scheduler)[0].num_scheduled_tokens == {"r0": 1}
    assert step(scheduler)[0].num_scheduled_tokens == {"r1": 8}


# -- the end of a request ----------------------------------------------------------------------


def test_end_tokens_end_a_request() -> None:
    scheduler = make()
    params = SamplingParams(max_tokens=9, stop_token_ids=(8,))
    scheduler.add_request(Request("eos", [5], SamplingParams(max_tokens=9), eos_token_id=7))
    scheduler.add_request(Request("stop", [5], params))
    output = scheduler.schedule()
    news = scheduler.update_from_output(output, ModelRunnerOutput(["eos", "stop"], [[7], [8]]))
    assert [(n.finish_reason, n.stop_reason) for n in news] == [("stop", None), ("stop", 8)]
    assert not scheduler.has_requests()
    assert free_blocks(scheduler) == 999


def test_max_model_len_ends_a_request() -> None:
    scheduler = make(max_model_len=6)
    add(scheduler, 4, max_tokens=100)
    step(scheduler)
    _, (news,) = step(scheduler)
    assert news.finish_reason == "length"
    assert not scheduler.has_requests()


@pytest.mark.parametrize("where", ["waiting", "running", "preempted", "in flight"])
def test_abort_returns_all_blocks(where: str) -> None:
    scheduler = make(2, 64, num_blocks=4, block_size=4)
    add(scheduler, 4, 4)
    if where != "waiting":
        step(scheduler)
    if where == "preempted":
        step(scheduler)
        assert scheduler.requests["r1"].status is RequestStatus.PREEMPTED
    if where == "in flight":
        output = scheduler.schedule()
    last_news = scheduler.abort("r1")
    assert last_news is not None and last_news.finish_reason == "abort"
    assert scheduler.abort("r1") is None
    if where == "in flight":
        news = scheduler.update_from_output(output, ModelRunnerOutput(["r0", "r1"], [[7], [7]]))
        assert [n.request_id for n in news] == ["r0"]
    assert scheduler.num_waiting == (where == "waiting")
    scheduler.abort("r0")
    assert (scheduler.num_waiting, scheduler.num_running) == (0, 0)
    assert free_blocks(scheduler) == 3
    add(scheduler, 1, prefix="next")
    assert scheduler.schedule().finished_req_ids == {"r0", "r1"}


def test_a_token_of_an_aborted_request_does_not_reach_the_next_of_its_name() -> None:
    scheduler = make()
    add(scheduler, 3)
    output = scheduler.schedule()
    scheduler.abort("r0")
    add(scheduler, 5)
    assert scheduler.update_from_output(output, ModelRunnerOutput(["r0"], [[7]])) == []
    assert scheduler.requests["r0"].output_token_ids == []
    following = scheduler.schedule()
    assert following.finished_req_ids == {"r0"}
    assert [new.req_id for new in following.scheduled_new_reqs] == ["r0"]


def test_a_failed_step_ends_its_requests_and_repeats_what_may_not_have_been_heard() -> None:
    scheduler = make(2, 64, num_blocks=4, block_size=4)
    add(scheduler, 4, 4)
    step(scheduler)
    add(scheduler, 1, prefix="gone")
    scheduler.abort("gone0")
    output = scheduler.schedule()
    assert output.preempted_req_ids == {"r1"}
    news = scheduler.fail_step(output)
    assert [(n.request_id, n.finish_reason) for n in news] == [("r0", "error")]
    assert free_blocks(scheduler) == 3
    following = scheduler.schedule()
    assert following.finished_req_ids == {"gone0", "r0"}
    assert following.preempted_req_ids == {"r1"}
    assert following.num_scheduled_tokens == {"r1": 5}


# -- static batching ---------------------------------------------------------------------------


def test_static_batching_waits_for_the_slowest() -> None:
    scheduler = make(2, 64, batching="static")
    for name, max_tokens in (("a", 1), ("b", 4), ("c", 1)):
        scheduler.add_request(Request(name, [5], max_tokens=max_tokens))
    assert run(scheduler) == [{"a": 1, "b": 1}, {"b": 1}, {"b": 1}, {"b": 1}, {"c": 1}]


def test_static_batching_does_not_take_in_who_comes_later() -> None:
    scheduler = make(4, 64, batching="static")
    add(scheduler, 1, 1, max_tokens=2)
    step(scheduler)
    add(scheduler, 1, prefix="late")
    assert step(scheduler)[0].num_scheduled_tokens == {"r0": 1, "r1": 1}
    assert step(scheduler)[0].num_scheduled_tokens == {"late0": 1}


def test_a_static_batch_keeps_its_members_when_the_budget_cuts_their_prompts() -> None:
    scheduler = make(2, 8, batching="static")
    add(scheduler, 12, 12, 1, max_tokens=2)
    assert [step(scheduler)[0].num_scheduled_tokens for _ in range(6)] == [
        {"r0": 8},
        {"r0": 4, "r1": 4},
        {"r0": 1, "r1": 7},
        {"r1": 1},
        {"r1": 1},
        {"r2": 1},
    ]


def test_a_static_batch_ends_when_its_waiting_members_are_aborted() -> None:
    scheduler = make(2, 4, batching="static")
    add(scheduler, 4, 4, 4, max_tokens=1)
    step(scheduler)
    scheduler.abort("r1")
    assert step(scheduler)[0].num_scheduled_tokens == {"r2": 4}


# -- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "max_tokens", "message"),
    [
        (64, 1, r"64 tokens.*max_model_len=64"),
        (30, 4, r"need 9 blocks.*has 8 .*num_blocks=9.*lower max_tokens or raise num_blocks"),
    ],
)
def test_a_request_that_cannot_finish_is_refused(
    length: int, max_tokens: int, message: str
) -> None:
    scheduler = make(max_model_len=64, num_blocks=9, block_size=4)
    with pytest.raises(ValueError, match=message):
        add(scheduler, length, max_tokens=max_tokens)
    assert not scheduler.has_requests()
    # One less is accepted and comes to its end: the last token is sampled, never computed.
    add(scheduler, 30, max_tokens=3)
    run(scheduler)


def test_max_model_len_bounds_the_blocks_a_request_may_need() -> None:
    scheduler = make(max_model_len=33, num_blocks=9, block_size=4)
    add(scheduler, 32, max_tokens=10_000)
    assert len(run(scheduler)) == 1


def test_an_id_in_use_is_refused_and_free_again_later() -> None:
    scheduler = make()
    add(scheduler, 1, max_tokens=1)
    with pytest.raises(ValueError, match="r0"):
        add(scheduler, 1)
    run(scheduler)
    add(scheduler, 1, max_tokens=1)
    assert len(run(scheduler)) == 1


def test_a_request_runs_once() -> None:
    scheduler = make()
    request = Request("r0", [5], max_tokens=1)
    scheduler.add_request(request)
    run(scheduler)
    with pytest.raises(ValueError, match=r"FINISHED_LENGTH_CAPPED.*make a new one"):
        scheduler.add_request(request)


def test_stats() -> None:
    scheduler = make(1, 64, num_blocks=11, block_size=4)
    add(scheduler, 8, 8)
    step(scheduler)
    stats = scheduler.make_stats()
    assert (stats.num_running_reqs, stats.num_waiting_reqs) == (1, 1)
    assert stats.kv_cache_usage == pytest.approx(0.2)

"""The engine with two steps in flight: order, news one step late, aborts and failures."""

from __future__ import annotations

from typing import Any

import pytest
from executor_world import quiet

from kimik3_lab.serving import (
    CacheConfig,
    Engine,
    ModelRunnerOutput,
    Request,
    SchedulerConfig,
    make_scheduler,
)


class Pending:
    """A step of :class:`InFlight`."""

    def __init__(self, executor: InFlight, number: int, output: ModelRunnerOutput) -> None:
        self.executor, self.number, self.output = executor, number, output

    def get_output(self) -> ModelRunnerOutput:
        self.executor.log.append(f"answer {self.number}")
        if error := self.executor.late.pop(self.number, None):
            raise error
        return self.output


class InFlight:
    """Samples the number of the step for whoever the plan has caught up with."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.early: dict[int, BaseException] = {}
        self.late: dict[int, BaseException] = {}
        self.known: dict[str, int] = {}
        self.count = 0

    def execute_model(self, plan: Any) -> Any:
        raise AssertionError("this executor is asked for steps in flight")

    def execute_model_async(self, plan: Any) -> Pending:
        self.count += bool(plan.num_scheduled_tokens)
        number = self.count
        self.log.append(f"execute {number}")
        if error := self.early.pop(number, None):
            raise error
        for new in plan.scheduled_new_reqs:
            self.known[new.req_id] = len(new.prompt_token_ids)
        for cached in plan.scheduled_cached_reqs:
            if cached.all_token_ids is not None:
                self.known[cached.req_id] = len(cached.all_token_ids)
        data = (*plan.scheduled_new_reqs, *plan.scheduled_cached_reqs)
        stops = {
            d.req_id: d.num_computed_tokens + plan.num_scheduled_tokens[d.req_id] for d in data
        }
        sampled = [[number] if stop >= self.known[i] else [] for i, stop in stops.items()]
        return Pending(self, number, ModelRunnerOutput(list(stops), sampled))


def make_engine(**cache: Any) -> tuple[Engine, InFlight]:
    executor = InFlight()
    config = SchedulerConfig(4, 64, 64, async_scheduling=True)
    return Engine(make_scheduler(config, CacheConfig(33, 4, **cache)), executor), executor


def run(engine: Engine, limit: int = 50) -> dict[str, list[int]]:
    """Step to the end; tokens by request."""
    said: dict[str, list[int]] = {}
    for _ in range(limit):
        for news in engine.step():
            said.setdefault(news.request_id, []).extend(news.new_token_ids)
        if not engine.has_unfinished_requests():
            return said
    raise AssertionError("no end")


def test_a_step_is_begun_before_the_last_one_is_asked_for() -> None:
    engine, executor = make_engine()
    engine.add_request(Request("a", [5] * 3, max_tokens=3))
    assert engine.step() == []  # nothing can be known yet
    assert run(engine) == {"a": [1, 2, 3]}
    assert executor.log == [
        "execute 1", "execute 2", "answer 1", "execute 3", "answer 2", "execute 3", "answer 3",
    ]  # fmt: skip
    assert engine.stats().num_wasted_tokens == 0  # who is sure to end is not planned again
    assert engine.stats().num_forwards == executor.count == 3  # a plan without tokens is no step


def test_who_ends_unforeseen_is_computed_once_more_and_not_heard() -> None:
    engine, executor = make_engine()
    engine.add_request(Request("a", [5] * 3, max_tokens=9, eos_token_id=2))
    assert run(engine) == {"a": [1, 2]}
    stats = engine.stats()
    assert (executor.count, stats.num_wasted_tokens, stats.num_generated_tokens) == (3, 1, 2)
    assert stats.scheduler.kv_cache_usage == 0.0


def test_who_leaves_in_flight_is_not_heard_either() -> None:
    engine, _ = make_engine()
    engine.add_request(Request("a", [5] * 3, max_tokens=4))
    engine.add_request(Request("b", [6] * 3, max_tokens=4))
    engine.step()
    engine.abort("a")
    assert run(engine) == {"b": [1, 2, 3, 4]}
    assert engine.stats().num_wasted_tokens == 3


def test_an_id_may_be_used_again_while_its_old_step_is_in_flight() -> None:
    engine, _ = make_engine()
    engine.add_request(Request("a", [5] * 3, max_tokens=4))
    engine.step()
    engine.abort("a")
    engine.add_request(Request("a", [6] * 5, max_tokens=2))
    assert run(engine) == {"a": [2, 3]}


def test_a_step_that_is_not_begun_leaves_the_one_in_flight_alone() -> None:
    engine, executor = make_engine()
    executor.early[2] = RuntimeError("no memory")
    engine.add_request(Request("a", [5] * 3, max_tokens=4))
    engine.step()
    with quiet():
        news = engine.step()
    assert [(n.new_token_ids, n.finish_reason) for n in news] == [([1], None), ([], "error")]
    assert (engine.stats().num_failed_steps, engine.has_unfinished_requests()) == (1, False)
    engine.add_request(Request("b", [5] * 3, max_tokens=1))
    assert run(engine) == {"b": [3]}


def test_a_step_that_fails_late_takes_those_behind_it_along() -> None:
    engine, executor = make_engine(enable_prefix_caching=True)
    engine.add_request(Request("a", [5] * 9, max_tokens=4))
    engine.step()
    executor.late[1] = RuntimeError("illegal memory access")
    engine.add_request(Request("b", [5] * 9, max_tokens=4))  # reads what the first step writes
    with quiet():
        news = engine.step()
    assert {n.request_id: n.finish_reason for n in news} == {"a": "error", "b": "error"}
    assert engine.stats().num_failed_steps == 2
    hits = engine.stats().scheduler.prefix_cache_hits
    engine.add_request(Request("c", [5] * 9, max_tokens=1))
    assert list(run(engine)) == ["c"]
    assert hits == engine.stats().scheduler.prefix_cache_hits == 8  # b's, and nothing of it for c


@pytest.mark.parametrize("when", ["early", "late"])
def test_an_interrupt_ends_all_and_goes_through(when: str) -> None:
    engine, executor = make_engine()
    getattr(executor, when)[{"early": 2, "late": 1}[when]] = KeyboardInterrupt()
    engine.add_request(Request("a", [5] * 3, max_tokens=4))
    engine.step()
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert not engine.has_unfinished_requests()
    assert engine.stats().scheduler.kv_cache_usage == 0.0


@pytest.mark.parametrize("begun", [True, False])
def test_an_interrupt_of_the_wait_behind_a_failure_ends_all(begun: bool) -> None:
    engine, executor = make_engine()
    if begun:  # the first step fails, then the wait for the second is interrupted
        executor.late |= {1: RuntimeError("illegal memory access"), 2: KeyboardInterrupt()}
    else:  # the second fails, then the wait for the first is interrupted
        executor.early[2], executor.late[1] = RuntimeError("no memory"), KeyboardInterrupt()
    engine.add_request(Request("a", [5] * 3, max_tokens=4))
    engine.step()
    engine.add_request(Request("b", [5] * 3, max_tokens=4))
    with quiet(), pytest.raises(KeyboardInterrupt):
        engine.step()
    assert not engine.has_unfinished_requests()
    assert engine.stats().scheduler.kv_cache_usage == 0.0
    assert engine.stats().num_failed_steps == 2


def test_an_executor_that_answers_at_once_is_not_asked_for_more() -> None:
    class AtOnce:
        def execute_model(self, plan: Any) -> ModelRunnerOutput:
            counts = plan.num_scheduled_tokens
            return ModelRunnerOutput(list(counts), [[9] for _ in counts])

    config = SchedulerConfig(4, 64, 64, async_scheduling=True)
    engine = Engine(make_scheduler(config, CacheConfig(33, 4)), AtOnce())
    engine.add_request(Request("a", [5] * 3, max_tokens=2))
    assert [news.new_token_ids for news in engine.step()] == [[9]]
    assert run(engine) == {"a": [9]}


def test_generate_leaves_nothing_in_flight() -> None:
    engine, executor = make_engine()
    (result,) = engine.generate([[5] * 3], progress=False)
    assert result.token_ids == list(range(1, 17))
    assert not engine.has_unfinished_requests()
    assert executor.log[-1] == "answer 16"

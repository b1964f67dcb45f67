"""An open loop: arrivals at their times, shared prefixes, flat memory, cost linear in steps."""

from __future__ import annotations

import sys
import time
import tracemalloc
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
from simulation_support import Prices, check_steps, drafting, plain, record

from kimik3_lab.benchmark.window import Window
from kimik3_lab.performance.parallelism import Parallelism
from kimik3_lab.serving.presets import LADDER, MAIN_2026_09_13
from kimik3_lab.simulation import SimulationError, SimulationRequest, simulate_arrivals
from kimik3_lab.simulation.arrivals import Queue
from kimik3_lab.simulation.door import most_admissions
from kimik3_lab.simulation.drive import drive
from kimik3_lab.simulation.latency_sketch import EXACT, LatencySketch
from kimik3_lab.simulation.requests import make_request
from kimik3_lab.simulation.run_log import RunLog

CACHING = next(rung for rung in LADDER if rung.name == "sparse retention")


def conversation(number: int, *, rate: float = 1.36, seed: int = 1) -> Iterator[SimulationRequest]:
    """Lengths like those of Mooncake's conversation trace; nothing is shared."""
    rng, moment = Random(seed), 0.0
    for index in range(number):
        moment += rng.expovariate(rate)
        prompt = 1 + min(int(rng.lognormvariate(8.74, 1.2)), 126_000)
        output = max(1, int(rng.gauss(343, 150)))
        yield SimulationRequest(f"request-{index + 1}", moment, prompt, output)


# -- when things happen -------------------------------------------------------------------------


def test_the_machine_waits_for_the_next_request() -> None:
    asked = [SimulationRequest("a", 1.0, 10, 3), SimulationRequest("b", 20.0, 10, 3)]
    result = simulate_arrivals(plain(Prices(0.5)), asked, keep_records=True)
    assert [r.token_times for r in result.records] == [[1.5, 2.0, 2.5], [20.5, 21.0, 21.5]]
    assert result.duration_s == 21.5
    assert result.utilization == pytest.approx(3.0 / 21.5)
    assert (result.window.open, result.window.close) == (0.0, 21.5)


def test_a_request_waits_for_the_step_that_runs() -> None:
    asked = [SimulationRequest("a", 0.0, 10, 9), SimulationRequest("b", 0.7, 10, 1)]
    result = simulate_arrivals(plain(Prices(0.5)), asked, keep_records=True)
    assert result.records[1].token_times == [1.5]
    assert result.records[1].ttft == pytest.approx(0.8)


def test_what_is_in_flight_at_the_end_is_cut_off() -> None:
    asked = [SimulationRequest(str(i), 1.0 * i, 10, 50) for i in range(10)]
    result = simulate_arrivals(plain(Prices(0.5)), asked, duration_s=5.2)
    assert (result.attempted, result.completed, result.cancelled) == (6, 0, 6)
    assert result.duration_s == 5.2


def test_the_warm_up_does_not_count() -> None:
    asked = [SimulationRequest(str(i), 10.0 * i, 10, 2) for i in range(10)]
    result = simulate_arrivals(plain(Prices(0.5)), asked, warmup_s=35.0)
    assert (result.completed, result.in_window, result.completed_in_window) == (10, 6, 6)
    assert result.output_tokens_per_s == pytest.approx(12 / (91.0 - 35.0))


def test_a_request_that_can_never_run_is_counted() -> None:
    asked = [SimulationRequest("long", 0.0, 5000, 2), SimulationRequest("short", 0.5, 500, 2)]
    spec = plain(max_model_len=4000)
    result = simulate_arrivals(spec, asked, keep_records=True)
    assert (result.refused, result.completed) == (1, 1)
    assert "exceed max_model_len=4000" in result.records[0].error


def test_requests_must_be_sorted() -> None:
    asked = [SimulationRequest("a", 2.0, 10, 2), SimulationRequest("b", 1.0, 10, 2)]
    with pytest.raises(ValueError, match=r"request b arrives at 1.0 s, after one .* 2.0 s: sort"):
        simulate_arrivals(plain(), asked)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"warmup_s": -1.0}, "warmup_s must be 0 or more"),
        ({"warmup_s": 5.0, "duration_s": 5.0}, "duration_s must be more than warmup_s=5.0"),
    ],
)
def test_a_window_that_cannot_be(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulate_arrivals(plain(), [], **changes)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ((0.0, 0, 5), "need at least one token each, got 0 and 5"),
        ((-1.0, 5, 5), "arrival_s must be 0 or more, got -1.0"),
        ((float("nan"), 5, 5), "arrival_s must be 0 or more, got nan"),
        ((0.0, 513, 5, (1,)), "1 hash_ids of 512 tokens do not cover a prompt of 513"),
        ((0.0, 5, 5, (-1,)), "hash_ids must lie in"),
    ],
)
def test_no_request(fields: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SimulationRequest("x", *fields)


def test_a_step_that_cannot_be_priced() -> None:
    with pytest.raises(SimulationError, match="a step cannot be priced: time goes forward only"):
        simulate_arrivals(plain(Prices(-1.0)), [SimulationRequest("a", 0.0, 10, 3)])


# -- shared prefixes ----------------------------------------------------------------------------


def test_hash_ids_say_what_is_shared() -> None:
    asked = [
        SimulationRequest("a", 0.0, 40, 2, (1, 2, 3), 16),
        SimulationRequest("b", 9.0, 40, 2, (1, 2, 9), 16),
        SimulationRequest("c", 18.0, 40, 2, (7, 2, 3), 16),
        SimulationRequest("d", 27.0, 40, 2),
        SimulationRequest("e", 36.0, 40, 2),
    ]
    spec = plain(
        preset=CACHING, cache={"block_size": 16, "num_kda_groups": 0, "retention_interval": None,
                               "prefill_checkpoints": "split"},
    )  # fmt: skip
    result = simulate_arrivals(spec, asked, keep_records=True)
    assert [r.cached_tokens for r in result.records] == [0, 32, 0, 0, 0]
    assert result.totals.cached_tokens == 32


def test_tokens_of_a_made_up_prompt() -> None:
    first, second = (make_request(SimulationRequest("a", 0.0, 5, 2), n) for n in (1, 2))
    assert set(first.prompt_token_ids).isdisjoint(second.prompt_token_ids)
    shared = make_request(SimulationRequest("a", 0.0, 5, 2, (8, 9, 9), 2), 1)
    assert shared.prompt_token_ids == [8, 8, 9, 9, 9]


def test_without_caching_nothing_is_said_of_it() -> None:
    asked = [SimulationRequest("a", 0.0, 600, 2, (1, 2))]
    result = simulate_arrivals(plain(), asked, keep_records=True)
    assert result.records[0].cached_tokens is None


@pytest.mark.parametrize("preset", [MAIN_2026_09_13, CACHING], ids=lambda preset: preset.name)
def test_every_token_is_computed_once(preset: Any) -> None:
    spec = drafting(Prices(0.02, 4e-5, 1e-4), preset=preset)
    run = record(spec, Queue(conversation(60)))
    check_steps(run)
    assert run.log.completed == 60


# -- a long queue -----------------------------------------------------------------------------


@pytest.mark.parametrize("preset", [MAIN_2026_09_13, CACHING], ids=lambda preset: preset.name)
def test_who_waits_outside_changes_nothing(preset: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An overloaded machine decides the same whether all wait inside the scheduler or not."""
    prices = Prices(0.05, 2e-4, 1e-4)
    spec = drafting(prices, preset=preset, num_blocks=300, max_model_len=130_000)
    asked = [
        SimulationRequest(f"request-{i}", 0.1 * i, 700 + 37 * (i % 50), 60, (i % 9, i, i, i, i, i))
        for i in range(1, 150)
    ]
    some = record(spec, Queue(asked))
    monkeypatch.setattr("kimik3_lab.simulation.door.most_admissions", lambda scheduler: 10**9)
    every = record(spec, Queue(asked))
    assert some.steps == every.steps
    assert some.log.records == every.log.records
    assert some.log.completed == 149


def test_a_short_door_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kimik3_lab.simulation.door.most_admissions", lambda scheduler: 1)
    with pytest.raises(AssertionError):
        test_who_waits_outside_changes_nothing(MAIN_2026_09_13, monkeypatch)


@pytest.mark.parametrize(
    ("settings", "most"),
    [
        ({}, 11),
        ({"num_speculative_tokens": 0, "speculative_method": None}, 99),
        ({"policy": "priority"}, float("inf")),
        ({"batching": "static"}, float("inf")),
        ({"long_prefill_token_threshold": 512}, float("inf")),
        ({"prefill_schedule_interval": 4}, float("inf")),
        ({"max_num_seqs": 5, "max_num_batched_tokens": 2048}, 5),
    ],
)
def test_how_many_a_step_can_take(settings: dict[str, Any], most: float) -> None:
    engine, _ = drafting(num_blocks=300, max_model_len=9000, scheduler=settings).make_engine()
    assert most_admissions(engine.scheduler) == most


def test_copies_that_step_together_take_all() -> None:
    """Behind them is no one queue to look at; a plan over TP8 DP2 EP16 starts all the same."""
    engine, _ = drafting(parallel=Parallelism(tp=8, dp=2, ep=16)).make_engine()
    assert most_admissions(engine.scheduler) == float("inf")


def test_a_queue_of_ones_own_sees_everybody() -> None:
    """Lesson 13 puts its own queue into the scheduler: it must be able to choose among all."""

    class ShortestFirst(list):  # type: ignore[type-arg]
        def add_request(self, request: Any) -> None:
            self.append(request)
            self.sort(key=lambda waiting: waiting.num_prompt_tokens)

        prepend_request = add_request

        def peek_request(self) -> Any:
            return self[0]

        def pop_request(self) -> Any:
            return self.pop(0)

        def remove_request(self, request: Any) -> bool:
            return False  # all of them have been taken out

    engine, executor = drafting(
        max_model_len=10_000, scheduler={"max_num_seqs": 1, "max_num_batched_tokens": 2048}
    ).make_engine()
    engine.scheduler.waiting = ShortestFirst()
    assert most_admissions(engine.scheduler) == float("inf")
    log = RunLog(Window(0.0, float("inf")), keep_records=True)
    asked = [SimulationRequest("long", 0.0, 5000, 3), SimulationRequest("short", 0.0, 40, 3)]
    drive(engine, executor, Queue(asked), log)
    assert log.records is not None
    first, _ = sorted(log.records, key=lambda record: record.end or 0.0)
    assert first.prompt_tokens == 40


def test_waiting_outside_takes_little_memory() -> None:
    """A thousand prompts of 8,000 tokens are 64 MB of tokens; nearly all of them wait outside."""
    spec = drafting(Prices(0.5), num_blocks=300, max_model_len=9000)
    asked = (SimulationRequest(str(i), 0.0, 8000, 5) for i in range(1000))
    tracemalloc.start()
    try:
        simulate_arrivals(spec, asked, duration_s=2.0)
        assert tracemalloc.get_traced_memory()[1] < 8e6
    finally:
        tracemalloc.stop()


# -- long runs ----------------------------------------------------------------------------------


def peak(number: int, *, keep_records: bool = False) -> int:
    """Bytes that a run takes at most."""
    spec = drafting(Prices(0.02, 4e-5, 1e-4), preset=CACHING, num_blocks=80)
    asked = (SimulationRequest(str(i), 0.2 * i, 900, 5, (i, i + 1)) for i in range(number))
    tracemalloc.start()
    try:
        result = simulate_arrivals(spec, asked, keep_records=keep_records)
        assert result.completed == number
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_is_flat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once cache and buckets are full, five times as many requests take no more.

    Python keeps some freed tuples for later use, which is what the allowance is for; 240 records
    alone would exceed it.
    """
    monkeypatch.setattr("kimik3_lab.simulation.latency_sketch.EXACT", 64)
    peak(5)  # what is made once
    flat = peak(60) + 100_000
    assert peak(300) < flat < peak(300, keep_records=True)


def calls(number: int) -> tuple[int, int]:
    """Steps of a run, and the function calls that it took."""
    spec, count = drafting(Prices(0.02, 4e-5, 1e-4)), 0

    def profile(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    asked = [SimulationRequest(str(i), 0.5 * i, 900, 60) for i in range(number)]
    sys.setprofile(profile)
    try:
        result = simulate_arrivals(spec, asked)
    finally:
        sys.setprofile(None)
    return result.totals.steps, count


def test_cost_is_linear_in_steps() -> None:
    calls(5)  # what is made once
    (few, small), (middle, medium), (many, large) = calls(20), calls(60), calls(100)
    assert few < middle < many
    assert (large - medium) / (many - middle) == pytest.approx(
        (medium - small) / (middle - few), rel=0.1
    )


def test_a_request_costs_little_of_our_own_time() -> None:
    """Twelve thousand are to take less than a minute; this allows for a machine half as fast."""
    spec = drafting(Prices(0.015, 4e-5, 1e-4), preset=CACHING)
    start = time.process_time()
    result = simulate_arrivals(spec, conversation(150))
    took = time.process_time() - start
    assert result.completed == 150
    assert took < 150 * 2 * 60 / 12_000


# -- percentiles --------------------------------------------------------------------------------


def test_a_sketch_is_exact_until_it_is_large() -> None:
    import numpy as np

    rng, sketch = Random(3), LatencySketch()
    values = [rng.lognormvariate(3, 2) for _ in range(EXACT)]
    for value in values:
        sketch.add(value)
    assert sketch.is_exact
    for q in (0.0, 0.1, 0.5, 0.9, 0.99, 1.0):
        assert sketch.quantile(q) == pytest.approx(np.quantile(values, q))
    values += [rng.lognormvariate(3, 2) for _ in range(20_000)]
    for value in values[EXACT:]:
        sketch.add(value)
    assert not sketch.is_exact
    for q in (0.0, 0.1, 0.5, 0.9, 0.99, 1.0):
        assert sketch.quantile(q) == pytest.approx(np.quantile(values, q), rel=0.012)
    assert (sketch.minimum, sketch.maximum) == (min(values), max(values))
    assert sketch.mean == pytest.approx(np.mean(values))
    limit = float(np.quantile(values, 0.7))
    assert sketch.share_within(limit) == pytest.approx(0.7, abs=0.01)


@pytest.mark.parametrize("sizes", [(10, 20), (5000, 20), (20, 5000), (5000, 6000)])
def test_sketches_add_up(sizes: tuple[int, int]) -> None:
    rng = Random(4)
    parts = [[rng.expovariate(0.1) for _ in range(size)] for size in sizes]
    whole, first, second = LatencySketch(), LatencySketch(), LatencySketch()
    for sketch, values in ((first, parts[0]), (second, parts[1]), (whole, parts[0] + parts[1])):
        for value in values:
            sketch.add(value)
    first.merge(second)
    assert first.count == whole.count
    assert first.mean == pytest.approx(whole.mean)
    for q in (0.0, 0.5, 0.99):
        assert first.quantile(q) == pytest.approx(whole.quantile(q), rel=0.012)


def test_the_same_value_many_times() -> None:
    one, many = LatencySketch(), LatencySketch()
    one.add(3.0, 5000)
    for _ in range(5000):
        many.add(3.0)
    assert (one.count, one.mean, one.quantile(0.5)) == (many.count, many.mean, many.quantile(0.5))


def test_an_empty_sketch() -> None:
    sketch = LatencySketch()
    assert sketch.mean is sketch.quantile(0.5) is sketch.share_within(1.0) is None
    with pytest.raises(ValueError, match="a share in"):
        sketch.quantile(50)

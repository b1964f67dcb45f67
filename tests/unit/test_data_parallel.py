"""Data-parallel copies in the simulator: each has its share of the requests, and its own cache."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kimik3_lab.config import K3Config
from kimik3_lab.performance.parallelism import Parallelism
from kimik3_lab.performance.step_cost import CostModel, StepCost
from kimik3_lab.performance.step_work import StepWork, decode_work, even_share, work_of_all
from kimik3_lab.serving import Request, Scheduler
from kimik3_lab.serving.presets import MAIN_2026_09_13
from kimik3_lab.simulation import SimulationSpec
from kimik3_lab.simulation.arrivals import simulate_arrivals
from kimik3_lab.simulation.data_parallel import LockstepScheduler
from kimik3_lab.simulation.load_estimate import Pace
from kimik3_lab.simulation.requests import SimulationRequest
from kimik3_lab.simulation.results import SimulationResult

ONE = SimulationSpec(MAIN_2026_09_13, parallel=Parallelism(8, ep=8))
TWO = replace(ONE, parallel=Parallelism(8, ep=16, dp=2))
IDLE = StepWork(num_tokens=0)


def burst(num_requests: int, prompt_tokens: int = 8000) -> list[SimulationRequest]:
    return [SimulationRequest(str(i), 0.0, prompt_tokens, 200) for i in range(num_requests)]


def run(spec: SimulationSpec, requests: list[SimulationRequest]) -> SimulationResult:
    return simulate_arrivals(spec, requests, keep_records=True)


def mean_ttft_s(result: SimulationResult) -> float:
    times = [record.first_token - record.start for record in result.records]
    return sum(times) / len(times)


def decode(num_seqs: int) -> StepWork:
    return decode_work(num_seqs, context=8000, num_speculative_tokens=8)


# -- what a step costs ----------------------------------------------------------------------------


def model(parallel: Parallelism) -> CostModel:
    return CostModel(K3Config.released(), "B300", parallel)


def test_a_copy_is_charged_for_its_own_requests() -> None:
    priced, alone = model(TWO.parallel), model(ONE.parallel)
    split = priced.lockstep_cost([decode(32), decode(32)])
    for part in ("mla_attention", "kda_state", "kda", "head"):
        assert split.parts[part] == alone.step_cost(decode(32)).parts[part], part
    assert split.parts["mla_attention"] < 0.6 * alone.step_cost(decode(64)).parts["mla_attention"]
    # As much as if both had all requests is what the simulator once charged.
    assert split.total_s < 0.6 * priced.step_cost(decode(64)).total_s
    assert priced.experts.distinct(decode(32)) == alone.experts.distinct(decode(64))


def test_the_slowest_copy_sets_the_time_and_all_load_the_experts() -> None:
    priced = model(TWO.parallel)
    uneven = priced.lockstep_cost([decode(8), decode(48)])
    assert uneven == priced.lockstep_cost([decode(48), decode(8)])
    even = priced.lockstep_cost([decode(28), decode(28)])
    assert uneven.parts["routed_experts"] == even.parts["routed_experts"]
    assert uneven.parts["all_reduce"] > even.parts["all_reduce"]
    assert uneven.parts["mla_attention"] == priced.step_cost(decode(48)).parts["mla_attention"]
    idle = priced.lockstep_cost([decode(48), IDLE])
    assert even.total_s < idle.total_s < uneven.total_s < priced.step_cost(decode(48)).total_s


def test_one_copy_is_priced_as_ever() -> None:
    priced = model(Parallelism(8))
    assert priced.lockstep_cost([decode(5)]) == priced.step_cost(decode(5))
    assert even_share(decode(5), 1) == decode(5) == work_of_all([decode(5)])


@pytest.mark.parametrize(
    ("works", "said"),
    [([decode(1)], "work of 1 copies, TP8 DP2 EP16 has 2"), ([IDLE, IDLE], "no copy has a row")],
)
def test_a_step_of_other_copies_is_refused(works: list[StepWork], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        model(TWO.parallel).lockstep_cost(works)


# -- who has what ---------------------------------------------------------------------------------


def test_blocks_seats_and_budget_are_those_of_a_copy() -> None:
    """A copy has the memory of its own eight GPUs, of which each holds half as many experts."""
    _, block_bytes = TWO._page()
    assert TWO.cache_config.num_blocks == TWO.room_bytes // block_bytes
    assert ONE.cache_config.num_blocks < TWO.cache_config.num_blocks
    scheduler = TWO.make_engine()[0].scheduler
    assert isinstance(scheduler, LockstepScheduler)
    assert isinstance(ONE.make_engine()[0].scheduler, Scheduler)
    managers = {id(copy.kv_cache_manager) for copy in scheduler.copies}
    assert len(managers) == 2
    assert scheduler.scheduler_config == ONE.scheduler_config


def test_a_prompt_is_computed_by_its_copy_alone() -> None:
    """Two prompts of a step's budget go side by side; two copies do not share one of them."""
    engine, executor = TWO.make_engine()
    scheduler, budget = engine.scheduler, TWO.scheduler_config.max_num_batched_tokens
    for name in ("a", "b"):
        engine.add_request(Request(name, [5] * (budget + 100)))
    output = scheduler.schedule()
    assert len(output.copies) == 2
    chunks = output.num_scheduled_tokens
    assert chunks["a"] == chunks["b"] <= budget
    assert scheduler.num_running == 2
    executor.execute_model(output)
    assert executor.totals.tokens == 2 * chunks["a"]


def test_requests_go_to_the_copy_with_the_fewest() -> None:
    scheduler = TWO.make_engine()[0].scheduler
    for i in range(7):
        scheduler.add_request(Request(str(i), [5] * 10))
    assert [len(copy.requests) for copy in scheduler.copies] == [4, 3]
    assert scheduler.num_waiting == len(scheduler.requests) == 7
    for name in ("0", "2", "4"):
        assert scheduler.abort(name).finish_reason == "abort"
    assert scheduler.abort("0") is None
    scheduler.add_request(Request("late", [5] * 10))
    assert "late" in scheduler.copies[0].requests
    with pytest.raises(ValueError, match="in use"):
        scheduler.add_request(Request("1", [5] * 10))
    assert scheduler.make_stats().num_waiting_reqs == 5


def test_copies_that_are_alike_take_turns() -> None:
    scheduler = TWO.make_engine()[0].scheduler
    for i in range(4):  # one at a time: the next comes when the last has gone
        scheduler.add_request(Request(str(i), [5] * 10))
        holder = [bool(copy.requests) for copy in scheduler.copies]
        assert holder == [i % 2 == 0, i % 2 == 1]
        scheduler.abort(str(i))


def test_the_engine_ends_what_a_failed_step_held() -> None:
    engine, executor = TWO.make_engine()
    for i in range(4):
        engine.add_request(Request(str(i), [5] * 10))

    def broken(works: object) -> StepCost:
        raise RuntimeError("no price")

    executor.costs.lockstep_cost = broken
    assert [news.finish_reason for news in engine.step()] == ["error"] * 4
    assert not engine.has_unfinished_requests()


def test_no_schedulers_are_refused() -> None:
    with pytest.raises(ValueError, match="one for each copy"):
        LockstepScheduler([])


# -- whole runs -----------------------------------------------------------------------------------


def test_two_copies_carry_a_burst_in_little_more_than_half_the_time() -> None:
    one, two = run(ONE, burst(64)), run(TWO, burst(64))
    assert one.completed == two.completed == 64
    ratio = one.totals.seconds / two.totals.seconds
    assert 1.6 < ratio < 2.2
    # What a copy does for itself halves, the experts' weights are read less often too.
    for part in ("mla_attention", "kda"):
        assert one.totals.parts[part] / two.totals.parts[part] == pytest.approx(2.0, rel=0.15)
    assert 1.6 < mean_ttft_s(one) / mean_ttft_s(two) < 2.3


def test_all_requests_of_a_run_are_counted_once() -> None:
    one, two = run(ONE, burst(20)), run(TWO, burst(20))
    prompts = {r.totals.kinds["prefill"].prefill_tokens + r.totals.kinds["mixed"].prefill_tokens
               for r in (one, two)}  # fmt: skip
    assert prompts == {20 * 8000}
    assert len(two.records) == 20


def test_a_request_alone_is_no_faster_than_on_one_copy() -> None:
    """The other copy has nothing to give; the experts are spread wider, over a slower network."""
    one, two = run(ONE, burst(1)), run(TWO, burst(1))
    assert mean_ttft_s(two) > 0.7 * mean_ttft_s(one)


def test_runs_are_the_same_again() -> None:
    assert run(TWO, burst(12)).row("mean") == run(TWO, burst(12)).row("mean")


def test_the_router_knows_the_pace_of_two_copies() -> None:
    one, two = Pace.of(ONE), Pace.of(TWO)
    assert one.prefill_token_s / two.prefill_token_s == pytest.approx(2.0, rel=0.25)
    assert 1.4 < one.output_token_s(512) / two.output_token_s(512) < 2.4

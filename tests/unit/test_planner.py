"""The planner: against trying everything; its bounds, against simulation; planners gone wrong."""

from __future__ import annotations

import json
import math
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from kimik3_lab.benchmark.records import RequestRecord
from kimik3_lab.benchmark.synthetic_traces import synthetic_trace
from kimik3_lab.benchmark.traces import TraceRequest, write_trace
from kimik3_lab.cli import app
from kimik3_lab.commands import CommandError
from kimik3_lab.performance.parallelism import Parallelism
from kimik3_lab.performance.scenarios import Scenario
from kimik3_lab.simulation import SimulationRequest, SimulationSpec, planner
from kimik3_lab.simulation.arrivals import simulate_arrivals
from kimik3_lab.simulation.goodput import goodput_curve
from kimik3_lab.simulation.latency_sketch import LatencySketch
from kimik3_lab.simulation.plan_choices import Bound, Candidate, candidates, lower_bound
from kimik3_lab.simulation.plan_results import Attempt, Plan
from kimik3_lab.simulation.planner import make_plan, verify_plan
from kimik3_lab.simulation.slo import Slo
from kimik3_lab.simulation.switches import find_preset
from kimik3_lab.simulation.trace_requests import fixed_lengths, to_simulation_requests

MAIN = find_preset("main-2026-09-13")
B300 = SimulationSpec(MAIN)
#: Requests so short that the cost model alone rules nothing out.
LIGHT = [TraceRequest(0.5 * i, 50, 5) for i in range(600)]
SLO = Slo(ttft_ms=1000)


def sketch(*values: float) -> LatencySketch:
    found = LatencySketch()
    for value in values:
        found.add(value)
    return found


def outcome(ttft_ms: float, requests: int, done: int | None = None, **more: Any) -> Any:
    """A result as the planner reads it."""
    done = requests if done is None else done
    return SimpleNamespace(
        attempted=requests, completed=done, refused=0, records=None,
        latencies={"ttft_ms": sketch(ttft_ms), "tpot_ms": sketch(10.0), "e2e_s": sketch(1.0)},
        **more,
    )  # fmt: skip


def machine(capacities: dict[str, int]) -> Callable[..., Any]:
    """Replicas that answer in time as long as they get no more than so many requests."""

    def simulate(spec: SimulationSpec, requests: Sequence[SimulationRequest], _: bool) -> Any:
        capacity = capacities[spec.accelerator.name + spec.parallel.name]
        return outcome(1000 * len(requests) / capacity, len(requests))

    return simulate


def choice(hardware: str, layout: Parallelism, price: float = 1.0) -> Candidate:
    return Candidate(SimulationSpec(MAIN, hardware, layout), price)


CHOICES = [
    choice("B300", Parallelism(tp=8)),
    choice("B300", Parallelism(tp=8, ep=8)),
    choice("GB300", Parallelism(tp=8), 1.3),
    choice("GB300", Parallelism(tp=16), 1.3),
]


@cache
def share(replicas: int) -> int:
    """Requests of one among so many replicas."""
    return len(planner._Search(LIGHT, SLO, 8, 0, machine({}), None)._share(1 / replicas))


def cheapest(capacities: list[int], max_gpus: int) -> float:
    """Try every number of every replica."""
    return min(
        (
            replicas * candidate.price
            for candidate, capacity in zip(CHOICES, capacities, strict=True)
            for replicas in range(1, max_gpus // candidate.gpus + 1)
            if share(replicas) <= capacity
        ),
        default=math.inf,
    )


def plan_with(make: Callable[..., Plan], capacities: list[int], max_gpus: int) -> Plan:
    names = [c.spec.accelerator.name + c.spec.parallel.name for c in CHOICES]
    simulate = machine(dict(zip(names, capacities, strict=True)))
    return make(LIGHT, SLO, CHOICES, max_gpus=max_gpus, simulate=simulate)


@pytest.fixture
def no_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost model rules nothing out, so the search does all the work, and quickly."""
    monkeypatch.setattr(planner, "lower_bound", lambda *_: Bound(1, ""))


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.integers(10, 800), min_size=4, max_size=4), st.sampled_from([16, 64, 200]))
def test_the_cheapest_is_found(no_bounds, capacities: list[int], max_gpus: int) -> None:
    plan = plan_with(make_plan, capacities, max_gpus)
    wanted = cheapest(capacities, max_gpus)
    assert (plan.best.price if plan.best else math.inf) == pytest.approx(wanted)
    # By bisection: a few runs for each choice, not one for each number of replicas.
    assert plan.simulations <= 4 * (2 + math.log2(max_gpus / 8) + 1)


#: Replicas that each choice needs, and the most GPUs there are.
NEEDS = [
    ((8, 30, 6, 30), 64),
    ((7, 30, 30, 30), 64),
    ((3, 1, 30, 30), 64),
    ((3, 30, 30, 30), 64),
    ((4, 3, 2, 1), 64),
    ((12, 11, 9, 6), 200),
    ((9, 30, 30, 5), 64),
    ((25, 30, 30, 12), 256),
    ((1, 1, 1, 1), 8),
]


MUTANTS = [
    ("if draw < share:", "if draw < share / 2:"),
    ("most = min(most, math.ceil(best.price / choice.price) - 1)", "most = most // 2"),
    ("low, high = (least - 1 if best is not None else least), most", "low, high = least, most - 1"),
    ("while high - low > 1:", "while high - low > 2:"),
    ("attempt.price < self.plan.best.price", "attempt.price > self.plan.best.price"),
    ("most = self._max_gpus // choice.gpus", "most = self._max_gpus"),
    ("                high = middle\n", "                low = middle\n"),
]


@pytest.mark.parametrize(("right", "wrong"), MUTANTS)
def test_wrong_planners_are_caught(
    no_bounds, monkeypatch: pytest.MonkeyPatch, right: str, wrong: str
) -> None:
    source = Path(planner.__file__).read_text(encoding="utf-8")
    assert source.count(right) == 1, right
    broken = types.ModuleType("broken_planner")
    monkeypatch.setitem(sys.modules, "broken_planner", broken)  # dataclasses look it up
    exec(compile(source.replace(right, wrong), "broken_planner", "exec"), broken.__dict__)

    def is_right(make: Callable[..., Plan]) -> bool:
        for replicas, max_gpus in NEEDS:
            capacities = [share(n) for n in replicas]
            plan = plan_with(make, capacities, max_gpus)
            found = plan.best.price if plan.best else math.inf
            if found != pytest.approx(cheapest(capacities, max_gpus)):
                return False
        return True

    broken.lower_bound = planner.lower_bound
    assert is_right(make_plan)
    assert not is_right(broken.make_plan)


def test_what_costs_more_is_not_simulated() -> None:
    simulated = []
    simulate = machine({"B300TP8": 5000, "GB300TP8": 5000})

    def listen(attempt: Attempt) -> None:
        simulated.append((attempt.name.split()[0], attempt.simulated))

    plan = make_plan(LIGHT, SLO, [CHOICES[2], CHOICES[0]], simulate=simulate, on_attempt=listen)
    assert simulated == [("B300", True), ("GB300", False)]
    assert plan.best.replicas == 1
    assert "no cheaper than 1 x B300" in plan.attempts[1].reason


def test_nothing_fits_and_the_nearest_miss() -> None:
    capacities = [20, 40, 30, 5]
    plan = plan_with(make_plan, capacities, 64)
    assert plan.best is None
    assert plan.nearest.name.startswith("B300 TP8 EP8")
    assert plan.nearest.replicas == 8
    assert plan.nearest.excess == min(a.excess for a in plan.attempts if a.excess is not None)
    assert plan.text.startswith("Nothing fits: no configuration keeps p95 TTFT <= 1,000 ms")
    assert plan.text.count("Nearest: 8 x B300 TP8 EP8") == 1
    assert verify_plan(plan, LIGHT) is None
    body = json.loads(json.dumps(plan.to_dict()))
    assert body["best"] is None
    assert body["nearest"]["replicas"] == 8


def test_nothing_can_run() -> None:
    found, refused = candidates(["H200"], [Parallelism(tp=8)], [MAIN])
    assert found == []
    plan = make_plan(LIGHT, SLO, found, refused=refused)
    assert plan.best is None
    assert plan.nearest is None
    assert "H200 TP8 main-2026-09-13: TP8 on H200: weights and" in plan.text
    with pytest.raises(ValueError, match="nothing to choose from"):
        make_plan(LIGHT, SLO, [])
    with pytest.raises(ValueError, match="the load holds no request"):
        make_plan([], SLO, CHOICES)


def test_a_plan_that_rests_on_few_requests_says_so() -> None:
    few = plan_with(make_plan, [30, 25, 25, 25], 800)
    assert few.best is not None
    assert "requests only, and a p95 needs 59" in few.notes[0]
    assert plan_with(make_plan, [700, 700, 700, 700], 800).notes == ()


def test_shares_are_nested_and_keep_sessions_whole() -> None:
    load = synthetic_trace("mooncake-conversation", 300.0)
    search = planner._Search(load, SLO, 8, 0, machine({}), None)
    before = load
    for replicas in range(2, 9):
        share = search._share(1 / replicas)
        assert {id(r) for r in share} <= {id(r) for r in before}
        kept = {r.session for r in share}
        assert share == [r for r in load if r.session in kept]
        # Random numbers missed by a fifth here, and the plan with them.
        assert len(share) == pytest.approx(len(load) / replicas, rel=0.08)
        before = share


def test_a_share_has_its_part_of_every_minute() -> None:
    load = list(fixed_lengths(3.0, 100, 10, 600.0, seed=2))
    for seed in range(5):
        share = planner._Search(load, SLO, 8, seed, machine({}), None)._share(1 / 5)
        for minute in range(10):
            came, got = (
                sum(60 * minute <= r.timestamp < 60 * (minute + 1) for r in requests)
                for requests in (load, share)
            )
            assert abs(got - came / 5) <= 2


# -- bounds ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["v0.27.1", "main-2026-09-13", "look-ahead-cap"])
@pytest.mark.parametrize("tokens", [(8000, 100), (200, 300)])
def test_the_bound_is_no_more_than_what_it_takes(preset: str, tokens: tuple[int, int]) -> None:
    """A machine that is never idle, and yet not done with its work by then, sets the scale."""
    candidate = Candidate(SimulationSpec(find_preset(preset)))
    load = list(fixed_lengths(6.0, *tokens, 30.0))
    asked = list(to_simulation_requests(load))
    seconds = simulate_arrivals(candidate.spec, asked).totals.seconds
    bound = lower_bound(candidate, asked, SLO).replicas
    # As if the bound had no slack: it may not ask for more than the simulated work.
    work = bound * (30.0 + 120.0)
    assert work - (30.0 + 120.0) <= seconds
    heavy = [replace(r, arrival_s=0.0) for r in asked] * 40
    many = lower_bound(candidate, heavy, SLO).replicas
    assert (many - 1) * 120.0 <= 40 * seconds
    assert many > 1


def test_promises_that_no_machine_keeps() -> None:
    asked = list(to_simulation_requests(fixed_lengths(1.0, 20_000, 50, 100.0)))
    bound = lower_bound(Candidate(B300), asked, Slo(ttft_ms=100))
    assert "even on an idle machine p95 TTFT is" in bound.impossible
    assert "p95 TPOT is" in lower_bound(Candidate(B300), asked, Slo(tpot_ms=0.1)).impossible
    assert lower_bound(Candidate(B300), asked, Slo(ttft_ms=60_000, tpot_ms=100)).impossible == ""
    # With a cache the whole prompt may be known already.
    shared = [replace(r, hash_ids=tuple(range(40))) for r in asked]
    caching = Candidate(SimulationSpec(find_preset("look-ahead-cap")))
    assert lower_bound(caching, shared, Slo(ttft_ms=100)).impossible == ""
    assert lower_bound(Candidate(B300), shared, Slo(ttft_ms=100)).impossible != ""


# -- promises --------------------------------------------------------------------------------------


def test_an_slo_is_judged_by_all_its_limits() -> None:
    slo = Slo(ttft_ms=100, tpot_ms=20, percentile=50)
    good = slo.judge(outcome(80.0, 3))
    assert (good.kept, good.reason, good.excess) == (True, "", 0.8)
    bad = slo.judge(outcome(150.0, 3))
    assert (bad.kept, bad.excess) == (False, 1.5)
    assert bad.reason == "p50 TTFT 150 ms > 100 ms"
    stuck = slo.judge(outcome(80.0, 3, done=2))
    assert (stuck.kept, stuck.excess) == (False, math.inf)
    assert "1 of 3 requests did not end" in stuck.reason
    assert "no request was sent" in slo.judge(outcome(80.0, 0)).reason


def test_goodput_counts_requests_within_all_limits() -> None:
    def record(first: float, end: float, status: str = "completed") -> RequestRecord:
        return RequestRecord(0, 0.0, None, status, [first, end], end, output_tokens=11)  # type: ignore[arg-type]

    slo = Slo(ttft_ms=1000, tpot_ms=100, goodput=0.5)
    records = [record(0.5, 1.0), record(0.5, 3.0), record(2.0, 2.5), record(0.5, 1.0, "cancelled")]
    assert [slo.is_good(r) for r in records] == [True, False, False, False]
    verdict = slo.judge(outcome(500.0, 4), records)
    assert verdict.measured["goodput"] == 0.25
    assert verdict.excess == 2.0
    assert verdict.reason == "goodput 25.0% < 50.0%"
    with pytest.raises(ValueError, match="goodput needs the records"):
        slo.judge(outcome(500.0, 4))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({}, "needs a limit"),
        ({"ttft_ms": 0}, "ttft_ms must be a number above 0"),
        ({"tpot_ms": 5, "percentile": 100}, "percentile must be in 1 ... 99"),
        ({"e2e_s": 5, "goodput": 1.5}, "goodput is a share"),
    ],
)
def test_promises_that_make_no_sense(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Slo(**wrong)


def test_candidates_are_priced_and_their_k_is_set() -> None:
    found, refused = candidates(
        ["B300", "B200"], [Parallelism(tp=8), Parallelism(tp=16)], [MAIN], [0, 4],
        prices={"B300": 6.0, "B200": 4.0}, base=SimulationSpec(MAIN, kv_dtype="fp8"),
    )  # fmt: skip
    assert [c.spec.num_speculative_tokens for c in found[:2]] == [0, 4]
    assert found[0].price == 48.0
    assert found[0].spec.kv_dtype == "fp8"
    assert {name.split()[0] for name in refused} <= {"B200"}
    assert len(found) + len(refused) == 8
    with pytest.raises(ValueError, match="no price above 0 for B200"):
        candidates(["B200"], [Parallelism()], [MAIN], prices={"B300": 1.0})


# -- with the simulator ----------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [700, 1200, 3000])
def test_the_answer_against_simulating_every_number(limit: float) -> None:
    load = list(fixed_lengths(3.0, 6000, 40, 25.0, seed=4))
    slo = Slo(ttft_ms=limit)
    choice = Candidate(B300)
    plan = make_plan(load, slo, [choice], max_gpus=80)
    search = planner._Search(load, slo, 80, 0, planner._simulate(0), None)
    kept = [n for n in range(1, 11) if search.attempt(choice, n).kept]
    assert plan.best.replicas == min(kept)
    assert 1 < plan.best.replicas < 10


def test_goodput_falls_when_the_load_rises() -> None:
    def load(scale: float) -> list[TraceRequest]:
        return list(fixed_lengths(scale, 6000, 40, 20.0, seed=1))

    curve = goodput_curve(B300, load, Slo(ttft_ms=1500, tpot_ms=50), (0.5, 2.0, 6.0), 20.0)
    shares = [point.good_share for point in curve]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.9 > 0.3 > shares[-1]
    assert curve[1].goodput_per_s == pytest.approx(shares[1] * curve[1].requests_per_s)
    # Throughput does not fall with it.
    assert curve[2].output_tokens_per_s > curve[1].output_tokens_per_s
    with pytest.raises(ValueError, match="no request at scale 1"):
        goodput_curve(B300, lambda _: [], Slo(ttft_ms=1), (1.0,), 20.0)


def run(*args: str):
    return CliRunner().invoke(app, ["plan", *args])


FAST = ("--rate", "1.5", "--prompt-tokens", "6000", "--output-tokens", "60", "--duration", "20",
        "--parallel", "tp8", "--preset", "main-2026-09-13")  # fmt: skip


def test_plan_on_the_command_line() -> None:
    result = run(*FAST, "--ttft-ms", "1500", "--json", "--verify", "round-robin")
    assert result.exit_code == 0, result.output
    body = json.loads(result.stdout)
    best = body["best"]
    assert best["configuration"] == "B300 TP8 main-2026-09-13 K=8"
    assert best["measured"]["ttft_ms"] <= 1500
    assert best["gpus"] == 8 * best["replicas"] == best["price"]
    fewer = [a for a in body["attempts"] if a["simulated"] and a["replicas"] < best["replicas"]]
    assert all(not a["kept"] and a["reason"] for a in fewer)
    corners = len(Scenario.corners()) - 1
    scenarios, fleets = body["checks"][:corners], body["checks"][corners:]
    assert all(f["configuration"].endswith("all behind round-robin") for f in fleets)
    assert {f["requests"] for f in fleets} == {body["load"]["requests"]}
    # From the size of the plan down, until one does not keep it.
    sizes = [f["replicas"] for f in fleets]
    assert sizes == list(range(best["replicas"], best["replicas"] - len(sizes), -1))
    assert [f["kept"] for f in fleets[:-1]] == [True] * (len(fleets) - 1)
    alone = [a for a in body["attempts"] if a["replicas"] == 1 and a["simulated"]]
    assert not fleets[-1]["kept"] or fleets[-1]["replicas"] == (2 if alone else 1)
    assert [c["configuration"].rpartition(": ")[2] for c in scenarios] == [
        scenario.name for scenario in Scenario.corners()[1:]
    ]
    # Main takes nothing from what 0.27.1 may have had.
    assert scenarios[0]["measured"] == best["measured"]
    assert any(c["measured"] != best["measured"] for c in scenarios)
    assert body == json.loads(
        run(*FAST, "--ttft-ms", "1500", "--json", "--verify", "round-robin").stdout
    )
    table = run(*FAST, "--ttft-ms", "1500", "--price", "B300=6", "--no-scenarios")
    assert "is the cheapest that keeps p95 TTFT <= 1,500 ms." in table.stdout
    assert f"price {48 * best['replicas']})" in table.stdout
    assert "may do with fewer: --verify least-loaded" in table.stdout


def test_nothing_fits_on_the_command_line() -> None:
    result = run(*FAST, "--ttft-ms", "60", "--max-gpus", "8")
    assert result.exit_code == 3
    assert "Nothing fits" in result.stdout
    assert "even on an idle machine" in result.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--ttft-ms", "5"), "name the load"),
        (("--rate", "1", "--workload", "agentic", "--ttft-ms", "5"), "name the load"),
        (("--rate", "1"), "give --ttft-ms, --tpot-ms or --e2e-s"),
        (("--workload", "chat", "--ttft-ms", "5"), "no workload 'chat'"),
        (("--trace", "/nowhere", "--ttft-ms", "5"), "no trace at /nowhere"),
        ((*FAST, "--ttft-ms", "5", "--parallel", "8"), "layouts such as tp8"),
        ((*FAST, "--ttft-ms", "5", "--parallel", "tp8+ep3"), "ep=3 must be 1"),
        ((*FAST, "--ttft-ms", "5", "--preset", "x"), "no preset 'x'"),
        ((*FAST, "--ttft-ms", "5", "--price", "B300"), "GPU=PRICE such as"),
        ((*FAST, "--ttft-ms", "5", "--price", "H200=1"), "missing for B300"),
        ((*FAST, "--ttft-ms", "5", "-k", "a"), "-k takes whole numbers"),
        ((*FAST, "--ttft-ms", "5", "--hardware", "B400"), "B400"),
    ],
)
def test_bad_options(args: tuple[str, ...], message: str) -> None:
    result = run(*args)
    assert isinstance(result.exception, CommandError), result.output
    assert message in str(result.exception)


def test_the_trace_command(tmp_path: Path) -> None:
    def trace(*args: str):
        return CliRunner().invoke(app, ["trace", *args])

    path = tmp_path / "t.jsonl"
    write_trace(synthetic_trace("mooncake-conversation", 200.0, seed=3), path)
    path.write_text(path.read_text() + "{}\n")
    body = json.loads(trace(str(path), "--skip-bad-rows", "--json",
                            "--against", "mooncake-conversation").stdout)  # fmt: skip
    assert body["bad_rows"] == 1
    rows = {row["name"]: row for row in body["statistics"]}
    assert rows["input p50"]["published"] == 6909
    assert abs(rows["input p50"]["deviation"]) < 0.3
    table = trace("--workload", "azure-conv", "--duration", "300", "-o", str(tmp_path / "o.gz"))
    assert table.exit_code == 0
    assert "output p90" in table.stdout
    assert "CC-BY 4.0" in table.stdout
    again = json.loads(trace(str(tmp_path / "o.gz"), "--rate-scale", "2", "--json").stdout)
    assert again["duration_s"] == pytest.approx(150, abs=3)
    talk = [{"from": "human", "value": "x" * 400}, {"from": "gpt", "value": "y" * 40}]
    chats = tmp_path / "chats.json"
    chats.write_text(json.dumps([{"id": str(i), "conversations": talk} for i in range(500)]))
    at_once = json.loads(trace(str(chats), "--json").stdout)
    assert {row["name"]: row["found"] for row in at_once["statistics"]}["requests an hour"] is None
    timed = json.loads(trace(str(chats), "--json", "--session-rate", "2").stdout)
    assert timed["duration_s"] == pytest.approx(250, rel=0.2)
    assert trace("--workload", "?").stdout.split() == list(
        __import__("kimik3_lab.benchmark.synthetic_traces", fromlist=["x"]).SYNTHETIC_TRACES
    )
    for args, message in (
        ((), "name a trace file"),
        ((str(path),), r"line "),
        ((str(path), "--against", "x"), "nothing is published here of 'x'"),
        (("--workload", "x"), "no workload 'x'"),
    ):
        result = trace(*args)
        assert isinstance(result.exception, CommandError)
        assert message in str(result.exception)

"""The cheapest configuration that keeps a promise under a load, found by simulation.

Needs numpy (through the intervals). Used by ``k3lab plan``; lesson 12 ends with it.

A configuration is hardware, layout, preset, K and a number of replicas. More replicas mean less
load for each, so for each kind of replica the smallest number that will do is found by bisection,
and one replica is simulated with its share of the sessions. Bounds from the cost model alone spare
most of the work: what cannot be cheaper than what has been found is not simulated.

The share of a replica is dealt by session: as the sessions begin, each gets the next number of a
sequence that spreads as evenly as one can (multiples of the golden ratio, without the whole part),
and a share of 1/n takes those below 1/n. So every share has its part of every minute, as behind a
router that deals sessions in turn, and a smaller share is part of a larger one. Independent random
numbers would not do: a fifth of 400 sessions had a quarter of their requests, and the plan asked
for five replicas where three were enough. What is left is how heavy those sessions happen to be,
and that nobody balances: a router that does needs fewer replicas at times, never many. That is
looked at with the whole fleet (:func:`verify_plan`). Near a limit one replica is noise.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from kimik3_lab.benchmark.intervals import samples_needed
from kimik3_lab.benchmark.records import RequestRecord
from kimik3_lab.benchmark.trace_request import TraceRequest
from kimik3_lab.performance.scenarios import Scenario
from kimik3_lab.simulation.arrivals import simulate_arrivals
from kimik3_lab.simulation.fleet import simulate_fleet
from kimik3_lab.simulation.plan_choices import Candidate, lower_bound
from kimik3_lab.simulation.plan_results import Attempt, Plan
from kimik3_lab.simulation.requests import SimulationRequest
from kimik3_lab.simulation.results import SimulationResult
from kimik3_lab.simulation.router import RouterName
from kimik3_lab.simulation.slo import Slo, Verdict
from kimik3_lab.simulation.spec import SimulationSpec
from kimik3_lab.simulation.trace_requests import to_simulation_requests

__all__ = ["Attempt", "Plan", "check_scenarios", "make_plan", "verify_plan"]

#: Each number falls into the largest gap that those before it left, however many there are.
_GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0
#: Simulates one replica: its spec, its share of the load, and whether records are needed.
Simulate = Callable[[SimulationSpec, Sequence[SimulationRequest], bool], SimulationResult]


def make_plan(
    load: Sequence[TraceRequest],
    slo: Slo,
    choices: Iterable[Candidate],
    *,
    refused: dict[str, str] | None = None,
    max_gpus: int = 128,
    seed: int = 0,
    simulate: Simulate | None = None,
    on_attempt: Callable[[Attempt], None] | None = None,
) -> Plan:
    """Search for the cheapest configuration.

    Parameters
    ----------
    load
        All requests, in order of arrival. Long enough that a queue that grows is seen: ten minutes
        or more.
    slo
        The promise.
    choices
        Ways to build a replica, see :func:`~kimik3_lab.simulation.plan_choices.candidates`.
    refused
        Name to reason for ways that cannot run; they are listed first.
    max_gpus
        Most GPUs in all.
    seed
        Of the dealing of sessions and of accepted lengths.
    simulate
        Takes the place of :func:`simulate_arrivals`.
    on_attempt
        Hears of each attempt when it is over.

    Raises
    ------
    ValueError
        If the load is empty or nothing is to choose from.
    """
    choices = list(choices)
    if not load:
        raise ValueError("the load holds no request: take a longer one, or a higher rate")
    if not choices and not refused:
        raise ValueError("nothing to choose from: name hardware, layouts and presets")
    search = _Search(load, slo, max_gpus, seed, simulate or _simulate(seed), on_attempt)
    for name, reason in (refused or {}).items():
        search.note(Attempt(name, 0, 0, 0.0, False, False, reason=reason))
    whole = list(to_simulation_requests(load))
    bounded = [(choice, lower_bound(choice, whole, slo)) for choice in choices]
    bounded.sort(key=lambda pair: (pair[1].replicas * pair[0].price, pair[0].price))
    for choice, bound in bounded:
        if bound.impossible:
            search.give_up(choice, bound.replicas, bound.impossible)
        else:
            search.smallest(choice, bound.replicas)
    plan = search.plan
    _warn(plan)
    if plan.best is None:
        missed = [a for a in plan.attempts if a.excess is not None]
        plan.nearest = min(missed, key=lambda a: (a.excess or 0.0, a.price), default=None)
    return plan


class _Search:
    """Looks for the smallest number of replicas, candidate by candidate."""

    def __init__(
        self,
        load: Sequence[TraceRequest],
        slo: Slo,
        max_gpus: int,
        seed: int,
        simulate: Simulate,
        on_attempt: Callable[[Attempt], None] | None,
    ) -> None:
        self.plan = Plan(slo)
        self._load, self._max_gpus = load, max_gpus
        self._simulate, self._on_attempt = simulate, on_attempt
        # A number for each session, in the order of their beginnings: a share takes those below it.
        self._first = random.Random(seed).random()
        self._draws: dict[str, float] = {}

    def smallest(self, choice: Candidate, least: int) -> None:
        """Find the fewest replicas that will do, if they cost less than the best so far."""
        most = self._max_gpus // choice.gpus
        best = self.plan.best
        if best is not None:
            most = min(most, math.ceil(best.price / choice.price) - 1)
        if least > most:
            gpus = least * choice.gpus
            if best is not None and gpus <= self._max_gpus:
                told = f"takes {gpus} GPUs or more: no cheaper than {best.replicas} x {best.name}"
            else:
                told = f"takes {gpus} GPUs or more, of {self._max_gpus}"
            self.give_up(choice, least, told)
            return
        # The most that is allowed comes early: if that is not enough, one run settles it.
        if best is None and self._keeps(choice, least):
            return
        low, high = (least - 1 if best is not None else least), most
        if low == most or not self._keeps(choice, most):
            return
        while high - low > 1:
            # Between bounds far apart the geometric middle: the small numbers matter.
            middle = max(low + 1, min(high - 1, math.isqrt(max(low, 1) * high)))
            if self._keeps(choice, middle):
                high = middle
            else:
                low = middle

    def _keeps(self, choice: Candidate, replicas: int) -> bool:
        attempt = self.attempt(choice, replicas)
        if attempt.kept and (self.plan.best is None or attempt.price < self.plan.best.price):
            self.plan.best, self.plan.candidate = attempt, choice
        self.note(attempt)
        return attempt.kept

    def attempt(self, choice: Candidate, replicas: int) -> Attempt:
        """Simulate one of so many replicas."""
        share = list(to_simulation_requests(self._share(1 / replicas)))
        needs_records = self.plan.slo.goodput is not None
        result = self._simulate(choice.spec, share, needs_records)
        verdict = self.plan.slo.judge(result, result.records)
        return _attempt(choice, replicas, verdict, len(share))

    def _share(self, share: float) -> list[TraceRequest]:
        """Sessions of one replica among ``1 / share``."""
        kept = []
        for number, request in enumerate(self._load):
            name = request.session or f"/{number}"
            draw = self._draws.get(name)
            if draw is None:
                draw = (self._first + len(self._draws) * _GOLDEN) % 1.0
                self._draws[name] = draw
            if draw < share:
                kept.append(request)
        return kept

    def give_up(self, choice: Candidate, replicas: int, reason: str) -> None:
        """Take note of what was not simulated."""
        gpus, price = replicas * choice.gpus, replicas * choice.price
        self.note(Attempt(choice.name, replicas, gpus, price, False, False, reason=reason))

    def note(self, attempt: Attempt) -> None:
        """Keep an attempt, and tell whoever listens."""
        self.plan.attempts.append(attempt)
        if self._on_attempt is not None:
            self._on_attempt(attempt)


def _warn(plan: Plan) -> None:
    """Say so if the answer rests on fewer requests than its percentile needs."""
    attempt = plan.best or plan.nearest
    share = max(plan.slo.percentile, 50) / 100
    needed = samples_needed(share)
    if attempt is not None and attempt.requests < needed:
        plan.notes = (
            f"a replica was simulated with {attempt.requests} requests only, and a "
            f"p{plan.slo.percentile} needs {needed}: take a longer load",
        )


def _attempt(choice: Candidate, replicas: int, verdict: Verdict, requests: int) -> Attempt:
    return Attempt(
        choice.name,
        replicas,
        replicas * choice.gpus,
        replicas * choice.price,
        verdict.kept,
        True,
        verdict.measured,
        verdict.excess,
        verdict.reason,
        requests,
    )


def _simulate(seed: int) -> Simulate:
    def simulate(
        spec: SimulationSpec, requests: Sequence[SimulationRequest], keep_records: bool
    ) -> SimulationResult:
        return simulate_arrivals(spec, requests, seed=seed, keep_records=keep_records)

    return simulate


def check_scenarios(
    plan: Plan,
    load: Sequence[TraceRequest],
    scenarios: Iterable[Scenario],
    *,
    seed: int = 0,
    simulate: Simulate | None = None,
) -> list[Attempt]:
    """Simulate the best configuration again under other assumptions.

    What public figures cannot settle, the plan cannot know: it is for the default scenario. This
    says which of the others would break the promise.

    Returns
    -------
    list of Attempt
        One a scenario, named after it; also added to the checks. Empty if nothing fits.
    """
    best, choice = plan.best, plan.candidate
    if best is None or choice is None:
        return []
    search = _Search(load, plan.slo, best.gpus, seed, simulate or _simulate(seed), None)
    found = []
    for scenario in scenarios:
        other = replace(choice, spec=replace(choice.spec, scenario=scenario))
        attempt = search.attempt(other, best.replicas)
        found.append(replace(attempt, name=f"{attempt.name}, scenario: {scenario.name}"))
    plan.checks += found
    return found


def verify_plan(
    plan: Plan,
    load: Sequence[TraceRequest],
    *,
    router: RouterName = "least-loaded",
    processes: int | None = None,
    seed: int = 0,
    progress: bool = False,
) -> Attempt | None:
    """Simulate the whole fleet of the best configuration behind a router, and smaller ones.

    As long as a fleet keeps the promise, the next smaller one is tried: a router that balances can
    need fewer replicas than the search, which had none.

    Returns
    -------
    Attempt or None
        What the fleet of the plan's size came to; it and the smaller ones are added to the checks.
        None if nothing fits.
    """
    best, choice = plan.best, plan.candidate
    if best is None or choice is None:
        return None
    checks: list[Attempt] = []
    # One replica is the same with a router and without: the search knows.
    alone = any(a.replicas == 1 and a.simulated and a.name == best.name for a in plan.attempts)
    for replicas in range(best.replicas, 1 if alone and best.replicas > 1 else 0, -1):
        fleet = simulate_fleet(
            choice.spec,
            to_simulation_requests(load),
            replicas=replicas,
            router=router,
            processes=processes,
            seed=seed,
            keep_records=plan.slo.goodput is not None,
            progress=progress,
        )
        records: list[RequestRecord] | None = None
        if plan.slo.goodput is not None:
            records = [record for result in fleet.replicas for record in result.records or ()]
        verdict = plan.slo.judge(fleet, records)
        found = _attempt(choice, replicas, verdict, fleet.attempted)
        checks.append(replace(found, name=f"{found.name}, all behind {router}"))
        if not verdict.kept:
            break
    plan.checks += checks
    return checks[0]

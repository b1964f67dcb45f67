"""What a run would have come to under another scenario, without running it again.

Needs the standard library and the cost model. ``k3lab simulate`` spans its intervals with it,
unless it is asked to simulate every scenario.

A closed loop is never idle: its streams always wait for something. So its latencies are in
proportion to the time of its steps. The steps of the run are priced anew, each kind by its mean; if
another number of drafts is accepted, as many more or fewer steps decode. What this leaves out is
that other step times let requests meet differently. For the published points it agrees with a
simulation to a few percent, see ``tests/unit/test_simulation_estimate.py``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kimik3_lab.performance.scenarios import Scenario
from kimik3_lab.performance.step_work import even_share
from kimik3_lab.simulation.acceptance import AcceptanceModel
from kimik3_lab.simulation.results import SimulationResult
from kimik3_lab.simulation.spec import SimulationSpec

__all__ = ["estimate_row"]


def estimate_row(
    result: SimulationResult, spec: SimulationSpec, scenario: Scenario, *, cold: bool = False
) -> dict[str, Any]:
    """Estimate :meth:`SimulationResult.row` for another scenario.

    Parameters
    ----------
    result
        A closed loop.
    spec
        What it was run with.
    scenario
        The other one.
    cold
        Whether the run began on a cold server.

    Examples
    --------
    >>> from kimik3_lab.serving.presets import V0_27_1
    >>> from kimik3_lab.simulation import simulate_closed_loop
    >>> spec = SimulationSpec(V0_27_1)
    >>> result = simulate_closed_loop(spec, 1, 20.0, output_tokens=50)
    >>> estimate_row(result, spec, spec.scenario) == result.row(spec.scenario.ttft_statistic)
    True
    """
    row = result.row(scenario.ttft_statistic)
    other = replace(spec, scenario=scenario)
    if spec.scenario == scenario or not result.totals.steps:
        return row
    before, after = _seconds(result, spec, other, cold=cold)
    whole = sum(after.values()) / sum(before.values())
    prompts = [kind for kind in ("prefill", "mixed") if before[kind]]
    first = sum(after[k] for k in prompts) / sum(before[k] for k in prompts) if prompts else whole
    factors = {
        "latency_s": whole,
        "ttft_ms": first,
        "tpot_ms": whole,
        "output_tokens_per_s": 1 / whole,
        "completed_requests": 1 / whole,
    }
    scaled = {name: None if row[name] is None else row[name] * f for name, f in factors.items()}
    count = scaled["completed_requests"]
    return {**scaled, "completed_requests": None if count is None else round(count)}


def _seconds(
    result: SimulationResult, spec: SimulationSpec, other: SimulationSpec, *, cold: bool
) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of each kind of step, as they were and as they would be."""
    costs, other_costs, k = spec.make_costs(), other.make_costs(), spec.num_speculative_tokens
    kinds = result.totals.kinds
    before: dict[str, float] = {}
    after: dict[str, float] = {}
    for name, kind in kinds.items():
        work, other_work = (even_share(kind.mean_work(k), s.parallel.dp) for s in (spec, other))
        warm = kind.seconds - kind.parts["cold_start"]
        ratio = 1.0
        if kind.steps:
            ratio = other_costs.step_cost(other_work).total_s / costs.step_cost(work).total_s
        before[name] = warm
        after[name] = warm * ratio
    if kinds["decode"].decode_seqs and k:
        # Mixed steps are as many as the prompts need; the rest of the tokens takes decode steps.
        mixed, decode = kinds["mixed"].decode_seqs, kinds["decode"].decode_seqs
        needed = (mixed + decode) * _tokens_a_step(spec, k) / _tokens_a_step(other, k)
        after["decode"] *= max(needed - mixed, 0.0) / decode
    if cold:
        before["decode"] += spec.scenario.cold_start_s
        after["decode"] += other.scenario.cold_start_s
    return before, after


def _tokens_a_step(spec: SimulationSpec, k: int) -> float:
    scenario = spec.scenario
    model = AcceptanceModel.of_mean(
        scenario.acceptance_length, k, at=scenario.acceptance_num_drafts
    )
    return model.acceptance_length

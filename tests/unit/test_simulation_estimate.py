"""Estimates for other scenarios agree with simulations of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from simulation_support import Prices, drafting

from kimik3_lab.performance.scenarios import Scenario
from kimik3_lab.serving.presets import MAIN_2026_09_13, V0_27_1
from kimik3_lab.simulation import SimulationSpec, simulate_closed_loop
from kimik3_lab.simulation.estimate import estimate_row


@pytest.mark.parametrize("preset", [V0_27_1, MAIN_2026_09_13], ids=lambda preset: preset.name)
@pytest.mark.parametrize("concurrency", [1, 4])
def test_an_estimate_is_near_a_simulation(preset: Any, concurrency: int) -> None:
    spec = SimulationSpec(preset)
    result = simulate_closed_loop(spec, concurrency, keep_records=False)
    for scenario in Scenario.corners()[1:6]:
        row = estimate_row(result, spec, scenario)
        run = simulate_closed_loop(
            replace(spec, scenario=scenario), concurrency, keep_records=False
        ).row(scenario.ttft_statistic)
        assert row["latency_s"] == pytest.approx(run["latency_s"], rel=0.05)
        assert row["tpot_ms"] == pytest.approx(run["tpot_ms"], rel=0.06)
        assert row["ttft_ms"] == pytest.approx(run["ttft_ms"], rel=0.06)
        assert row["completed_requests"] == pytest.approx(run["completed_requests"], abs=4)


def test_by_hand() -> None:
    """Twice as many tokens a verification, so half of the decode steps."""
    spec = drafting(Prices(0.5), choices={"acceptance_length": 2.0})
    result = simulate_closed_loop(spec, 1, 300.0, prompt_tokens=10, output_tokens=101)
    kinds = result.totals.kinds
    more = replace(spec.scenario, acceptance_length=4.0)
    row = estimate_row(result, spec, more)
    factor = (kinds["prefill"].seconds + kinds["decode"].seconds / 2) / result.totals.seconds
    assert row["latency_s"] == pytest.approx(result.latency("e2e_s") * factor)
    assert row["ttft_ms"] == pytest.approx(500.0)
    assert row["completed_requests"] == round(result.completed_in_window / factor)


def test_another_statistic_is_another_figure_of_the_same_run() -> None:
    spec = drafting(Prices(0.02, 1e-4, 1e-4), choices={"ttft_statistic": "median"})
    result = simulate_closed_loop(spec, 8, 60.0, prompt_tokens=3000, output_tokens=100)
    row = estimate_row(result, spec, replace(spec.scenario, ttft_statistic="mean"))
    assert row["ttft_ms"] == pytest.approx(result.latency("ttft_ms"))
    assert row["ttft_ms"] != pytest.approx(result.latency("ttft_ms", "median"))
    assert row["latency_s"] == pytest.approx(result.latency("e2e_s"))


def test_mean_work_is_that_of_equal_steps() -> None:
    result = simulate_closed_loop(
        drafting(choices={"acceptance_length": 1.0}), 1, 50.0, prompt_tokens=10, output_tokens=5
    )
    work = result.totals.kinds["prefill"].mean_work(8)
    assert (work.num_tokens, work.num_prefill_seqs, work.prefill_pairs) == (10, 1, 55)
    work = result.totals.kinds["decode"].mean_work(8)
    assert (work.num_decode_tokens, work.num_decode_seqs, work.num_logits) == (9, 1, 9)
    work.check()

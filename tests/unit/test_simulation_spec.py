"""What is simulated: memory, switches by name, and the changes between two rungs."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from simulation_support import Prices, drafting

from kimik3_lab.performance.parallelism import Parallelism
from kimik3_lab.performance.scenarios import Scenario
from kimik3_lab.serving.presets import LADDER, MAIN_2026_09_13, V0_27_1
from kimik3_lab.simulation import SimulationSpec
from kimik3_lab.simulation.cells import Cell, at_corners, interval, simulate_cells
from kimik3_lab.simulation.switches import (
    find_preset,
    preset_id,
    set_scenario,
    set_switches,
    switch_names,
)
from kimik3_lab.simulation.waterfall import compose

SPEC = SimulationSpec(V0_27_1)

# -- memory ---------------------------------------------------------------------------------------


def test_the_cache_is_what_the_weights_leave() -> None:
    """Nine tenths of 288 GB, less 205.06 GB of weights and 4 GiB; a block has 24 pages."""
    page = 896 * 576 * 2
    room = 259_200_000_000 - 205_056_581_360 - 4 * 2**30
    assert SPEC.room_bytes == room
    assert SPEC.cache_config.num_blocks == room // (24 * page)
    # What vLLM had for its cache on such a machine (#51855).
    assert SPEC.room_bytes / 2**30 == pytest.approx(46.48, rel=0.01)


@pytest.mark.parametrize(
    ("changes", "block_size"),
    [
        ({}, 896),
        ({"kv_dtype": "fp8"}, 1664),
        ({"scheduler": {"num_speculative_tokens": 7}}, 768),
        ({"scheduler": {"num_speculative_tokens": 0, "speculative_method": None}}, 768),
        ({"parallel": Parallelism(tp=16)}, 512),
        ({"cache": {"block_size": 1024}}, 1024),
    ],
)
def test_the_block_holds_a_state(changes: dict[str, Any], block_size: int) -> None:
    assert replace(SPEC, **changes).cache_config.block_size == block_size


def test_the_published_rungs_have_the_block_of_the_preset() -> None:
    for preset in LADDER[:8]:
        assert SimulationSpec(preset).cache_config.block_size == preset.cache["block_size"]


def test_longest_request() -> None:
    assert SPEC.scheduler_config.max_model_len == 1_048_576
    small = replace(SPEC, num_blocks=100)
    longest = small.scheduler_config.max_model_len
    assert 50_000 < longest < 100 * 896
    assert replace(SPEC, max_model_len=9000).scheduler_config.max_model_len == 9000


def test_weights_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"TP8 on B200: weights and .* leave -4\d\.\d GB of 162"):
        _ = replace(SPEC, hardware="B200").cache_config


def test_context_parallelism_lengthens_the_block() -> None:
    spec = replace(SPEC, parallel=Parallelism(tp=8, dcp=8))
    assert spec.cache_config.scheduler_block_size == 8 * 896


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_dtype": "fp4"}, "kv_dtype must be one of bf16, fp8, got 'fp4'"),
        ({"utilization": 1.5}, "utilization is a share above 0, up to 1, got 1.5"),
        ({"scheduler": {"batch": 1}}, "no scheduler setting batch; there are: async_scheduling"),
        ({"cache": {"blocks": 1}}, "no cache setting blocks; there are: block_size"),
    ],
)
def test_a_bad_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SPEC, **changes)


def test_the_cost_model_hears_of_everything() -> None:
    costs = replace(
        SPEC, preset=MAIN_2026_09_13, hardware="GB300", constants={"step_host": 0.0}
    ).make_costs()
    assert costs.execution == MAIN_2026_09_13.execution
    assert costs.gpu.name == "GB300"


# -- switches -------------------------------------------------------------------------------------


def test_every_rung_has_a_name() -> None:
    names = [preset_id(preset) for preset in LADDER]
    assert len(set(names)) == len(LADDER)
    assert [find_preset(name) for name in names] == list(LADDER)
    assert find_preset("Main 2026-09-13") is MAIN_2026_09_13


def test_a_switch_goes_where_it_belongs() -> None:
    spec = set_switches(
        SPEC,
        {
            "token_budget": "adaptive",
            "max_num_seqs": "64",
            "enable_prefix_caching": "true",
            "retention_interval": "none",
            "watermark": "0.25",
            "num_blocks": "500",
            "skinny_gemm": True,
        },
    )
    assert spec.scheduler == {"token_budget": "adaptive", "max_num_seqs": 64, "watermark": 0.25}
    assert spec.cache == {"enable_prefix_caching": True, "retention_interval": None}
    assert (spec.num_blocks, spec.preset.execution) == (500, {"skinny_gemm"})
    assert set_switches(spec, {"skinny_gemm": "false"}).preset.execution == frozenset()


def test_all_rungs_can_be_reached_by_switches() -> None:
    """A rung is nothing but switches, so that a learner can throw them one by one."""
    for below, rung in pairwise(LADDER):
        changed: dict[str, Any] = {}
        for before, after in ((below.scheduler, rung.scheduler), (below.cache, rung.cache)):
            changed |= {k: v for k, v in after.items() if before.get(k, "absent") != v}
        changed |= dict.fromkeys(rung.execution - below.execution, True)
        spec = set_switches(SimulationSpec(below), changed)
        assert spec.scheduler_config == SimulationSpec(rung).scheduler_config
        assert spec.cache_config == SimulationSpec(rung).cache_config
        assert spec.preset.execution == rung.execution


def test_no_drafter() -> None:
    spec = set_switches(SPEC, {"num_speculative_tokens": "0"})
    assert spec.scheduler_config.speculative_method is None


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("token_budgt", 1, "no switch 'token_budgt'; did you mean token_budget?"),
        ("token_budget", "big", "takes static, adaptive or lookahead_cap, got 'big'"),
        ("max_num_seqs", "2.5", "takes a whole number, got '2.5'"),
        ("max_num_seqs", True, "takes a whole number, got True"),
        ("enable_prefix_caching", "yes", "takes true or false, got 'yes'"),
        ("retention_interval", "all", "takes a whole number or none, got 'all'"),
    ],
)
def test_a_bad_switch(name: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        set_switches(SPEC, {name: value})


def test_choices_of_a_scenario() -> None:
    scenario = set_scenario(
        Scenario.default(), {"acceptance_length": "4", "moe_backend_0_27_1": "marlin"}
    )
    assert (scenario.acceptance_length, scenario.moe_backend_0_27_1) == (4.0, "marlin")
    with pytest.raises(ValueError, match="no choice 'luck'"):
        set_scenario(Scenario.default(), {"luck": "1"})
    with pytest.raises(ValueError, match="ttft_statistic takes mean or median, got 'mode'"):
        set_scenario(Scenario.default(), {"ttft_statistic": "mode"})


def test_switch_names_are_those_of_the_configurations() -> None:
    assert {"max_num_batched_tokens", "block_size", "kv_dtype", *MAIN_2026_09_13.execution} <= set(
        switch_names()
    )


# -- many runs ------------------------------------------------------------------------------------


def test_what_makes_no_difference_is_run_once() -> None:
    """The kernel of v0.27.1's experts is nothing to September, nor is a statistic to a run."""
    marlin = replace(Scenario.default(), moe_backend_0_27_1="marlin")
    means = replace(Scenario.default(), ttft_statistic="mean")
    warm = replace(Scenario.default(), cold_start_s=0.0)
    options = {"duration_s": 4.0, "prompt_tokens": 500, "output_tokens": 20}
    for preset, cold, distinct in (
        (MAIN_2026_09_13, False, 1), (V0_27_1, False, 2), (V0_27_1, True, 3)
    ):  # fmt: skip
        cells = [
            Cell(SimulationSpec(preset, scenario=scenario), 1, {**options, "cold": cold})
            for scenario in (Scenario.default(), marlin, means, warm)
        ]
        ended: list[Any] = []
        results = simulate_cells(cells, on_end=ended.append)
        assert len(results) == 4
        assert len(ended) == len({id(result) for result in results}) == distinct
        assert [r.records for r in results] == [cell.run().records for cell in cells]


def test_corners_begin_with_the_cell_itself() -> None:
    cell = Cell(SPEC, 4, {"seed": 3})
    group = at_corners(cell)
    assert group[0] == cell
    assert [c.spec.scenario for c in group[1:]] == list(Scenario.corners())
    assert {(c.concurrency, c.options["seed"]) for c in group} == {(4, 3)}


def test_corners_keep_what_was_assumed() -> None:
    scenario = replace(Scenario.default(), acceptance_length=2.61)
    cells = at_corners(Cell(replace(SPEC, scenario=scenario), 4))
    assert {cell.spec.scenario.acceptance_length for cell in cells} == {2.61}


def test_an_interval_spans_all_rows() -> None:
    rows = [{"a": 1.0, "b": None}, {"a": 3.0, "b": None}, {"a": 2.0, "b": None}]
    assert interval(rows) == {"a": (1.0, 3.0), "b": None}


def test_processes_do_not_change_the_results() -> None:
    options = {"duration_s": 6.0, "prompt_tokens": 500, "output_tokens": 40}
    cells = [Cell(SimulationSpec(V0_27_1), n, {**options, "seed": n}) for n in range(1, 6)]
    here, apart = simulate_cells(cells), simulate_cells(cells, processes=2)
    assert [r.records for r in here] == [r.records for r in apart]
    assert [r.load for r in apart] == ["c=1", "c=2", "c=3", "c=4", "c=5"]


# -- changes in any order -------------------------------------------------------------------------


def test_all_changes_in_order_are_the_ladder() -> None:
    for top in range(len(LADDER)):
        made = compose(range(1, top + 1))
        rung = LADDER[top]
        assert (made.scheduler, made.cache, made.execution) == (
            rung.scheduler, rung.cache, rung.execution
        )  # fmt: skip


def test_the_last_change_first() -> None:
    made = compose([LADDER.index(MAIN_2026_09_13)])
    assert made.execution == {"zero_copy_mixed_batch"}
    assert made.scheduler == V0_27_1.scheduler


def test_a_cold_server_is_slower_once() -> None:
    spec = drafting(Prices(0.5), choices={"cold_start_s": 3.0})
    for cold, first in ((True, 3.5), (False, 0.5)):
        engine, executor = spec.make_engine(cold=cold)
        from kimik3_lab.serving import Request, SamplingParams

        engine.add_request(Request("a", [5] * 10, SamplingParams(max_tokens=2)))
        engine.step()
        assert executor.clock.now == first
        engine.step()
        assert executor.clock.now == first + 0.5
        assert sum(executor.totals.parts.values()) == pytest.approx(first + 0.5)

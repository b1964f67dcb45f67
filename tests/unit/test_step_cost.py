"""Price of a step: bytes against the accounting, hand-computed cases, and what must only grow."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from kimik3_lab.config import K3Config
from kimik3_lab.performance import dense_cost, expert_cost, step_cost
from kimik3_lab.performance.constants import CONSTANTS, constants_with
from kimik3_lab.performance.flops import flops_per_token
from kimik3_lab.performance.hardware import ACCELERATORS
from kimik3_lab.performance.matmuls import matrix_products
from kimik3_lab.performance.parallelism import Parallelism
from kimik3_lab.performance.placement import Layout, LayoutError, rank_weights
from kimik3_lab.performance.scenarios import Scenario
from kimik3_lab.performance.step_bytes import step_bytes
from kimik3_lab.performance.step_cost import (
    BLACKWELL_GRAPH_ROWS,
    EXECUTION_SWITCHES,
    GRAPH_ROWS,
    PARTS,
    CostModel,
)
from kimik3_lab.performance.step_work import StepWork, decode_work, prefill_work
from kimik3_lab.serving.presets import LADDER

RELEASED = K3Config.released()
EVEN = Scenario(routing_skew=0.0, token_reuse=0.0)


def model(
    hardware: str = "B300",
    parallel: Parallelism | None = None,
    execution: frozenset[str] = EXECUTION_SWITCHES,
    scenario: Scenario = EVEN,
    **constants: float,
) -> CostModel:
    return CostModel(
        RELEASED,
        hardware,
        parallel or Parallelism(8),
        execution=execution,
        scenario=scenario,
        constants=constants,
    )


def mixed(prompt: int, seqs: int, drafts: int = 8) -> StepWork:
    """A step with a prompt of so many tokens beside so many requests that verify."""
    a, b = prefill_work(prompt), decode_work(seqs, context=8500, num_speculative_tokens=drafts)
    names = [f.name for f in dataclasses.fields(StepWork)]
    return StepWork(**{name: getattr(a, name) + getattr(b, name) for name in names})


WORKS = [
    decode_work(1, context=8500),
    decode_work(64, context=8500),
    decode_work(16, context=8500, num_speculative_tokens=8),
    decode_work(300, context=100_000),
    prefill_work(129),
    prefill_work(8000, num_speculative_tokens=8),
    prefill_work(8192, start=100_000),
    mixed(8000, 15),
    mixed(100, 15),
]


# -- counts ------------------------------------------------------------------------------------


def test_pairs_of_a_chunk_are_counted_by_hand() -> None:
    # Tokens 6, 7, 8 of a prompt see 6, 7 and 8 keys.
    assert prefill_work(3, start=5).prefill_pairs == 6 + 7 + 8
    assert prefill_work(3, start=5, num_seqs=2).prefill_pairs == 2 * (6 + 7 + 8)


@pytest.mark.parametrize("work", WORKS)
def test_helpers_make_possible_steps(work: StepWork) -> None:
    work.check()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_tokens": 5}, "num_prefill_tokens"),
        ({"num_logits": -1}, "num_logits"),
        ({"num_decode_seqs": 9}, "decode"),
        ({"num_decode_seqs": 0}, "decode"),
    ],
)
def test_impossible_steps_are_refused(change: dict[str, int], message: str) -> None:
    work = dataclasses.replace(decode_work(4, context=10), **change)
    with pytest.raises(ValueError, match=message):
        work.check()


# -- bytes and operations ------------------------------------------------------------------------


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16])
def test_products_read_all_that_the_placement_counts(tp: int) -> None:
    read = sum(max(1, p.calls) * p.weight_bytes for p in matrix_products(RELEASED, tp))
    assert read == rank_weights(RELEASED, Layout(tp)).trunk


@pytest.mark.parametrize("config", [RELEASED, K3Config.tiny(), K3Config.micro()])
def test_products_compute_all_that_a_token_needs(config: K3Config) -> None:
    products = matrix_products(config, 1)
    flops = flops_per_token(config).matmul
    for part in {p.part for p in products if p.calls}:
        assert sum(p.calls * p.flops_per_row for p in products if p.part == part) == flops[part]
    assert {p.part for p in products if p.calls} == set(flops) - {"routed_experts"}


@pytest.mark.parametrize("parallel", [Parallelism(8), Parallelism(16), Parallelism(8, ep=8)])
@pytest.mark.parametrize("batch", [1, 16, 256])
def test_a_step_moves_the_bytes_of_the_accounting(parallel: Parallelism, batch: int) -> None:
    layout = Layout(parallel.tp, 1, parallel.whole_experts)
    expected = step_bytes(RELEASED, batch, 8192, layout)
    moved = model(parallel=parallel).moved_bytes(decode_work(batch, context=8192))
    for name, value in moved.items():
        assert value == pytest.approx(getattr(expected, name), rel=1e-3), name


@pytest.mark.parametrize("gpu", ACCELERATORS)
@pytest.mark.parametrize("work", WORKS)
def test_no_step_beats_the_floor(gpu: str, work: StepWork) -> None:
    priced = model(gpu)
    assert priced.step_cost(work).total_s > priced.floor_seconds(work)


def test_experts_of_context_parallel_and_data_parallel_ranks() -> None:
    work = decode_work(8, context=100_000)
    alone, split = model(), model(parallel=Parallelism(8, dcp=8))
    assert split.moved_bytes(work)["rows"] == alone.moved_bytes(work)["rows"] / 8
    # Two copies of the trunk bring twice the tokens to the experts, and hold half of each.
    twice = model(parallel=Parallelism(8, ep=16, dp=2))
    assert twice.experts.distinct(work) == alone.experts.distinct(decode_work(16, context=1))
    assert twice.experts.layer_bytes == pytest.approx(alone.experts.layer_bytes / 2)


# -- hand-computed -------------------------------------------------------------------------------


def test_a_decode_step_by_hand() -> None:
    """Every constant but bandwidth is taken out; what is left are bytes over bandwidth."""
    free = {name: 0.0 for name, c in CONSTANTS.items() if c.unit in ("s", "s/token")}
    one = {name: 1.0 for name, c in CONSTANTS.items() if c.unit == "1"}
    huge = {"mla_sequence_bandwidth": 1e30, "bulk_all_reduce": 1e30}
    priced = model(execution=frozenset(), **(free | one | huge))
    work = decode_work(16, context=8192)
    parts = priced.step_cost(work).parts
    # q, k, v, g: 4 matrices of 12288 x 7168 in bf16 over 8 ranks; o; the decay's first matrix whole
    # with its neighbour beta split; the decay's second; vectors. 69 layers, 8 TB/s.
    kda = 5 * 12288 * 7168 * 2 / 8 + 128 * 7168 * 2 + (96 * 7168 + 12288 * 128) * 2 / 8
    assert parts["kda"] == pytest.approx(69 * kda / 8e12, rel=2e-3)
    distinct = 896 * (1 - (1 - 16 / 896) ** 16)
    tiles = float(step_cost_tiles(16))
    compute = 16 * 16 * 6 * 3584 * 3072 / 8 / 4.5e15
    experts = 92 * (distinct * 17_547_264 / 8 / 8e12 + compute) * tiles
    assert parts["routed_experts"] == pytest.approx(experts, rel=1e-3)
    states = 69 * 2 * 16 * (96 * 128 * 128 * 4 + 3 * 12288 * 3 * 2) / 8 / 8e12
    assert parts["kda_state"] == pytest.approx(states)
    assert parts["mla_attention"] == pytest.approx(16 * 8192 * 27_648 / 8e12)


def step_cost_tiles(tokens: int) -> float:
    """Between the two neighbours of ``tokens``, on a logarithmic scale."""
    below = max(pair for pair in expert_cost.TILES if pair[0] <= tokens)
    above = min(pair for pair in expert_cost.TILES if pair[0] >= tokens)
    if below == above:
        return below[1]
    share = math.log(tokens / below[0]) / math.log(above[0] / below[0])
    return below[1] + share * (above[1] - below[1])


def test_drafts_write_a_state_each() -> None:
    priced = model()
    plain = priced.moved_bytes(decode_work(4, context=100))["state"]
    verified = priced.moved_bytes(decode_work(4, context=100, num_speculative_tokens=8))["state"]
    assert verified == plain * (1 + 9) / 2


def test_a_step_of_0_27_1_is_the_launch_floor() -> None:
    cost = model(execution=frozenset()).step_cost(prefill_work(1024, last=False))
    floor = 93 * CONSTANTS["eager_layer_0_27_1"].value
    assert cost.parts["launch_floor"] > 0
    assert cost.total_s == pytest.approx(floor + CONSTANTS["step_host"].value)
    # Eight of them are the published time to first token of 2,262.9 ms, at one request.
    assert 8 * cost.total_s == pytest.approx(2.2629, rel=0.03)


@pytest.mark.parametrize(
    ("hardware", "execution", "rows"),
    [
        ("B300", EXECUTION_SWITCHES, BLACKWELL_GRAPH_ROWS),
        ("B300", EXECUTION_SWITCHES - {"other_step_changes"}, GRAPH_ROWS),
        ("H200", EXECUTION_SWITCHES, GRAPH_ROWS),
    ],
)
def test_the_graph_boundary(hardware: str, execution: frozenset[str], rows: int) -> None:
    inside = model(hardware, execution=execution).step_cost(prefill_work(rows))
    # On an H200 so many rows keep the GPU busy for longer than the host needs to launch them.
    outside = model(hardware, execution=execution, eager_layer=1.0).step_cost(
        prefill_work(rows + 1)
    )
    assert "launch_floor" not in inside.parts
    assert outside.parts.get("launch_floor", 0.0) > 0
    assert inside.parts["shared_experts"] == 0 < outside.parts["shared_experts"]


# -- what must only grow, and what each switch does ----------------------------------------------


def grown(work: StepWork, name: str) -> StepWork:
    more = {name: getattr(work, name) * 2}
    if name in ("num_prefill_tokens", "num_decode_tokens"):
        more["num_tokens"] = work.num_tokens + getattr(work, name)
    return dataclasses.replace(work, **more)


@pytest.mark.parametrize("scenario", Scenario.corners(), ids=lambda scenario: scenario.name)
@pytest.mark.parametrize(
    "name",
    ["num_prefill_tokens", "num_decode_tokens", "decode_context", "prefill_pairs", "num_logits"],
)
def test_more_work_never_takes_less_time(name: str, scenario: Scenario) -> None:
    for execution in (frozenset(), EXECUTION_SWITCHES):
        priced = model(execution=execution, scenario=scenario)
        for work in WORKS:
            if getattr(work, name):
                more = priced.step_cost(grown(work, name)).total_s
                assert more > priced.step_cost(work).total_s * 0.97, work


@pytest.mark.parametrize("work", WORKS)
def test_parts_add_up_and_have_names(work: StepWork) -> None:
    for execution in (frozenset(), EXECUTION_SWITCHES):
        cost = model(execution=execution).step_cost(work)
        assert set(cost.parts) <= set(PARTS)
        assert min(cost.parts.values()) >= 0
        assert cost.total_s == pytest.approx(sum(cost.parts.values()))


@pytest.mark.parametrize("switch", sorted(EXECUTION_SWITCHES))
def test_a_switch_helps_where_it_should_and_nowhere_else(switch: str) -> None:
    """Parts that a switch may change; and a step that it makes quicker."""
    touched = {
        "kda_prefill_in_place": ({"kda_state"}, prefill_work(8000)),
        "skinny_gemm": (
            {"kda", "mla", "latent_moe", "router", "shared_experts", "dense_mlp"}
            | {"head", "drafter"},
            decode_work(1, context=8500),
        ),
        "deferred_finalize": ({"routed_experts"}, decode_work(4, context=8500)),
        "other_step_changes": (
            {"decode_step_residual", "all_reduce", "drafter", "head", "mixed_batch"},
            decode_work(4, context=8500, num_speculative_tokens=8),
        ),
        "zero_copy_mixed_batch": ({"mixed_batch"}, mixed(8000, 3)),
    }  # fmt: skip
    names, quicker = touched[switch]
    for work in WORKS:
        before = model(execution=frozenset()).step_cost(work)
        after = model(execution=frozenset({switch})).step_cost(work)
        # What the later version loses in mixed steps came with its other changes.
        if switch != "other_step_changes" or "mixed_batch" not in before.parts:
            assert after.total_s <= before.total_s * (1 + 1e-12)
        changed = {
            name
            for name in before.parts.keys() | after.parts.keys()
            if before.parts.get(name, 0.0) != pytest.approx(after.parts.get(name, 0.0))
        }
        assert changed <= names | {"launch_floor"}
    without = model(execution=EXECUTION_SWITCHES - {switch}).step_cost(quicker)
    assert model().step_cost(quicker).total_s < without.total_s * 0.995


def test_presets_only_know_these_switches() -> None:
    assert set().union(*(preset.execution for preset in LADDER)) == EXECUTION_SWITCHES


def test_faster_hardware_is_faster() -> None:
    for work in WORKS:
        b300 = model("B300").step_cost(work).total_s
        assert model("GB300").step_cost(work).total_s <= b300
        assert model("H200").step_cost(work).total_s > b300


def test_skewed_routing_and_repetition_read_fewer_experts() -> None:
    work = decode_work(4, context=8500, num_speculative_tokens=8)
    even = model().experts.distinct(work)
    assert even == pytest.approx(896 * (1 - (1 - 16 / 896) ** 36), rel=1e-6)
    assert model(scenario=Scenario(routing_skew=1.0, token_reuse=0.0)).experts.distinct(work) < even
    assert model(scenario=Scenario(routing_skew=0.0, token_reuse=0.3)).experts.distinct(work) < even
    # Four tokens of four requests share nothing, whatever the reuse within a request.
    one = decode_work(4, context=8500)
    reuse = model(scenario=Scenario(routing_skew=0.0, token_reuse=0.9))
    assert reuse.experts.distinct(one) == model().experts.distinct(one)


def test_corners_agree_on_what_was_measured() -> None:
    """Time per token of one request, of both versions, which the published latency gives."""
    work = decode_work(1, context=8500, num_speculative_tokens=8)
    for execution in (frozenset(), EXECUTION_SWITCHES):
        found = [
            model(execution=execution, scenario=scenario).step_cost(work).total_s
            / scenario.acceptance_length
            for scenario in Scenario.corners()
        ]
        for scenario, seconds in zip(Scenario.corners(), found, strict=True):
            off = 0.06 if scenario.name.startswith("0.27.1 measured") else 0.02
            assert seconds == pytest.approx(found[0], rel=off), scenario.name


def test_constants_of_a_scenario_give_way_to_those_that_are_asked_for() -> None:
    scenario = Scenario(constants=(("step_host", 1.0), ("markov_draft", 2.0)))
    work = decode_work(1, context=1)
    assert model(scenario=scenario).step_cost(work).parts["host"] == 1.0
    assert model(scenario=scenario, step_host=3.0).step_cost(work).parts["host"] == 3.0


def test_a_given_load_is_used() -> None:
    load = [1.0] * 16 + [0.0] * 880
    given = model(scenario=Scenario(expert_load=tuple(load)))
    assert given.experts.distinct(decode_work(64, context=1)) == 16
    with pytest.raises(ValueError, match="probability"):
        model(scenario=Scenario(expert_load=(1.5,) * 896))


# -- refusals ------------------------------------------------------------------------------------


def test_unknown_names_are_refused() -> None:
    with pytest.raises(KeyError, match=r"B301.*B300"):
        model("B301")
    with pytest.raises(ValueError, match=r"warp_drive.*skinny_gemm"):
        model(execution=frozenset({"warp_drive"}))
    with pytest.raises(KeyError, match=r"gemm_speed.*gemm_bandwidth"):
        constants_with({"gemm_speed": 1.0})
    with pytest.raises(ValueError, match="step_host"):
        constants_with({"step_host": -1.0})


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tp": 0}, "tp"),
        ({"tp": 8, "ep": 4}, "ep=4"),
        ({"tp": 8, "dp": 2}, "ep=16"),
        ({"tp": 8, "dcp": 3}, "dcp=3"),
        ({"tp": 8, "num_gpus": 16}, "num_gpus=16"),
    ],
)
def test_impossible_layouts_are_refused(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        Parallelism(**sizes)


def test_parallel_layouts_up_to_72_gpus_are_priced() -> None:
    work = decode_work(32, context=8500)
    for parallel in (
        Parallelism(8, pp=2),
        Parallelism(16),
        Parallelism(8, ep=16, dp=2, dcp=8),
        Parallelism(8, ep=56, dp=7),
        Parallelism(8, pp=9),
    ):
        cost = model("GB300", parallel).step_cost(work)
        assert 0 < cost.total_s < 0.2
    within = model("GB300", Parallelism(16)).step_cost(work).parts["all_reduce"]
    across = model("B300", Parallelism(16)).step_cost(work).parts["all_reduce"]
    assert across > within + 185 * CONSTANTS["node_crossing"].value * 0.99


def test_a_pipeline_hands_over_at_every_boundary() -> None:
    work = prefill_work(8192)
    two = model("B300", Parallelism(8, pp=2)).step_cost(work).parts["pipeline"]
    assert model("B300", Parallelism(8, pp=3)).step_cost(work).parts["pipeline"] == 2 * two
    # Nine rows of 7,168 bf16 values a token, at 100 GB/s, and a start.
    assert two == pytest.approx(10e-6 + 8192 * 9 * 7168 * 2 / 100e9)


# -- mutants that these tests must notice --------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "name", "wrong", "check"),
    [
        (step_cost, "GRAPH_ROWS", 100_000,
         lambda: test_the_graph_boundary("H200", EXECUTION_SWITCHES, GRAPH_ROWS)),
        (step_cost, "BLACKWELL_GRAPH_ROWS", 512,
         lambda: test_the_graph_boundary("B300", EXECUTION_SWITCHES, BLACKWELL_GRAPH_ROWS)),
        (expert_cost, "effective_tokens", lambda rows, seqs, reuse: rows,
         test_skewed_routing_and_repetition_read_fewer_experts),
        (dense_cost, "SKINNY_ROWS", 0,
         lambda: test_a_switch_helps_where_it_should_and_nowhere_else("skinny_gemm")),
    ],
)  # fmt: skip
def test_mutants_are_caught(
    module: Any, name: str, wrong: Any, check: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    check()
    monkeypatch.setattr(module, name, wrong)
    with pytest.raises(AssertionError):
        check()

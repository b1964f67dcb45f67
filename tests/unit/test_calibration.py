"""The fit, what was set on what, and how near the constants come to the tables they were set on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from kimik3_lab.config import K3Config
from kimik3_lab.performance import measurements
from kimik3_lab.performance.attribution import explain, switch_worth
from kimik3_lab.performance.calibration import FITTED, calibrate
from kimik3_lab.performance.collectives import Collectives
from kimik3_lab.performance.constants import CONSTANTS, constants_with
from kimik3_lab.performance.dense_cost import DenseProducts
from kimik3_lab.performance.expert_cost import ExpertLayers
from kimik3_lab.performance.hardware import accelerator
from kimik3_lab.performance.measurements import load_measurements, row_roles
from kimik3_lab.performance.parallelism import Parallelism
from kimik3_lab.performance.published import IMPROVED, PublishedPoint, load_points
from kimik3_lab.performance.scenarios import Scenario
from kimik3_lab.performance.sensitivity import spread
from kimik3_lab.performance.step_cost import EXECUTION_SWITCHES, PARTS, CostModel
from kimik3_lab.performance.step_work import decode_work, prefill_work

RELEASED, EIGHT = K3Config.released(), Parallelism(8)
ROWS = {row.id: row for row in load_measurements()}
FIRST_IMAGE = frozenset({"kda_prefill_in_place", "skinny_gemm", "other_step_changes"})


def model(hardware: str = "B300", parallel: Parallelism = EIGHT, **options: object) -> CostModel:
    return CostModel(
        RELEASED,
        hardware,
        parallel,
        **{"execution": EXECUTION_SWITCHES, **options},  # type: ignore
    )


def value(name: str) -> float:
    found = ROWS[name].value
    assert found is not None
    return found


# -- what was set on what ------------------------------------------------------------------------


def test_every_constant_lies_in_its_range_and_has_its_evidence() -> None:
    ids = [role.id for role in row_roles()]
    for constant in CONSTANTS.values():
        assert constant.low <= constant.value <= constant.high, constant.name
        assert constant.meaning and constant.evidence
        assert bool(constant.source) or constant.evidence.startswith("assumed")
        for pattern in constant.set_on:
            assert any(fnmatchcase(name, pattern) for name in ids), (constant.name, pattern)


def test_rows_that_only_check_are_named_as_such() -> None:
    roles = {role.id: role for role in row_roles()}
    held_out = {name for name, role in roles.items() if role.role == "held out"}
    assert {
        "b300-sglang-tpot-c1", "gb300-tp8-decode-c1", "gb300-tp16-decode-c1", "pr51725-ttft",
        "sglang-dspark7-step-c1", "h200-tp16-tpot-c2", "h200-tp16-tpot-c4",
    } <= held_out  # fmt: skip
    assert roles["kda-scan-1024"].constants == ("kda_scan_latency", "kda_scan_head_token")
    for role in roles.values():
        assert (role.role == "set") == bool(role.constants)


def test_the_file_of_measurements_names_its_sources() -> None:
    for row in ROWS.values():
        assert row.source_url.startswith("https://")
        assert row.unit and row.metric
        assert row.value is not None or row.value_high is not None


@pytest.mark.parametrize(
    ("text", "message"),
    [("id,value\na,1\n", "no column"), (None, "appears twice")],
)
def test_a_bad_file_of_measurements(text: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    if text is None:
        names = measurements.Measurement.__slots__
        line = ",".join("1" if "value" in name else "x" for name in names)
        text = ",".join(names) + f"\n{line}\n{line}\n"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        load_measurements(path)


# -- against the tables that constants were set on -----------------------------------------------


def test_products_of_the_tables() -> None:
    dense = DenseProducts(
        RELEASED, accelerator("B300"), 8, constants_with(), skinny=False
    )  # fmt: skip
    for name, shape, rows in (
        ("gemm-qkvg-6144x7168-128", (6144, 7168), 128),
        ("gemm-qkvg-6144x7168-8192", (6144, 7168), 8192),
        ("gemm-o-7168x1536-1", (7168, 1536), 1),
        ("gemm-o-7168x1536-8192", (7168, 1536), 8192),
        ("gemm-latent-down-3584x7168-1", (3584, 7168), 1),
        ("gemm-shared-down-7168x768-1", (7168, 768), 1),
    ):
        microseconds = 1e6 * dense.call(2.0 * shape[0] * shape[1], rows)
        assert microseconds == pytest.approx(value(name), rel=0.15), name


@pytest.mark.parametrize(
    ("table", "backend", "parallel", "skew"),
    [
        ("moe-trtllm", "trtllm_gen", Parallelism(8), 0.55),
        ("moe-marlin", "marlin", Parallelism(8), 0.55),
        ("moe-flashinfer-uniform", "trtllm_gen", Parallelism(8), 0.0),
        ("moe-flashinfer-skew", "trtllm_gen", Parallelism(8), 1.02),
        ("moe-trtllm-ep8", "trtllm_gen", Parallelism(8, ep=8), 0.55),
    ],
)
def test_expert_tables(table: str, backend: str, parallel: Parallelism, skew: float) -> None:
    """Half of every table within 12 %, all of it within 25 %."""
    scenario = Scenario(routing_skew=skew, token_reuse=0.0)
    layers = ExpertLayers(
        RELEASED,
        accelerator("B300"),
        parallel,
        scenario,
        constants_with(),
        backend=backend,  # type: ignore[arg-type]
        deferred=False,
    )
    errors = []
    for name, row in ROWS.items():
        if name.startswith(table) and name.removeprefix(table + "-").isdigit():
            seconds = layers.seconds(decode_work(int(row.rows), context=1)) / layers.layers
            errors.append(abs(math.log(1e6 * seconds / value(name))))
    assert len(errors) >= 5
    assert sorted(errors)[len(errors) // 2] < 0.12
    assert max(errors) < 0.25


def test_all_reduce_tables() -> None:
    for style, name in (("custom", "vllm"), ("low_latency", "sglang")):
        # The tables are of one kernel; larger sums in the model are as fast as the fit made them.
        constants = constants_with({"bulk_all_reduce": 190e9})
        eight = Collectives(accelerator("B300"), 8, style, constants)  # type: ignore[arg-type]
        for row in ROWS.values():
            if row.id.startswith(f"allreduce-{name}-graph"):
                microseconds = 1e6 * eight.all_reduce(float(row.rows))
                assert microseconds == pytest.approx(value(row.id), rel=0.25), row.id


def test_kda_tables() -> None:
    kda = model().kda
    for seqs in (16, 256, 1024):
        each = 1e6 * kda.seconds(decode_work(seqs, context=1)) / kda.layers
        assert each == pytest.approx(value(f"kda-decode-{seqs}"), rel=0.12)
    for seqs in (8, 16):
        work = decode_work(seqs, context=1, num_speculative_tokens=7)
        each = 1e6 * (kda.seconds(work) / kda.layers - CONSTANTS["kda_convolution_verify"].value)
        assert each == pytest.approx(value(f"kda-verify-vllm-{seqs}"), rel=0.12)
    for tokens in (1024, 8192):
        each = kda.seconds(prefill_work(tokens)) / kda.layers
        each -= CONSTANTS["kda_convolution_in_place"].value
        assert 1e6 * each == pytest.approx(value(f"kda-scan-{tokens}"), rel=0.03)


# -- single steps that were measured and nothing was set on --------------------------------------


def test_decode_steps_that_were_not_fitted() -> None:
    plain = decode_work(1, context=8192 + 512)
    b300 = 1e3 * model().step_cost(plain).total_s
    assert b300 == pytest.approx(value("b300-sglang-tpot-c1"), rel=0.05)
    fp8 = Scenario(cache_itemsize=1)
    for gpus in (8, 16):
        gb300 = model("GB300", Parallelism(gpus), scenario=fp8, execution=FIRST_IMAGE)
        rate = 1.0 / gb300.step_cost(plain).total_s
        assert rate == pytest.approx(value(f"gb300-tp{gpus}-decode-c1"), rel=0.05)
    drafted = decode_work(1, context=8700, num_speculative_tokens=7)
    step = 1e3 * model(execution=frozenset({"other_step_changes"})).step_cost(drafted).total_s
    assert step == pytest.approx(value("sglang-dspark7-step-c1"), rel=0.12)


def test_two_nodes_of_h200() -> None:
    marlin = Scenario(moe_backend="marlin")
    for ep, name in ((1, "h200-tp16"), (16, "h200-tp16-ep16")):
        two = model(
            "H200",
            Parallelism(16, ep=ep),
            execution=frozenset({"other_step_changes"}),
            scenario=marlin,
        )
        for seqs in (1, 2, 4, 8, 16):
            step = 1e3 * two.step_cost(decode_work(seqs, context=1500)).total_s
            assert step == pytest.approx(value(f"{name}-tpot-c{seqs}"), rel=0.12)


def test_context_parallelism_shortens_long_contexts() -> None:
    """Set on these rows: their difference; the step itself is not."""
    for seqs in (1, 2):
        work = decode_work(seqs, context=120_200)
        alone = 1e3 * model().step_cost(work).total_s
        split = 1e3 * model(parallel=Parallelism(8, dcp=8)).step_cost(work).total_s
        before, after = (value(f"pr50484-tpot-{kind}-c{seqs}") for kind in ("tp8", "dcp8"))
        assert alone - split == pytest.approx(before - after, rel=0.25)
        assert alone == pytest.approx(before, rel=0.15)
        assert split == pytest.approx(after, rel=0.16)


# -- the fit -------------------------------------------------------------------------------------


def linear(
    constants: Mapping[str, float], scenario: Scenario, points: Sequence[PublishedPoint]
) -> list[tuple[float, float]]:
    """A machine on which every number does one thing, at the published scale."""
    found = []
    for point in points:
        step = 14.0 + 8e3 * constants["markov_draft"]
        step += 1e3 * constants["decode_step_residual"] * (point.version != IMPROVED)
        grow = 1.0 + 0.02 * point.concurrency
        ttft = point.ttft_ms * constants["bulk_all_reduce"] / 300e9
        latency = grow * step / scenario.acceptance_length + ttft / 1000
        found.append((latency, ttft))
    return found


def test_a_fit_finds_what_made_the_points() -> None:
    truth = {f.name: f.prior * f.spread**0.5 for f in FITTED}
    scenario = Scenario(acceptance_length=truth["acceptance_length"])
    made = [
        PublishedPoint(**{**vars_of(point), "latency_s": latency, "ttft_ms": ttft})
        for point, (latency, ttft) in zip(
            load_points(), linear(truth, scenario, load_points()), strict=True
        )
    ]
    start = {f.name: f.prior for f in FITTED}
    before = errors(made, linear(start, Scenario(acceptance_length=3.4), made))
    fit = calibrate(linear, made)
    after = errors(made, linear(fit.constants, fit.scenario, made))
    assert max(before) > 0.05
    assert max(after) < 0.03
    # Numbers that no point depends on stay where they were expected.
    assert fit.values["routing_skew"] == pytest.approx(0.55)


def test_a_fit_never_gets_worse_and_uses_only_what_it_is_given() -> None:
    asked: list[int] = []

    def watched(
        constants: Mapping[str, float], scenario: Scenario, points: Sequence[PublishedPoint]
    ) -> list[tuple[float, float]]:
        asked.extend(point.concurrency for point in points)
        return linear(constants, scenario, points)

    kept = [point for point in load_points() if point.concurrency != 4]
    losses = [calibrate(watched, kept, strides=(1.0,) * n).loss for n in range(4)]
    assert losses == sorted(losses, reverse=True)
    assert losses[0] > losses[-1]
    assert set(asked) == {1, 16}
    with pytest.raises(ValueError, match="at least one"):
        calibrate(linear, [])


def vars_of(point: PublishedPoint) -> dict[str, object]:
    return {name: getattr(point, name) for name in point.__dataclass_fields__}


def errors(points: Sequence[PublishedPoint], found: Sequence[tuple[float, float]]) -> list[float]:
    return [
        abs(math.log(latency / point.latency_s))
        for point, (latency, _) in zip(points, found, strict=True)
    ]


# -- intervals and attribution -------------------------------------------------------------------


def test_an_interval_holds_its_value_and_widens_with_ignorance() -> None:
    steps = [(1.0, decode_work(16, context=8500))]
    base = Scenario.default()
    one = spread(steps, "B300", EIGHT, execution=EXECUTION_SWITCHES, scenario=base)
    more = spread(
        steps, "B300", EIGHT, execution=EXECUTION_SWITCHES, scenario=base, corners=base.corners()
    )
    assert more.low_s < one.low_s < one.value_s < one.high_s < more.high_s
    assert "scenario: skewed routing" in more.swings
    assert "eager_layer_0_27_1" not in one.swings  # not part of this step
    widths = [high - low for low, high in more.swings.values()]
    assert widths == sorted(widths, reverse=True)


def test_an_explanation_lists_every_part_once() -> None:
    cost = model().step_cost(decode_work(16, context=8500, num_speculative_tokens=8))
    rows = explain(cost)
    assert [row.seconds for row in rows] == sorted((r.seconds for r in rows), reverse=True)
    assert sum(row.share for row in rows) == pytest.approx(1.0)
    assert sum(row.seconds for row in rows) == pytest.approx(cost.total_s)
    assert rows[0].label == PARTS["routed_experts"]


def test_the_worth_of_switches_in_both_orders() -> None:
    work = decode_work(4, context=8500, num_speculative_tokens=8)
    rows = switch_worth(work, "B300", EIGHT)
    assert {row.switch for row in rows} == EXECUTION_SWITCHES
    none = model(execution=frozenset()).step_cost(work).total_s
    every = model().step_cost(work).total_s
    largest = max(rows, key=lambda row: row.last_s)
    assert largest.switch == "other_step_changes"
    # Switches of different parts of a captured step add up in either order.
    assert sum(row.first_s for row in rows) == pytest.approx(none - every, rel=0.02)
    assert sum(row.last_s for row in rows) == pytest.approx(none - every, rel=0.02)

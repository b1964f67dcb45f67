"""The cost of a layer on two GPUs: what was measured, what was predicted, and the arithmetic."""

from __future__ import annotations

import itertools
import json
import statistics
from collections import Counter

import numpy as np
import pytest

from kimik3_lab.config import K3Config
from kimik3_lab.parallel.measure_cases import COLLECTIVES, Plan, layer_cases
from kimik3_lab.paths import data_dir
from kimik3_lab.performance.collectives import CURVES, scaled_bandwidth
from kimik3_lab.performance.constants import CONSTANTS
from kimik3_lab.performance.expert_tiles import TILED, TileCount, draw_counts
from kimik3_lab.performance.layer_cost import KERNELS, LayerCost
from kimik3_lab.performance.measured_collectives import MeasuredCollectives

PATH = data_dir() / "results" / "h200x2" / "collectives.json"
BODY = json.loads(PATH.read_text(encoding="utf-8"))
TABLE = MeasuredCollectives.from_rows(BODY["collectives"], 2)


def kernel_rows(operator):
    path = data_dir() / "results" / "h200x2" / "one_gpu.json"
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return [row for row in rows if row["operator"] == operator and row["ours_us"]]


# -- what it is set on -------------------------------------------------------------------------


def test_the_experts_line_goes_through_one_gpus_rows():
    line, worst = KERNELS["experts"], 0.0
    for operator, width, top_k in (("moe_mxfp4_tp8", 384, 16), ("moe_mxfp4_ep8", 3072, 2)):
        for row in kernel_rows(operator):
            tokens = int(row["case"].split(",")[0].removeprefix("T="))
            size = row["inputs"]["distinct_experts"] * 3 * 3584 * width * 17 / 32
            us = line.us(size, tokens * top_k * 6 * 3584 * width)
            worst = max(worst, abs(us / row["ours_us"] - 1))
    assert 0.05 < worst <= line.within


@pytest.mark.parametrize(
    ("name", "operator", "size"),
    [
        ("attn_res", "attnres8", lambda tokens: 12 * 2 * 7168 * tokens),
        ("router", "router", lambda tokens: 4 * 896 * tokens),
    ],
)
def test_the_other_lines_do_too(name, operator, size):
    for row in kernel_rows(operator):
        tokens = int(row["case"].removeprefix("T="))
        assert KERNELS[name].us(size(tokens)) == pytest.approx(
            row["ours_us"], rel=KERNELS[name].within
        )


# -- the recorded run --------------------------------------------------------------------------


def test_the_record_is_of_two_gpus():
    made = BODY["provenance"]
    assert not BODY["dry_run"]
    assert made["device"] == "2 x NVIDIA H200"
    assert made["environment"]["NCCL_NVLS_ENABLE"] == "0"
    assert made["command"].startswith("python -m kimik3_lab.parallel.measure --first ep:4096")
    assert not made["git_commit"].endswith("-dirty")
    assert {row["collective"] for row in BODY["collectives"]} == set(COLLECTIVES)
    assert {row["mode"] for row in BODY["collectives"]} == {"eager", "graph"}
    sizes = {row["bytes"] for row in BODY["collectives"]}
    assert (min(sizes), max(sizes)) == (4096, 256 << 20)
    assert max(BODY["check_relative_error"].values()) < 1e-2


def test_the_record_is_complete():
    cases = set(layer_cases(Plan.make(on_gpu=True, quick=False, ranks=2)))
    recorded = [(r["parallel"].removesuffix("2"), r["T"], r["routing"]) for r in BODY["layers"]]
    assert BODY["complete"]
    assert set(recorded) == cases
    layers = {"moe": 25, "whole": 20}  # dealt out experts: the MoE alone
    assert Counter(row["layer"] for row in BODY["layers"]) == layers
    sizes = Plan.make(on_gpu=True, quick=False, ranks=2).sizes
    rows = {(r["collective"], r["mode"], r["bytes"]) for r in BODY["collectives"]}
    assert rows == set(itertools.product(COLLECTIVES, ("eager", "graph"), sizes))
    assert len(rows) == len(BODY["collectives"]) == 136


def predicted(cost, row):
    """Both predictions of a row, from its counts: with experts and pairs, with tiles if counted."""
    whole = row["parallel"] == "ep2"
    case = {
        "ranks": 2, "whole_experts": whole,
        "distinct": row["distinct_experts_busiest_rank"], "pairs": row["pairs_busiest_rank"],
    }  # fmt: skip
    yield cost.layer_us(row["layer"], row["T"], **case).total
    if "tiles_busiest_rank" in row:
        tiles = TileCount(*row["tiles_busiest_rank"])
        us = TILED.us(tiles, latent=3584, width=3072 if whole else 1536)
        yield cost.layer_us(row["layer"], row["T"], experts_us=us, **case).total


@pytest.mark.parametrize("run", ["this", "earlier", "foretold"])
def test_the_record_predicts_as_the_code_does(run):
    """Recorded predictions are today's: nobody has set the constants on the layers since."""
    earlier = BODY["earlier_run"]
    collectives, rows = {
        "this": (BODY["collectives"], BODY["layers"]),
        "earlier": (earlier["collectives"], earlier["layers"]),
        "foretold": (earlier["collectives"], BODY["predicted_before_measured"]["layers"]),
    }[run]
    assert len(rows) == {"this": 45, "earlier": 40, "foretold": 5}[run]
    cost = LayerCost(K3Config.released(), "H200", MeasuredCollectives.from_rows(collectives, 2))
    for row in rows:
        names = ("predicted_us", "predicted_tiles_us")[: 1 if run == "earlier" else 2]
        assert list(predicted(cost, row)) == pytest.approx([row[n] for n in names], rel=1e-3)
        if "us" in row:
            assert row["error"] == pytest.approx(row["predicted_us"] / row["us"] - 1, abs=1e-3)


def test_layers_of_up_to_64_tokens_are_predicted_within_a_tenth():
    errors = [abs(row["error"]) for row in BODY["layers"] if row["T"] <= 64]
    assert statistics.median(errors) < 0.055
    assert sum(error < 0.1 for error in errors) == 25
    assert len(errors) == 27
    assert max(errors) < 0.115


def test_placing_by_load_helps_the_layer_that_waits():
    by_case = {(r["layer"], r["parallel"], r["T"], r["routing"]): r for r in BODY["layers"]}
    for tokens, takes in ((16, 0.78), (64, 0.80), (256, 0.87), (4096, 0.93)):
        skewed = by_case["moe", "ep2", tokens, "skewed"]
        placed = by_case["moe", "ep2", tokens, "placed"]
        assert skewed["imbalance"] > 1.45
        assert placed["imbalance"] < 1.1
        assert placed["us"] / skewed["us"] == pytest.approx(takes, abs=0.006)


# -- the arithmetic ----------------------------------------------------------------------------


def test_times_between_sizes_and_beyond():
    table = MeasuredCollectives({"all_reduce": ([1000, 4000], [1e-5, 2e-5])}, ranks=2)
    assert table.seconds("all_reduce", 2000) == pytest.approx(2**0.5 * 1e-5)
    assert table.seconds("all_reduce", 8000) == pytest.approx(4e-5)
    assert table.seconds("all_reduce", 1) == pytest.approx(1e-5)
    assert table.seconds("all_reduce", 0) == 0.0


def test_a_line_through_points_of_a_line():
    sizes = [1 << n for n in range(12, 29)]
    seconds = [1e-5 + size / 3e11 for size in sizes]
    line = MeasuredCollectives({"all_gather": (sizes, seconds)}, 2).line("all_gather")
    assert line.latency_s == pytest.approx(1e-5)
    assert line.bandwidth == pytest.approx(3e11)
    assert line.worst_error < 1e-9
    assert line.seconds(3e11) == pytest.approx(1.00001)
    with pytest.raises(ValueError, match="needs two sizes"):
        MeasuredCollectives({"all_gather": ([1], [1.0])}, 2).line("all_gather")


def test_two_h200_say_what_eight_b300_reach():
    """Scaled by published links, the measured all-reduce lies within the constant's range."""
    line = TABLE.line("all_reduce", 64 << 20)
    assert 0.6 < line.bandwidth / 450e9 < 0.75  # of an H200's link; two ranks send each byte once
    scaled = scaled_bandwidth(line.bandwidth, (2, 450e9), (8, 900e9))
    bulk = CONSTANTS["bulk_all_reduce"]
    assert bulk.low < scaled < bulk.high
    assert scaled == pytest.approx(bulk.value, rel=0.03)
    assert scaled_bandwidth(3e11, (2, 450e9), (2, 450e9)) == 3e11


def test_nccl_starts_later_than_the_kernels_that_vllm_takes():
    """Why the curves of small messages are not replaced by these: vLLM does not use NCCL there."""
    small = TABLE.line("all_reduce", 0, 256 << 10)
    assert small.latency_s > 1.5 * max(curve.one_latency for curve in CURVES.values())


def test_a_busier_rank_takes_longer():
    cost = LayerCost(K3Config.released(), "H200", TABLE)

    def time(**changes):
        case = {"ranks": 2, "whole_experts": True, "distinct": 100.0, "pairs": 200.0, **changes}
        return cost.layer_us("moe", 16, **case).total

    assert time(distinct=140.0) > time() < time(pairs=20000.0)
    whole = cost.layer_us("whole", 16, ranks=2, whole_experts=True, distinct=100.0, pairs=200.0)
    assert whole.total > time()
    assert whole.exchanges == whole.parts["all_reduce"] > 0
    known = {"ranks": 2, "whole_experts": True, "distinct": 1, "pairs": 1}
    given = cost.layer_us("moe", 16, experts_us=1234.0, **known)
    assert given.parts["experts"] == 1234.0
    with pytest.raises(ValueError, match="'moe' or 'whole', got 'mlp'"):
        cost.layer_us("mlp", 1, ranks=2, whole_experts=True, distinct=1, pairs=1)


def test_exchanges_of_two_gpus_price_no_other_number():
    cost = LayerCost(K3Config.released(), "H200", TABLE)
    case = {"whole_experts": False, "distinct": 16, "pairs": 16}
    for layer in ("moe", "whole"):
        assert cost.layer_us(layer, 1, ranks=2, **case).exchanges > 20
        assert cost.layer_us(layer, 1, ranks=1, **case).exchanges == 0
    for ranks in (0, 4):
        with pytest.raises(ValueError, match=f"timed on 2 GPUs, not on {ranks}: give ranks=2"):
            cost.layer_us("moe", 1, ranks=ranks, **case)
    with pytest.raises(ValueError, match="no collective 'allreduce' was timed; recorded: all_"):
        TABLE.seconds("allreduce", 4096)
    with pytest.raises(ValueError, match="no collective 'allreduce'"):
        TABLE.line("allreduce")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"load": "skew"}, "'uniform' or 'skewed', got 'skew'"),
        ({"top_k": 9}, "picks 1 to 8 of 8 experts, got top_k 9"),
        ({"top_k": 0}, "got top_k 0"),
    ],
)
def test_a_draw_that_makes_no_sense_is_refused(changes, message):
    case = {"experts": 8, "top_k": 2, "tokens": 4, "load": "uniform", **changes}
    with pytest.raises(ValueError, match=message):
        draw_counts(**case, generator=np.random.default_rng(0))


def test_rows_of_a_mode_that_was_not_timed():
    with pytest.raises(ValueError, match="no collective was timed in mode 'graph'"):
        MeasuredCollectives.from_rows([], 2)

"""The benchmark's cases and goals, and its floors against figures worked out by hand."""

from __future__ import annotations

import doctest
import importlib

import pytest
from benchmarks import floors
from benchmarks.cases import (
    CASES,
    OPERATORS,
    RANKS,
    Case,
    cases,
    expected_floor_us,
    find_case,
)
from benchmarks.registry import PEERS

MXFP4 = {1: 1.35, 4: 1.3, 16: 1.25, 256: 1.15, 1024: 1.0, 2048: 1.0, 8192: 1.0}
BF16 = {16: 0.97, 64: 0.97, 256: 0.97, 8192: 1.1}
#: Every cell that has a goal: operator, case, goal.
CELLS = [
    *(("moe_mxfp4_tp8", f"T={t}", goal) for t, goal in {**MXFP4, 64: 1.2}.items()),
    *(("moe_mxfp4_ep8", f"T={t}", goal) for t, goal in {**MXFP4, 64: 1.25}.items()),
    *((f"moe_bf16_{rank}", f"T={t}", g) for rank in ("tp8", "ep8") for t, g in BF16.items()),
    *(("attnres8", f"T={t}", goal) for t, goal in
      {1: 1.6, 16: 1.6, 64: 1.5, 256: 1.25, 1024: 1.25, 8192: 1.25}.items()),
    *(("router", f"T={t}", 2.5 if t == 8192 else 1.5) for t in (1, 16, 64, 256, 8192)),
    ("kda_decode", "H=12,B=1", 1.5), ("kda_decode", "H=12,B=16", 1.1),
    ("kda_decode", "H=12,B=64", 1.1), ("kda_decode", "H=12,B=256", 1.1),
    ("kda_decode", "H=96,B=1", 1.2), ("kda_decode", "H=96,B=16", 1.05),
    ("kda_decode", "H=96,B=64", 1.05), ("kda_decode", "H=96,B=256", 1.05),
    ("kda_prefill", "H=12,1x8192", 1.5), ("kda_prefill", "H=12,1x2048", 1.3),
    ("kda_prefill", "H=96,1x8192", 1.6), ("kda_prefill", "H=12,8x1024", 1.6),
    ("kda_prefill", "H=96,8x1024", 1.6),
    *(("kda_recover", f"K=8,B={batch}", 0.7) for batch in (1, 16, 64)),
]  # fmt: skip


@pytest.mark.parametrize(("operator", "name", "goal"), CELLS)
def test_every_cell_of_the_goals_is_a_case(operator: str, name: str, goal: float) -> None:
    case = find_case(operator, name)
    assert case is not None and case.goal is not None
    assert case.goal.value == goal


def test_no_goal_beyond_the_table_but_the_skewed_loads() -> None:
    table = {(operator, name) for operator, name, _ in CELLS}
    assert len(table) == len(CELLS) == 51
    for case in CASES:
        if case.goal and (case.operator, case.name) not in table:
            even = find_case(case.operator, case.name.removesuffix(",skewed"))
            assert case.load == "skewed" and even is not None and even.goal == case.goal


def test_goals_over_named_peers_and_floors() -> None:
    flash = [find_case("kda_prefill", f"H=12,1x{length}") for length in (8192, 2048)]
    assert all(case and case.goal and case.goal.against == ("flash_kda",) for case in flash)
    for name in ("H=96,1x8192", "H=12,8x1024", "H=96,8x1024"):
        case = find_case("kda_prefill", name)
        assert case and case.goal and case.goal.against == ("vllm_triton", "fla")
    for case in cases(("kda_recover",)):
        assert case.goal and case.goal.kind == "fraction_of_floor" and case.goal.or_below_us == 6.0
    for case in CASES:
        assert case.goal is None or set(case.goal.against) <= set(PEERS[case.operator])


def test_names_are_unique_and_choices_are_checked() -> None:
    assert len({(case.operator, case.name) for case in CASES}) == len(CASES)
    assert set(PEERS) == set(OPERATORS)
    assert [c.name for c in cases(("attnres8",), ("T=1", "T=64"))] == ["T=1", "T=64"]
    with pytest.raises(ValueError, match=r"no operator moe; there are moe_mxfp4_tp8"):
        cases(("moe",))
    with pytest.raises(ValueError, match=r"no case T=2; there are T=1 T=16"):
        cases(("router",), ("T=2",))


# Distinct experts as drawn by one run at 4.3 TB/s and 790 TFLOP/s; the microseconds follow from
# distinct x 3 x 3584 x I x (2 or 17/32) bytes and from pairs x 6 x 3584 x I operations.
@pytest.mark.parametrize(
    ("rank", "tokens", "distinct", "bf16_us", "mxfp4_us", "flop_us"),
    [
        ("tp8", 1, 16, 30.7, 8.2, 0.167),
        ("tp8", 16, 226, 434, 115, 2.7),
        ("tp8", 64, 610, 1173, 312, 10.7),
        ("tp8", 256, 889, 1709, 454, 43),
        ("tp8", 8192, 896, 1748, 484, 1370),
        ("ep8", 1, 2, 30.7, 8.2, 0.167),
        ("ep8", 64, 76, 1170, 309, 10.7),
        ("ep8", 2048, 112, 1728, 464, 343),
    ],
)
def test_moe_floors(
    rank: str, tokens: int, distinct: int, bf16_us: float, mxfp4_us: float, flop_us: float
) -> None:
    inner, top_k = RANKS[rank].intermediate, RANKS[rank].top_k
    for weight_bytes, expected in ((2, bf16_us), (17 / 32, mxfp4_us)):
        moved = floors.moe_bytes(tokens, distinct, inner, weight_bytes)
        assert floors.floor_us(moved) == pytest.approx(expected, rel=0.006)
    flops = floors.moe_flops(tokens * top_k, inner)
    assert floors.floor_us(0, flops) == pytest.approx(flop_us, rel=0.02)


@pytest.mark.parametrize(
    ("moved", "expected_us"),
    [
        (floors.attn_res_bytes(1), 0.04),  # 12 rows x 14,336 bytes
        (floors.attn_res_bytes(64), 2.56),
        (floors.attn_res_bytes(8192), 328),
        (floors.router_bytes(256), 0.222),  # 256 x (3584 + 128) + 3584 bytes
        (floors.router_bytes(8192), 7.07),
        (floors.kda_decode_bytes(12, 256), 98.0),  # 94.6 us of states and inputs, plus 3.7 %
        (floors.kda_decode_bytes(96, 64), 196.2),
        (floors.kda_prefill_bytes(12, 8192, 1), 29.7),  # 127 MB
        (floors.kda_prefill_bytes(12, 2048, 1), 7.7),
        (floors.kda_prefill_bytes(12, 8192, 8), 32.2),
        (floors.kda_prefill_bytes(96, 8192, 1), 237),
        (floors.kda_prefill_bytes(96, 8192, 8), 258),
        # 64 x 12 heads x (131,072 bytes of state + 8 tokens x 1024)
        (floors.kda_recover_bytes(12, 64, 8), 24.9),
        # 16 x (8192 x 1152 bytes of rows + 108 x 2176 bytes of queries and outputs)
        (floors.mla_decode_bytes(12, 16, 9, 8192), 36.0),
    ],
)
def test_floors_of_the_rest(moved: int, expected_us: float) -> None:
    assert floors.floor_us(moved) == pytest.approx(expected_us, rel=0.006)


def test_the_slower_of_memory_and_arithmetic_is_the_floor() -> None:
    inner = RANKS["tp8"].intermediate
    few = floors.moe_bytes(2048, 896, inner, 17 / 32), floors.moe_flops(2048 * 16, inner)
    many = floors.moe_bytes(8192, 896, inner, 17 / 32), floors.moe_flops(8192 * 16, inner)
    assert floors.floor_us(*few) == floors.floor_us(few[0]) > floors.floor_us(0, few[1])
    assert floors.floor_us(*many) == floors.floor_us(0, many[1]) > floors.floor_us(many[0])


@pytest.mark.parametrize(
    ("operator", "name", "expected_us"),
    [
        ("moe_mxfp4_ep8", "T=1", 8.2), ("moe_bf16_tp8", "T=64", 1179), ("attnres8", "T=1024", 41),
        ("moe_mxfp4_tp8", "T=8192", 1370), ("router", "T=8192", 7.07),
        ("kda_decode", "H=12,B=16", 6.14), ("kda_prefill", "H=12,8x1024", 32.2),
        ("kda_recover", "K=8,B=64", 24.9), ("mla_decode", "B=1,T=1,L=8192", 2.2),
        ("mla_decode", "B=16,T=9,L=8192", 39.0),  # of arithmetic: 30.8 GFLOP
    ],
)  # fmt: skip
def test_expected_floors(operator: str, name: str, expected_us: float) -> None:
    case = find_case(operator, name)
    assert case is not None
    assert expected_floor_us(case) == pytest.approx(expected_us, rel=0.006)


def test_a_case_says_what_its_name_abbreviates() -> None:
    for case in CASES:
        if case.operator == "kda_prefill":
            heads, shape = case.name.split(",")
            count, length = map(int, shape.split("x"))
            assert heads == f"H={case.sizes['heads']}"
            assert case.lengths == (length,) * count
        elif case.operator == "mla_decode":
            batch, tokens, length = (case.sizes[name] for name in ("batch", "tokens", "length"))
            assert case.name == f"B={batch},T={tokens},L={length}"
        elif case.operator.startswith("kda"):
            assert case.name.endswith(f"B={case.sizes['batch']}")
        else:
            assert case.name.split(",")[0] == f"T={case.sizes['tokens']}"
    assert isinstance(CASES[0], Case)


@pytest.mark.parametrize("name", ["cases", "floors", "inputs.moe", "inputs.routings", "provenance"])
def test_examples(name: str) -> None:
    result = doctest.testmod(importlib.import_module(f"benchmarks.{name}"))
    assert result.attempted and not result.failed

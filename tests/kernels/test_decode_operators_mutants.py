"""Wrong small kernels, one mistake each: ``test_decode_operators`` must refuse them all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import test_decode_operators as tests
from mutants import CONTROL, Mutant, use

pytest.importorskip("triton", reason="running kernels needs Triton")

# NumPy, which runs the kernels here, remarks on some of the mistakes.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

#: Of each operator: its module of kernels, and the tests that have to see a mistake.
RUNS: dict[str, tuple[str, list[Callable[[str], None]]]] = {
    "few_rows_linear": (
        "few_rows",
        [lambda device: tests.test_few_rows_are_multiplied(9, 300, 70, None, device)],
    ),
    "row_norm": (
        "row_norms",
        [lambda device: tests.test_a_row_is_normed_and_its_tail_copied(60, 30, device)],
    ),
    "gated_norm": (
        "row_norms",
        [lambda device: tests.test_heads_are_normed_then_gated(5, 40, device)],
    ),
    "situ_and_mul": (
        "gating",
        [lambda device: tests.test_gates_equal_their_equations("situ", 1030, device)],
    ),
    "silu_and_mul": (
        "gating",
        [lambda device: tests.test_gates_equal_their_equations("silu", 90, device)],
    ),
    "sigmoid_mul": (
        "gating",
        [lambda device: tests.test_gates_equal_their_equations("sigmoid", 90, device)],
    ),
    "rotate_pairs": ("rotary", [tests.test_pairs_are_rotated_in_place]),
}

MUTANTS = {
    "few_rows_linear": [
        Mutant("last-block-only", "rows.to(COMPUTE), total,", "rows.to(COMPUTE), 0.0 * total,"),
        Mutant("depth-not-masked", "inside = k < K - start", "inside = k < K"),
        Mutant("weights-stand-still", "tl.load(weight + start,", "tl.load(weight,"),
        Mutant("columns-of-the-first", "tl.program_id(0) * BLOCK_N", "0 * BLOCK_N"),
        Mutant("rows-next-to-each-other", "[None, :] * x_stride", "[None, :] * K"),
        Mutant("rows-not-masked",
               "mask = (n < N)[:, None] & (t < T)",
               "mask = (n < N)[:, None] & (t < BLOCK_T)"),
    ],
    "row_norm": [
        Mutant("eps-missing", "/ WIDTH + eps)", "/ WIDTH)"),
        Mutant("mean-over-the-padding", "/ WIDTH + eps)", "/ BLOCK + eps)"),
        Mutant("weight-left-out", "x * scale[:, None] * weight", "x * scale[:, None]"),
        Mutant("tail-of-another-row",
               "token * x_stride + WIDTH + cols, mask=behind",
               "token * out_stride + WIDTH + cols, mask=behind"),
        Mutant("tail-in-front", "tl.store(out + WIDTH, tail", "tl.store(out, tail"),
        Mutant("tail-too-long", "(cols < TAIL)", "(cols <= TAIL)"),
    ],
    "gated_norm": [
        Mutant("gate-upside-down", "tl.exp(-gate.to(COMPUTE))", "tl.exp(gate.to(COMPUTE))"),
        Mutant("gate-of-the-first-head", "gate_stride + head * WIDTH", "gate_stride + 0 * head"),
        Mutant("gate-has-the-stride-of-x", "token * gate_stride", "token * x_stride"),
        Mutant("every-head-is-the-first", "(row % HEADS)[:, None]", "(0 * row)[:, None]"),
        Mutant("heads-of-nobody", "row[:, None] < rows", "row[:, None] <= rows"),
        Mutant("out-has-the-stride-of-x",
               "out_ptr + token * out_stride + head",
               "out_ptr + token * x_stride + head"),
    ],
    "situ_and_mul": [
        Mutant("bounds-swapped", "bounded = beta * (", "bounded = linear_beta * ("),
        Mutant("sigmoid-left-out", "- 1.0) * _sigmoid(x)", "- 1.0)"),
        Mutant("up-not-bounded",
               "(linear_beta * (2.0 * _sigmoid(2.0 * y / linear_beta) - 1.0))",
               "y"),
        Mutant("half-the-slope", "_sigmoid(2.0 * x / beta)", "_sigmoid(x / beta)"),
        Mutant("second-program-repeats-the-first", "tl.program_id(1) * BLOCK", "0 * BLOCK"),
    ],
    "silu_and_mul": [
        Mutant("gate-and-up-swapped", "result = x * _sigmoid(x) * y",
               "result = y * _sigmoid(y) * x"),
        Mutant("sigmoid-of-the-negative", "result = x * _sigmoid(x) * y",
               "result = x * _sigmoid(-x) * y"),
        Mutant("gelu", "result = x * _sigmoid(x) * y", "result = x * _sigmoid(1.702 * x) * y"),
        Mutant("every-row-is-the-first", "tl.program_id(0).to", "(0 * tl.program_id(0)).to"),
        Mutant("out-has-the-stride-of-x", "row * out_stride", "row * x_stride"),
    ],
    "sigmoid_mul": [
        Mutant("gate-and-value-swapped", "result = x * _sigmoid(y)", "result = y * _sigmoid(x)"),
        Mutant("silu-of-the-gate", "result = x * _sigmoid(y)", "result = x * y * _sigmoid(y)"),
        Mutant("gate-has-the-stride-of-x", "row * y_stride", "row * x_stride"),
        Mutant("one-element-too-many", "inside = cols < WIDTH", "inside = cols <= WIDTH"),
        Mutant("one-element-too-few", "inside = cols < WIDTH", "inside = cols < WIDTH - 1"),
    ],
    "rotate_pairs": [
        Mutant("heads-next-to-each-other", "head * head_stride", "head * (2 * PAIRS)"),
        Mutant("the-other-way", "even * cos - odd * sin", "even * cos + odd * sin"),
        Mutant("cos-and-sin-swapped", "even * sin + odd * cos", "even * cos + odd * sin"),
        Mutant("angle-of-the-first-token", "cos_ptr + token * PAIRS", "cos_ptr + 0 * token"),
        Mutant("pairs-overlap", "head_stride + 2 * pair", "head_stride + pair"),
        Mutant("one-pair-too-many", "& (pair < PAIRS)", "& (pair <= PAIRS)"),
        Mutant("one-head-too-few", "head < HEADS", "head < HEADS - 1"),
    ],
}  # fmt: skip


def first_failure(operator: str, device: str) -> str | None:
    """Run an operator's tests up to the first that refuses."""
    for run in RUNS[operator][1]:
        try:
            run(device)
        except AssertionError as error:
            return str(error)
    return None


@pytest.mark.parametrize(
    ("operator", "mutant"),
    [(operator, mutant) for operator, mutants in MUTANTS.items() for mutant in mutants],
    ids=str,
)
def test_refuses(
    operator: str, mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    use(RUNS[operator][0], mutant, tmp_path, monkeypatch)
    assert first_failure(operator, device), f"the wrong {operator}, {mutant}, passed"


@pytest.mark.parametrize("operator", RUNS)
def test_accepts_the_kernel_built_the_same_way(
    operator: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    use(RUNS[operator][0], CONTROL, tmp_path, monkeypatch)
    assert first_failure(operator, device) is None

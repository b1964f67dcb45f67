"""Wrong finalize kernels, one mistake each: the check of ``test_finalize`` must refuse them all."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from finalize_cases import F16, F32, Case, check
from mutants import Mutant, build

pytest.importorskip("triton", reason="running kernels needs Triton")

from k3_kernels.finalize import FinalizeConfig

# NumPy, which runs the kernels here, remarks on some of the mistakes.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

CASES = [
    Case(3, 4, 100),
    Case(3, 4, 100, norm=True),
    Case(2, 3, 40, norm=True, scale=1e-3),
    Case(4, 3, 100, F16, norm=True, weighted=False),
    Case(3, 3, 40, F32, norm=True, out_dtype=F16),
    *(Case(6, 4, 50, local=kind) for kind in ("range", "map")),
    Case(6, 4, 50, weighted=False, local="range"),
    Case(2, 4, 40, cancels=True),
]
CONFIGS = (FinalizeConfig(64, 1), FinalizeConfig(16, 1, 2))

MUTANTS = [
    # The sum
    Mutant("weight-left-out", "value = value * weight", "pass"),
    Mutant("weight-of-the-first-choice", "(weights_ptr + token * TOP_K + choice)",
           "(weights_ptr + token * TOP_K)"),
    Mutant("weights-of-the-first-token", "(weights_ptr + token * TOP_K + choice)",
           "(weights_ptr + choice)"),
    Mutant("last-choice-left-out", "tl.static_range(TOP_K)", "tl.static_range(TOP_K - 1)"),
    Mutant("rows-do-not-advance", "row += pairs_stride", "row += 0"),
    Mutant("rows-of-the-first-token", "token * TOP_K * pairs_stride", "0 * pairs_stride"),
    Mutant("last-row-only", "(total[piece] + value,)", "(value,)"),
    Mutant("choices-in-reverse", "    for choice in tl.static_range(TOP_K):",
           "    row += (TOP_K - 1) * pairs_stride\n    pairs_stride = -pairs_stride\n"
           "    for choice in tl.static_range(TOP_K - 1, -1, -1):"),
    # Rows of other ranks
    Mutant("map-read-before-its-start", "(expert >= 0) & (expert < map_size)",
           "expert < map_size"),
    Mutant("map-read-behind-its-end", "(expert >= 0) & (expert < map_size)", "expert >= 0"),
    Mutant("absent-rows-read", "mask=cols < end", "mask=cols < WIDTH"),
    Mutant("range-not-shifted", "expert -= first_expert", "pass"),
    Mutant("map-read-elsewhere", "map_ptr + expert, mask=known", "map_ptr, mask=known"),
    Mutant("range-too-long", "(expert < num_experts), WIDTH", "(expert <= num_experts), WIDTH"),
    # The norm
    Mutant("sum-not-rounded", ".to(out_ptr.dtype.element_ty).to(COMPUTE)", ""),
    Mutant("mean-over-the-padding", "tl.sum(square, 0) / WIDTH", "tl.sum(square, 0) / BLOCK_D"),
    Mutant("eps-missing", "/ WIDTH + eps)", "/ WIDTH)"),
    Mutant("norm-weight-left-out", "rounded[piece] * scale * norm", "rounded[piece] * scale"),
    Mutant("not-scaled", "rounded[piece] * scale * norm", "rounded[piece] * norm"),
    Mutant("last-piece-decides", "square += value * value", "square = value * value"),
    # Addresses and masks
    Mutant("store-mask-missing", "result, mask=cols < WIDTH)", "result)"),
    Mutant("store-mask-off-by-one", "result, mask=cols < WIDTH)", "result, mask=cols < WIDTH - 1)"),
    Mutant("load-behind-the-row", "row + cols, mask=cols < end", "row + cols, mask=cols <= end"),
    Mutant("second-program-repeats-the-first", "tl.program_id(1) * (PIECES", "0 * (PIECES"),
    Mutant("every-token-is-the-first", "tl.program_id(0).to", "(0 * tl.program_id(0)).to"),
    Mutant("out-has-the-stride-of-pairs", "token * out_stride", "token * pairs_stride"),
]  # fmt: skip


def first_failure(device: str) -> str | None:
    """Run the check over the cases with two sizes of pieces, up to the first failure."""
    for config in CONFIGS:
        for case in CASES:
            try:
                check(case, device, config, row_gap=24)
            except AssertionError as error:
                return f"{case} {config}: {error}"
    return None


def use(mutant: Mutant, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Let the operator launch the mutant."""
    module = importlib.import_module("k3_kernels.finalize_kernel")
    patch.setattr(module, "finalize_kernel", build(module, mutant, folder).finalize_kernel)


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_check_refuses(
    mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    use(mutant, tmp_path, monkeypatch)
    assert first_failure(device), f"the wrong kernel {mutant} passed all {len(CASES)} cases"


def test_check_accepts_the_kernel_built_the_same_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    use(Mutant("control", '__all__ = ["finalize_kernel"]', "__all__ = []"), tmp_path, monkeypatch)
    assert first_failure(device) is None

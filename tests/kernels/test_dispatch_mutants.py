"""Wrong dispatch kernels, one mistake each: the check of ``test_dispatch`` must refuse them all."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from dispatch_cases import Case, check
from mutants import Mutant, build

pytest.importorskip("triton", reason="running kernels needs Triton")

from k3_kernels.dispatch import DispatchConfig

# NumPy, which runs the kernels here, remarks on some of the mistakes.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

CASES = [
    Case(5, 4, 9, 4),
    Case(9, 1, 4, 8, routing="one"),
    Case(20, 2, 40, 4, routing="few"),
    Case(6, 4, 12, 4, routing="stray"),
    Case(9, 4, 5, 2, where="middle", all_experts=17),
    Case(6, 4, 5, 2, routing="stray", where="map", all_experts=17, dtype=torch.int64),
]
ONE = DispatchConfig(1)
SLICES = DispatchConfig(1, single=0, slice_pairs=16, place_warps=1, rows=2)
KERNELS = ("dispatch_kernel", "count_kernel", "place_kernel")

COUNT_ALL = "tl.sum(begins.to(tl.int32), 0) * BLOCK_SIZE)"
COUNT_PAIRS = "tl.sum(present.to(tl.int32), 0))"
MUTANTS = [
    # Which pairs are here
    Mutant("id-not-shifted", "local = ids - first_expert", "local = ids"),
    Mutant("id-behind-the-range", "(local < num_experts)", "(local <= num_experts)"),
    Mutant("negative-id-kept", "here = (local >= 0) & (local <", "here = (local >= -1) & (local <"),
    Mutant("wide-ids-cut", "mask=mask, other=-1)", "mask=mask, other=-1).to(tl.int32)"),
    # Sort and ranks
    Mutant("not-stable", "(local << LOG_P) | index", "(local << LOG_P) | (2**LOG_P - 1 - index)"),
    Mutant("runs-not-separated", "tl.where(expert == later_expert, run, 0)", "run"),
    Mutant("rank-from-one", "keys & (2**LOG_P - 1), run - 1", "keys & (2**LOG_P - 1), run"),
    Mutant("absent-pairs-kept", "tl.where(here, (local", "tl.where(here | (index < 3), (local"),
    # Placing
    Mutant("one-block-an-expert", "present & (rank % BLOCK_SIZE == 0)", "present & (rank == 0)"),
    Mutant("blocks-from-one", "(begins.to(tl.int32), 0) - 1", "(begins.to(tl.int32), 0)"),
    Mutant("used-counts-pairs", COUNT_ALL, COUNT_PAIRS),
    Mutant("padding-is-zero", "fill(sorted_ptr, num_pairs, 0,", "fill(sorted_ptr, 0, 0,"),
    Mutant("padding-not-to-the-end", "mask=offsets < length)", "mask=offsets < length - 1)"),
    Mutant("padding-behind-the-end", ", mask=offsets < length)", ")"),
    Mutant("unused-blocks-are-zero", "block_experts_ptr, -1, 0,", "block_experts_ptr, 0, 0,"),
    Mutant("counts-not-cleared", "fill(counts_ptr, 0, 0, WIDTH", "fill(counts_ptr, 9, 0, WIDTH"),
    Mutant("counts-are-ranks", "counts_ptr + expert, rank + 1,", "counts_ptr + expert, rank,"),
    # Slices
    Mutant("own-slice-counted-as-earlier", "(rows < number)", "(rows <= number)"),
    Mutant("earlier-slices-forgotten", "- padded + earlier", "- padded"),
    Mutant("later-slices-forgotten", "tl.range(0, slices, ROWS)", "tl.range(0, ROWS, ROWS)"),
    Mutant("not-padded", "padded = (total + BLOCK_SIZE - 1)", "padded = (total)"),
    Mutant("offset-includes-itself", "tl.cumsum(padded, 0) - padded", "tl.cumsum(padded, 0)"),
    Mutant("counts-of-another-slice", "counts_row = slice_counts_ptr + number *",
           "counts_row = slice_counts_ptr + (tl.num_programs(0) - 1 - number) *"),
    Mutant("ranks-in-sorted-order", "+ number * WIDTH + pair,", "+ number * WIDTH + index,"),
    Mutant("block-expert-not-written", "here & (slot % BLOCK_SIZE == 0)", "here & (slot < 0)"),
]  # fmt: skip


def first_failure(device: str) -> str | None:
    """Run the check over the cases with one launch and with two, up to the first failure."""
    for case in CASES:
        for config in (ONE, SLICES):
            try:
                check(case, device, config)
            except (AssertionError, IndexError) as error:  # a wild index may also be refused
                return f"{case} {config}: {error}"
    return None


def use(mutant: Mutant, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Let the operator launch the mutant."""
    module = importlib.import_module("k3_kernels.dispatch_kernel")
    wrong = build(module, mutant, folder)
    for kernel in KERNELS:
        patch.setattr(module, kernel, getattr(wrong, kernel))


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_check_refuses(
    mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    use(mutant, tmp_path, monkeypatch)
    assert first_failure(device), f"the wrong kernel {mutant} passed all {len(CASES)} cases"


def test_check_accepts_the_kernels_built_the_same_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    use(Mutant("control", '"place_kernel"]', '"place_kernel", ]'), tmp_path, monkeypatch)
    assert first_failure(device) is None

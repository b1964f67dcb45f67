"""Wrong attention kernels, one mistake each: the check of ``test_mla_decode`` must refuse all."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from mla_decode_cases import FEW_CASES, check
from mutants import Mutant, build, use

pytest.importorskip("triton", reason="running kernels needs Triton")

import k3_kernels

# NumPy, which runs the kernels here, remarks on some of the mistakes.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

INFINITY = '-float("inf")'

MUTANTS = [
    # Who sees what
    Mutant("drafts-see-each-other", "limits + tokens - num_tokens + 1", "limits"),
    Mutant(
        "one-row-too-many", "limits + tokens - num_tokens + 1", "limits + tokens + 2 - num_tokens"
    ),
    Mutant("first-token-for-all", "limits + tokens - num_tokens + 1", "limits - num_tokens + 1"),
    Mutant("lengths-of-the-first-token", "tokens * lengths_token_stride", "tokens * 0"),
    Mutant("length-of-the-first-request", "request * lengths_stride", "0 * lengths_stride"),
    Mutant("lengths-next-to-each-other", "request * lengths_stride", "request"),
    Mutant("rows-behind-the-context", "mask = rows < last", "mask = rows < last + BLOCK_N"),
    # Where rows are
    Mutant("every-request-is-the-first", "request.to(tl.int64) * table_stride", "0"),
    Mutant(
        "one-block-for-ever", "block_of_rows(table, start + BLOCK_N,", "block_of_rows(table, first,"
    ),
    Mutant(
        "block-one-step-late",
        "block_of_rows(table, start + BLOCK_N,",
        "block_of_rows(table, start,",
    ),
    Mutant("page-begins-anew", "start % PAGE * ROW_STRIDE", "0 * ROW_STRIDE"),
    Mutant("row-in-page-lost", "rows % PAGE * ROW_STRIDE", "0 * rows"),
    # Scores
    Mutant("pe-unused", "q_pe = tl.load(at", "q_pe = 0.0 * tl.load(at"),
    Mutant("pe-from-the-latent", "cache_ptr + RANK, blocks", "cache_ptr, blocks"),
    Mutant("not-scaled", "scores * scale", "scores"),
    Mutant("heads-and-tokens-swapped", "tokens = pairs // HEADS", "tokens = pairs % num_tokens"),
    # Online softmax
    Mutant("no-highest", "tl.maximum(highest, tl.max(scores, AXIS))", "tl.maximum(highest, 0.0)"),
    Mutant("mix-not-rescaled", "mixed * tl.expand_dims(rescale, AXIS)", "mixed"),
    Mutant("total-not-rescaled", "total * rescale", "total"),
    Mutant(
        "nothing-seen-is-nan",
        f"tl.where(new_highest == {INFINITY}, 0.0, new_highest)",
        "new_highest",
    ),
    Mutant("not-divided", "mixed / tl.expand_dims(total, AXIS)", "mixed"),
    Mutant("lse-in-base-two", " * 0.6931471805599453", ""),
    Mutant("lse-without-highest", "(highest + tl.log2(total))", "tl.log2(total)"),
    # Splits and their merge
    Mutant("parts-overlap", "first = split * part", "first = 0"),
    Mutant(
        "parts-of-one-tile",
        "+ num_splits - 1) // num_splits * BLOCK_N",
        ") // num_splits * BLOCK_N",
    ),
    Mutant("parts-in-one-place", " + split * out_split_stride", ""),
    Mutant("merged-unweighted", "parts * shares[:, None]", "parts"),
    Mutant("unwritten-parts-read", "mask=(shares > 0)[:, None] & inside", "mask=inside"),
    Mutant("merge-without-highest", "base + tl.log(total)", "tl.log(total)"),
    Mutant(
        "merge-not-divided", "parts * shares[:, None], 0) / total", "parts * shares[:, None], 0)"
    ),
    Mutant("first-columns-only", "tl.program_id(1) * COLUMNS", "0 * COLUMNS"),
    # Addresses and masks
    Mutant(
        "column-mask-missing",
        "tl.expand_dims(exists, AXIS) & tl.expand_dims(columns < RANK, 1 - AXIS)",
        "tl.expand_dims(exists, AXIS) & tl.expand_dims(columns < COLUMNS, 1 - AXIS)",
    ),
    Mutant(
        "other-way-adds-keys",
        "tl.trans(tile), shares.to(COMPUTE), mixed,",
        "tl.trans(tile), shares.to(COMPUTE) * 2, mixed,",
    ),
    Mutant(
        "rows-that-do-not-exist",
        "inside = tl.expand_dims(exists, AXIS) &",
        "inside = tl.expand_dims(pairs >= 0, AXIS) &",
    ),
    Mutant("merge-mask-missing", "mask=columns < RANK)", "mask=columns < COLUMNS * 1000)"),
]


def first_failure(device: str) -> str | None:
    """Run the check over the suite's few cases, up to a failure."""
    for case in FEW_CASES:
        try:
            check(case, device, row_gap=24)
        except (AssertionError, IndexError) as error:
            return f"{case}: {error}"
    return None


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_check_refuses(
    mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    use("mla_decode", mutant, tmp_path, monkeypatch)
    assert first_failure(device), f"the wrong kernel {mutant} passed all cases"


def test_check_refuses_an_operator_that_ignores_a_stride(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """Lengths of one dimension, which the kernel reads with the stride that it is told."""
    module = importlib.import_module("k3_kernels.mla_decode")
    stride = "lengths.stride(0),\n"
    mutant = Mutant("stride-of-lengths", stride, f"1 if lengths.ndim == 1 else {stride}")
    monkeypatch.setattr(k3_kernels, "mla_decode", build(module, mutant, tmp_path).mla_decode)
    assert first_failure(device), "the wrong operator passed all cases"


def test_check_accepts_the_kernel_built_the_same_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    module = importlib.import_module("k3_kernels.mla_decode_kernel")
    control = build(module, Mutant("control", "__all__ = [", "_ALL = ["), tmp_path)
    for name in module.__all__:
        monkeypatch.setattr(module, name, getattr(control, name))
    assert first_failure(device) is None

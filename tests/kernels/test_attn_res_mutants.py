"""Wrong AttnRes kernels, one mistake each: the check of ``test_attn_res`` must refuse them all."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from attn_res_cases import FEW_CASES, Case, check
from mutants import Mutant, build

pytest.importorskip("triton", reason="running kernels needs Triton")

from k3_kernels.attn_res import AttnResConfig

# NumPy, which runs the kernels here, remarks on some of the mistakes.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

LOGIT = "logit = sums[2 * row + 1] * inverse_rms"
MIX = "new_mix[piece] + sources[row][piece].to(COMPUTE) * weight"

MUTANTS = [
    # The mix
    Mutant("values-normalised", MIX, MIX + " * tl.rsqrt(sums[2 * row] / HIDDEN + eps)"),
    Mutant("keys-not-normalised", LOGIT, LOGIT.removesuffix(" * inverse_rms")),
    Mutant("temperature", LOGIT, LOGIT + " / tl.sqrt(HIDDEN * 1.0)"),
    Mutant(
        "key-norm-weight-unused",
        "(query[piece].to(COMPUTE) * key_norm[piece].to(COMPUTE),)",
        "(query[piece].to(COMPUTE),)",
    ),
    Mutant("sum-of-squares-not-mean", "sums[2 * row] / HIDDEN + eps", "sums[2 * row] + eps"),
    Mutant("key-eps-missing", "sums[2 * row] / HIDDEN + eps)", "sums[2 * row] / HIDDEN)"),
    Mutant(
        "eps-swapped",
        "total, key_eps, N_BLOCKS < GROUP",
        "total, norm_eps, N_BLOCKS < GROUP",
    ),
    Mutant("last-group-left-out", "tl.range(0, N_BLOCKS //", "tl.range(0, -1 + N_BLOCKS //"),
    Mutant("one-group-too-many", "tl.range(0, N_BLOCKS //", "tl.range(0, 1 + N_BLOCKS //"),
    Mutant(
        "remainder-repeats-a-block", "_stride, N_BLOCKS % GROUP,", "_stride * 0, N_BLOCKS % GROUP,"
    ),
    Mutant("registers-same-group", "blocks[group * GROUP + row]", "blocks[row]"),
    Mutant("registers-wrong-rest", "N_BLOCKS // GROUP * GROUP + row", "row"),
    Mutant("last-piece-not-in-logit", "dot += value", "dot += (piece == 0) * value"),
    # Online softmax
    Mutant("mix-not-rescaled", "mix[piece] * rescale,", "mix[piece],"),
    Mutant("total-not-rescaled", "total * rescale", "total"),
    Mutant("never-rescaled", "    if not FIRST:", "    if False:"),
    Mutant("running-maximum-lost", "new_mix, new_highest, new_total", "new_mix, logit, new_total"),
    Mutant("sums-in-another-order", "halves + (first, second)", "halves + (second, first)"),
    # The following norm
    Mutant("norm-eps-missing", "mean_square + norm_eps", "mean_square"),
    Mutant("norm-weight-unused", " * norm[piece].to(COMPUTE)", ""),
    Mutant("norm-skipped", "share * tl.rsqrt(mean_square + norm_eps)", "share"),
    # The prefix
    Mutant("delta-not-added", " + delta[piece].to(COMPUTE)", ""),
    Mutant(
        "mix-sees-the-unrounded-sum", "(added.to(prefix_out_ptr.dtype.element_ty),)", "(added,)"
    ),
    Mutant("prefix-not-stored", "    if STORE_PREFIX:", "    if STORE_PREFIX and not HAS_DELTA:"),
    # Addresses and masks
    Mutant("store-mask-missing", "row[piece], mask=cols < HIDDEN)", "row[piece])"),
    Mutant("load-mask-missing", ", mask=cols < HIDDEN, other=0.0)", ")"),
    Mutant("load-mask-off-by-one", "mask=cols < HIDDEN, other", "mask=cols < HIDDEN - 1, other"),
    Mutant("block-stride", "block_row += GROUP * blocks_stride", "block_row += blocks_stride"),
    Mutant("rows-of-a-group-repeat", "        ptr += stride", "        ptr += 0"),
    Mutant("delta-stride", "token * delta_stride", "token * prefix_stride"),
    Mutant("every-token-is-the-first", "tl.program_id(0)", "tl.program_id(1)"),
]

SPLIT_MUTANTS = [
    Mutant("delta-not-added", "(live.to(COMPUTE) + delta.to(COMPUTE))", "live"),
    Mutant("sum-not-rounded", ".to(prefix_out_ptr.dtype.element_ty)", ""),
    Mutant("prefix-not-in-the-sums", "(rows == N_BLOCKS)[:, None],", "(rows < 0)[:, None],"),
    Mutant("prefix-in-every-row", "(rows == N_BLOCKS)[:, None],", "(rows > 0)[:, None],"),
    Mutant("key-norm-weight-unused", "probe = query * tl.load(", "probe = query + 0.0 * tl.load("),
    Mutant("slice-mask-missing", "cols, live, mask=inside)", "cols, live)"),
    Mutant("slices-in-one-place", "(token * tl.num_programs(1) + part)", "(token * part)"),
    Mutant("tokens-in-one-place", "partial_ptr + token * (SLICES *", "partial_ptr + 0 * (SLICES *"),
    Mutant("first-slice-only", "tl.static_range(SLICES)", "tl.static_range(1)"),
    Mutant("squares-are-dots", "square, dot = tl.split(sums)", "dot, square = tl.split(sums)"),
    Mutant("key-eps-missing", "square / HIDDEN + key_eps", "square / HIDDEN"),
    Mutant("last-source-left-out", "rows <= N_BLOCKS, logit", "rows < N_BLOCKS, logit"),
    Mutant("padding-takes-part", 'logit, -float("inf"))', "logit, 0.0)"),
    Mutant("no-maximum-taken", "tl.exp(logit - tl.max(logit, 0))", "tl.exp(logit)"),
    Mutant("not-divided", "share = share / tl.sum(share, 0)", "pass"),
    Mutant("one-block-less", "tl.static_range(N_BLOCKS + 1)", "tl.static_range(N_BLOCKS)"),
    Mutant("weights-in-one-place", "(rows == source, share, 0.0)", "(rows == 0, share, 0.0)"),
    Mutant("norm-eps-missing", "/ HIDDEN + norm_eps)", "/ HIDDEN)"),
    Mutant("norm-weight-unused", "scale * norm[piece].to(COMPUTE)", "scale"),
]

CONFIGS = (
    AttnResConfig(64, 1, 3, preload=True),
    AttnResConfig(64, 1, 2, preload=False, group=3),
    AttnResConfig(64, 1, 0, preload=True, group=3),
)
#: For the form whose two launches are both in slices.
GRAM_MUTANTS = [
    # All products of sources
    Mutant("delta-not-added", "(live.to(COMPUTE) + delta.to(COMPUTE))", "live"),
    Mutant("sum-not-rounded", "delta.to(COMPUTE)).to(stored)", "delta.to(COMPUTE))"),
    Mutant("prefix-not-in-the-products", "(rows == N_BLOCKS)[:, None],", "(rows < 0)[:, None],"),
    Mutant("key-norm-weight-unused", "key_norm = tl.load(", "key_norm = 1.0 + 0.0 * tl.load("),
    Mutant("probe-rounded-once", "tl.static_range(3)", "tl.static_range(1)"),
    Mutant("one-probe-for-all", "probes[step][third]", "probes[step][0]"),
    Mutant("first-step-only", "tile = tl.where((rows == N_BLOCKS)[:, None], lives[step][None, :], "
           "tiles[step])", "tile = tl.where((rows == N_BLOCKS)[:, None], lives[0][None, :], "
           "tiles[0])"),
    Mutant("steps-not-added-up", "(0, 2, 1)), gram,", "(0, 2, 1)), 0.0 * gram,"),
    Mutant("first-part-only", "total = tl.sum(gram, 0)",
           "total = tl.sum(tl.where((tl.arange(0, PARTS) == 0)[:, None, None], gram, 0.0), 0)"),
    Mutant("slices-in-one-place", "(token * tl.num_programs(1) + part) * (", "(token * part) * ("),
    Mutant("block-stride", "rows[:, None].to(tl.int64) * blocks_stride",
           "rows[:, None].to(tl.int64) * blocks_token_stride"),
    Mutant("slice-mask-missing", "cols, lives[step], mask=cols < HIDDEN)", "cols, lives[step])"),
    # The mix and the norm after it
    Mutant("tokens-in-one-place", "gram_ptr + token * (SLICES *", "gram_ptr + 0 * (SLICES *"),
    Mutant("first-slice-only", "tl.static_range(SLICES)", "tl.static_range(1)"),
    Mutant("squares-are-dots", "square = tl.sum(tl.where(diagonal,",
           "square = tl.sum(tl.where(of_probe,"),
    Mutant("key-eps-missing", "square / HIDDEN + key_eps", "square / HIDDEN"),
    Mutant("padding-takes-part", 'logit, -float("inf"))', "logit, 0.0)"),
    Mutant("no-maximum-taken", "tl.exp(logit - tl.max(logit, 0))", "tl.exp(logit)"),
    Mutant("not-divided", "share = share / tl.sum(share, 0)", "pass"),
    Mutant("squares-of-sources-alone", "tl.where(is_source, gram *", "tl.where(diagonal, gram *"),
    Mutant("norm-eps-missing", "tl.rsqrt(mean_square + norm_eps)", "tl.rsqrt(mean_square)"),
    Mutant("one-block-less", "tl.static_range(N_BLOCKS + 1)", "tl.static_range(N_BLOCKS)"),
    Mutant("weights-in-one-place", "(rows == row, share, 0.0)", "(rows == 0, share, 0.0)"),
    Mutant("norm-weight-unused", "scale * norm.to(COMPUTE)", "scale"),
    Mutant("store-mask-missing", "to(out_ptr.dtype.element_ty), mask=inside",
           "to(out_ptr.dtype.element_ty)"),
]  # fmt: skip

SPLIT = (AttnResConfig(64, 1, 1, preload=True, slice_h=32, slice_warps=1),)
SLICES = (
    AttnResConfig(0, 1, 1, preload=True, slice_h=64, slice_warps=2, mix_h=32),
    AttnResConfig(0, 1, 1, preload=True, slice_h=512, slice_warps=1, mix_h=64),  # two steps
)
#: Mistakes that only show at the size of a logit that float16 cannot hold.
LARGE = Case(5, 2, 100, torch.float32, scale=1.0, sharp=200.0)
#: And those that only show where rounding a probe of float16 moves the weights.
SHARP = Case(8, 3, 100, torch.float16, sharp=20.0)


def first_failure(device: str, configs: tuple[AttnResConfig, ...]) -> str | None:
    """Run the check over the suite's few cases with each configuration, up to a failure.

    A case that one configuration does not fail at, another often does: those come next.
    """
    for case in (*FEW_CASES, LARGE, SHARP):
        for config in configs:
            try:
                check(case, device, row_gap=24, config=config)
            except AssertionError as error:
                return f"{case} {config}: {error}"
    return None


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_check_refuses(
    mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    module = importlib.import_module("k3_kernels.attn_res_kernel")
    monkeypatch.setattr(module, "attn_res_kernel", build(module, mutant, tmp_path).attn_res_kernel)
    assert first_failure(device, CONFIGS), f"the wrong kernel {mutant} passed all cases"


@pytest.mark.parametrize("mutant", SPLIT_MUTANTS, ids=str)
def test_check_refuses_two_launches(
    mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    module = importlib.import_module("k3_kernels.attn_res_split_kernel")
    wrong = build(module, mutant, tmp_path)
    for kernel in ("attn_res_scores_kernel", "attn_res_mix_kernel"):
        monkeypatch.setattr(module, kernel, getattr(wrong, kernel))
    assert first_failure(device, SPLIT), f"the wrong kernel {mutant} passed all cases"


@pytest.mark.parametrize("mutant", GRAM_MUTANTS, ids=str)
def test_check_refuses_both_launches_in_slices(
    mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    module = importlib.import_module("k3_kernels.attn_res_gram_kernel")
    wrong = build(module, mutant, tmp_path)
    for kernel in ("attn_res_gram_kernel", "attn_res_slice_kernel"):
        monkeypatch.setattr(module, kernel, getattr(wrong, kernel))
    assert first_failure(device, SLICES), f"the wrong kernel {mutant} passed all cases"


def test_check_accepts_the_kernels_built_the_same_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    for name, kernels in (
        ("attn_res_kernel", ["attn_res_kernel"]),
        ("attn_res_split_kernel", ["attn_res_scores_kernel", "attn_res_mix_kernel"]),
        ("attn_res_gram_kernel", ["attn_res_gram_kernel", "attn_res_slice_kernel"]),
    ):
        module = importlib.import_module(f"k3_kernels.{name}")
        control = build(module, Mutant(f"control-{name}", "__all__ = [", "_ALL = ["), tmp_path)
        for kernel in kernels:
            monkeypatch.setattr(module, kernel, getattr(control, kernel))
    assert first_failure(device, (*CONFIGS, *SPLIT, *SLICES)) is None

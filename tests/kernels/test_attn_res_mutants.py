"""Wrong AttnRes kernels, one mistake each: the check of ``test_attn_res`` must refuse them all."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
from attn_res_cases import CASES, check
from mutants import Mutant, build

pytest.importorskip("triton", reason="running kernels needs Triton")

import k3_kernels  # noqa: F401

# NumPy, which runs the kernels here, remarks on some of the mistakes.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

LOGIT = "logit = tl.sum(dot, 0) * inverse_rms"
MIX = "mix[piece] * rescale + source[piece].to(COMPUTE) * weight"

MUTANTS = [
    # The mix
    Mutant("values-normalised", MIX, MIX + " * inverse_rms"),
    Mutant("keys-not-normalised", LOGIT, LOGIT.removesuffix(" * inverse_rms")),
    Mutant("temperature", LOGIT, LOGIT + " / tl.sqrt(HIDDEN * 1.0)"),
    Mutant("key-norm-weight-unused", " * key_norm[piece].to(COMPUTE)", ""),
    Mutant(
        "sum-of-squares-not-mean", "tl.sum(square, 0) / HIDDEN + eps", "tl.sum(square, 0) + eps"
    ),
    Mutant("key-eps-missing", "/ HIDDEN + eps)", "/ HIDDEN)"),
    Mutant(
        "eps-swapped",
        "live, probe, mix, highest, total, key_eps,",
        "live, probe, mix, highest, total, norm_eps,",
    ),
    Mutant("last-block-left-out", "tl.range(0, N_BLOCKS,", "tl.range(0, N_BLOCKS - 1,"),
    Mutant("one-block-too-many", "tl.range(0, N_BLOCKS,", "tl.range(0, N_BLOCKS + 1,"),
    Mutant("last-piece-not-in-logit", "dot += value", "dot += (piece == 0) * value"),
    # Online softmax
    Mutant("mix-not-rescaled", "mix[piece] * rescale +", "mix[piece] +"),
    Mutant("total-not-rescaled", "total * rescale + weight", "total + weight"),
    Mutant("running-maximum-lost", "new_mix, new_highest, new_total", "new_mix, logit, new_total"),
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
    Mutant("block-stride", "block_row += blocks_stride", "block_row += blocks_token_stride"),
    Mutant("delta-stride", "token * delta_stride", "token * prefix_stride"),
    Mutant("every-token-is-the-first", "tl.program_id(0)", "tl.program_id(1)"),
]


def first_failure(device: str) -> str | None:
    """Run the check over the suite's cases in both regimes, up to the first failure."""
    operator = sys.modules["k3_kernels.attn_res"]
    for case in CASES:
        for latency_tokens in (10**9, -1):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(operator, "_LATENCY_TOKENS", latency_tokens)
                try:
                    check(case, device, row_gap=24)
                except AssertionError as error:
                    return f"{case}: {error}"
    return None


def use(mutant: Mutant, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Let the operator launch the mutant."""
    module = importlib.import_module("k3_kernels.attn_res_kernel")
    patch.setattr(module, "attn_res_kernel", build(module, mutant, folder).attn_res_kernel)


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_check_refuses(
    mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    use(mutant, tmp_path, monkeypatch)
    assert first_failure(device), f"the wrong kernel {mutant} passed all {len(CASES)} cases"


def test_check_accepts_the_kernel_built_the_same_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    control = Mutant("control", '__all__ = ["attn_res_kernel"]', "__all__ = []")
    use(control, tmp_path, monkeypatch)
    assert first_failure(device) is None

"""Wrong prefill and convolution kernels, one mistake each: the checks must refuse them all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import kda_prefill_cases
import pytest
import test_kda_conv
from mutants import CONTROL, Mutant, first_failure, use

pytest.importorskip("triton", reason="running kernels needs Triton")

from k3_kernels.kda_prefill import KDAPrefillConfig

# NumPy, which runs the kernels here, remarks on some of the mistakes.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

PREFILL = [
    # A chunk by itself
    Mutant("norm-eps-missing", "squared = k_length + l2_eps", "squared = k_length"),
    Mutant("q-not-scaled", "tl.rsqrt(q_length + l2_eps) * scale", "tl.rsqrt(q_length + l2_eps)"),
    Mutant("gate-bias-missing", "rate + bias[None, :], 100.0)", "rate, 100.0)"),
    Mutant("rows-behind-the-end",
           "steepest = tl.where(inside, lower_bound * LOG2_E, 0.0)",
           "steepest = tl.where(row >= 0, lower_bound * LOG2_E, 0.0)"),
    Mutant("triangle-upside-down", "tl.where(i > j, a, 0.0)", "tl.where(i < j, a, 0.0)"),
    Mutant("scores-without-diagonal",
           "tl.where(i >= j, scores, 0.0)",
           "tl.where(i > j, scores, 0.0)"),
    Mutant("beta-of-the-column",
           "-beta[:, None] * inverse[None, :]",
           "-beta[None, :] * inverse[:, None]"),
    Mutant("beta-once", "inverse[:, None] * beta[None, :]", "inverse[:, None] * inverse[None, :]"),
    Mutant("halves-swapped", "second = grow * later", "second = grow * (1.0 - later)"),
    Mutant("one-middle-for-both",
           "to_second = tl.load(sums + 4 *",
           "to_second = tl.load(sums + 3 *"),
    Mutant("inverse-of-two-stops", "    x = double_blocks(x, minus_a, CHUNK, 16, TRIANGLE)\n", ""),
    Mutant("inverse-added", "-beta[:, None] * inverse[None", "beta[:, None] * inverse[None"),
    # The walk
    Mutant("state-not-decayed", "state * decay[None, :], input", "state, input"),
    Mutant("error-not-subtracted", "k_length[None, :] - recalled)", "k_length[None, :])"),
    Mutant("output-without-own-chunk", "o = tl.dot(written, tl.trans(weights), o,",
           "o = tl.dot(0.0 * written, tl.trans(weights), o,"),
    Mutant("triangle-not-transposed", "tl.dot(error, tl.trans(triangle)", "tl.dot(error, triangle"),
    Mutant("key-lengths-left-out", "* k_length[None, :] - recalled", "- recalled"),
    Mutant("starts-from-zero", "!= 0) & (segment == 0):", "!= 0) & (segment < 0):"),
    Mutant("checkpoint-one-late", "if index + 1 == before_cut:", "if index == before_cut:"),
    Mutant("checkpoint-slot-of-nobody", "(keep > null_slot) & (keep < num_slots)",
           "keep < num_slots"),
    Mutant("no-cut", "(cut > 0) & (cut <= length), cut, 0)", "(cut > 0) & (cut < 0), cut, 0)"),
    Mutant("chunks-of-the-next",
           "tl.where(sequence < mine, count, 0)",
           "tl.where(sequence <= mine, count, 0)"),
    # Pieces at the same time
    Mutant("rows-of-the-next-sequence", "if v_tokens < CHUNK:", "if v_tokens < 0:"),
    Mutant("identity-with-values",
           "tl.where(identity, 0, tokens)",
           "tl.where(identity, tokens, tokens)"),
    Mutant("map-left-out",
           "state = tl.dot(high, mapped, tl.load(start)",
           "state = tl.dot(0.0 * high, mapped, tl.load(start)"),
]  # fmt: skip

CONV = [
    Mutant("taps-backwards", "(WIDTH - 1 - back) * taps_tap_stride", "back * taps_tap_stride"),
    Mutant("silu-missing", "y = y * sigmoid(y)", "y = y"),
    Mutant("looks-into-the-neighbour",
           "(exists & (position >= back))",
           "(exists & (token >= back))"),
    Mutant("old-window-ignored", "(remembers & (position < back))", "(remembers & (position < 0))"),
    Mutant("old-window-always", "remembers & (continued != 0)", "remembers & (continued >= 0)"),
    Mutant("window-one-late",
           "position = length - (WIDTH - 1) + column",
           "position = length - WIDTH + column"),
    Mutant("checkpoint-at-the-end",
           "position = cut - (WIDTH - 1) + column",
           "position = length - (WIDTH - 1) + column"),
    Mutant("checkpoint-slot-of-nobody", "(keep > null_slot) & (keep < num_slots)",
           "(keep < num_slots)"),
]  # fmt: skip


#: Modules that are built anew for a mutant, each behind those it imports from.
BUILT = {
    "kda_prefill": ("kda_chunk_rows", "kda_chunks", "kda_scan"),
    "kda_conv": ("kda_conv",),
}


def _runs(operator: str) -> list[tuple[Callable[..., None], Any, dict[str, Any]]]:
    if operator == "kda_conv":
        return [(test_kda_conv.check, case, {}) for case in test_kda_conv.CASES[::-1]]
    check, cases = kda_prefill_cases.check, kda_prefill_cases.CASES
    # Slow decays: what a state was 128 tokens ago has to matter.
    pieces = kda_prefill_cases.Case(lengths=(300,), continued=(True,), alike=True)
    config = KDAPrefillConfig(32, 4, 0, 32, 4, 2, 4)
    return [*((check, cases[i], {}) for i in (4, 10, 8, 12)), (check, pieces, {"config": config})]


@pytest.mark.parametrize("mutant", PREFILL, ids=str)
def test_prefill_check_refuses(
    mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    use("kda_prefill", mutant, tmp_path, monkeypatch, *BUILT["kda_prefill"])
    assert first_failure(_runs("kda_prefill"), device), f"the wrong kernel {mutant} passed"


@pytest.mark.parametrize("mutant", CONV, ids=str)
def test_conv_check_refuses(
    mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    use("kda_conv", mutant, tmp_path, monkeypatch)
    assert first_failure(_runs("kda_conv"), device), f"the wrong kernel {mutant} passed"


@pytest.mark.parametrize("operator", ["kda_prefill", "kda_conv"])
def test_check_accepts_the_kernel_built_the_same_way(
    operator: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    use(operator, CONTROL, tmp_path, monkeypatch, *BUILT[operator])
    assert first_failure(_runs(operator), device) is None

"""Wrong prefill and convolution kernels, one mistake each: the checks must refuse them all."""

from __future__ import annotations

from pathlib import Path

import kda_prefill_cases
import pytest
import test_kda_conv
from mutants import Mutant, use

pytest.importorskip("triton", reason="running kernels needs Triton")

from k3_kernels.kda_prefill import KDAPrefillConfig

# NumPy, which runs the kernels here, remarks on some of the mistakes.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

PREFILL = [
    # A chunk by itself
    Mutant("norm-eps-missing", "tl.rsqrt(k_length + l2_eps)", "tl.rsqrt(k_length)"),
    Mutant("q-not-scaled", "tl.where(is_key, 1.0, scale)", "1.0"),
    Mutant("gate-bias-missing", "(raw.to(COMPUTE) + bias[None, :])", "raw.to(COMPUTE)"),
    Mutant("rows-behind-the-end", "g = tl.where(mask, g, 0.0).to(TRIANGLE)", "g = g.to(TRIANGLE)"),
    Mutant("triangle-upside-down",
           "row[:, None] > row[None, :], a *",
           "row[:, None] < row[None, :], a *"),
    Mutant("scores-without-diagonal",
           "row[:, None] >= row[None, :], scores",
           "row[:, None] > row[None, :], scores"),
    Mutant("beta-of-the-column", "a * beta[:, None]", "a * beta[None, :]"),
    Mutant("beta-once", "unit_lower_inverse(a, CHUNK, TRIANGLE) * beta[None, :]",
           "unit_lower_inverse(a, CHUNK, TRIANGLE)"),
    Mutant("blocks-not-carried", "carried *= tl.exp2(passed)[None, :]", "carried *= 1.0"),
    Mutant("wrong-block-passed", "block[:, None] == this - 1, g", "block[:, None] == this, g"),
    Mutant("inverse-of-two-stops", "    x = double_blocks(x, a, CHUNK, 16, TRIANGLE)\n", ""),
    Mutant("inverse-added", "return x - tl.dot(left", "return x + tl.dot(left"),
    # The walk
    Mutant("state-not-decayed", "state * decay[None, :], input", "state, input"),
    Mutant("error-not-subtracted", "(v.to(COMPUTE) - recalled)", "v.to(COMPUTE)"),
    Mutant("output-without-own-chunk", "o = tl.dot(written, tl.trans(weights), o,",
           "o = tl.dot(0.0 * written, tl.trans(weights), o,"),
    Mutant("triangle-not-transposed", "tl.dot(error, tl.trans(triangle)", "tl.dot(error, triangle"),
    Mutant("starts-from-zero", "!= 0) & (segment == 0):", "!= 0) & (segment < 0):"),
    Mutant("checkpoint-one-late", "if index + 1 == before_cut:", "if index == before_cut:"),
    Mutant("no-cut", "(cut > 0) & (cut <= length), cut, 0)", "(cut > 0) & (cut < 0), cut, 0)"),
    Mutant("chunks-of-the-next",
           "tl.where(sequence < mine, count, 0)",
           "tl.where(sequence <= mine, count, 0)"),
    # Pieces at the same time
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
]  # fmt: skip


def first_failure(operator: str, device: str) -> str | None:
    """Run the check over the suite's cases up to the first failure."""
    if operator == "kda_conv":
        runs = [(test_kda_conv.check, (case, device), {}) for case in test_kda_conv.CASES[::-1]]
    else:
        cases = kda_prefill_cases.CASES
        # Slow decays: what a state was 128 tokens ago has to matter.
        pieces = kda_prefill_cases.Case(lengths=(300,), continued=(True,), alike=True)
        runs = [(kda_prefill_cases.check, (cases[i], device), {}) for i in (4, 10, 8)]
        config = KDAPrefillConfig(16, 4, 0, 32, 4, 2, 4)
        runs.append((kda_prefill_cases.check, (pieces, device), {"config": config}))
    for check, arguments, options in runs:
        try:
            check(*arguments, **options)
        except AssertionError as error:
            return f"{arguments[0]}: {error}"
    return None


@pytest.mark.parametrize("mutant", PREFILL, ids=str)
def test_prefill_check_refuses(
    mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    use("kda_prefill", mutant, tmp_path, monkeypatch)
    assert first_failure("kda_prefill", device), f"the wrong kernel {mutant} passed"


@pytest.mark.parametrize("mutant", CONV, ids=str)
def test_conv_check_refuses(
    mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    use("kda_conv", mutant, tmp_path, monkeypatch)
    assert first_failure("kda_conv", device), f"the wrong kernel {mutant} passed"


@pytest.mark.parametrize("operator", ["kda_prefill", "kda_conv"])
def test_check_accepts_the_kernel_built_the_same_way(
    operator: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    control = Mutant("control", "from __future__ import annotations\n", "\n")
    use(operator, control, tmp_path, monkeypatch)
    assert first_failure(operator, device) is None

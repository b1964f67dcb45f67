"""Wrong KDA kernels, one mistake each: the checks of the KDA tests must refuse them all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import kda_decode_cases
import kda_recover_cases
import pytest
from mutants import CONTROL, Mutant, first_failure, use

pytest.importorskip("triton", reason="running kernels needs Triton")

from k3_kernels.kda_decode import KDADecodeConfig
from k3_kernels.kda_recover import KDARecoverConfig

# NumPy, which runs the kernels here, remarks on some of the mistakes.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DECODE = [
    # A token
    Mutant("no-decay", "state = state * decay[None, :, :]", "state = state"),
    Mutant("error-not-subtracted", "u = beta * (v - recalled)", "u = beta * v"),
    Mutant("beta-left-out", "u = beta * (v - recalled)", "u = v - recalled"),
    Mutant("output-before-the-write", "return read + u * qk, u, state", "return read, u, state"),
    Mutant("q-not-scaled", "    inverse_q *= scale\n", ""),
    Mutant("l2-eps-missing", "tl.rsqrt(kk + eps)", "tl.rsqrt(kk)"),
    Mutant("gate-bias-missing", "x = raw + bias", "x = raw"),
    Mutant("softplus-of-minus-x", "tl.maximum(x, 0.0) +", "tl.maximum(-x, 0.0) +"),
    Mutant("bounds-swapped", "    if BOUNDED:", "    if not BOUNDED:"),
    Mutant("silu-missing", "return (y * sigmoid(y)).to(x.dtype)", "return y.to(x.dtype)"),
    Mutant("taps-backwards", "taps[column].to(COMPUTE)", "taps[WIDTH - 2 - column].to(COMPUTE)"),
    Mutant("key-is-value", "q_and_v, k_and_decay = tl.split(", "k_and_decay, q_and_v = tl.split("),
    # The output
    Mutant("norm-over-sum", "tl.sum(o * o, 0) / D + eps", "tl.sum(o * o, 0) + eps"),
    Mutant("norm-eps-is-l2-eps", "output_gate.to(COMPUTE), norm_eps, D)\n    tl.store(out_tile",
           "output_gate.to(COMPUTE), l2_eps, D)\n    tl.store(out_tile"),
    Mutant("gate-before-norm",
           "return o * tl.rsqrt(tl.sum(o * o, 0) / D + eps) * weight * sigmoid(gate)",
           "o *= sigmoid(gate)\n    return o * tl.rsqrt(tl.sum(o * o, 0) / D + eps) * weight"),
    # Slots and windows
    Mutant("window-not-moved-on",
           "    for column in tl.static_range(1, WIDTH - 1):\n        shifted",
           "    for column in tl.static_range(0, WIDTH - 2):\n        shifted"),
    Mutant("padding-writes",
           "padding = slot <= null_slot\n    if padding | (not exists):\n        # Padding",
           "padding = slot < null_slot\n    if padding | (not exists):\n        # Padding"),
    Mutant("next-draft-slot",
           "draft_slot = tl.load(slots_ptr + row * slots_stride + token * slots_draft_stride)",
           "draft_slot = tl.load(slots_ptr + row * slots_stride + (token - token) * "
           "slots_draft_stride)"),
    Mutant("draft-slot-of-nobody",
           "(draft_slot > null_slot) & (draft_slot < num_slots)",
           "draft_slot < num_slots"),
    Mutant("window-too-narrow",
           "(count <= max_tokens) & (count + WIDTH - 2 <= num_columns)",
           "(count <= max_tokens) & (count + WIDTH - 3 <= num_columns)"),
    Mutant("window-one-late",
           "(WIDTH - 2 + token) * conv_column_stride",
           "(WIDTH - 1 + token) * conv_column_stride"),
    Mutant("slice-left-out", "range(0, LOOPED, num_stages", "range(0, LOOPED - 1, num_stages"),
    Mutant("slice-of-v", "tl.where(tiles == tile, v, 0.0)", "tl.where(tiles == 0, v, 0.0)"),
    # Loads before the branch
    Mutant("early-slice-is-the-first", "+ (NUM_TILES - 1) * BLOCK_V * D", "+ 0 * BLOCK_V * D"),
    Mutant("early-slice-of-the-window's-slot",
           "early = state_ptr + start_slot.to(tl.int64)",
           "early = state_ptr + slot.to(tl.int64)"),
    Mutant("early-window-without-v",
           "part < tl.where(valid, 3, 0)",
           "part < tl.where(valid, 2, 0)"),
    Mutant("next-token-of-the-next",
           "tl.minimum(token + 1, count - 1)",
           "tl.minimum(token + 2, count - 1)"),
    Mutant("u-before-beta",
           "tl.store(u_row + head * D + channels, u)",
           "tl.store(u_row + head * D + channels, v)"),
    Mutant("recording-writes-the-state",
           "    if not (DRAFT_SLOTS or RECORD):\n        tl.store(state_ptr",
           "    if not DRAFT_SLOTS:\n        tl.store(state_ptr"),
]  # fmt: skip

RECOVER = [
    Mutant("decay-of-later-tokens-left-out", "k[token] * behind, 0.0)", "k[token], 0.0)"),
    Mutant("own-decay-included",
           "k[token] * behind, 0.0)",
           "k[token] * behind * decay[token], 0.0)"),
    Mutant("forward-instead-of-back",
           "tl.static_range(TOKENS - 1, -1, -1)",
           "tl.static_range(TOKENS)"),
    Mutant("rejected-keys-too",
           "weights = (tl.where(token < count, k",
           "weights = (tl.where(token < TOKENS, k"),
    Mutant("rejected-decays-too",
           "behind = tl.where(token < count,",
           "behind = tl.where(token < TOKENS,"),
    Mutant("state-not-decayed", "state * behind[:, None, :] + written", "state + written"),
    Mutant("keys-as-they-are",
           "normalised + (k[token] * inverse[:, None],)",
           "normalised + (k[token],)"),
    Mutant("window-not-moved", "load_columns(old_window, is_qkv, count - 1,",
           "load_columns(old_window, is_qkv, count - count,"),
    Mutant("boundary-gets-the-end",
           "weights_after(boundary, normalised",
           "weights_after(count, normalised"),
    Mutant("boundary-behind-the-end", "(boundary <= count)", "(boundary <= count + 1)"),
    Mutant("boundary-slot-of-nobody",
           "inside & (boundary_slot > null_slot) & (boundary_slot",
           "inside & (boundary_slot"),
    Mutant("window-too-narrow", "count + WIDTH - 2 <= num_columns",
           "count + WIDTH - 3 <= num_columns"),
    Mutant("more-than-recorded", "(count > 0) & (count <= TOKENS)", "(count > 0)"),
    Mutant("slot-of-nobody",
           "exists = (slot > null_slot) & (slot < num_slots)",
           "exists = slot > null_slot"),
    Mutant("final-slot-of-nobody", "(final_slot > null_slot) & (final_slot < num_slots)",
           "(final_slot > null_slot)"),
    Mutant("final-slot-ignored",
           "layer_state + final_slot.to(tl.int64)",
           "layer_state + slot.to(tl.int64)"),
    # Loads that are held where they are, and u of a slice in its turn
    Mutant("late-u-of-the-first-slice", "load_u(u_row, values + piece * SLICE,",
           "load_u(u_row, values + 0 * SLICE,"),
    Mutant("late-u-left-out", "if LATE_U and piece > 0:", "if LATE_U and piece < 0:"),
    Mutant("pinned-padding-goes-on",
           "if PIN:\n        if not exists:",
           "if PIN:\n        if False:"),
    Mutant("pinned-mask-turned", "tl.where(exists, D * D, 0)", "tl.where(exists, 0, D * D)"),
    Mutant("pinned-slices-repeat", "early = tl.load(source + piece * (SLICE * D)",
           "early = tl.load(source + 0 * (SLICE * D)"),
    Mutant("layer-ignored",
           "layer_state = state_ptr + layer * state_layer_stride",
           "layer_state = state_ptr"),
]  # fmt: skip


#: Modules that are built anew for a mutant, each behind those it imports from.
BUILT = {
    "kda_decode": ("kda_step", "kda_decode", "kda_verify"),
    "kda_recover": ("kda_recover",),
}
#: The cases that see most come first; the right kernel has to pass them all.
ORDER = (15, 7, 0, 14, 5, 12, 10, 22)


def _runs(operator: str) -> list[tuple[Callable[..., None], Any, dict[str, Any]]]:
    if operator == "kda_recover":
        pinned = {"config": KDARecoverConfig(32, 8, 2, ahead=2, pin=True, late_u=True)}
        return [
            *((kda_recover_cases.check_left_alone, c, {}) for c in kda_recover_cases.LEFT_ALONE),
            *(
                (kda_recover_cases.check_left_alone, c, pinned)
                for c in kda_recover_cases.LEFT_ALONE
            ),
            (kda_recover_cases.check, kda_recover_cases.CASES[0], pinned),
            *((kda_recover_cases.check, case, {}) for case in kda_recover_cases.CASES[::-1]),
        ]
    first, *rest = ((kda_decode_cases.check, kda_decode_cases.CASES[i], {}) for i in ORDER)
    in_slices = {"config": KDADecodeConfig(8, 16, 1, 3)}
    sliced = (kda_decode_cases.check, kda_decode_cases.CASES[0], in_slices)
    early = {"config": KDADecodeConfig(16, 16, 1, 2, early=True, pin=True)}
    pinned = (kda_decode_cases.check, kda_decode_cases.CASES[9], early)
    return [first, (kda_decode_cases.check_left_alone, 4, {}), sliced, pinned, *rest]


@pytest.mark.parametrize("mutant", DECODE, ids=str)
def test_decode_check_refuses(
    mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    use("kda_decode", mutant, tmp_path, monkeypatch, *BUILT["kda_decode"])
    assert first_failure(_runs("kda_decode"), device), f"the wrong kernel {mutant} passed"


@pytest.mark.parametrize("mutant", RECOVER, ids=str)
def test_recover_check_refuses(
    mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    use("kda_recover", mutant, tmp_path, monkeypatch)
    assert first_failure(_runs("kda_recover"), device), f"the wrong kernel {mutant} passed"


@pytest.mark.parametrize("operator", ["kda_decode", "kda_recover"])
def test_check_accepts_the_kernel_built_the_same_way(
    operator: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    use(operator, CONTROL, tmp_path, monkeypatch, *BUILT[operator])
    assert first_failure(_runs(operator), device) is None

"""The prefill's short convolution against the reference, sequence by sequence."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import pytest
import torch
from redzone import RedZone

pytest.importorskip("triton", reason="running kernels needs Triton")

from k3_kernels import kda_conv

from kimik3_lab.reference import kda

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
TOLERANCE = {F32: 1e-5, F16: 1e-3, BF16: 8e-3}


@dataclass(frozen=True)
class Case:
    """One call; see the operator."""

    lengths: tuple[int, ...] = (40,)
    slots: tuple[int, ...] = (1,)
    channels: int = 96
    continued: tuple[bool, ...] | None = None
    checkpoints: tuple[int, ...] | None = None
    checkpoint_slots: tuple[int, ...] = ()
    dtype: torch.dtype = F32
    taps: int = 4
    null_slot: int = -1


CASES = [
    Case(),
    Case(dtype=F16),
    Case(lengths=(1,), continued=(True,)),
    Case(lengths=(2,), channels=300),
    Case(lengths=(3, 0, 1, 20), slots=(3, 0, 1, 2), continued=(True, True, True, False)),
    Case(lengths=(17, 16, 2), slots=(2, -1, 0), continued=(False, True, True)),
    Case(lengths=(20, 5, 2, 9), slots=(0, 1, 2, 3), continued=(True, True, True, False),
         checkpoints=(16, 2, 1, 0), checkpoint_slots=(4, 5, 6, 7)),
    Case(lengths=(9, 9), slots=(0, 1), taps=2, continued=(True, False)),
    Case(lengths=(5,), channels=3 * 3 * 64),  # the tiny K3's
    # Checkpoints that nobody keeps: their slot is padding, or they are none and have one slot.
    Case(lengths=(20, 5), slots=(3, 1), channels=48, continued=(True, False), checkpoints=(16, 2),
         checkpoint_slots=(4, 0), null_slot=0),
    Case(lengths=(9, 5), slots=(3, 1), channels=48, checkpoints=(0, 0), checkpoint_slots=(0, 0)),
]  # fmt: skip


def check(case: Case, device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    zone = RedZone(device, row_gap=16)
    dense = RedZone(device)

    def normal(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    num_slots = max((*case.slots, *case.checkpoint_slots)) + 2
    x = normal(sum(case.lengths), case.channels, dtype=case.dtype)
    taps = normal(case.channels, case.taps)
    # One column more than the taps need, as an engine with drafts has.
    conv = normal(num_slots, case.taps, case.channels, dtype=case.dtype)
    expected, windows = torch.zeros(x.shape, dtype=torch.float64), conv.clone()
    end = 0
    for b, length in enumerate(case.lengths):
        start, end, slot = end, end + length, case.slots[b]
        if slot <= case.null_slot or length == 0:
            continue
        history = conv[slot, : case.taps - 1].T
        if case.continued is None or not case.continued[b]:
            history = torch.zeros_like(history)
        y, window = kda.short_conv(x[start:end].double(), taps.double(), history.double())
        expected[start:end] = y
        windows[slot, : case.taps - 1] = window.T.to(case.dtype)
        if case.checkpoints is not None and 0 < case.checkpoints[b] <= length:
            cut = x[start : start + case.checkpoints[b]].double()
            _, window = kda.short_conv(cut, taps.double(), history.double())
            if case.checkpoint_slots[b] > case.null_slot:
                windows[case.checkpoint_slots[b], : case.taps - 1] = window.T.to(case.dtype)

    def numbers(*values: int) -> torch.Tensor:
        return dense.copy("numbers", torch.tensor(values, dtype=torch.int32))

    guarded = dense.copy("conv_state", conv)
    out = zone.empty("out", tuple(x.shape), case.dtype)
    cuts = {}
    if case.checkpoints is not None:
        cuts = {
            "checkpoint_at": numbers(*case.checkpoints),
            "checkpoint_slots": numbers(*case.checkpoint_slots),
        }
    ends = torch.tensor((0, *case.lengths)).cumsum(0).tolist()
    kda_conv(
        zone.copy("qkv", x), zone.copy("taps", taps), guarded.transpose(1, 2),
        numbers(*case.slots), cu_seqlens=numbers(*ends), out=out, **cuts,
        null_slot=case.null_slot,
        has_initial_state=None if case.continued is None
        else torch.tensor(case.continued, device=device),
    )  # fmt: skip
    zone.check()
    dense.check()
    assert torch.equal(guarded.cpu(), windows), "wrong windows"
    torch.testing.assert_close(
        out.cpu().double(), expected, rtol=TOLERANCE[case.dtype], atol=TOLERANCE[case.dtype]
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_reference(case: Case, device: str) -> None:
    check(case, device)


def test_one_sequence_needs_no_lengths(device: str) -> None:
    x, taps = torch.randn(20, 96, device=device), torch.randn(96, 4, device=device)
    slot = torch.tensor([0], dtype=torch.int32, device=device)
    lengths = torch.tensor([0, 20], dtype=torch.int32, device=device)
    one, other = (torch.zeros(1, 96, 3, device=device) for _ in range(2))
    with_lengths = kda_conv(x, taps, one, slot, cu_seqlens=lengths)
    assert torch.equal(kda_conv(x, taps, other, slot), with_lengths)
    assert torch.equal(one, other) and torch.equal(one[0], x[-3:].T)


@pytest.mark.parametrize("case", CASES[3:7], ids=str)
def test_more_tokens_than_a_grid_holds(
    case: Case, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A million tokens are more tiles of 16 than CUDA takes: the tiles grow."""
    monkeypatch.setattr(sys.modules["k3_kernels.kda_conv"], "GRID_LIMIT", 1)
    check(case, device)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"qkv": torch.zeros(5)}, ValueError, r"qkv must be a tensor \[N, C\]"),
        ({"conv_weight": torch.zeros(5, 4)}, ValueError, "conv_weight has shape"),
        ({"conv_state": torch.zeros(2, 6, 2)}, ValueError, "keeps 2 inputs, but 4 taps need 3"),
        ({"conv_state": torch.zeros(2, 6, 3).half()}, TypeError, "conv_state is torch.float16"),
        ({"state_slots": torch.tensor([2]).int()}, ValueError, "names slot 2"),
        ({"state_slots": torch.tensor([0, 1]).int()}, ValueError, "2 sequences need cu_seqlens"),
        ({"checkpoint_at": torch.tensor([1]).int()}, ValueError, "checkpoint_at and"),
        ({"has_initial_state": torch.tensor([1, 1])}, ValueError, "has_initial_state has shape"),
        ({"conv_state": torch.tensor(0.0)}, ValueError, r"conv_state has shape \[\]"),
        ({"cu_seqlens": torch.tensor([0, 4]).int()}, ValueError, r"cu_seqlens is \[0, 4\]"),
        ({"out": torch.zeros(3, 7)}, ValueError, "out has shape"),
        (
            {"checkpoint_at": torch.tensor([1]).int(), "checkpoint_slots": torch.tensor([0]).int()},
            ValueError,
            "checkpoint_slots names slot 0 for request 0, whose last state goes there",
        ),
    ],
)
def test_refusals_name_the_argument(
    changes: dict[str, object], error: type[Exception], message: str
) -> None:
    good = {
        "qkv": torch.zeros(3, 6),
        "conv_weight": torch.zeros(6, 4),
        "conv_state": torch.zeros(2, 6, 3),
        "state_slots": torch.tensor([0], dtype=torch.int32),
    }
    with pytest.raises(error, match=message):
        kda_conv(**{**good, **changes})  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_released_shape(device: str) -> None:
    check(
        Case(
            lengths=(300, 65, 1, 128), slots=(4, 0, 2, 1), channels=3 * 12 * 128, dtype=BF16,
            continued=(True, True, True, False), checkpoints=(100, 64, 1, 2),
            checkpoint_slots=(5, 6, 7, 8),
        ),
        device,
    )  # fmt: skip

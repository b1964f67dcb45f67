"""Packing of MXFP4 experts: every weight and scale is where the kernels look for it."""

from __future__ import annotations

import pytest
import torch
from k3_kernels.moe_weights import BF16Experts, PackedMatrices, pack_mxfp4, random_mxfp4
from moe_cases import dequantize

LAYOUTS = ("rotated", "nibbles")


def draw(experts: int, hidden: int, inner: int, scales: tuple[int, int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = []
    for rows, columns in ((2 * inner, hidden), (hidden, inner)):
        for size, low, high in ((columns // 2, 0, 256), (-(-columns // 32), *scales)):
            shape = (experts, rows, size)
            tensors.append(torch.randint(low, high, shape, dtype=torch.uint8, generator=generator))
    return tensors


def unpack(matrices: PackedMatrices) -> torch.Tensor:
    """Read words as the module's text says, one bit after another: ``[E, M, rows, columns]``."""
    experts, row_tiles, column_tiles, count, _, _ = matrices.words.shape
    words = matrices.words.long() & 0xFFFFFFFF
    # Bit of (mantissa, low exponent, high exponent, sign) in each half, and how far plane j's bits
    # are from there.
    planes = []
    for j in range(4):
        halves = []
        for half in range(2):
            value = torch.zeros_like(words)
            for bit, place in enumerate((6, 7, 8, 15)):
                if matrices.layout == "nibbles":
                    at = 16 * half + 4 * j + bit
                else:
                    turn = {0: 4, 1: 10, 2: 6 if bit == 0 else 14, 3: 0}[j]
                    at = (16 * half + place - turn) % 32
                value |= ((words >> at) & 1) << bit
            halves.append(value)
        planes.append(torch.stack(halves, -1))
    codes = torch.stack(planes, -3)  # E, N, K, M, 64, j, w, b
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    values = grid[codes & 7] * (1 - 2 * (codes >> 3))
    scale = (matrices.scales.long()[..., None] >> torch.tensor([0, 8, 16, 24])) & 255
    bias = 127 if matrices.wide else 126 + 127
    values = values * torch.exp2(scale.double() - bias)[..., None, None]
    whole = values.permute(0, 3, 1, 4, 2, 5, 6, 7)
    return whole.reshape(experts, count, row_tiles * 64, column_tiles * 128)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scales", [(0, 129), (100, 255)], ids=["narrow", "wide"])
@pytest.mark.parametrize(("hidden", "inner"), [(64, 32), (160, 72), (256, 128), (34, 6)])
def test_every_weight_is_found_again(
    layout: str, scales: tuple[int, int], hidden: int, inner: int
) -> None:
    tensors = draw(3, hidden, inner, scales)
    experts = pack_mxfp4(*tensors, layout=layout)  # type: ignore[arg-type]
    assert experts.gate_up.wide == (scales[1] > 129)
    assert (experts.num_experts, experts.hidden_size, experts.intermediate_size) == (
        3, hidden, inner,
    )  # fmt: skip
    gate_up, down = unpack(experts.gate_up), unpack(experts.down)
    expected = dequantize(*tensors[:2]).view(3, 2, inner, hidden)
    assert torch.equal(gate_up[:, :, :inner, :hidden], expected)
    assert torch.equal(down[:, 0, :hidden, :inner], dequantize(*tensors[2:]))
    # What fills the tiles must not contribute.
    assert gate_up[:, :, inner:].eq(0).all() and gate_up[..., hidden:].eq(0).all()
    assert down[:, :, hidden:].eq(0).all() and down[..., inner:].eq(0).all()


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = draw(5, 64, 32, (100, 120))
    whole = pack_mxfp4(*tensors)
    monkeypatch.setattr("k3_kernels.moe_weights._CHUNK_BYTES", 2 * 64 * 32 // 2 * 2)
    parts = pack_mxfp4(*tensors)
    assert torch.equal(whole.gate_up.words, parts.gate_up.words)
    assert torch.equal(whole.down.scales, parts.down.scales)


def test_released_bytes_stay_as_many() -> None:
    """At K3's sizes tiles are full: packing adds nothing."""
    for hidden, inner in ((3584, 384), (3584, 3072)):
        tensors = [
            torch.zeros(1, *t.shape[1:], dtype=torch.uint8) for t in draw(1, hidden, inner, (1, 2))
        ]
        experts = pack_mxfp4(*tensors)
        packed = [t for m in vars(experts).values() for t in (m.words, m.scales)]
        assert sum(t.nbytes for t in packed) == sum(t.nbytes for t in tensors)


def test_no_experts() -> None:
    tensors = [t[:0] for t in draw(1, 64, 32, (1, 2))]
    assert pack_mxfp4(*tensors).num_experts == 0


@pytest.mark.parametrize("copies", [True, False])
def test_random_experts_look_like_packed_ones(copies: bool) -> None:
    packed = pack_mxfp4(*draw(3, 160, 72, (118, 122)))
    drawn = random_mxfp4(3, 160, 72, device="cpu", copies=copies)
    for name in ("gate_up", "down"):
        one, other = getattr(packed, name), getattr(drawn, name)
        assert (one.rows, one.columns, one.layout, one.wide) == (
            other.rows, other.columns, other.layout, other.wide,
        )  # fmt: skip
        for kind in ("words", "scales"):
            expected, got = getattr(one, kind), getattr(other, kind)
            assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
            assert got.is_contiguous() == copies and (got.stride(0) == 0) == (not copies)
        sizes = unpack(other).abs()
        assert sizes[sizes > 0].min() >= 0.5 * 2**-9 and sizes.max() <= 6 * 2**-6
        assert sizes.max() > 6 * 2**-7, "the largest scale is missing"


def test_a_seed_draws_the_same_experts() -> None:
    one, same, other = (
        random_mxfp4(1, 64, 64, device="cpu", generator=torch.Generator().manual_seed(seed))
        for seed in (1, 1, 2)
    )
    assert torch.equal(one.down.words, same.down.words)
    assert not torch.equal(one.down.words, other.down.words)


GOOD = draw(2, 64, 32, (110, 120))


@pytest.mark.parametrize(
    ("position", "replacement", "error", "message"),
    [
        (0, GOOD[0].int(), TypeError, "gate_up must be a uint8 tensor, got torch.int32"),
        (1, None, TypeError, "gate_up_scale must be a uint8 tensor, got NoneType"),
        (2, GOOD[2][0], ValueError, "down must have three dimensions"),
        (3, GOOD[3].to("meta"), ValueError, "down_scale must have three dimensions and be on cpu"),
        (1, GOOD[1][..., :1], ValueError, r"gate_up_scale has shape \[2, 64, 1\], expected"),
        (2, GOOD[2][:1], ValueError, r"down has shape \[1, 64, 16\], expected \[2, 64, 16\]"),
        (0, GOOD[0][:, :62], ValueError, "I even"),
        (3, torch.full_like(GOOD[3], 255), ValueError, "down_scale holds the byte 255"),
    ],
)
def test_refusals_name_the_argument(
    position: int, replacement: object, error: type[Exception], message: str
) -> None:
    arguments = list(GOOD)
    arguments[position] = replacement  # type: ignore[call-overload]
    with pytest.raises(error, match=message):
        pack_mxfp4(*arguments)


def test_refuses_an_unknown_layout() -> None:
    with pytest.raises(ValueError, match="layout must be 'rotated' or 'nibbles', got 'p3'"):
        pack_mxfp4(*GOOD, layout="p3")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("gate_up", "down", "error", "message"),
    [
        (
            torch.zeros(2, 15, 8),
            torch.zeros(2, 8, 7),
            ValueError,
            r"expected gate_up \[E, 2 I, H\]",
        ),
        (torch.zeros(2, 16, 8), torch.zeros(2, 8, 7), ValueError, r"needs down \[2, 8, 8\]"),
        (torch.zeros(2, 16, 8).int(), torch.zeros(2, 8, 8), TypeError, "gate_up is torch.int32"),
        (torch.zeros(2, 16, 8), torch.zeros(2, 8, 8).mT, ValueError, "down must be contiguous"),
        (torch.zeros(2, 16, 8), torch.zeros(2, 8, 8).half(), ValueError, "they must agree"),
    ],
)
def test_plain_weights_are_checked(
    gate_up: torch.Tensor, down: torch.Tensor, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        BF16Experts(gate_up, down)

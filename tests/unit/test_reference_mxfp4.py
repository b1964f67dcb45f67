"""MXFP4: every byte, every tie, ragged rows, groups without a value."""

from __future__ import annotations

import pytest
import torch

from kimik3_lab.reference import mxfp4

GRID = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def u8(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.uint8)


def test_every_byte_low_nibble_first() -> None:
    packed = torch.arange(256, dtype=torch.uint8).reshape(16, 16)
    scale = torch.full((16, 1), 127, dtype=torch.uint8)
    values = mxfp4.dequantize(packed, scale).reshape(256, 2)
    for byte in range(256):
        for column, nibble in enumerate((byte & 15, byte >> 4)):
            want = GRID[nibble & 7] * (-1 if nibble & 8 else 1)
            assert values[byte, column].item() == want, (byte, column)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_scale(dtype: torch.dtype) -> None:
    scale = torch.arange(256, dtype=torch.uint8).unsqueeze(-1)
    packed = u8([0x92] * 16).expand(256, 16)  # 1 in even columns, -0.5 in odd ones
    values = mxfp4.dequantize(packed, scale, dtype)
    assert values.dtype is dtype
    for byte in range(255):
        assert values[byte].double().tolist() == [2.0 ** (byte - 127), -(2.0 ** (byte - 128))] * 16
    assert values[255].isnan().all()


def test_scale_255_spoils_its_own_group_only() -> None:
    values = mxfp4.dequantize(u8([0x22] * 40), u8([127, 255, 128]))  # 80 columns: 32 + 32 + 16
    assert values[0, :32].eq(1).all()
    assert values[0, 32:64].isnan().all()
    assert values[0, 64:].eq(2).all()


def test_rounding_is_to_nearest_with_ties_to_the_even_code() -> None:
    # The 6 keeps the scale at 1. Codes 0 to 7 stand for the grid; ties lie between neighbours.
    ties = {0.25: 0, 0.75: 2, 1.25: 2, 1.75: 4, 2.5: 4, 3.5: 6, 5.0: 6}
    for value, code in ties.items():
        for delta, want in ((0.0, code), (-1e-3, None), (1e-3, None)):
            x = value + delta
            packed, scale = mxfp4.quantize(torch.tensor([[6.0, -x]]))
            assert scale.tolist() == [[127]]
            if want is None:
                want = min(range(8), key=lambda c: abs(GRID[c] - x))
            assert packed.item() == 7 | (want | 8) << 4, x


@pytest.mark.parametrize(
    ("largest", "exponent", "code"),
    [(6.0, 0, 7), (6.99, 0, 7), (7.0, 1, 6), (7.01, 1, 6), (4.0, 0, 6), (3.99, 0, 6), (3.4, -1, 7),
     (1.0, -2, 6)],
)  # fmt: skip
def test_scale_puts_the_largest_on_top_of_the_grid(
    largest: float, exponent: int, code: int
) -> None:
    packed, scale = mxfp4.quantize(torch.tensor([[largest, 0.0]]))
    decoded = mxfp4.dequantize(packed, scale)[0, 0].item()
    if largest == 3.99:  # rounds to 4 in whichever scale
        assert decoded == 4.0
        return
    assert (scale.item() - 127, packed.item()) == (exponent, code)


@pytest.mark.parametrize("columns", [2, 30, 32, 34, 64, 80])
def test_what_was_unpacked_packs_to_the_same_values(columns: int) -> None:
    generator = torch.Generator().manual_seed(columns)
    groups = -(-columns // 32)
    packed = torch.randint(0, 256, (5, columns // 2), generator=generator, dtype=torch.uint8)
    scale = torch.randint(4, 250, (5, groups), generator=generator, dtype=torch.uint8)
    values = mxfp4.dequantize(packed, scale, torch.float64)
    again, new_scale = mxfp4.quantize(values)
    assert again.shape == packed.shape and new_scale.shape == scale.shape
    assert again.dtype is new_scale.dtype is torch.uint8
    assert torch.equal(mxfp4.dequantize(again, new_scale, torch.float64), values)


def test_negative_zero_survives() -> None:
    values = mxfp4.dequantize(*mxfp4.quantize(torch.tensor([[-0.0, 1.0]])))
    assert torch.signbit(values[0, 0])


def test_error_is_at_most_a_fifth_of_the_largest() -> None:
    w = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    error = (mxfp4.dequantize(*mxfp4.quantize(w)) - w).abs().reshape(64, 3, 32).amax(-1)
    largest = w.abs().reshape(64, 3, 32).amax(-1)
    assert (error <= largest / 5 + 1e-6).all()
    assert error.max() > 0.1 * largest.max()  # four bits do cost something


def test_groups_run_along_the_input_dimension_and_do_not_mix() -> None:
    w = torch.cat((torch.full((1, 32), 6e-4), torch.full((1, 2), 600.0)), -1)
    packed, scale = mxfp4.quantize(w)
    assert scale.shape == (1, 2)
    values = mxfp4.dequantize(packed, scale)
    torch.testing.assert_close(values, w, rtol=0.2, atol=0)


def test_extremes() -> None:
    zeros = torch.zeros(1, 32)
    packed, scale = mxfp4.quantize(zeros)
    assert not packed.any() and scale.item() == 0
    tiny = torch.full((1, 2), 1e-45)  # below everything the format can hold
    assert mxfp4.quantize(tiny)[1].item() == 0
    huge = torch.full((1, 2), 1e300, dtype=torch.float64)
    packed, scale = mxfp4.quantize(huge)
    assert (packed.item(), scale.item()) == (0x77, 254)  # the largest value there is


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_group_without_a_value_gets_scale_255(bad: float) -> None:
    w = torch.ones(1, 64)
    w[0, 40] = bad
    _, scale = mxfp4.quantize(w)
    assert scale[0, 1] == 255 and scale[0, 0] != 255


def test_leading_dimensions() -> None:
    w = torch.randn(2, 3, 4, 64, generator=torch.Generator().manual_seed(1))
    packed, scale = mxfp4.quantize(w)
    assert packed.shape == (2, 3, 4, 32) and scale.shape == (2, 3, 4, 2)
    one = mxfp4.dequantize(*mxfp4.quantize(w[1, 2]))
    assert torch.equal(mxfp4.dequantize(packed, scale)[1, 2], one)


def test_refusals_say_what_is_wrong() -> None:
    with pytest.raises(ValueError, match=r"must be even.*got 33"):
        mxfp4.quantize(torch.ones(2, 33))
    with pytest.raises(ValueError, match=r"float tensor, got torch\.int64"):
        mxfp4.quantize(torch.ones(2, 32, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"needs a scale of shape \(1, 2\), got \(1, 1\)"):
        mxfp4.dequantize(u8([0] * 17), u8([127]))
    with pytest.raises(ValueError, match="uint8"):
        mxfp4.dequantize(torch.zeros(1, 16), u8([127]))

"""MXFP4, the four-bit format of the routed experts: two weights a byte, one scale per 32 weights.

Needs torch. Lesson 03 packs an expert by hand; lesson 04 reads the bytes inside a kernel.

A weight is a sign bit and three bits that choose a magnitude from ``0 0.5 1 1.5 2 3 4 6``
(``e2m1``). A group of 32 consecutive weights along the *input* dimension shares one scale byte
``s``, worth ``2 ** (s - 127)`` (``e8m0``). That is 17 bytes for 32 weights.

Source: OCP Microscaling Formats specification 1.0; byte order as in compressed-tensors 0.20.1
``mxfp4-pack-quantized``, which the released checkpoint uses.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kimik3_lab.reference.norms import compute_dtype
from kimik3_lab.tensors import MXFP4_GROUP

__all__ = ["MAGNITUDES", "SCALE_BIAS", "SCALE_NAN", "dequantize", "quantize"]

#: Magnitude of each three-bit code; bit 3 of a nibble is the sign.
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
#: A scale byte ``s`` stands for ``2 ** (s - SCALE_BIAS)``.
SCALE_BIAS = 127
#: The scale byte of a group that has no value.
SCALE_NAN = 255


def quantize(w: Tensor) -> tuple[Tensor, Tensor]:
    """Pack a matrix.

    The scale of a group is the power of two that puts its largest magnitude on the top of the
    grid: between 3.5 and 7 units, where 6 is the nearest code to everything above 5. Values are
    rounded to the nearest code, ties to the code with an even last bit.

    Parameters
    ----------
    w
        ``[..., out, in]``, any float type, ``in`` even. The last group of a row may be shorter
        than 32.

    Returns
    -------
    packed, scale
        ``uint8 [..., out, in / 2]`` (low nibble: even column) and
        ``uint8 [..., out, ceil(in / 32)]``. A group that holds a NaN or an infinity gets the
        scale 255.

    Raises
    ------
    ValueError
        If ``in`` is odd or ``w`` is not a float tensor.

    Examples
    --------
    >>> packed, scale = quantize(torch.tensor([[6.0, -0.5, 1.0, 0.0]]))
    >>> [hex(byte) for byte in packed[0].tolist()], scale[0].tolist()
    (['0x97', '0x2'], [127])
    """
    if not w.is_floating_point():
        raise ValueError(f"quantize takes a float tensor, got {w.dtype}: convert it first")
    columns = w.shape[-1]
    if columns % 2:
        raise ValueError(
            f"the input dimension must be even, as two weights share a byte; got {columns}"
        )
    wide = w.to(compute_dtype(w.dtype))
    groups = _in_groups(wide)
    largest = groups.abs().amax(-1)
    fraction, exponent = torch.frexp(largest)  # largest = fraction * 2**exponent, 0.5 <= fraction
    # In units of the scale the largest becomes 8 * fraction: 4 to 8. From 7 on, 8 is nearer than
    # 6, and a scale twice as large can express it.
    exponent = exponent - 3 + (fraction >= 7 / 8).int()
    exponent = exponent.clamp(-SCALE_BIAS, SCALE_NAN - 1 - SCALE_BIAS)
    exponent = torch.where(largest > 0, exponent, -SCALE_BIAS)
    units = groups.double() * torch.exp2(-exponent.double()).unsqueeze(-1)  # exact
    codes = _nearest_code(units.abs()) | (torch.signbit(units).to(torch.uint8) << 3)
    codes = codes.flatten(-2)[..., :columns]
    packed = codes[..., 0::2] | (codes[..., 1::2] << 4)
    scale = torch.where(torch.isfinite(largest), exponent + SCALE_BIAS, SCALE_NAN)
    return packed, scale.to(torch.uint8)


def dequantize(packed: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Unpack a matrix.

    Parameters
    ----------
    packed
        ``uint8 [..., out, in / 2]``.
    scale
        ``uint8 [..., out, ceil(in / 32)]``; 255 makes its group NaN.
    dtype
        Type of the result. Each value is exact in float32 and float64, and in bfloat16 too,
        as long as it lies within the range of that type.

    Returns
    -------
    Tensor
        ``[..., out, in]``.

    Raises
    ------
    ValueError
        If a tensor is not ``uint8`` or the shapes do not belong together.

    Examples
    --------
    >>> dequantize(torch.tensor([[0x97, 0x02]], dtype=torch.uint8),
    ...            torch.tensor([[128]], dtype=torch.uint8))
    tensor([[12., -1.,  2.,  0.]])
    """
    if packed.dtype != torch.uint8 or scale.dtype != torch.uint8:
        raise ValueError(f"expected two uint8 tensors, got {packed.dtype} and {scale.dtype}")
    columns = 2 * packed.shape[-1]
    expected = (*packed.shape[:-1], -(-columns // MXFP4_GROUP))
    if tuple(scale.shape) != expected:
        raise ValueError(
            f"packed {tuple(packed.shape)} holds {columns} columns and needs a scale of shape "
            f"{expected}, got {tuple(scale.shape)}"
        )
    codes = torch.stack((packed & 0xF, packed >> 4), -1).flatten(-2).long()
    grid = torch.tensor(
        (*MAGNITUDES, *(-m for m in MAGNITUDES)), dtype=torch.float64, device=packed.device
    )
    exponent = scale.double() - SCALE_BIAS
    factor = torch.where(scale == SCALE_NAN, torch.nan, torch.exp2(exponent))
    factor = factor.repeat_interleave(MXFP4_GROUP, -1)[..., :columns]
    return (grid[codes] * factor).to(dtype)


def _in_groups(w: Tensor) -> Tensor:
    """``[..., in]`` to ``[..., groups, 32]``, the last group filled up with zeros."""
    missing = -w.shape[-1] % MXFP4_GROUP
    return torch.nn.functional.pad(w, (0, missing)).unflatten(-1, (-1, MXFP4_GROUP))


def _nearest_code(magnitude: Tensor) -> Tensor:
    """Index of the nearest magnitude, ties to the even index; above the grid, its top."""
    grid = torch.tensor(MAGNITUDES, dtype=magnitude.dtype, device=magnitude.device)
    middles = (grid[1:] + grid[:-1]) / 2
    # A value exactly in the middle of codes c and c + 1 goes up only if c is odd.
    below = (magnitude.unsqueeze(-1) > middles).sum(-1)
    at_or_below = (magnitude.unsqueeze(-1) >= middles).sum(-1)
    return torch.where(below % 2 == 0, below, at_or_below).to(torch.uint8)

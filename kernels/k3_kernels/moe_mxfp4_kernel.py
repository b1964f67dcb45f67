"""Triton code that turns packed MXFP4 words into matrix operands; used by the expert GEMMs.

Needs Triton. :mod:`k3_kernels.moe_layout` describes the packed layouts.

A word of 32 bits holds eight weights of one row: four *planes* of two, one in each half of the
word. A plane is brought to the bits ``1000_0001_1100_0000`` of both halves and is then a pair of
bfloat16 numbers: sign, the two exponent bits at the low end of the exponent, the mantissa bit on
top of the mantissa. Such a number is the weight times ``2 ** -126``, the subnormal 0.5 included,
with no arithmetic at all. The scale of its group makes up for the power of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["plane", "plane_scale", "scaled_dot", "scaled_plane"]


@triton.jit
def rotate(q, N: tl.constexpr):
    """Rotate a 32-bit word left: one funnel shift on the GPU."""
    return (q << N) | (q >> (32 - N))


@triton.jit
def plane(
    q,
    J: tl.constexpr,
    ROTATED: tl.constexpr,
    COMPUTE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Plane J of words ``[ROWS, COLUMNS / 2]`` as ``[ROWS, COLUMNS]`` numbers, times 2 ** -126."""
    if ROTATED:
        # Three planes lie one rotation away from their places. Rotations by 6 and by 14 collect the
        # four bits that are left of every half: nine operations for eight weights.
        if J == 0:
            pair = rotate(q, 4) & 0x81C081C0
        elif J == 1:
            pair = rotate(q, 10) & 0x81C081C0
        elif J == 2:
            pair = (rotate(q, 6) & 0x00400040) | (rotate(q, 14) & 0x81808180)
        else:
            pair = q & 0x81C081C0
    else:
        # Nibbles in order: the sign is in place after one shift, the magnitude after another.
        high = q << (12 - 4 * J)
        pair = (high & 0x80008000) | ((high >> 6) & 0x01C001C0)
    low = (pair & 0xFFFF).to(tl.uint16)
    high = (pair >> 16).to(tl.uint16)
    halves = tl.join(low, high).reshape(ROWS, COLUMNS)
    if COMPUTE == tl.bfloat16:  # noqa: SIM300
        numbers = halves.to(tl.bfloat16, bitcast=True)
    else:
        numbers = (halves.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return numbers


@triton.jit
def plane_scale(s, J: tl.constexpr, WIDE: tl.constexpr):
    """Scale of plane J out of four bytes.

    Packing has added 126 to every byte if all fit, so that a byte is the exponent field of the
    scale times ``2 ** 126``: one mask and one shift. WIDE bytes are the checkpoint's, and the
    missing factor is up to the caller.
    """
    if WIDE:
        byte = (s >> (8 * J)) & 0xFF
        # Zero stands for 2 ** -127, which float32 has as a subnormal only.
        field = tl.where(byte == 0, 0x00400000, byte << 23)
    elif J < 3:
        field = (s & (0xFF << (8 * J))) << (23 - 8 * J)
    else:
        field = (s >> 1) & 0x7F800000
    return field.to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def scaled_dot(
    q,
    s,
    x,
    acc,
    J: tl.constexpr,
    ROTATED: tl.constexpr,
    WIDE: tl.constexpr,
    COMPUTE: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Add plane J times ``x [GROUP, tokens]`` to the accumulator, scaled in float32."""
    product = tl.dot(plane(q, J, ROTATED, COMPUTE, ROWS, GROUP), x, input_precision="ieee")
    if WIDE:
        acc += product * 8.507059173023462e37 * plane_scale(s, J, WIDE)[:, None]  # 2 ** 126
    else:
        acc += product * plane_scale(s, J, WIDE)[:, None]
    return acc


@triton.jit
def scaled_plane(
    q,
    s,
    J: tl.constexpr,
    ROTATED: tl.constexpr,
    WIDE: tl.constexpr,
    COMPUTE: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Plane J with its scale multiplied in: the weights themselves, exact in bfloat16."""
    numbers = plane(q, J, ROTATED, COMPUTE, ROWS, GROUP)
    if WIDE:
        wide = (numbers.to(tl.float32) * 8.507059173023462e37) * plane_scale(s, J, WIDE)[:, None]
        scaled = wide.to(COMPUTE)
    else:
        scaled = numbers * plane_scale(s, J, WIDE).to(COMPUTE)[:, None]
    return scaled

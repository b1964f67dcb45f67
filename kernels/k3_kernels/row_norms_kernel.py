"""Triton code of :mod:`k3_kernels.row_norms`: RMSNorm of pieces of rows.

Needs Triton.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["row_norms_kernel"]


@triton.jit
def row_norms_kernel(
    out_ptr,  # [T, HEADS * WIDTH + TAIL]
    x_ptr,  # [T, HEADS * WIDTH + TAIL]
    weight_ptr,  # [WIDTH]
    gate_ptr,  # [T, HEADS * WIDTH], read if HAS_GATE
    out_stride,
    x_stride,
    gate_stride,
    rows,  # T * HEADS
    eps,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    TAIL: tl.constexpr,  # elements behind the head that are copied as they are; one head then
    HAS_GATE: tl.constexpr,
    ROWS: tl.constexpr,  # heads of a program
    BLOCK: tl.constexpr,  # at least WIDTH and TAIL
    COMPUTE: tl.constexpr,  # tl.float32: everything between load and store
):
    """One program normalises ROWS heads, of one token or of several."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token, head = (row // HEADS).to(tl.int64)[:, None], (row % HEADS)[:, None]
    cols = tl.arange(0, BLOCK)[None, :]
    present = row[:, None] < rows
    inside = present & (cols < WIDTH)
    x = tl.load(x_ptr + token * x_stride + head * WIDTH + cols, mask=inside, other=0.0).to(COMPUTE)
    weight = tl.load(weight_ptr + cols, mask=cols < WIDTH, other=0.0).to(COMPUTE)
    scale = tl.rsqrt(tl.sum(x * x, 1) / WIDTH + eps)
    result = x * scale[:, None] * weight
    if HAS_GATE:
        gate = tl.load(gate_ptr + token * gate_stride + head * WIDTH + cols, mask=inside, other=0.0)
        result = result / (1.0 + tl.exp(-gate.to(COMPUTE)))
    out = out_ptr + token * out_stride + head * WIDTH + cols
    tl.store(out, result.to(out_ptr.dtype.element_ty), mask=inside)
    if TAIL:
        behind = present & (cols < TAIL)
        tail = tl.load(x_ptr + token * x_stride + WIDTH + cols, mask=behind, other=0.0)
        tl.store(out + WIDTH, tail.to(out_ptr.dtype.element_ty), mask=behind)

"""Triton code of :mod:`k3_kernels.gating`: one half of a projection bounds or opens the other.

Needs Triton.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["gating_kernel"]


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def gating_kernel(
    out_ptr,  # [T, WIDTH]
    x_ptr,  # [T, WIDTH]
    y_ptr,  # [T, WIDTH]
    out_stride,
    x_stride,
    y_stride,
    beta,
    linear_beta,
    WIDTH: tl.constexpr,
    KIND: tl.constexpr,  # "situ", "silu" or "sigmoid"
    BLOCK: tl.constexpr,  # elements of a program
    COMPUTE: tl.constexpr,  # tl.float32: everything between load and store
):
    """One program computes BLOCK elements of a row."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < WIDTH
    x = tl.load(x_ptr + row * x_stride + cols, mask=inside, other=0.0).to(COMPUTE)
    y = tl.load(y_ptr + row * y_stride + cols, mask=inside, other=0.0).to(COMPUTE)
    if KIND == "situ":
        # tanh(z) = 2 sigmoid(2 z) - 1
        bounded = beta * (2.0 * _sigmoid(2.0 * x / beta) - 1.0) * _sigmoid(x)
        result = bounded * (linear_beta * (2.0 * _sigmoid(2.0 * y / linear_beta) - 1.0))
    elif KIND == "silu":
        result = x * _sigmoid(x) * y
    else:
        result = x * _sigmoid(y)
    tl.store(out_ptr + row * out_stride + cols, result.to(out_ptr.dtype.element_ty), mask=inside)

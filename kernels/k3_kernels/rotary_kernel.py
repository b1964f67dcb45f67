"""Triton code of :func:`k3_kernels.rotary.rotate_pairs`.

Needs Triton.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["rotate_kernel"]


@triton.jit
def rotate_kernel(
    x_ptr,  # [T, HEADS, 2 * PAIRS], changed in place
    cos_ptr,  # [T, PAIRS]
    sin_ptr,  # [T, PAIRS]
    x_stride,
    head_stride,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_P: tl.constexpr,
    COMPUTE: tl.constexpr,  # tl.float32: everything between load and store
):
    """One program rotates all heads of a token."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BLOCK_H)[:, None]
    pair = tl.arange(0, BLOCK_P)[None, :]
    inside = (head < HEADS) & (pair < PAIRS)
    at = x_ptr + token * x_stride + head * head_stride + 2 * pair
    even = tl.load(at, mask=inside, other=0.0).to(COMPUTE)
    odd = tl.load(at + 1, mask=inside, other=0.0).to(COMPUTE)
    cos = tl.load(cos_ptr + token * PAIRS + pair, mask=pair < PAIRS, other=0.0).to(COMPUTE)
    sin = tl.load(sin_ptr + token * PAIRS + pair, mask=pair < PAIRS, other=0.0).to(COMPUTE)
    dtype = x_ptr.dtype.element_ty
    tl.store(at, (even * cos - odd * sin).to(dtype), mask=inside)
    tl.store(at + 1, (even * sin + odd * cos).to(dtype), mask=inside)

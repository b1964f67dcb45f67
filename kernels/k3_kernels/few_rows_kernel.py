"""Triton code of :func:`k3_kernels.few_rows.few_rows_linear`: a product with few rows of input.

Needs Triton.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["few_rows_kernel"]


# One binary serves any number of rows of a block.
@triton.jit(do_not_specialize=["T"])
def few_rows_kernel(
    out_ptr,  # [T, N]
    x_ptr,  # [T, K]
    weight_ptr,  # [N, K]
    T,
    N,
    K,
    out_stride,
    x_stride,
    weight_stride,
    BLOCK_T: tl.constexpr,  # at least T: columns of the matrix instruction
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    COMPUTE: tl.constexpr,  # type of the products' operands; sums are float32
):
    """One program computes BLOCK_N columns of the output for all rows."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    t = tl.arange(0, BLOCK_T)
    k = tl.arange(0, BLOCK_K)
    # Weights are the left operand, so that few rows of x waste little of the instruction.
    weight = weight_ptr + n.to(tl.int64)[:, None] * weight_stride + k[None, :]
    x = x_ptr + t.to(tl.int64)[None, :] * x_stride + k[:, None]
    total = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        inside = k < K - start
        w = tl.load(weight + start, mask=(n < N)[:, None] & inside[None, :], other=0.0)
        rows = tl.load(x + start, mask=(t < T)[None, :] & inside[:, None], other=0.0)
        total = tl.dot(w.to(COMPUTE), rows.to(COMPUTE), total, input_precision="ieee")
    out = out_ptr + t.to(tl.int64)[None, :] * out_stride + n[:, None]
    mask = (n < N)[:, None] & (t < T)[None, :]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=mask)

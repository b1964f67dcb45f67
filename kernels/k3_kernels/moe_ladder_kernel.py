"""Triton code of the one kernel that only the ladder needs: SiTU on its own.

Needs Triton. Used by :mod:`k3_kernels.moe_ladder`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from k3_kernels.moe_gemm_kernel import situ

__all__ = ["situ_kernel"]


@triton.jit
def situ_kernel(
    out_ptr,  # [rows, I]
    gate_up_ptr,  # [rows, 2 I]
    I: tl.constexpr,  # noqa: E741
    BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr,
    BLOCK: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """One program: BLOCK columns of a row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < I
    at = gate_up_ptr + row * (2 * I) + columns
    gate = tl.load(at, mask=mask, other=0.0).to(COMPUTE)
    up = tl.load(at + I, mask=mask, other=0.0).to(COMPUTE)
    result = situ(gate, up, BETA, LINEAR_BETA).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * I + columns, result, mask=mask)

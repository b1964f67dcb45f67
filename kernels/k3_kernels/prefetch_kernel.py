"""Triton code that other kernels share: ask for memory early, without waiting for it.

Needs Triton. The kernels of AttnRes and of KDA's decode and recover use it.

A kernel that is launched while the one before it still runs may not read what that one, or those
before it, could still write. It may bring it into the second-level cache, though, which is where
all writes end up: a line that changes later is changed there. So what a kernel will read first can
travel while the kernel before drains, when the memory has little else to do.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["prefetch_rows"]


@triton.jit
def prefetch_rows(ptr, stride, COUNT: tl.constexpr, BYTES: tl.constexpr):
    """Ask the second-level cache for BYTES of each of COUNT <= 32 rows, ``stride`` elements apart.

    Nothing is read and nothing waits; sm_90 and later. The first COUNT threads ask for a row each.
    Starts and sizes are rounded down to 16 bytes, as the instruction wants; allocations start so.
    """
    if COUNT > 0 and BYTES >= 16:
        start = ptr.to(tl.int64)
        apart = (tl.zeros([], tl.int64) + stride) * (ptr.dtype.element_ty.primitive_bitwidth // 8)
        tl.inline_asm_elementwise(
            """{
            .reg .pred %mine;
            .reg .b32 %thread;
            .reg .b64 %row;
            mov.u32 %thread, %tid.x;
            setp.lt.u32 %mine, %thread, $3;
            cvt.u64.u32 %row, %thread;
            mad.lo.s64 %row, %row, $2, $1;
            and.b64 %row, %row, -16;
            @%mine cp.async.bulk.prefetch.L2.global [%row], $4;
            mov.u32 $0, 0;
            }""",
            "=r,l,l,r,r",
            [start, apart, COUNT, BYTES // 16 * 16],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip

"""Triton code of :func:`k3_kernels.finalize.finalize`: weighted sum over choices, then RMSNorm.

Needs Triton. :mod:`k3_kernels.finalize` describes the operator and chooses the constants below.
"""

# Triton compiles `row + (x,)` but no starred expression.
# ruff: noqa: RUF005

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["finalize_kernel"]


@triton.jit
def finalize_kernel(
    out_ptr,  # [T, WIDTH]
    pairs_ptr,  # [T * TOP_K, WIDTH]
    weights_ptr,  # [T, TOP_K], read if HAS_WEIGHTS
    ids_ptr,  # [T, TOP_K], read if HAS_IDS
    map_ptr,  # [map_size], read if HAS_MAP
    norm_ptr,  # [WIDTH], read if HAS_NORM
    out_stride,
    pairs_stride,
    first_expert,
    num_experts,
    map_size,
    eps,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    HAS_IDS: tl.constexpr,  # leave out pairs whose expert is on another rank
    HAS_MAP: tl.constexpr,
    HAS_NORM: tl.constexpr,
    BLOCK_D: tl.constexpr,  # elements of a piece of a row
    PIECES: tl.constexpr,  # pieces of one program; all of the row's if HAS_NORM
    PDL: tl.constexpr,  # launched before the previous kernel has ended: wait for it
    COMPUTE: tl.constexpr,  # tl.float32: everything between load and store
):
    """One program sums PIECES pieces of one token's row."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * (PIECES * BLOCK_D)
    row = pairs_ptr + token * TOP_K * pairs_stride
    total = ()
    for _ in tl.static_range(PIECES):
        total = total + (tl.zeros([BLOCK_D], COMPUTE),)
    # In the order of the choices: the sum of a token is the same in every run and for every T.
    for choice in tl.static_range(TOP_K):
        # What another rank computes was never written here and may be anything: columns to read.
        end = WIDTH
        if HAS_IDS:
            expert = tl.load(ids_ptr + token * TOP_K + choice)
            if HAS_MAP:
                known = (expert >= 0) & (expert < map_size)
                expert = tl.load(map_ptr + expert, mask=known, other=-1).to(expert.dtype)
            else:
                expert -= first_expert
            end = tl.where((expert >= 0) & (expert < num_experts), WIDTH, 0)
        if HAS_WEIGHTS:
            weight = tl.load(weights_ptr + token * TOP_K + choice).to(COMPUTE)
        new_total = ()
        for piece in tl.static_range(PIECES):
            cols = start + piece * BLOCK_D + tl.arange(0, BLOCK_D)
            value = tl.load(row + cols, mask=cols < end, other=0.0).to(COMPUTE)
            if HAS_WEIGHTS:
                value = value * weight
            new_total = new_total + (total[piece] + value,)
        total = new_total
        row += pairs_stride

    if HAS_NORM:
        # The model keeps the sum in its own type; the norm has to see the same value.
        square = tl.zeros([BLOCK_D], COMPUTE)
        rounded = ()
        for piece in tl.static_range(PIECES):
            value = total[piece].to(out_ptr.dtype.element_ty).to(COMPUTE)
            rounded = rounded + (value,)
            square += value * value
        scale = tl.rsqrt(tl.sum(square, 0) / WIDTH + eps)
        total = ()
        for piece in tl.static_range(PIECES):
            cols = start + piece * BLOCK_D + tl.arange(0, BLOCK_D)
            norm = tl.load(norm_ptr + cols, mask=cols < WIDTH, other=0.0).to(COMPUTE)
            total = total + (rounded[piece] * scale * norm,)
    out_row = out_ptr + token * out_stride
    for piece in tl.static_range(PIECES):
        cols = start + piece * BLOCK_D + tl.arange(0, BLOCK_D)
        result = total[piece].to(out_ptr.dtype.element_ty)
        tl.store(out_row + cols, result, mask=cols < WIDTH)

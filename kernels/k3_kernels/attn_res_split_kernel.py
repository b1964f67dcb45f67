"""Triton code of :func:`k3_kernels.attn_res` for few tokens: many programs a token, two launches.

Needs Triton. :mod:`k3_kernels.attn_res` describes the operator and chooses the constants below.

:func:`attn_res_scores_kernel` takes the sums that the logits need, a slice of a token a program;
:func:`attn_res_mix_kernel` has asked for the blocks meanwhile and only has to mix them.
"""

# Triton compiles `row + (x,)` but no starred expression.
# ruff: noqa: RUF005

from __future__ import annotations

import triton
import triton.language as tl

from k3_kernels.attn_res_kernel import load_row, load_rows, store_row
from k3_kernels.prefetch_kernel import prefetch_rows

__all__ = ["attn_res_mix_kernel", "attn_res_scores_kernel"]


@triton.jit
def attn_res_scores_kernel(
    partial_ptr,  # [T, slices, ROWS, 2]: of each source sum(s * s) and sum(key_norm * query * s)
    prefix_out_ptr,  # [T, H], written if STORE_PREFIX
    blocks_ptr,  # [N_BLOCKS, T, H], not read if N_BLOCKS is 0
    prefix_ptr,  # [T, H]
    delta_ptr,  # [T, H], read if HAS_DELTA
    query_ptr,  # [H]
    key_norm_ptr,  # [H]
    prefix_out_stride,
    blocks_stride,
    blocks_token_stride,
    prefix_stride,
    delta_stride,
    N_BLOCKS: tl.constexpr,
    HIDDEN: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    STORE_PREFIX: tl.constexpr,
    ROWS: tl.constexpr,  # power of two above N_BLOCKS
    SLICE: tl.constexpr,  # columns of a program
    PDL: tl.constexpr,  # launched before the previous kernel has ended: wait for it
    PREFETCH: tl.constexpr,  # ask for blocks and prefix before it has ended
    COMPUTE: tl.constexpr,
):
    """One program sums over one slice of one token's sources."""
    if PREFETCH:
        start = tl.program_id(0).to(tl.int64) * blocks_token_stride + tl.program_id(1) * SLICE
        size: tl.constexpr = SLICE * blocks_ptr.dtype.element_ty.primitive_bitwidth // 8
        if (tl.program_id(1) + 1) * SLICE <= HIDDEN:
            prefetch_rows(blocks_ptr + start, blocks_stride, N_BLOCKS, size)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    cols = part * SLICE + tl.arange(0, SLICE)
    rows = tl.arange(0, ROWS)
    inside = cols < HIDDEN
    blocks = tl.load(
        blocks_ptr
        + token * blocks_token_stride
        + rows[:, None].to(tl.int64) * blocks_stride
        + cols[None, :],
        mask=(rows < N_BLOCKS)[:, None] & inside[None, :],
        other=0.0,
    ).to(COMPUTE)
    live = tl.load(prefix_ptr + token * prefix_stride + cols, mask=inside, other=0.0)
    if HAS_DELTA:
        delta = tl.load(delta_ptr + token * delta_stride + cols, mask=inside, other=0.0)
        live = (live.to(COMPUTE) + delta.to(COMPUTE)).to(prefix_out_ptr.dtype.element_ty)
    query = tl.load(query_ptr + cols, mask=inside, other=0.0).to(COMPUTE)
    probe = query * tl.load(key_norm_ptr + cols, mask=inside, other=0.0).to(COMPUTE)
    if STORE_PREFIX:
        tl.store(prefix_out_ptr + token * prefix_out_stride + cols, live, mask=inside)
    sources = tl.where((rows == N_BLOCKS)[:, None], live.to(COMPUTE)[None, :], blocks)
    # All sums in one exchange between threads.
    sums = tl.sum(tl.join(sources * sources, sources * probe[None, :]), 1)
    partial = partial_ptr + (token * tl.num_programs(1) + part) * (2 * ROWS)
    tl.store(partial + 2 * rows[:, None] + tl.arange(0, 2)[None, :], sums)


@triton.jit
def attn_res_mix_kernel(
    out_ptr,  # [T, H]
    partial_ptr,  # [T, SLICES, ROWS, 2]
    blocks_ptr,  # [N_BLOCKS, T, H], not read if N_BLOCKS is 0
    prefix_ptr,  # [T, H]: the new prefix
    norm_ptr,  # [H]
    out_stride,
    blocks_stride,
    blocks_token_stride,
    prefix_stride,
    key_eps,
    norm_eps,
    N_BLOCKS: tl.constexpr,
    HIDDEN: tl.constexpr,
    ROWS: tl.constexpr,
    SLICES: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """One program mixes and normalises one token, given the sums of the first launch."""
    token = tl.program_id(0).to(tl.int64)
    # The blocks were there before the first launch: they may come while it still runs.
    blocks = load_rows(
        blocks_ptr + token * blocks_token_stride, blocks_stride, N_BLOCKS, HIDDEN, BLOCK_H
    )
    norm = load_row(norm_ptr, HIDDEN, BLOCK_H)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    rows = tl.arange(0, ROWS)
    partial = partial_ptr + token * (SLICES * 2 * ROWS)
    partial = partial + 2 * rows[:, None] + tl.arange(0, 2)[None, :]
    # Every warp adds up all of it for itself: the loads wait once, an exchange would wait twice.
    sums = tl.zeros([ROWS, 2], COMPUTE)
    for _ in tl.static_range(SLICES):
        sums += tl.load(partial)
        partial += 2 * ROWS
    square, dot = tl.split(sums)
    sources = blocks + (load_row(prefix_ptr + token * prefix_stride, HIDDEN, BLOCK_H),)
    logit = dot * tl.rsqrt(square / HIDDEN + key_eps)
    logit = tl.where(rows <= N_BLOCKS, logit, -float("inf"))
    share = tl.exp(logit - tl.max(logit, 0))
    share = share / tl.sum(share, 0)
    mix = ()
    for _ in tl.static_range((HIDDEN + BLOCK_H - 1) // BLOCK_H):
        mix = mix + (tl.zeros([BLOCK_H], COMPUTE),)
    for source in tl.static_range(N_BLOCKS + 1):
        weight = tl.sum(tl.where(rows == source, share, 0.0), 0)
        added = ()
        for piece in tl.static_range((HIDDEN + BLOCK_H - 1) // BLOCK_H):
            added = added + (mix[piece] + sources[source][piece].to(COMPUTE) * weight,)
        mix = added
    square = tl.zeros([BLOCK_H], COMPUTE)
    for piece in tl.static_range((HIDDEN + BLOCK_H - 1) // BLOCK_H):
        square += mix[piece] * mix[piece]
    scale = tl.rsqrt(tl.sum(square, 0) / HIDDEN + norm_eps)
    out = ()
    for piece in tl.static_range((HIDDEN + BLOCK_H - 1) // BLOCK_H):
        result = mix[piece] * scale * norm[piece].to(COMPUTE)
        out = out + (result.to(out_ptr.dtype.element_ty),)
    store_row(out_ptr + token * out_stride, out, HIDDEN, BLOCK_H)

"""Triton code of :func:`k3_kernels.attn_res` for a few dozen tokens: both launches in slices.

Needs Triton. :mod:`k3_kernels.attn_res` describes the operator and chooses the constants below.

The last norm needs the mean square of the whole mix, which a program that mixes only a slice does
not see. It is ``sum_ij a_i a_j (s_i . s_j)``, though: :func:`attn_res_gram_kernel` takes all
products of sources, a slice of a token a program, and :func:`attn_res_slice_kernel` needs nothing
else to mix and normalise its own slice. Tensor cores take the products; the probe is a row like the
sources, or three: what bfloat16 leaves of a float32 is again rounded to bfloat16, twice.
"""

# Triton compiles `row + (x,)` but no starred expression.
# ruff: noqa: RUF005

from __future__ import annotations

import triton
import triton.language as tl

from k3_kernels.prefetch_kernel import prefetch_rows

__all__ = ["attn_res_gram_kernel", "attn_res_slice_kernel"]


@triton.jit
def attn_res_gram_kernel(
    gram_ptr,  # [T, slices, ROWS, ROWS]: products of the sources and of the probe's three parts
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
    ROWS: tl.constexpr,  # power of two, at least N_BLOCKS + 4 and 16
    SLICE: tl.constexpr,  # columns of a program
    PARTS: tl.constexpr,  # of a step that are multiplied beside each other, one a warp
    STEPS: tl.constexpr,  # that the slice is multiplied in: shared memory holds one
    PDL: tl.constexpr,  # launched before the previous kernel has ended: wait for it
    PREFETCH: tl.constexpr,  # ask for blocks and prefix before it has ended
    COMPUTE: tl.constexpr,
):
    """One program multiplies one slice of one token's sources with each other."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    if PREFETCH:
        size: tl.constexpr = SLICE * blocks_ptr.dtype.element_ty.primitive_bitwidth // 8
        if (part + 1) * SLICE <= HIDDEN:
            start = token * blocks_token_stride + part * SLICE
            prefetch_rows(blocks_ptr + start, blocks_stride, N_BLOCKS, size)
            prefetch_rows(prefix_ptr + token * prefix_stride + part * SLICE, 0, 1, size)
    rows = tl.arange(0, ROWS)
    stored = prefix_out_ptr.dtype.element_ty
    STEP: tl.constexpr = SLICE // STEPS
    # Weights do not come from the launch before.
    probes = ()
    for step in tl.static_range(STEPS):
        cols = part * SLICE + step * STEP + tl.arange(0, STEP)
        query = tl.load(query_ptr + cols, mask=cols < HIDDEN, other=0.0).to(COMPUTE)
        key_norm = tl.load(key_norm_ptr + cols, mask=cols < HIDDEN, other=0.0).to(COMPUTE)
        high = (query * key_norm).to(stored)
        rest = query * key_norm - high.to(COMPUTE)
        middle = rest.to(stored)
        probes = probes + ((high, middle, (rest - middle.to(COMPUTE)).to(stored)),)
    if PDL:
        tl.extra.cuda.gdc_wait()
        # Not earlier: the second launch reads the blocks at once.
        tl.extra.cuda.gdc_launch_dependents()
    # All loads before the first exchange between threads, which none of them passes.
    tiles = ()
    lives = ()
    for step in tl.static_range(STEPS):
        cols = part * SLICE + step * STEP + tl.arange(0, STEP)
        tile = tl.load(
            blocks_ptr
            + token * blocks_token_stride
            + rows[:, None].to(tl.int64) * blocks_stride
            + cols[None, :],
            mask=(rows < N_BLOCKS)[:, None] & (cols < HIDDEN)[None, :],
            other=0.0,
        )
        tiles = tiles + (tile,)
        live = tl.load(prefix_ptr + token * prefix_stride + cols, mask=cols < HIDDEN, other=0.0)
        if HAS_DELTA:
            row = delta_ptr + token * delta_stride
            delta = tl.load(row + cols, mask=cols < HIDDEN, other=0.0)
            live = (live.to(COMPUTE) + delta.to(COMPUTE)).to(stored)
        lives = lives + (live,)
    gram = tl.zeros([PARTS, ROWS, ROWS], COMPUTE)
    for step in tl.static_range(STEPS):
        cols = part * SLICE + step * STEP + tl.arange(0, STEP)
        if STORE_PREFIX:
            row = prefix_out_ptr + token * prefix_out_stride
            tl.store(row + cols, lives[step], mask=cols < HIDDEN)
        tile = tl.where((rows == N_BLOCKS)[:, None], lives[step][None, :], tiles[step])
        for third in tl.static_range(3):
            of_probe = (rows == N_BLOCKS + 1 + third)[:, None]
            tile = tl.where(of_probe, probes[step][third][None, :], tile)
        side = tl.permute(tl.reshape(tile, [ROWS, PARTS, STEP // PARTS]), (1, 0, 2))
        # Products of two bfloat16 are exact in float32, in which they are added up.
        gram = tl.dot(side, tl.permute(side, (0, 2, 1)), gram, input_precision="ieee")
    total = tl.sum(gram, 0)
    place = gram_ptr + (token * tl.num_programs(1) + part) * (ROWS * ROWS)
    tl.store(place + rows[:, None] * ROWS + rows[None, :], total)


@triton.jit
def attn_res_slice_kernel(
    out_ptr,  # [T, H]
    gram_ptr,  # [T, SLICES, ROWS, ROWS]
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
    SLICES: tl.constexpr,  # of the first launch
    SLICE: tl.constexpr,  # columns of a program of this one
    PDL: tl.constexpr,
    EARLY: tl.constexpr,  # let the next launch start before the first of these has ended
    COMPUTE: tl.constexpr,
):
    """One program mixes and normalises one slice of one token, given all products of sources."""
    token = tl.program_id(0).to(tl.int64)
    if PDL and EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    cols = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    inside = cols < HIDDEN
    # The blocks were there before the first launch: they may come while it still runs.
    source = blocks_ptr + token * blocks_token_stride + cols
    sources = ()
    for _ in tl.static_range(N_BLOCKS):
        sources = sources + (tl.load(source, mask=inside, other=0.0),)
        source += blocks_stride
    norm = tl.load(norm_ptr + cols, mask=inside, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        if not EARLY:
            tl.extra.cuda.gdc_launch_dependents()
    rows = tl.arange(0, ROWS)
    gram = tl.zeros([ROWS, ROWS], COMPUTE)
    place = gram_ptr + token * (SLICES * ROWS * ROWS) + rows[:, None] * ROWS + rows[None, :]
    for _ in tl.static_range(SLICES):
        gram += tl.load(place)
        place += ROWS * ROWS
    live = tl.load(prefix_ptr + token * prefix_stride + cols, mask=inside, other=0.0)
    sources = sources + (live,)
    is_source = (rows <= N_BLOCKS)[:, None] & (rows <= N_BLOCKS)[None, :]
    diagonal = (rows[:, None] == rows[None, :]) & is_source
    of_probe = (rows > N_BLOCKS)[:, None] & (rows <= N_BLOCKS)[None, :]
    square = tl.sum(tl.where(diagonal, gram, 0.0), 0)
    dot = tl.sum(tl.where(of_probe, gram, 0.0), 0)  # rows behind the probe's are zero
    logit = dot * tl.rsqrt(square / HIDDEN + key_eps)
    logit = tl.where(rows <= N_BLOCKS, logit, -float("inf"))
    share = tl.exp(logit - tl.max(logit, 0))
    share = share / tl.sum(share, 0)
    weighted = tl.sum(tl.where(is_source, gram * share[None, :], 0.0), 1)
    column = tl.sum(tl.where(rows[:, None] == rows[None, :], share[None, :], 0.0), 1)
    # Rounding must not make a mean square negative.
    mean_square = tl.maximum(tl.sum(weighted * column, 0), 0.0) / HIDDEN
    scale = tl.rsqrt(mean_square + norm_eps)
    mix = tl.zeros([SLICE], COMPUTE)
    for row in tl.static_range(N_BLOCKS + 1):
        weight = tl.sum(tl.where(rows == row, share, 0.0), 0)
        mix += sources[row].to(COMPUTE) * weight
    result = mix * scale * norm.to(COMPUTE)
    tl.store(out_ptr + token * out_stride + cols, result.to(out_ptr.dtype.element_ty), mask=inside)

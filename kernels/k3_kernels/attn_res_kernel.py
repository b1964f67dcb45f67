"""Triton code of :func:`k3_kernels.attn_res`: add, mix over depth, RMSNorm, in one launch.

Needs Triton. :mod:`k3_kernels.attn_res` describes the operator and chooses the constants below.

A row of H elements is a tuple of pieces of BLOCK_H: 7168 is seven times 1024, and a single Triton
tile can only have a power of two. The loops over pieces are unrolled, so that a piece lives in
registers like any tile.
"""

# Triton compiles `row + (x,)` but no starred expression.
# ruff: noqa: RUF005

from __future__ import annotations

import triton
import triton.language as tl

from k3_kernels.prefetch_kernel import prefetch_rows

__all__ = ["attn_res_kernel", "load_row", "load_rows", "store_row"]


@triton.jit
def load_row(ptr, HIDDEN: tl.constexpr, BLOCK_H: tl.constexpr):
    """Load a row as a tuple of pieces; zeros stand behind its end."""
    row = ()
    for piece in tl.static_range((HIDDEN + BLOCK_H - 1) // BLOCK_H):
        cols = piece * BLOCK_H + tl.arange(0, BLOCK_H)
        if (piece + 1) * BLOCK_H <= HIDDEN:
            row = row + (tl.load(ptr + cols),)
        else:
            row = row + (tl.load(ptr + cols, mask=cols < HIDDEN, other=0.0),)
    return row


@triton.jit
def store_row(ptr, row, HIDDEN: tl.constexpr, BLOCK_H: tl.constexpr):
    """Store a tuple of pieces as a row."""
    for piece in tl.static_range((HIDDEN + BLOCK_H - 1) // BLOCK_H):
        cols = piece * BLOCK_H + tl.arange(0, BLOCK_H)
        if (piece + 1) * BLOCK_H <= HIDDEN:
            tl.store(ptr + cols, row[piece])
        else:
            tl.store(ptr + cols, row[piece], mask=cols < HIDDEN)


@triton.jit
def load_rows(ptr, stride, COUNT: tl.constexpr, HIDDEN: tl.constexpr, BLOCK_H: tl.constexpr):
    """Load COUNT rows, ``stride`` apart."""
    rows = ()
    for _ in tl.static_range(COUNT):
        rows = rows + (load_row(ptr, HIDDEN, BLOCK_H),)
        ptr += stride
    return rows


@triton.jit
def sum_each(vectors, COUNT: tl.constexpr, LOG: tl.constexpr):
    """Sum each of COUNT <= 2 ** LOG vectors; one exchange between threads serves all of them."""
    level = vectors
    for _ in tl.static_range(2**LOG - COUNT):
        level = level + (tl.zeros_like(vectors[0]),)
    for step in tl.static_range(LOG):
        joined = ()
        for pair in tl.static_range(2 ** (LOG - 1 - step)):
            joined = joined + (tl.join(level[2 * pair], level[2 * pair + 1]),)
        level = joined
    sums = (tl.sum(level[0], 0),)
    for step in tl.static_range(LOG):
        halves = ()
        for part in tl.static_range(2**step):
            first, second = tl.split(sums[part])
            halves = halves + (first, second)
        sums = halves
    return sums


@triton.jit
def fold_sources(
    sources,
    probe,
    mix,
    highest,
    total,
    eps,
    FIRST: tl.constexpr,  # there is no mix yet
    COUNT: tl.constexpr,
    LOG: tl.constexpr,  # 2 ** LOG is at least COUNT
    HIDDEN: tl.constexpr,
    BLOCK_H: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """One step of the online softmax: take COUNT sources into the running mix."""
    # Lane by lane first: one multiply-add an element, and one reduction a group instead of seven
    # a row.
    partial = ()
    for row in tl.static_range(COUNT):
        square = tl.zeros([BLOCK_H], COMPUTE)
        dot = tl.zeros([BLOCK_H], COMPUTE)
        for piece in tl.static_range((HIDDEN + BLOCK_H - 1) // BLOCK_H):
            value = sources[row][piece].to(COMPUTE)
            square += value * value
            dot += value * probe[piece]
        partial = partial + (square, dot)
    sums = sum_each(partial, 2 * COUNT, LOG + 1)
    new_highest = highest
    logits = ()
    for row in tl.static_range(COUNT):
        inverse_rms = tl.rsqrt(sums[2 * row] / HIDDEN + eps)
        logit = sums[2 * row + 1] * inverse_rms
        logits = logits + (logit,)
        new_highest = tl.maximum(new_highest, logit)
    # `mix` and `total` are relative to the highest logit so far; a higher one rescales them.
    new_total = total
    new_mix = mix
    if not FIRST:
        rescale = tl.exp(highest - new_highest)
        new_total = total * rescale
        new_mix = ()
        for piece in tl.static_range((HIDDEN + BLOCK_H - 1) // BLOCK_H):
            new_mix = new_mix + (mix[piece] * rescale,)
    for row in tl.static_range(COUNT):
        weight = tl.exp(logits[row] - new_highest)
        new_total += weight
        added = ()
        for piece in tl.static_range((HIDDEN + BLOCK_H - 1) // BLOCK_H):
            # Values are the sources themselves, not their normalised keys.
            added = added + (new_mix[piece] + sources[row][piece].to(COMPUTE) * weight,)
        new_mix = added
    return new_mix, new_highest, new_total


@triton.jit
def attn_res_kernel(
    out_ptr,  # [T, H]
    prefix_out_ptr,  # [T, H], written if STORE_PREFIX
    blocks_ptr,  # [N_BLOCKS, T, H], not read if N_BLOCKS is 0
    prefix_ptr,  # [T, H]
    delta_ptr,  # [T, H], read if HAS_DELTA
    query_ptr,  # [H]
    key_norm_ptr,  # [H]
    norm_ptr,  # [H]
    out_stride,
    prefix_out_stride,
    blocks_stride,  # from one block to the next
    blocks_token_stride,
    prefix_stride,
    delta_stride,
    key_eps,
    norm_eps,
    N_BLOCKS: tl.constexpr,
    HIDDEN: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    STORE_PREFIX: tl.constexpr,
    BLOCK_H: tl.constexpr,  # elements of a piece of a row
    GROUP: tl.constexpr,  # blocks that are taken into the mix together
    LOG_GROUP: tl.constexpr,  # 2 ** LOG_GROUP is at least GROUP
    STAGES: tl.constexpr,  # STAGES - 1 groups are in flight; 0: all blocks are, in registers
    PRELOAD: tl.constexpr,  # ask for prefix, delta and norm weight at the start, not when needed
    PDL: tl.constexpr,  # launched before the previous kernel has ended: wait for it
    PREFETCH: tl.constexpr,  # ask for blocks and prefix before it has ended, and make the probe
    COMPUTE: tl.constexpr,  # tl.float32: everything between load and store
):
    """One program computes one token."""
    # 64 bit: a long prefill times eight blocks times 7168 does not fit 31.
    token = tl.program_id(0).to(tl.int64)
    prefix_row = prefix_ptr + token * prefix_stride
    delta_row = delta_ptr + token * delta_stride
    block_row = blocks_ptr + token * blocks_token_stride

    if PREFETCH:
        size: tl.constexpr = HIDDEN * blocks_ptr.dtype.element_ty.primitive_bitwidth // 8
        prefetch_rows(block_row, blocks_stride, N_BLOCKS, size)
        prefetch_rows(prefix_row, 0, 1, size)
        query = load_row(query_ptr, HIDDEN, BLOCK_H)
        key_norm = load_row(key_norm_ptr, HIDDEN, BLOCK_H)
        early_probe = ()
        for piece in tl.static_range((HIDDEN + BLOCK_H - 1) // BLOCK_H):
            product = query[piece].to(COMPUTE) * key_norm[piece].to(COMPUTE)
            early_probe = early_probe + (product,)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if STAGES == 0:
        blocks = load_rows(block_row, blocks_stride, N_BLOCKS, HIDDEN, BLOCK_H)
    if PRELOAD:
        # Only started here: nothing waits for them until the blocks have been asked for too.
        prefix = load_row(prefix_row, HIDDEN, BLOCK_H)
        if HAS_DELTA:
            delta = load_row(delta_row, HIDDEN, BLOCK_H)
        norm = load_row(norm_ptr, HIDDEN, BLOCK_H)
    if not PREFETCH:
        query = load_row(query_ptr, HIDDEN, BLOCK_H)
        key_norm = load_row(key_norm_ptr, HIDDEN, BLOCK_H)
    # The key of a source is its RMSNorm, weight included. The weight moves to the query once, and
    # the root mean square comes out of the dot product, so no normalised source is ever formed.
    probe = ()
    mix = ()
    for piece in tl.static_range((HIDDEN + BLOCK_H - 1) // BLOCK_H):
        if PREFETCH:
            probe = probe + (early_probe[piece],)
        else:
            probe = probe + (query[piece].to(COMPUTE) * key_norm[piece].to(COMPUTE),)
        mix = mix + (tl.zeros([BLOCK_H], COMPUTE),)
    highest = -float("inf")
    total = 0.0
    if STAGES == 0:
        for group in tl.static_range(N_BLOCKS // GROUP):
            sources = ()
            for row in tl.static_range(GROUP):
                sources = sources + (blocks[group * GROUP + row],)
            mix, highest, total = fold_sources(
                sources, probe, mix, highest, total, key_eps, group == 0, GROUP, LOG_GROUP, HIDDEN,
                BLOCK_H, COMPUTE,
            )  # fmt: skip
        sources = ()
        for row in tl.static_range(N_BLOCKS % GROUP):
            sources = sources + (blocks[N_BLOCKS // GROUP * GROUP + row],)
    else:
        for _ in tl.range(0, N_BLOCKS // GROUP, num_stages=STAGES):
            sources = load_rows(block_row, blocks_stride, GROUP, HIDDEN, BLOCK_H)
            block_row += GROUP * blocks_stride
            mix, highest, total = fold_sources(
                sources, probe, mix, highest, total, key_eps, False, GROUP, LOG_GROUP, HIDDEN,
                BLOCK_H, COMPUTE,
            )  # fmt: skip
        sources = load_rows(block_row, blocks_stride, N_BLOCKS % GROUP, HIDDEN, BLOCK_H)

    # The live prefix is the last source, so that it and the sublayer's output may arrive late.
    if not PRELOAD:
        prefix = load_row(prefix_row, HIDDEN, BLOCK_H)
        if HAS_DELTA:
            delta = load_row(delta_row, HIDDEN, BLOCK_H)
    if HAS_DELTA:
        live = ()
        for piece in tl.static_range((HIDDEN + BLOCK_H - 1) // BLOCK_H):
            added = prefix[piece].to(COMPUTE) + delta[piece].to(COMPUTE)
            # The next layer reads the stored, rounded sum: the mix has to see the same value.
            live = live + (added.to(prefix_out_ptr.dtype.element_ty),)
    else:
        live = prefix
    if STORE_PREFIX:
        store_row(prefix_out_ptr + token * prefix_out_stride, live, HIDDEN, BLOCK_H)
    sources = sources + (live,)
    mix, highest, total = fold_sources(
        sources, probe, mix, highest, total, key_eps, N_BLOCKS < GROUP, N_BLOCKS % GROUP + 1,
        LOG_GROUP, HIDDEN, BLOCK_H, COMPUTE,
    )  # fmt: skip

    # The norm of the following sublayer, on the mix in full precision. `mix` still lacks its
    # division by `total`: the scalar takes it, which saves a multiplication an element.
    if not PRELOAD:
        norm = load_row(norm_ptr, HIDDEN, BLOCK_H)
    square = tl.zeros([BLOCK_H], COMPUTE)
    for piece in tl.static_range((HIDDEN + BLOCK_H - 1) // BLOCK_H):
        square += mix[piece] * mix[piece]
    share = 1.0 / total
    mean_square = tl.sum(square, 0) / HIDDEN * share * share
    scale = share * tl.rsqrt(mean_square + norm_eps)
    out = ()
    for piece in tl.static_range((HIDDEN + BLOCK_H - 1) // BLOCK_H):
        result = mix[piece] * scale * norm[piece].to(COMPUTE)
        out = out + (result.to(out_ptr.dtype.element_ty),)
    store_row(out_ptr + token * out_stride, out, HIDDEN, BLOCK_H)

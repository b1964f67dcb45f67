"""Triton code that loads the tiles of the expert GEMMs for many tokens.

Needs Triton. Used by the kernels of :mod:`k3_kernels.moe_gemm` for many tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

from k3_kernels.moe_mxfp4_kernel import scaled_plane

__all__ = ["slot_range", "token_tile", "weight_tile"]


@triton.jit
def side_by_side(left, right, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Two tiles ``[ROWS, COLUMNS]`` as one of twice the columns; moves no data."""
    return tl.join(left, right).permute(0, 2, 1).reshape(ROWS, 2 * COLUMNS)


@triton.jit
def weight_tile(
    words_ptr, scales_ptr, rows, step,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, MXFP4: tl.constexpr, ROTATED: tl.constexpr,
    WIDE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WORDS: tl.constexpr,
    COMPUTE: tl.constexpr,
):  # fmt: skip
    """Load BLOCK_K columns of weights as ``[BLOCK_N, BLOCK_K]``; zeros outside if it is plain."""
    if MXFP4:
        q = tl.load(words_ptr + step * WORDS).to(tl.uint32, bitcast=True)
        s = tl.load(scales_ptr + step * (WORDS // 16)).to(tl.uint32, bitcast=True)
        p0 = scaled_plane(q, s, 0, ROTATED, WIDE, COMPUTE, BLOCK_N, 32)
        p1 = scaled_plane(q, s, 1, ROTATED, WIDE, COMPUTE, BLOCK_N, 32)
        p2 = scaled_plane(q, s, 2, ROTATED, WIDE, COMPUTE, BLOCK_N, 32)
        p3 = scaled_plane(q, s, 3, ROTATED, WIDE, COMPUTE, BLOCK_N, 32)
        p01 = side_by_side(p0, p1, BLOCK_N, 32)
        tile = side_by_side(p01, side_by_side(p2, p3, BLOCK_N, 32), BLOCK_N, 64)
    else:
        if ROWS % BLOCK_N == 0 and COLUMNS % BLOCK_K == 0:
            plain = tl.load(words_ptr + step * BLOCK_K)
        else:
            k = step * BLOCK_K + tl.arange(0, BLOCK_K)
            inside = (rows[:, None] < ROWS) & (k[None, :] < COLUMNS)
            plain = tl.load(words_ptr + step * BLOCK_K, mask=inside, other=0.0)
        tile = plain.to(COMPUTE)
    return tile


@triton.jit
def token_tile(
    ptr, offsets, valid, step,
    COLUMNS: tl.constexpr, MASKED: tl.constexpr, BLOCK_K: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Load BLOCK_K columns of the tokens at ``ptr + offsets``; ``offsets [BLOCK_K, tokens]``.

    MASKED leaves out what is not valid. A tile with few tokens is otherwise filled with copies of
    one, which cost as much of the way from the L2 cache as tokens of their own.
    """
    # Offsets and not pointers are kept from step to step: half the registers.
    at = ptr + (offsets + step * BLOCK_K)
    if COLUMNS % BLOCK_K != 0:
        inside = step * BLOCK_K + tl.arange(0, BLOCK_K)[:, None] < COLUMNS
        tile = tl.load(at, mask=inside & valid[None, :], other=0.0)
    elif MASKED:
        tile = tl.load(at, mask=valid[None, :], other=0.0)
    else:
        tile = tl.load(at)
    return tile.to(COMPUTE)


@triton.jit
def slot_range(ids_ptr, origin, first, end, num_pairs, SIZE: tl.constexpr):
    """Slots of a tile, their pairs, and which of them are ours and hold a pair.

    The others stand for the tile's first pair: what is computed for them is not stored, and a load
    without a mask, which saves registers, stays inside the array.
    """
    slots = first + tl.arange(0, SIZE)
    pairs = tl.load(ids_ptr + slots, mask=slots < end, other=num_pairs)
    valid = pairs < num_pairs
    # The first slot of a tile always holds a pair, but not that of its second part.
    any_pair = tl.load(ids_ptr + origin)
    return tl.where(valid, slots, origin), tl.where(valid, pairs, any_pair), valid

"""Triton code that lists the tiles of the expert GEMMs, and reads the list.

Needs Triton. :mod:`k3_kernels.moe_tiles` describes the list; the GEMMs for many tokens read it.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["list_tiles_kernel", "listed_tile"]


@triton.jit
def larger(a, b):
    """Return the larger of two numbers, for a scan."""
    return tl.maximum(a, b)


@triton.jit
def list_tiles_kernel(
    tiles_ptr,  # [max_tiles, 8]
    block_experts_ptr,
    max_blocks,
    max_tiles,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Write the list, CHUNK blocks at a time; one program."""
    listed = 0
    run = 0  # where the last expert's blocks begin
    first = 0
    while first < max_blocks:
        at = first + tl.arange(0, CHUNK)
        expert = tl.load(block_experts_ptr + at, mask=at < max_blocks, other=-1)
        before = tl.load(block_experts_ptr + at - 1, mask=(at > 0) & (at < max_blocks), other=-2)
        begin = tl.associative_scan(tl.where(expert != before, at, run), 0, larger)
        run = tl.max(begin, 0)
        index = at - begin
        starts = (expert >= 0) & (index % TILE == 0)
        tile = listed + tl.cumsum(starts.to(tl.int32), 0) - 1
        own = tile - index // TILE  # the expert's first tile
        count = starts.to(tl.int32)
        for ahead in tl.static_range(1, TILE):
            mask = starts & (at + ahead < max_blocks)
            follower = tl.load(block_experts_ptr + at + ahead, mask=mask, other=-2)
            count += (follower == expert).to(tl.int32)
        entry = tiles_ptr + tile * 8
        tl.store(entry, expert, mask=starts)
        tl.store(entry + 1, at, mask=starts)
        tl.store(entry + 2, count, mask=starts)
        tl.store(entry + 3, own, mask=starts)
        after = tl.load(block_experts_ptr + at + 1, mask=at + 1 < max_blocks, other=-2)
        tl.store(tiles_ptr + own * 8 + 4, index // TILE + 1, mask=(expert >= 0) & (after != expert))
        listed += tl.sum(starts.to(tl.int32), 0)
        first += CHUNK
    tl.store(tiles_ptr + 5, listed)
    while listed < max_tiles:
        at = listed + tl.arange(0, CHUNK)
        entry = tiles_ptr + at * 8
        tl.store(entry, at * 0, mask=at < max_tiles)
        tl.store(entry + 1, at * 0, mask=at < max_tiles)
        tl.store(entry + 2, at * 0, mask=at < max_tiles)
        tl.store(entry + 3, at, mask=at < max_tiles)
        tl.store(entry + 4, at * 0 + 1, mask=at < max_tiles)
        listed += CHUNK


@triton.jit
def listed_tile(tiles_ptr, program, N_BLOCKS: tl.constexpr, PLACES: tl.constexpr):
    """Find a program's tile.

    An expert's programs are dealt out with the rows of its weights outermost: all its tiles then
    ask for the same rows at the same time and find them in the L2 cache. Tile after tile, an
    expert's weights have left that cache before they are asked for again: they are as large.

    Programs that start together work at PLACES places of the list. At one, the multiprocessors all
    have an expert with many tokens, which takes arithmetic, and then all have some with few, which
    take memory.

    Returns
    -------
    expert
    block, count
        First block of the tile and how many there are, 0 if there is nothing to do.
    n_block
        Rows of the weights.
    """
    if PLACES > 1:
        apart = tl.load(tiles_ptr + 5) * N_BLOCKS // PLACES
        dealt = program % PLACES * apart + program // PLACES
        program = tl.where(program < apart * PLACES, dealt, program)
    own = tl.load(tiles_ptr + program // N_BLOCKS * 8 + 3)
    tiles = tl.load(tiles_ptr + own * 8 + 4)
    inside = program - own * N_BLOCKS
    entry = tiles_ptr + (own + inside % tiles) * 8
    return tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), inside // tiles

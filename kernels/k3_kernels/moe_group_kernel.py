"""Triton code that tells a program of an expert GEMM whose weights it reads and for which rows.

Needs Triton. Used by the kernels of :mod:`k3_kernels.moe_gemm`.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["pair_group", "sorted_group", "tile_of_blocks"]


@triton.jit
def sorted_group(sorted_ids_ptr, block_experts_ptr, block, num_pairs, BLOCK_M: tl.constexpr):
    """Expert (negative: none) and pair ids of a block that :func:`k3_kernels.dispatch` made."""
    expert = tl.load(block_experts_ptr + block)
    slots = block * BLOCK_M + tl.arange(0, BLOCK_M)
    pairs = tl.load(sorted_ids_ptr + slots)
    return expert, slots, pairs, pairs < num_pairs


@triton.jit
def pair_group(
    expert_ids_ptr,
    pair,
    num_pairs,
    first_expert,
    NUM_EXPERTS: tl.constexpr,
    MAX_PAIRS: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Do the dispatch of few pairs inside the program: no launch before, no list in memory.

    There is one program for each pair. Those that share an expert find each other by comparing all
    ids with their own; the first of every BLOCK_M of them, in the order of pairs, computes for all
    of these and the others return.

    Returns
    -------
    expert
        -1: another program does it. -2: the expert is not one of ours.
    pairs, valid
        ``[BLOCK_M]``.
    """
    every = tl.arange(0, MAX_PAIRS)
    ids = tl.load(expert_ids_ptr + every, mask=every < num_pairs, other=-1)
    mine = tl.load(expert_ids_ptr + pair)
    same = (ids == mine) & (every < num_pairs)
    before = tl.sum((same & (every < pair)).to(tl.int32), 0)
    rank = tl.cumsum(same.to(tl.int32), 0) - 1 - before
    columns = tl.arange(0, BLOCK_M)
    chosen = same[:, None] & (rank[:, None] == columns[None, :])
    pairs = tl.sum(tl.where(chosen, every[:, None], 0), 0)
    valid = tl.sum(chosen.to(tl.int32), 0) > 0
    local = (mine >= first_expert) & (mine < first_expert + NUM_EXPERTS)
    expert = tl.where(local, mine - first_expert, -2)
    expert = tl.where(before % BLOCK_M == 0, expert, -1)
    return expert.to(tl.int32), pairs, valid


@triton.jit
def tile_of_blocks(block_experts_ptr, block, max_blocks, TILE: tl.constexpr):
    """Join up to TILE neighbouring blocks of one expert into the tile of one program.

    Returns
    -------
    expert
    count
        Blocks of the tile that starts here; 0 if another block starts it.
    """
    expert = tl.load(block_experts_ptr + block)
    # The blocks of an expert lie together, so counting those before this one is enough. 64 at once:
    # more than one round is for experts with thousands of tokens.
    before = 0
    end = block
    while end > 0:
        at = end - 1 - tl.arange(0, 64)
        same = tl.load(block_experts_ptr + at, mask=at >= 0, other=-1) == expert
        found = tl.sum(same.to(tl.int32), 0)
        before += found
        end = tl.where(found == 64, end - 64, 0)
    ahead = block + tl.arange(0, 16)
    mask = (ahead < max_blocks) & (tl.arange(0, 16) < TILE)
    same = tl.load(block_experts_ptr + ahead, mask=mask, other=-1) == expert
    count = tl.sum((same & mask).to(tl.int32), 0)
    return expert, tl.where((before % TILE == 0) & (expert >= 0), count, 0)

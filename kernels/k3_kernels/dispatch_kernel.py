"""Triton code of :func:`k3_kernels.dispatch.dispatch`: sort pairs by expert, pad to blocks.

Needs Triton. :mod:`k3_kernels.dispatch` describes the operator and chooses the constants below.

:func:`dispatch_kernel` does everything in one program. :func:`count_kernel` and then
:func:`place_kernel` do it with one program for each slice of the pairs.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["count_kernel", "dispatch_kernel", "place_kernel"]

#: Behind every real key.
ABSENT = tl.constexpr(0x7FFFFFFF)


@triton.jit
def longer_run(expert, run, later_expert, later_run):
    """Join two neighbouring stretches of a sorted sequence: the length of the run at the end."""
    return later_expert, later_run + tl.where(expert == later_expert, run, 0)


@triton.jit
def local_experts(ids_ptr, map_ptr, offsets, mask, first_expert, num_experts, map_size,
                  HAS_MAP: tl.constexpr):  # fmt: skip
    """Load the experts of some pairs: their index on this rank, and whether they are on it."""
    ids = tl.load(ids_ptr + offsets, mask=mask, other=-1)
    if HAS_MAP:
        known = (ids >= 0) & (ids < map_size)
        local = tl.load(map_ptr + ids, mask=known, other=-1)
    else:
        local = ids - first_expert
    here = (local >= 0) & (local < num_experts)
    return local.to(tl.int32), here & mask


@triton.jit
def sort_pairs(local, here, index, LOG_P: tl.constexpr):
    """Sort pairs by expert, then by index; also the rank of each within its expert."""
    keys = tl.sort(tl.where(here, (local << LOG_P) | index, ABSENT))
    present = keys < ABSENT
    expert = keys >> LOG_P
    _, run = tl.associative_scan((expert, tl.full([2**LOG_P], 1, tl.int32)), 0, longer_run)
    return present, expert, keys & (2**LOG_P - 1), run - 1


@triton.jit
def fill(ptr, value, start, step, length, WIDTH: tl.constexpr):
    """Write ``value`` to every ``step``-th stretch of WIDTH elements."""
    for first in tl.range(start, length, step):
        offsets = first + tl.arange(0, WIDTH)
        tl.store(ptr + offsets, tl.zeros([WIDTH], tl.int32) + value, mask=offsets < length)


@triton.jit
def dispatch_kernel(
    sorted_ptr,  # [max_padded]
    block_experts_ptr,  # [max_blocks]
    padded_ptr,  # [1]
    counts_ptr,  # [num_experts], written if COUNTS
    ids_ptr,  # [num_pairs]
    map_ptr,  # [map_size], read if HAS_MAP
    num_pairs,
    max_padded,
    max_blocks,
    first_expert,
    num_experts,
    map_size,
    LOG_P: tl.constexpr,  # 2 ** LOG_P is at least num_pairs
    BLOCK_SIZE: tl.constexpr,
    HAS_MAP: tl.constexpr,
    COUNTS: tl.constexpr,
    PDL: tl.constexpr,  # launched before the previous kernel has ended: wait for it
):
    """Do everything in one program."""
    WIDTH: tl.constexpr = 2**LOG_P
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    index = tl.arange(0, WIDTH)
    local, here = local_experts(
        ids_ptr, map_ptr, index, index < num_pairs, first_expert, num_experts, map_size, HAS_MAP
    )
    # Padding first, while the ids are on their way; what is used is overwritten below.
    fill(sorted_ptr, num_pairs, 0, WIDTH, max_padded, WIDTH)
    fill(block_experts_ptr, -1, 0, WIDTH, max_blocks, WIDTH)
    if COUNTS:
        fill(counts_ptr, 0, 0, WIDTH, num_experts, WIDTH)
    present, expert, pair, rank = sort_pairs(local, here, index, LOG_P)
    # Blocks follow one another as the experts do, so counting the pairs that begin one numbers it.
    begins = present & (rank % BLOCK_SIZE == 0)
    block = tl.cumsum(begins.to(tl.int32), 0) - 1
    tl.debug_barrier()  # the padding is written by other threads of this program
    tl.store(sorted_ptr + block * BLOCK_SIZE + rank % BLOCK_SIZE, pair, mask=present)
    tl.store(block_experts_ptr + block, expert, mask=begins)
    tl.store(padded_ptr, tl.sum(begins.to(tl.int32), 0) * BLOCK_SIZE)
    if COUNTS:
        tl.atomic_max(counts_ptr + expert, rank + 1, mask=present, sem="relaxed")


@triton.jit
def count_kernel(
    sorted_ptr,  # [max_padded], filled with the padding value
    block_experts_ptr,  # [max_blocks], filled with -1
    ranks_ptr,  # [num_pairs]: rank of a pair among those of its slice with the same expert
    slice_counts_ptr,  # [slices, num_experts]
    ids_ptr,  # [num_pairs]
    map_ptr,  # [map_size], read if HAS_MAP
    num_pairs,
    max_padded,
    max_blocks,
    first_expert,
    num_experts,
    map_size,
    LOG_P: tl.constexpr,  # a slice has 2 ** LOG_P pairs
    HAS_MAP: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program counts the pairs of each expert in one slice and ranks them."""
    WIDTH: tl.constexpr = 2**LOG_P
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    number = tl.program_id(0)
    index = tl.arange(0, WIDTH)
    offsets = number * WIDTH + index
    local, here = local_experts(
        ids_ptr, map_ptr, offsets, offsets < num_pairs, first_expert, num_experts, map_size, HAS_MAP
    )
    step = tl.num_programs(0) * WIDTH
    counts_row = slice_counts_ptr + number * num_experts
    fill(counts_row, 0, 0, WIDTH, num_experts, WIDTH)
    fill(sorted_ptr, num_pairs, number * WIDTH, step, max_padded, WIDTH)
    fill(block_experts_ptr, -1, number * WIDTH, step, max_blocks, WIDTH)
    present, expert, pair, rank = sort_pairs(local, here, index, LOG_P)
    tl.store(ranks_ptr + number * WIDTH + pair, rank, mask=present)
    tl.debug_barrier()  # the zeros are written by other threads of this program
    tl.atomic_max(counts_row + expert, rank + 1, mask=present, sem="relaxed")


@triton.jit
def place_kernel(
    sorted_ptr,
    block_experts_ptr,
    padded_ptr,  # [1]
    counts_ptr,  # [num_experts], written if COUNTS
    ranks_ptr,
    slice_counts_ptr,
    ids_ptr,
    map_ptr,
    num_pairs,
    first_expert,
    num_experts,
    map_size,
    LOG_P: tl.constexpr,
    LOG_E: tl.constexpr,  # 2 ** LOG_E is at least num_experts
    ROWS: tl.constexpr,  # slices whose counts are read at once
    BLOCK_SIZE: tl.constexpr,
    HAS_MAP: tl.constexpr,
    COUNTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program places the pairs of one slice."""
    WIDTH: tl.constexpr = 2**LOG_P
    number = tl.program_id(0)
    offsets = number * WIDTH + tl.arange(0, WIDTH)
    mask = offsets < num_pairs
    local, here = local_experts(
        ids_ptr, map_ptr, offsets, mask, first_expert, num_experts, map_size, HAS_MAP
    )
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    rank = tl.load(ranks_ptr + offsets, mask=here, other=0)

    experts = tl.arange(0, 2**LOG_E)
    total = tl.zeros([2**LOG_E], tl.int32)
    earlier = tl.zeros([2**LOG_E], tl.int32)
    slices = tl.num_programs(0)
    for first in tl.range(0, slices, ROWS):
        rows = first + tl.arange(0, ROWS)
        counts = tl.load(
            slice_counts_ptr + rows[:, None] * num_experts + experts[None, :],
            mask=(rows < slices)[:, None] & (experts < num_experts)[None, :],
            other=0,
        )
        total += tl.sum(counts, 0)
        earlier += tl.sum(tl.where((rows < number)[:, None], counts, 0), 0)
    padded = (total + BLOCK_SIZE - 1) // BLOCK_SIZE * BLOCK_SIZE
    base = tl.cumsum(padded, 0) - padded + earlier
    slot = tl.gather(base, tl.where(here, local, 0), 0) + rank
    tl.store(sorted_ptr + slot, offsets, mask=here)
    # Every expert starts at a multiple of the block size.
    begins = here & (slot % BLOCK_SIZE == 0)
    tl.store(block_experts_ptr + slot // BLOCK_SIZE, local, mask=begins)
    if number == 0:
        tl.store(padded_ptr, tl.sum(padded, 0))
        if COUNTS:
            tl.store(counts_ptr + experts, total, mask=experts < num_experts)

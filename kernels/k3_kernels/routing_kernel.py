"""Triton code of :func:`k3_kernels.routing.route`: sigmoid, bias, top-k, renormalise, one launch.

Needs Triton. :mod:`k3_kernels.routing` describes the operator and chooses the constants below.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["route_kernel"]


@triton.jit
def preference_of(logit, bias):
    """Return the score of an expert and what it is ranked by."""
    score = 1.0 / (1.0 + tl.exp(-logit))
    return score, score + bias


@triton.jit
def ordered(value):
    """Map floats to integers that compare the same way; nothing is above NaN."""
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(value == value, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)


@triton.jit
def upper_half(n_dims: tl.constexpr, bit: tl.constexpr):
    """Return 1 where a bit of the index is set, over a tensor of shape [2] * n_dims."""
    return tl.reshape(tl.arange(0, 2), [1] * (n_dims - 1 - bit) + [2] + [1] * bit)


@triton.jit
def across(cube, n_dims: tl.constexpr, bit: tl.constexpr):
    """Exchange the elements whose indices differ in one bit."""
    return cube ^ tl.xor_sum(cube, n_dims - 1 - bit, keep_dims=True)


@triton.jit
def merge(cube, n_dims: tl.constexpr, stage: tl.constexpr, upward):
    """Sort bitonic runs of 2 ** stage elements, ascending where ``upward``."""
    for step in tl.static_range(stage):
        other = across(cube, n_dims, stage - 1 - step)
        swap = (cube < other) != ((upper_half(n_dims, stage - 1 - step) ^ upward) != 0)
        cube = tl.where(swap, other, cube)
    return cube


@triton.jit
def network_top_k(keys, LOG_K: tl.constexpr, LOG_N: tl.constexpr, SORTED: tl.constexpr):
    """Return the 2 ** LOG_K largest of 2 ** LOG_N keys, if SORTED descending."""
    cube = tl.reshape(keys, [2] * LOG_N)
    for stage in tl.static_range(1, LOG_K):
        cube = merge(cube, LOG_N, stage, upper_half(LOG_N, stage))
    cube = merge(cube, LOG_N, LOG_K, 0)
    # Two descending runs: the larger of each element and the other run's mirror image are the
    # upper half of both, as one bitonic run.
    for level in tl.static_range(LOG_N - LOG_K):
        mirrored = cube
        for bit in tl.static_range(LOG_K):
            mirrored = across(mirrored, LOG_N - level, bit)
        cube = tl.where(upper_half(LOG_N - level, LOG_K) == 1, mirrored, cube)
        cube = tl.max(cube, LOG_N - level - 1 - LOG_K)
        if SORTED or level < LOG_N - LOG_K - 1:
            cube = merge(cube, LOG_N - level - 1, LOG_K, 0)
    return tl.reshape(cube, [2**LOG_K])


@triton.jit
def largest_keys(
    keys,
    TOP_K: tl.constexpr,
    LOG_E: tl.constexpr,
    LOG_K: tl.constexpr,
    VECTOR: tl.constexpr,
    WARPS: tl.constexpr,
    SELECT: tl.constexpr,
):
    """Return the largest of distinct keys, the TOP_K best in the first TOP_K places."""
    if SELECT == "argmax":
        slots = tl.arange(0, 2**LOG_K)
        best = tl.zeros([2**LOG_K], tl.uint32)
        for slot in tl.static_range(TOP_K):
            largest = tl.max(keys, 0)
            best = tl.where(slots == slot, largest, best)
            keys = tl.where(keys == largest, 0, keys)
        return best
    # A thread holds VECTOR neighbours of every chunk that the program loads. Renaming the indices,
    # which moves nothing, makes the bits that the network compares first those that tell the
    # elements of one thread apart: most of its steps then need no exchange between threads.
    CHUNKS: tl.constexpr = 2**LOG_E // (WARPS * 32 * VECTOR)
    lanes = tl.reshape(keys, [CHUNKS, WARPS * 32, VECTOR])
    lanes = tl.permute(lanes, [1, 0, 2])
    if SELECT == "topk":
        return tl.topk(tl.reshape(lanes, [2**LOG_E]), 2**LOG_K)
    # If not all of them are wanted, they have to be in order.
    return network_top_k(tl.reshape(lanes, [2**LOG_E]), LOG_K, LOG_E, TOP_K != 2**LOG_K)


@triton.jit
def exact_search(
    row,
    bias_ptr,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDTH: tl.constexpr,  # columns at once: few, so that this rare path needs no extra registers
    COMPUTE: tl.constexpr,
):
    """Find the TOP_K experts one after the other by their whole preferences."""
    LOWEST: tl.constexpr = -0x80000000  # below every number
    slots = tl.arange(0, BLOCK_K)
    experts = tl.zeros([BLOCK_K], tl.int32)
    last = tl.full([], 0x7FFFFFFF, tl.int32)
    last_id = tl.full([], -1, tl.int32)
    for slot in tl.range(TOP_K):
        top = tl.full([], LOWEST, tl.int32)
        top_id = tl.full([], 0, tl.int32)
        for start in tl.range(0, NUM_EXPERTS, WIDTH):
            cols = start + tl.arange(0, WIDTH)
            real = cols < NUM_EXPERTS
            _, preference = preference_of(
                tl.load(row + cols, mask=real, other=0.0).to(COMPUTE),
                tl.load(bias_ptr + cols, mask=real, other=0.0).to(COMPUTE),
            )
            order = ordered(preference)
            behind = real & ((order < last) | ((order == last) & (cols > last_id)))
            order = tl.where(behind, order, LOWEST)
            highest = tl.max(order, 0)
            first = tl.min(tl.where(order == highest, cols, NUM_EXPERTS), 0)
            top_id = tl.where(highest > top, first, top_id)
            top = tl.maximum(highest, top)
        experts = tl.where(slots == slot, top_id, experts)
        last = top
        last_id = top_id
    return experts


@triton.jit
def route_kernel(
    expert_ids_ptr,  # [T, TOP_K] int32
    weights_ptr,  # [T, TOP_K] float32
    logits_ptr,  # [T, NUM_EXPERTS]
    bias_ptr,  # [NUM_EXPERTS]
    logits_stride,
    scale,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    LOG_E: tl.constexpr,  # 2 ** LOG_E is at least NUM_EXPERTS and 32 * VECTOR * WARPS
    LOG_K: tl.constexpr,  # 2 ** LOG_K is at least TOP_K and 2
    VECTOR: tl.constexpr,  # logits that a thread loads at once
    WARPS: tl.constexpr,  # of the launch
    SELECT: tl.constexpr,
    PDL: tl.constexpr,  # launched before the previous kernel has ended: wait for it
    COMPUTE: tl.constexpr,  # tl.float32: everything between load and store
):
    """One program routes one token."""
    BLOCK_E: tl.constexpr = 2**LOG_E
    BLOCK_K: tl.constexpr = 2**LOG_K
    ID_MASK: tl.constexpr = BLOCK_E - 1
    STEP_MASK: tl.constexpr = 0xFFFFFFFF - ID_MASK
    SEARCH_WIDTH: tl.constexpr = min(BLOCK_E, 256 * WARPS)
    # 23 bits of a float in [1, 2) count its distance from 1. The upper ones become the upper bits
    # of a key, the lower bits of the key tell the experts apart.
    FRACTION_SHIFT: tl.constexpr = 9

    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    row = logits_ptr + token * logits_stride
    cols = tl.arange(0, BLOCK_E)
    slots = tl.arange(0, BLOCK_K)
    real = cols < NUM_EXPERTS
    logit = tl.load(row + cols, mask=real, other=0.0).to(COMPUTE)
    bias = tl.load(bias_ptr + cols, mask=real, other=0.0).to(COMPUTE)
    # A preference lies between -bound and 1 + bound.
    bound = tl.max(tl.abs(bias), 0)
    step = 0.99999 / (1.0 + 2.0 * bound)
    _, preference = preference_of(logit, bias)
    # Not beyond the range, and at its end where it is not a number.
    position = tl.minimum((preference + bound) * step + 1.0, 1.9999999)
    keys = position.to(tl.uint32, bitcast=True) << FRACTION_SHIFT
    # Of two equal preferences the lower id has the larger key. A column behind the last expert
    # has the smallest key of all.
    keys = (keys & STEP_MASK) | (ID_MASK - cols).to(tl.uint32)
    keys = tl.where(real, keys, 0)
    best = largest_keys(keys, TOP_K, LOG_E, LOG_K, VECTOR, WARPS, SELECT)
    expert = ID_MASK - (best & ID_MASK).to(tl.int32)

    # The key has lost low bits of the preference. That matters when the last expert chosen and
    # the first one left out agree in what is left: then as many as share its step are too many.
    last = tl.min(tl.where(slots < TOP_K, best, 0xFFFFFFFF), 0)
    chosen = tl.sum((keys >= (last & STEP_MASK)).to(tl.int32), 0)
    if (chosen != TOP_K) | (not (bound < 1e30)):
        expert = exact_search(row, bias_ptr, NUM_EXPERTS, TOP_K, BLOCK_K, SEARCH_WIDTH, COMPUTE)

    # Sixteen experts, exactly: gather, rank among themselves, weigh.
    taken = slots < TOP_K
    score, exact = preference_of(
        tl.load(row + expert, mask=taken, other=0.0).to(COMPUTE),
        tl.load(bias_ptr + expert, mask=taken, other=0.0).to(COMPUTE),
    )
    order = tl.where(taken, ordered(exact), -0x80000000)
    ahead = (order[None, :] > order[:, None]) | (
        (order[None, :] == order[:, None]) & (expert[None, :] < expert[:, None])
    )
    rank = tl.sum((ahead & taken[None, :]).to(tl.int32), 1)
    weight = score
    if RENORMALIZE:
        weight = score / (tl.sum(tl.where(taken, score, 0.0), 0) + 1e-20)
    place = token * TOP_K + rank
    tl.store(expert_ids_ptr + place, expert, mask=taken)
    tl.store(weights_ptr + place, weight * scale, mask=taken)

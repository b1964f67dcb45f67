"""Triton code of the MXFP4 expert GEMMs for few tokens an expert: gate-up with SiTU, and down.

Needs Triton. :mod:`k3_kernels.moe_gemm` describes the operators and chooses the constants below.

The weights are the *left* operand: 64 rows of a weight matrix meet BLOCK_M = 8 or 16 tokens, so
that the smallest dimension of the matrix instruction is the one that few tokens fill. Words travel
from shared memory into the registers of that operand and are unpacked there.
"""

# Triton compiles `row + (x,)` but no starred expression.
# ruff: noqa: RUF005

from __future__ import annotations

import triton
import triton.language as tl

from k3_kernels.moe_group_kernel import pair_group, sorted_group
from k3_kernels.moe_mxfp4_kernel import scaled_dot

__all__ = ["down_kernel", "gate_up_kernel", "situ"]


@triton.jit
def situ(gate, up, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr):
    """SiTU in float32; tanh(z) is 2 sigmoid(2z) - 1, which does not overflow."""
    bounded = BETA * (2.0 * tl.sigmoid(gate * (2.0 / BETA)) - 1.0)
    linear = LINEAR_BETA * (2.0 * tl.sigmoid(up * (2.0 / LINEAR_BETA)) - 1.0)
    return bounded * tl.sigmoid(gate) * linear


@triton.jit
def load_columns(ptr, rows, stride, valid, start, K: tl.constexpr, COMPUTE: tl.constexpr):
    """Load 32 columns of the given rows as ``[32, rows]``; zeros behind column K."""
    k = start + tl.arange(0, 32)
    mask = valid[None, :]
    if K % 128 != 0:
        mask = mask & (k[:, None] < K)
    tile = tl.load(ptr + rows[None, :].to(tl.int64) * stride + k[:, None], mask=mask, other=0.0)
    return tile.to(COMPUTE)


@triton.jit
def at_most(first, K_BLOCKS: tl.constexpr, PART: tl.constexpr, SPLIT_K: tl.constexpr):
    """Return a block that exists: where a split has more parts than blocks, some have none.

    Such a part computes nothing, but asks for its first scales all the same.
    """
    if PART * (SPLIT_K - 1) >= K_BLOCKS:
        first = tl.minimum(first, K_BLOCKS - 1)
    return first


@triton.jit
def gate_up_kernel(
    out_ptr,  # [rows, I]: SiTU(gate, up); a row is a slot (sorted) or a pair (direct)
    x_ptr,  # [T, H]
    words_ptr,  # [E, N_BLOCKS, K_BLOCKS, 2, 64, 16] 32-bit words: gate, then up
    scales_ptr,  # [E, N_BLOCKS, K_BLOCKS, 2, 64] four scale bytes
    ids_ptr,  # direct: expert of every pair [P]; sorted: pair of every slot
    block_experts_ptr,  # sorted: expert of every block
    partial_ptr,  # [programs, 2, BLOCK_M, 64] float32 if SPLIT_K > 1
    counter_ptr,  # [programs / SPLIT_K] int32 zeros, left as zeros
    x_stride,
    num_pairs,
    first_expert,
    H: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    TOP_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr,
    FUSED: tl.constexpr,  # False: out is [rows, 2 I], gate and up as they are
    ROTATED: tl.constexpr,  # which of the two bit layouts
    WIDE: tl.constexpr,  # scale bytes above 128 occur
    MAX_PAIRS: tl.constexpr,  # direct: power of two >= num_pairs; 0: sorted
    BLOCK_M: tl.constexpr,
    SPLIT_K: tl.constexpr,
    UNROLL: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """One program: 64 gate rows and 64 up rows of one expert, BLOCK_M tokens, a part of H."""
    BLOCK_N: tl.constexpr = 64
    N_BLOCKS: tl.constexpr = (I + BLOCK_N - 1) // BLOCK_N
    K_BLOCKS: tl.constexpr = (H + 127) // 128
    PART: tl.constexpr = (K_BLOCKS + SPLIT_K - 1) // SPLIT_K
    program = tl.program_id(0)
    part = program % SPLIT_K
    n_block = (program // SPLIT_K) % N_BLOCKS
    block = program // (SPLIT_K * N_BLOCKS)
    if MAX_PAIRS > 0:
        expert, pairs, valid = pair_group(
            ids_ptr, block, num_pairs, first_expert, NUM_EXPERTS, MAX_PAIRS, BLOCK_M
        )
        rows = pairs
    else:
        expert, rows, pairs, valid = sorted_group(
            ids_ptr, block_experts_ptr, block, num_pairs, BLOCK_M
        )
    if expert < 0:
        return
    tokens = pairs // TOP_K
    n = tl.arange(0, BLOCK_N)
    tile = (expert.to(tl.int64) * N_BLOCKS + n_block) * K_BLOCKS
    words = words_ptr + tile * 2048 + n[:, None] * 16 + tl.arange(0, 16)[None, :]
    scales = scales_ptr + tile * 128 + n
    gate = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    first = part * PART
    last = tl.minimum(first + PART, K_BLOCKS)
    # Triton runs copies ahead for operands of a dot alone; scales meet its result. So they are
    # asked for one step early by hand, or every step would wait for memory.
    ahead = at_most(first, K_BLOCKS, PART, SPLIT_K) * 128
    next_gate = tl.load(scales + ahead)
    next_up = tl.load(scales + ahead + 64)
    for k in tl.range(first, last, loop_unroll_factor=UNROLL):
        s_gate = next_gate.to(tl.uint32, bitcast=True)
        s_up = next_up.to(tl.uint32, bitcast=True)
        following = tl.minimum(k + 1, last - 1) * 128
        next_gate = tl.load(scales + following)
        next_up = tl.load(scales + following + 64)
        q_gate = tl.load(words + k * 2048).to(tl.uint32, bitcast=True)
        q_up = tl.load(words + k * 2048 + 1024).to(tl.uint32, bitcast=True)
        for j in tl.static_range(4):
            x = load_columns(x_ptr, tokens, x_stride, valid, k * 128 + 32 * j, H, COMPUTE)
            gate = scaled_dot(q_gate, s_gate, x, gate, j, ROTATED, WIDE, COMPUTE, BLOCK_N, 32)
            up = scaled_dot(q_up, s_up, x, up, j, ROTATED, WIDE, COMPUTE, BLOCK_N, 32)
    if SPLIT_K > 1:
        # The program that finishes last adds up what the others left in memory.
        columns = tl.arange(0, BLOCK_M)
        inside = columns[None, :] * BLOCK_N + n[:, None]
        group = program // SPLIT_K
        mine = partial_ptr + program.to(tl.int64) * (2 * BLOCK_M * BLOCK_N) + inside
        tl.store(mine, gate, mask=valid[None, :])
        tl.store(mine + BLOCK_M * BLOCK_N, up, mask=valid[None, :])
        # Every thread's stores before the counter, the counter before the other programs' loads.
        tl.debug_barrier()
        arrived = tl.atomic_add(counter_ptr + group, 1, sem="acq_rel")
        if arrived < SPLIT_K - 1:
            return
        gate = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        theirs = partial_ptr + group.to(tl.int64) * (SPLIT_K * 2 * BLOCK_M * BLOCK_N) + inside
        for other in tl.static_range(SPLIT_K):
            at = theirs + other * (2 * BLOCK_M * BLOCK_N)
            gate += tl.load(at, mask=valid[None, :], other=0.0, cache_modifier=".cg")
            up += tl.load(
                at + BLOCK_M * BLOCK_N, mask=valid[None, :], other=0.0, cache_modifier=".cg"
            )
        tl.store(counter_ptr + group, 0)
    columns = n_block * BLOCK_N + n
    mask = valid[None, :]
    if I % BLOCK_N != 0:
        mask = mask & (columns[:, None] < I)
    if FUSED:
        at = out_ptr + rows[None, :].to(tl.int64) * I + columns[:, None]
        tl.store(at, situ(gate, up, BETA, LINEAR_BETA).to(out_ptr.dtype.element_ty), mask=mask)
    else:
        at = out_ptr + rows[None, :].to(tl.int64) * (2 * I) + columns[:, None]
        tl.store(at, gate.to(out_ptr.dtype.element_ty), mask=mask)
        tl.store(at + I, up.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def down_kernel(
    out_ptr,  # [P * SPLIT_K, H]: a pair's expert output times its weight, in SPLIT_K summands
    act_ptr,  # [rows, I]
    words_ptr,  # [E, N_BLOCKS, K_BLOCKS, 64, 16] 32-bit words
    scales_ptr,  # [E, N_BLOCKS, K_BLOCKS, 64] four scale bytes
    weights_ptr,  # [P] float32
    ids_ptr,
    block_experts_ptr,
    num_pairs,
    first_expert,
    H: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    NUM_EXPERTS: tl.constexpr,
    ROTATED: tl.constexpr,
    WIDE: tl.constexpr,
    MAX_PAIRS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SPLIT_K: tl.constexpr,
    UNROLL: tl.constexpr,
    ROW_BLOCKS: tl.constexpr,  # blocks of 64 rows that a program computes one after another
    RESIDENT: tl.constexpr,  # the activations stay in registers meanwhile; needs SPLIT_K == 1
    COMPUTE: tl.constexpr,
):
    """One program: ROW_BLOCKS times 64 rows of one expert's down matrix, BLOCK_M tokens."""
    BLOCK_N: tl.constexpr = 64
    N_BLOCKS: tl.constexpr = (H + BLOCK_N - 1) // BLOCK_N
    K_BLOCKS: tl.constexpr = (I + 127) // 128
    CHUNKS: tl.constexpr = (N_BLOCKS + ROW_BLOCKS - 1) // ROW_BLOCKS
    PART: tl.constexpr = (K_BLOCKS + SPLIT_K - 1) // SPLIT_K
    program = tl.program_id(0)
    part = program % SPLIT_K
    chunk = (program // SPLIT_K) % CHUNKS
    block = program // (SPLIT_K * CHUNKS)
    if MAX_PAIRS > 0:
        expert, pairs, valid = pair_group(
            ids_ptr, block, num_pairs, first_expert, NUM_EXPERTS, MAX_PAIRS, BLOCK_M
        )
        rows = pairs
        if expert == -1:
            return
        # Not one of our experts: with no weights to read it contributes zeros to the sum.
        active = valid & (tl.zeros((BLOCK_M,), tl.int32) + expert >= 0)
        expert = tl.maximum(expert, 0)
    else:
        expert, rows, pairs, valid = sorted_group(
            ids_ptr, block_experts_ptr, block, num_pairs, BLOCK_M
        )
        if expert < 0:
            return
        active = valid
    n = tl.arange(0, BLOCK_N)
    first_block = chunk * ROW_BLOCKS
    last_block = tl.minimum(first_block + ROW_BLOCKS, N_BLOCKS)
    tile = expert.to(tl.int64) * N_BLOCKS * K_BLOCKS
    words = words_ptr + tile * 1024 + n[:, None] * 16 + tl.arange(0, 16)[None, :]
    scales = scales_ptr + tile * 64 + n
    weight = tl.load(weights_ptr + pairs, mask=active, other=0.0)
    out = out_ptr + (pairs[None, :].to(tl.int64) * SPLIT_K + part) * H + n[:, None]
    if RESIDENT:
        x = ()
        for j in tl.static_range(4 * K_BLOCKS):
            x = x + (load_columns(act_ptr, rows, I, active, 32 * j, I, COMPUTE),)
        ahead = ()
        for k in tl.static_range(K_BLOCKS):
            ahead = ahead + (tl.load(scales + (first_block * K_BLOCKS + k) * 64),)
        for n_block in tl.range(first_block, last_block):
            current = ahead
            following = tl.minimum(n_block + 1, last_block - 1) * K_BLOCKS
            ahead = ()
            for k in tl.static_range(K_BLOCKS):
                ahead = ahead + (tl.load(scales + (following + k) * 64),)
            acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for k in tl.static_range(K_BLOCKS):
                at = n_block * K_BLOCKS + k
                q = tl.load(words + at * 1024).to(tl.uint32, bitcast=True)
                s = current[k].to(tl.uint32, bitcast=True)
                for j in tl.static_range(4):
                    acc = scaled_dot(
                        q, s, x[4 * k + j], acc, j, ROTATED, WIDE, COMPUTE, BLOCK_N, 32
                    )
            mask = valid[None, :]
            if H % BLOCK_N != 0:
                mask = mask & (n_block * BLOCK_N + n[:, None] < H)
            result = (acc * weight[None, :]).to(out_ptr.dtype.element_ty)
            tl.store(out + n_block * BLOCK_N, result, mask=mask)
    else:
        first = part * PART
        last = tl.minimum(first + PART, K_BLOCKS)
        for n_block in tl.range(first_block, last_block):
            acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            start = at_most(first, K_BLOCKS, PART, SPLIT_K)
            ahead = tl.load(scales + (n_block * K_BLOCKS + start) * 64)
            for k in tl.range(first, last, loop_unroll_factor=UNROLL):
                s = ahead.to(tl.uint32, bitcast=True)
                ahead = tl.load(scales + (n_block * K_BLOCKS + tl.minimum(k + 1, last - 1)) * 64)
                q = tl.load(words + (n_block * K_BLOCKS + k) * 1024).to(tl.uint32, bitcast=True)
                for j in tl.static_range(4):
                    x = load_columns(act_ptr, rows, I, active, k * 128 + 32 * j, I, COMPUTE)
                    acc = scaled_dot(q, s, x, acc, j, ROTATED, WIDE, COMPUTE, BLOCK_N, 32)
            mask = valid[None, :]
            if H % BLOCK_N != 0:
                mask = mask & (n_block * BLOCK_N + n[:, None] < H)
            result = (acc * weight[None, :]).to(out_ptr.dtype.element_ty)
            tl.store(out + n_block * BLOCK_N, result, mask=mask)

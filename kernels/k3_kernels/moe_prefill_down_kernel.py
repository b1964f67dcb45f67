"""Triton code of the experts' down for many tokens an expert, bfloat16 and MXFP4.

Needs Triton. :mod:`k3_kernels.moe_gemm` describes the operator and chooses the constants below;
:mod:`k3_kernels.moe_prefill_gate_kernel` comes before and says how a program holds its tokens.
"""

# Triton compiles `row + (x,)` but no starred expression.
# ruff: noqa: RUF005

from __future__ import annotations

import triton
import triton.language as tl

from k3_kernels.moe_group_kernel import tile_of_blocks
from k3_kernels.moe_tile_kernel import slot_range, token_tile, weight_tile
from k3_kernels.moe_tiles_kernel import listed_tile

__all__ = ["down_prefill_kernel"]


@triton.jit
def down_part(
    out_ptr, act_ptr, more_act_ptr, words_ptr, scales_ptr, weights_ptr, ids_ptr, expert,
    first_block, last_block, first, end, num_pairs,
    H: tl.constexpr, I: tl.constexpr, MXFP4: tl.constexpr, ROTATED: tl.constexpr,  # noqa: E741
    WIDE: tl.constexpr, MAIN: tl.constexpr, EXTRA: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, ROW_BLOCKS: tl.constexpr, RESIDENT: tl.constexpr, FIT: tl.constexpr,
    BOXED: tl.constexpr, INDEX: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Down for MAIN slots from ``first`` and EXTRA slots behind them, row block after row block."""
    N_TILES: tl.constexpr = (H + 63) // 64
    K_BLOCKS: tl.constexpr = (I + 127) // 128
    MASKED: tl.constexpr = FIT and EXTRA == 0
    n = tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    slots, pairs, valid = slot_range(ids_ptr, first, first, end, num_pairs, MAIN)
    act = slots.to(INDEX)[None, :] * I + k[:, None]
    weight = tl.load(weights_ptr + pairs, mask=valid, other=0.0)
    out = out_ptr + pairs[None, :].to(tl.int64) * H
    if EXTRA > 0:
        slots, pairs, more_valid = slot_range(ids_ptr, first, first + MAIN, end, num_pairs, EXTRA)
        more_act = slots.to(INDEX)[None, :] * I + k[:, None]
        more_weight = tl.load(weights_ptr + pairs, mask=more_valid, other=0.0)
        more_out = out_ptr + pairs[None, :].to(tl.int64) * H
    if RESIDENT:
        x = ()
        more_x = ()
        for step in tl.static_range((I + BLOCK_K - 1) // BLOCK_K):
            x = x + (token_tile(act_ptr, act, valid, step, I, MASKED, BLOCK_K, COMPUTE),)
            if EXTRA > 0:
                right = token_tile(
                    more_act_ptr, more_act, more_valid, step, I, MASKED, BLOCK_K, COMPUTE
                )
                more_x = more_x + (right,)
    for n_block in range(first_block, last_block):
        rows = n_block * BLOCK_N + n
        row = expert * H + n_block * BLOCK_N
        acc = tl.zeros((BLOCK_N, MAIN), tl.float32)
        if EXTRA > 0:
            more_acc = tl.zeros((BLOCK_N, EXTRA), tl.float32)
        if MXFP4:
            tile = (expert.to(tl.int64) * N_TILES + rows // 64) * K_BLOCKS
            if N_TILES * 64 % BLOCK_N != 0:
                tile = tl.minimum(tile, ((expert.to(tl.int64) + 1) * N_TILES - 1) * K_BLOCKS)
            words = words_ptr + (tile * 1024 + rows % 64 * 16)[:, None] + tl.arange(0, 16)[None, :]
            scales = scales_ptr + tile * 64 + rows % 64
        elif BOXED:
            words = words_ptr
            scales = scales_ptr
        else:
            words = words_ptr + (expert.to(tl.int64) * H + rows)[:, None] * I + k[None, :]
            scales = scales_ptr
        if RESIDENT:
            for step in tl.static_range((I + BLOCK_K - 1) // BLOCK_K):
                left = weight_tile(
                    words, scales, rows, step, H, I, MXFP4, ROTATED, WIDE, BLOCK_N, BLOCK_K, 1024,
                    COMPUTE,
                )  # fmt: skip
                acc = tl.dot(left, x[step], acc, input_precision="ieee")
                if EXTRA > 0:
                    more_acc = tl.dot(left, more_x[step], more_acc, input_precision="ieee")
        else:
            for step in tl.range(0, (I + BLOCK_K - 1) // BLOCK_K):
                if BOXED:
                    right = act_ptr.load([first, step * BLOCK_K]).to(COMPUTE).trans()
                    left = words.load([row, step * BLOCK_K]).to(COMPUTE)
                else:
                    right = token_tile(act_ptr, act, valid, step, I, MASKED, BLOCK_K, COMPUTE)
                    left = weight_tile(
                        words, scales, rows, step, H, I, MXFP4, ROTATED, WIDE, BLOCK_N, BLOCK_K,
                        1024, COMPUTE,
                    )  # fmt: skip
                acc = tl.dot(left, right, acc, input_precision="ieee")
                if EXTRA > 0:
                    if BOXED:
                        at = [first + MAIN, step * BLOCK_K]
                        right = more_act_ptr.load(at).to(COMPUTE).trans()
                    else:
                        right = token_tile(
                            more_act_ptr, more_act, more_valid, step, I, MASKED, BLOCK_K, COMPUTE
                        )
                    more_acc = tl.dot(left, right, more_acc, input_precision="ieee")
        if BOXED and ROW_BLOCKS == 1:  # read again rather than kept in registers all along
            slots, pairs, valid = slot_range(ids_ptr, first, first, end, num_pairs, MAIN)
            weight = tl.load(weights_ptr + pairs, mask=valid, other=0.0)
            out = out_ptr + pairs[None, :].to(tl.int64) * H
            if EXTRA > 0:
                slots, pairs, more_valid = slot_range(
                    ids_ptr, first, first + MAIN, end, num_pairs, EXTRA
                )
                more_weight = tl.load(weights_ptr + pairs, mask=more_valid, other=0.0)
                more_out = out_ptr + pairs[None, :].to(tl.int64) * H
        inside = rows[:, None] < H
        result = (acc * weight[None, :]).to(out_ptr.dtype.element_ty)
        tl.store(out + rows[:, None], result, mask=valid[None, :] & inside)
        if EXTRA > 0:
            result = (more_acc * more_weight[None, :]).to(out_ptr.dtype.element_ty)
            tl.store(more_out + rows[:, None], result, mask=more_valid[None, :] & inside)


@triton.jit
def down_prefill_kernel(
    out_ptr,  # [P, H]: a pair's expert output times its weight
    act_ptr,  # [slots, I]; BOXED: a descriptor of that for BLOCK_M rows, below for other tiles
    words_ptr,
    scales_ptr,
    weights_ptr,  # [P] float32
    ids_ptr,
    block_experts_ptr,  # LISTED: the list of tiles
    half_act_ptr,
    extra_act_ptr,
    num_pairs,
    max_blocks,
    H: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    MXFP4: tl.constexpr,
    ROTATED: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    EXTRA_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROW_BLOCKS: tl.constexpr,
    RESIDENT: tl.constexpr,
    FIT: tl.constexpr,
    FIT_EXTRA: tl.constexpr,
    BOXED: tl.constexpr,
    LISTED: tl.constexpr,
    INDEX: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """One program: ROW_BLOCKS times BLOCK_N rows of one expert, BLOCK_M + EXTRA_M tokens."""
    N_BLOCKS: tl.constexpr = (H + BLOCK_N - 1) // BLOCK_N
    CHUNKS: tl.constexpr = (N_BLOCKS + ROW_BLOCKS - 1) // ROW_BLOCKS
    GRANULE: tl.constexpr = EXTRA_M if EXTRA_M > 0 else BLOCK_M
    TILE: tl.constexpr = (BLOCK_M + EXTRA_M) // GRANULE
    HALF: tl.constexpr = BLOCK_M // 2
    program = tl.program_id(0)
    block = program // CHUNKS
    chunk = program % CHUNKS
    if LISTED:
        expert, block, count, chunk = listed_tile(block_experts_ptr, program, CHUNKS, LISTED)
    elif TILE == 1:
        expert = tl.load(block_experts_ptr + block)
        count = tl.where(expert < 0, 0, 1)
    else:
        expert, count = tile_of_blocks(block_experts_ptr, block, max_blocks, TILE)
    if count == 0:
        return
    first_block = chunk * ROW_BLOCKS
    last_block = tl.minimum(first_block + ROW_BLOCKS, N_BLOCKS)
    if BOXED:
        half_act = half_act_ptr
        extra_act = extra_act_ptr
    else:
        half_act = act_ptr
        extra_act = act_ptr
    first = block * GRANULE
    end = first + count * GRANULE
    if EXTRA_M > 0:
        if count == TILE:
            down_part(
                out_ptr, act_ptr, extra_act, words_ptr, scales_ptr, weights_ptr, ids_ptr, expert,
                first_block, last_block, first, end, num_pairs, H, I, MXFP4, ROTATED, WIDE, BLOCK_M,
                EXTRA_M, BLOCK_N, BLOCK_K, ROW_BLOCKS, RESIDENT, FIT, BOXED, INDEX, COMPUTE,
            )  # fmt: skip
        elif count == 1:
            down_part(
                out_ptr, extra_act, extra_act, words_ptr, scales_ptr, weights_ptr, ids_ptr, expert,
                first_block, last_block, first, end, num_pairs, H, I, MXFP4, ROTATED, WIDE, EXTRA_M,
                0, BLOCK_N, BLOCK_K, ROW_BLOCKS, RESIDENT, FIT, BOXED, INDEX, COMPUTE,
            )  # fmt: skip
        elif FIT and HALF > GRANULE and count * GRANULE <= HALF:
            down_part(
                out_ptr, half_act, extra_act, words_ptr, scales_ptr, weights_ptr, ids_ptr, expert,
                first_block, last_block, first, end, num_pairs, H, I, MXFP4, ROTATED, WIDE, HALF, 0,
                BLOCK_N, BLOCK_K, ROW_BLOCKS, RESIDENT, FIT, BOXED, INDEX, COMPUTE,
            )  # fmt: skip
        elif FIT_EXTRA and HALF > GRANULE and count * GRANULE == HALF + EXTRA_M:
            down_part(
                out_ptr, half_act, extra_act, words_ptr, scales_ptr, weights_ptr, ids_ptr, expert,
                first_block, last_block, first, end, num_pairs, H, I, MXFP4, ROTATED, WIDE, HALF,
                EXTRA_M, BLOCK_N, BLOCK_K, ROW_BLOCKS, RESIDENT, FIT, BOXED, INDEX, COMPUTE,
            )  # fmt: skip
        else:
            down_part(
                out_ptr, act_ptr, extra_act, words_ptr, scales_ptr, weights_ptr, ids_ptr, expert,
                first_block, last_block, first, end, num_pairs, H, I, MXFP4, ROTATED, WIDE, BLOCK_M,
                0, BLOCK_N, BLOCK_K, ROW_BLOCKS, RESIDENT, FIT, BOXED, INDEX, COMPUTE,
            )  # fmt: skip
    else:
        down_part(
            out_ptr, act_ptr, extra_act, words_ptr, scales_ptr, weights_ptr, ids_ptr, expert,
            first_block, last_block, first, end, num_pairs, H, I, MXFP4, ROTATED, WIDE, BLOCK_M, 0,
            BLOCK_N, BLOCK_K, ROW_BLOCKS, RESIDENT, FIT, BOXED, INDEX, COMPUTE,
        )  # fmt: skip

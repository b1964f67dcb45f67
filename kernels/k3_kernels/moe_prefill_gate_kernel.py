"""Triton code of the experts' gate and up for many tokens an expert, bfloat16 and MXFP4.

Needs Triton. :mod:`k3_kernels.moe_gemm` describes the operator and chooses the constants below;
:mod:`k3_kernels.moe_prefill_down_kernel` is what follows.

As in :mod:`k3_kernels.moe_gemm_kernel` weights are the left operand. With 64 tokens or more the
matrix instruction is large enough to be the limit, so a step multiplies 128 columns at once:
MXFP4 words become one tile of bfloat16 in registers, scales included, and no accumulator is touched
between steps.

A program's tokens are BLOCK_M and, with EXTRA_M, so many more, multiplied with the same weights in
registers: tiles come in powers of two, experts do not. Dispatch then makes blocks of EXTRA_M slots
and a program takes as many of them as it can.
"""

from __future__ import annotations

import triton
import triton.language as tl

from k3_kernels.moe_gemm_kernel import situ
from k3_kernels.moe_group_kernel import tile_of_blocks
from k3_kernels.moe_tile_kernel import slot_range, token_tile, weight_tile
from k3_kernels.moe_tiles_kernel import listed_tile

__all__ = ["gate_up_prefill_kernel"]


@triton.jit
def store_gate_up(
    out_ptr, gate, up, slots, valid, columns,
    I: tl.constexpr, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr,  # noqa: E741
    FUSED: tl.constexpr,
):  # fmt: skip
    """Store SiTU of an accumulated tile, or the tile itself."""
    mask = valid[None, :] & (columns[:, None] < I)
    if FUSED:
        at = out_ptr + slots[None, :].to(tl.int64) * I + columns[:, None]
        tl.store(at, situ(gate, up, BETA, LINEAR_BETA).to(out_ptr.dtype.element_ty), mask=mask)
    else:
        at = out_ptr + slots[None, :].to(tl.int64) * (2 * I) + columns[:, None]
        tl.store(at, gate.to(out_ptr.dtype.element_ty), mask=mask)
        tl.store(at + I, up.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def gate_up_part(
    out_ptr, x_ptr, words_ptr, scales_ptr, up_offset, row, ids_ptr, columns, first, end, x_stride,
    num_pairs,
    H: tl.constexpr, I: tl.constexpr, TOP_K: tl.constexpr,  # noqa: E741
    BETA: tl.constexpr, LINEAR_BETA: tl.constexpr, FUSED: tl.constexpr, MXFP4: tl.constexpr,
    ROTATED: tl.constexpr, WIDE: tl.constexpr, MAIN: tl.constexpr, EXTRA: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, FIT: tl.constexpr, BOXED: tl.constexpr,
    INDEX: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Gate-up for MAIN slots from ``first`` and EXTRA slots behind them."""
    # A tile that is full but for its last slots can do without, and has no registers to spare.
    MASKED: tl.constexpr = FIT and EXTRA == 0
    slots, pairs, valid = slot_range(ids_ptr, first, first, end, num_pairs, MAIN)
    k = tl.arange(0, BLOCK_K)
    x = (pairs // TOP_K).to(INDEX)[None, :] * x_stride + k[:, None]
    gate = tl.zeros((BLOCK_N, MAIN), tl.float32)
    up = tl.zeros((BLOCK_N, MAIN), tl.float32)
    if EXTRA > 0:
        more_slots, pairs, more_valid = slot_range(
            ids_ptr, first, first + MAIN, end, num_pairs, EXTRA
        )
        more = (pairs // TOP_K).to(INDEX)[None, :] * x_stride + k[:, None]
        more_gate = tl.zeros((BLOCK_N, EXTRA), tl.float32)
        more_up = tl.zeros((BLOCK_N, EXTRA), tl.float32)
    for step in tl.range(0, (H + BLOCK_K - 1) // BLOCK_K):
        right = token_tile(x_ptr, x, valid, step, H, MASKED, BLOCK_K, COMPUTE)
        if EXTRA > 0:
            more_right = token_tile(x_ptr, more, more_valid, step, H, MASKED, BLOCK_K, COMPUTE)
        if BOXED:
            left = words_ptr.load([row, step * BLOCK_K]).to(COMPUTE)
        else:
            left = weight_tile(
                words_ptr, scales_ptr, columns, step, I, H, MXFP4, ROTATED, WIDE, BLOCK_N, BLOCK_K,
                2048, COMPUTE,
            )  # fmt: skip
        gate = tl.dot(left, right, gate, input_precision="ieee")
        if EXTRA > 0:
            more_gate = tl.dot(left, more_right, more_gate, input_precision="ieee")
        if BOXED:
            left = words_ptr.load([row + I, step * BLOCK_K]).to(COMPUTE)
        else:
            left = weight_tile(
                words_ptr + up_offset, scales_ptr + 64, columns, step, I, H, MXFP4, ROTATED, WIDE,
                BLOCK_N, BLOCK_K, 2048, COMPUTE,
            )  # fmt: skip
        up = tl.dot(left, right, up, input_precision="ieee")
        if EXTRA > 0:
            more_up = tl.dot(left, more_right, more_up, input_precision="ieee")
    store_gate_up(out_ptr, gate, up, slots, valid, columns, I, BETA, LINEAR_BETA, FUSED)
    if EXTRA > 0:
        store_gate_up(
            out_ptr,
            more_gate,
            more_up,
            more_slots,
            more_valid,
            columns,
            I,
            BETA,
            LINEAR_BETA,
            FUSED,
        )


@triton.jit
def gate_up_prefill_kernel(
    out_ptr,  # [slots, I]
    x_ptr,  # [T, H]
    words_ptr,  # MXFP4: [E, ., ., 2, 64, 16] words; else [E, 2 I, H], BOXED: a descriptor of that
    scales_ptr,
    ids_ptr,  # pair of every slot
    block_experts_ptr,  # LISTED: the list of tiles
    x_stride,
    num_pairs,
    max_blocks,
    H: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    TOP_K: tl.constexpr,
    BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr,
    FUSED: tl.constexpr,  # False: out is [slots, 2 I], gate and up as they are
    MXFP4: tl.constexpr,
    ROTATED: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    EXTRA_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # 128 for MXFP4, whose tiles are that wide
    FIT: tl.constexpr,  # read tokens that exist only, and take half a tile where it is enough
    FIT_EXTRA: tl.constexpr,  # and half a tile with EXTRA_M more
    BOXED: tl.constexpr,  # weights come through the copy engine
    LISTED: tl.constexpr,  # at so many places of the list, 0: no list
    INDEX: tl.constexpr,  # tl.int32, or tl.int64 if an offset does not fit
    COMPUTE: tl.constexpr,
):
    """One program: BLOCK_N rows of gate and of up of one expert, BLOCK_M + EXTRA_M tokens."""
    N_BLOCKS: tl.constexpr = (I + BLOCK_N - 1) // BLOCK_N
    N_TILES: tl.constexpr = (I + 63) // 64
    K_BLOCKS: tl.constexpr = (H + 127) // 128
    GRANULE: tl.constexpr = EXTRA_M if EXTRA_M > 0 else BLOCK_M
    TILE: tl.constexpr = (BLOCK_M + EXTRA_M) // GRANULE
    HALF: tl.constexpr = BLOCK_M // 2
    program = tl.program_id(0)
    n_block = program % N_BLOCKS
    block = program // N_BLOCKS
    if LISTED:
        expert, block, count, n_block = listed_tile(block_experts_ptr, program, N_BLOCKS, LISTED)
    elif TILE == 1:
        expert = tl.load(block_experts_ptr + block)
        count = tl.where(expert < 0, 0, 1)
    else:
        expert, count = tile_of_blocks(block_experts_ptr, block, max_blocks, TILE)
    if count == 0:
        return
    first = block * GRANULE
    end = first + count * GRANULE
    columns = n_block * BLOCK_N + tl.arange(0, BLOCK_N)
    row = expert * (2 * I) + n_block * BLOCK_N
    if MXFP4:
        tile = (expert.to(tl.int64) * N_TILES + columns // 64) * K_BLOCKS
        if N_TILES * 64 % BLOCK_N != 0:
            # Behind the last tile that one again: nobody stores what these rows give.
            tile = tl.minimum(tile, ((expert.to(tl.int64) + 1) * N_TILES - 1) * K_BLOCKS)
        words = words_ptr + (tile * 2048 + columns % 64 * 16)[:, None] + tl.arange(0, 16)[None, :]
        scales = scales_ptr + tile * 128 + columns % 64
        up_offset: tl.constexpr = 1024
    elif BOXED:
        words = words_ptr
        scales = scales_ptr
        up_offset: tl.constexpr = 0
    else:
        rows = expert.to(tl.int64) * (2 * I) + columns
        words = words_ptr + rows[:, None] * H + tl.arange(0, BLOCK_K)[None, :]
        scales = scales_ptr
        up_offset: tl.constexpr = I * H
    if EXTRA_M > 0:
        if count == TILE:
            gate_up_part(
                out_ptr, x_ptr, words, scales, up_offset, row, ids_ptr, columns, first, end,
                x_stride, num_pairs, H, I, TOP_K, BETA, LINEAR_BETA, FUSED, MXFP4, ROTATED, WIDE,
                BLOCK_M, EXTRA_M, BLOCK_N, BLOCK_K, FIT, BOXED, INDEX, COMPUTE,
            )  # fmt: skip
        elif count == 1:
            gate_up_part(
                out_ptr, x_ptr, words, scales, up_offset, row, ids_ptr, columns, first, end,
                x_stride, num_pairs, H, I, TOP_K, BETA, LINEAR_BETA, FUSED, MXFP4, ROTATED, WIDE,
                EXTRA_M, 0, BLOCK_N, BLOCK_K, FIT, BOXED, INDEX, COMPUTE,
            )  # fmt: skip
        elif FIT and HALF > GRANULE and count * GRANULE <= HALF:
            gate_up_part(
                out_ptr, x_ptr, words, scales, up_offset, row, ids_ptr, columns, first, end,
                x_stride, num_pairs, H, I, TOP_K, BETA, LINEAR_BETA, FUSED, MXFP4, ROTATED, WIDE,
                HALF, 0, BLOCK_N, BLOCK_K, FIT, BOXED, INDEX, COMPUTE,
            )  # fmt: skip
        elif FIT_EXTRA and HALF > GRANULE and count * GRANULE == HALF + EXTRA_M:
            gate_up_part(
                out_ptr, x_ptr, words, scales, up_offset, row, ids_ptr, columns, first, end,
                x_stride, num_pairs, H, I, TOP_K, BETA, LINEAR_BETA, FUSED, MXFP4, ROTATED, WIDE,
                HALF, EXTRA_M, BLOCK_N, BLOCK_K, FIT, BOXED, INDEX, COMPUTE,
            )  # fmt: skip
        else:
            gate_up_part(
                out_ptr, x_ptr, words, scales, up_offset, row, ids_ptr, columns, first, end,
                x_stride, num_pairs, H, I, TOP_K, BETA, LINEAR_BETA, FUSED, MXFP4, ROTATED, WIDE,
                BLOCK_M, 0, BLOCK_N, BLOCK_K, FIT, BOXED, INDEX, COMPUTE,
            )  # fmt: skip
    else:
        gate_up_part(
            out_ptr, x_ptr, words, scales, up_offset, row, ids_ptr, columns, first, end, x_stride,
            num_pairs, H, I, TOP_K, BETA, LINEAR_BETA, FUSED, MXFP4, ROTATED, WIDE, BLOCK_M, 0,
            BLOCK_N, BLOCK_K, FIT, BOXED, INDEX, COMPUTE,
        )  # fmt: skip

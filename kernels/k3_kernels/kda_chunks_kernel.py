"""Triton code of :func:`k3_kernels.kda_prefill`, first part: prepare all chunks at once.

Needs Triton. :mod:`k3_kernels.kda_prefill` describes the operator, derives the formulas and chooses
the constants below.
"""

from __future__ import annotations

import triton
import triton.language as tl

from k3_kernels.kda_chunk_rows_kernel import chunks_before, pick, rows_of_chunk
from k3_kernels.kda_step_kernel import LOG2_E, sigmoid

__all__ = ["double_blocks", "kda_chunks_kernel", "unit_lower_inverse"]


@triton.jit
def double_blocks(x, minus_a, CHUNK: tl.constexpr, SIZE: tl.constexpr, TRIANGLE: tl.constexpr):
    """From the inverses of diagonal blocks of SIZE rows to those of twice as many.

    [[p, 0], [r, s]]^-1 = [[p^-1, 0], [-s^-1 r p^-1, s^-1]], in all blocks at once.
    """
    row = tl.arange(0, CHUNK)[:, None]
    column = tl.arange(0, CHUNK)[None, :]
    below = (row // (2 * SIZE) == column // (2 * SIZE)) & (row // SIZE != column // SIZE)
    small = x.to(TRIANGLE)
    left = tl.dot(small, tl.where(below, minus_a, 0.0).to(TRIANGLE), input_precision="ieee")
    return tl.dot(left.to(TRIANGLE), small, x, input_precision="ieee")


@triton.jit
def unit_lower_inverse(minus_a, CHUNK: tl.constexpr, TRIANGLE: tl.constexpr):
    """Invert I + ``a``, ``a [CHUNK, CHUNK]`` strictly lower.

    This is substitution, five times by blocks instead of 63 times by rows. Everything that occurs
    is a block of the result; the powers of ``a``, which would give the inverse as well, lose every
    digit for keys that are alike.
    """
    tl.static_assert(CHUNK == 64)
    row = tl.arange(0, CHUNK)[:, None]
    column = tl.arange(0, CHUNK)[None, :]
    x = tl.where(row == column, 1.0, tl.where(row // 2 == column // 2, minus_a, 0.0))
    x = double_blocks(x, minus_a, CHUNK, 2, TRIANGLE)
    x = double_blocks(x, minus_a, CHUNK, 4, TRIANGLE)
    x = double_blocks(x, minus_a, CHUNK, 8, TRIANGLE)
    x = double_blocks(x, minus_a, CHUNK, 16, TRIANGLE)
    return double_blocks(x, minus_a, CHUNK, 32, TRIANGLE)


@triton.jit(
    do_not_specialize=["num_tokens", "num_sequences", "beta_stride"],
    do_not_specialize_on_alignment=["beta_ptr", "cu_seqlens_ptr", "checkpoint_ptr"],
)
def kda_chunks_kernel(
    q_ptr,  # [N, H * D], not normalised; so is the next one
    k_ptr,
    gate_ptr,  # [N, H * D], raw
    beta_ptr,  # [N, H], raw
    A_log_ptr,  # [H]
    dt_bias_ptr,  # [H * D]
    cu_seqlens_ptr,  # [B + 1], read if VARLEN
    checkpoint_ptr,  # [B], read if CHECKPOINTS
    sums_ptr,  # [5, CHUNK, CHUNK]: which rows' decays are added up, with which sign
    factors_ptr,  # [chunks, H, 3, CHUNK, D]: what the state is multiplied with, keys and queries,
    # and what it is updated with
    solve_ptr,  # [chunks, H, CHUNK, CHUNK], and the next one
    scores_ptr,
    decay_ptr,  # [chunks, H, D] float32
    lengths_ptr,  # [chunks, H, 2, CHUNK] float32: of keys, and what queries are multiplied with
    q_stride,
    k_stride,
    gate_stride,
    beta_stride,
    num_tokens,
    num_sequences,
    lower_bound,
    scale,
    l2_eps,
    VARLEN: tl.constexpr,
    CHECKPOINTS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    D: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,  # keys that are in registers at a time
    HALF: tl.constexpr,  # rows that meet keys in their middle, 16 rows away at most
    OPERAND: tl.constexpr,  # type of the factors of a product; bfloat16 has the range it takes
    TRIANGLE: tl.constexpr,  # type of the factors of the inverse; float16 has the digits
    STAGES: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Everything about one chunk of one head that does not depend on the state."""
    head = tl.program_id(0)
    H = tl.num_programs(0)
    chunk = tl.program_id(1)
    sequence, begin, length, cut, before_cut, count = chunks_before(
        cu_seqlens_ptr, checkpoint_ptr, num_sequences, num_tokens,
        VARLEN, CHECKPOINTS, CHUNK, BLOCK_B,
    )  # fmt: skip
    ends = tl.cumsum(count, 0)
    mine = tl.sum((ends <= chunk).to(tl.int32), 0)
    if mine >= num_sequences:
        return
    token, tokens = rows_of_chunk(
        chunk - pick(ends - count, sequence, mine), pick(begin, sequence, mine),
        pick(length, sequence, mine), pick(cut, sequence, mine), pick(before_cut, sequence, mine),
        CHUNK,
    )  # fmt: skip

    row = tl.arange(0, CHUNK)
    inside = row < tokens
    start = token.to(tl.int64)
    rate = tl.exp(tl.load(A_log_ptr + head).to(COMPUTE)) * -LOG2_E
    place = chunk.to(tl.int64) * H + head
    i, j = row[:, None], row[None, :]
    square = i * CHUNK + j
    # A scan over rows that lie in different warps costs several times as much as a product with a
    # matrix of ones.
    sums = sums_ptr + square
    upto = tl.load(sums)
    behind = tl.load(sums + CHUNK * CHUNK)
    from_middle = tl.load(sums + 2 * CHUNK * CHUNK)
    to_first = tl.load(sums + 3 * CHUNK * CHUNK)
    to_second = tl.load(sums + 4 * CHUNK * CHUNK)
    column = tl.arange(0, BLOCK_K)
    mask = inside[:, None]
    tile = i * D + column[None, :]
    q_at = i * q_stride + column[None, :]
    k_at = i * k_stride + column[None, :]
    gate_at = i * gate_stride + column[None, :]
    q_ptr += start * q_stride + head * D
    k_ptr += start * k_stride + head * D
    gate_ptr += start * gate_stride + head * D
    factors = factors_ptr + place * (3 * CHUNK * D) + tile
    # The interpreter's float64 has room for the elements above the diagonal, which nobody asks for.
    SUM: tl.constexpr = OPERAND if OPERAND == tl.float64 else COMPUTE  # noqa: SIM300
    a = tl.zeros([CHUNK, CHUNK], SUM)
    scores = tl.zeros([CHUNK, CHUNK], SUM)
    k_length = tl.zeros([CHUNK], COMPUTE)
    q_length = tl.zeros([CHUNK], COMPUTE)
    steepest = tl.where(inside, lower_bound * LOG2_E, 0.0)[:, None]
    later = tl.where(row >= HALF, 1.0, 0.0)[:, None]
    for first in tl.range(0, D, BLOCK_K, num_stages=STAGES):
        raw = tl.load(gate_ptr + first + gate_at, mask=mask, other=0.0)
        k = tl.load(k_ptr + first + k_at, mask=mask, other=0.0)
        q = tl.load(q_ptr + first + q_at, mask=mask, other=0.0)
        bias = tl.load(dt_bias_ptr + head * D + first + column).to(COMPUTE) * rate
        # In powers of two, which is what the hardware exponentiates.
        g = tl.rsqrt(1.0 + tl.exp2(tl.minimum(raw.to(COMPUTE) * rate + bias[None, :], 100.0)))
        g = steepest * g * g
        total = tl.exp2(tl.sum(g, 0))
        g = g.to(TRIANGLE)
        k = k.to(COMPUTE)
        q = q.to(COMPUTE)
        k_length += tl.sum(k * k, 1)
        q_length += tl.sum(q * q, 1)
        # Rows and keys meet in the middle of the rows' half, so that no decay is divided by more
        # than that of 16 rows.
        grow = tl.exp2(tl.dot(from_middle, g, input_precision="ieee"))
        second = grow * later
        grow -= second
        keys = tl.exp2(tl.dot(to_first, g, input_precision="ieee"))
        keys = tl.trans((k * keys).to(OPERAND))
        a = tl.dot((k * grow).to(OPERAND), keys, a, input_precision="ieee")
        scores = tl.dot((q * grow).to(OPERAND), keys, scores, input_precision="ieee")
        keys = tl.exp2(tl.dot(to_second, g, input_precision="ieee"))
        keys = tl.trans((k * keys).to(OPERAND))
        a = tl.dot((k * second).to(OPERAND), keys, a, input_precision="ieee")
        scores = tl.dot((q * second).to(OPERAND), keys, scores, input_precision="ieee")
        left = k * tl.exp2(tl.dot(behind, g, input_precision="ieee"))
        left = left.to(factors_ptr.dtype.element_ty)
        grow = tl.exp2(tl.dot(upto, g, input_precision="ieee"))
        kg = (k * grow).to(factors_ptr.dtype.element_ty)
        qg = (q * grow).to(factors_ptr.dtype.element_ty)
        # Stored last: a product waits for everything before it that is not yet in memory.
        tl.store(factors + first, kg)
        tl.store(factors + first + CHUNK * D, qg)
        tl.store(factors + first + 2 * CHUNK * D, left)
        tl.store(decay_ptr + place * D + first + column, total)
    squared = k_length + l2_eps
    inverse = tl.rsqrt(squared)
    lengths = lengths_ptr + place * (2 * CHUNK) + row
    tl.store(lengths, squared * inverse)
    tl.store(lengths + CHUNK, tl.rsqrt(q_length + l2_eps) * scale)
    square += place * (CHUNK * CHUNK)
    scores = tl.where(i >= j, scores, 0.0).to(COMPUTE)
    tl.store(scores_ptr + square, scores.to(scores_ptr.dtype.element_ty))
    beta = tl.load(beta_ptr + (start + row) * beta_stride + head, mask=inside, other=0.0)
    beta = tl.where(inside, sigmoid(beta.to(COMPUTE)), 0.0) * inverse
    minus_a = tl.where(i > j, a, 0.0).to(COMPUTE) * -beta[:, None] * inverse[None, :]
    solve = unit_lower_inverse(minus_a, CHUNK, TRIANGLE) * inverse[:, None] * beta[None, :]
    tl.store(solve_ptr + square, solve.to(solve_ptr.dtype.element_ty))

"""Triton code of :func:`k3_kernels.kda_prefill`: prepare the chunks, walk along the sequences.

Needs Triton. :mod:`k3_kernels.kda_prefill` describes the operator, derives the formulas and chooses
the constants below.
"""

# A test of a compile-time constant cannot be joined with one of a value.
# ruff: noqa: SIM102

from __future__ import annotations

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from k3_kernels.kda_decode_kernel import sigmoid

__all__ = ["TensorDescriptor", "kda_chunks_kernel", "kda_scan_kernel", "kda_starts_kernel"]

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def chunks_before(
    cu_seqlens_ptr,
    checkpoint_ptr,
    num_sequences,
    num_tokens,
    VARLEN: tl.constexpr,
    CHECKPOINTS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """Count the chunks of each sequence; return what they follow from too, all ``[BLOCK_B]``.

    A sequence is cut at its checkpoint, so that the state there is one between two chunks. Every
    program works this out again from the lengths: cheaper than a launch, and than asking the GPU.
    """
    sequence = tl.arange(0, BLOCK_B)
    present = sequence < num_sequences
    if VARLEN:
        begin = tl.load(cu_seqlens_ptr + sequence, mask=present, other=0)
        length = tl.load(cu_seqlens_ptr + sequence + 1, mask=present, other=0) - begin
    else:
        begin = tl.zeros([BLOCK_B], tl.int32)
        length = tl.where(present, num_tokens, 0)
    cut = tl.zeros([BLOCK_B], tl.int32)
    if CHECKPOINTS:
        cut = tl.load(checkpoint_ptr + sequence, mask=present, other=0)
        cut = tl.where((cut > 0) & (cut <= length), cut, 0)
    before_cut = (cut + CHUNK - 1) // CHUNK
    count = before_cut + (length - cut + CHUNK - 1) // CHUNK
    return sequence, begin, length, cut, before_cut, count


@triton.jit
def pick(values, sequence, wanted):
    """Return the value of one sequence."""
    return tl.sum(tl.where(sequence == wanted, values, 0), 0)


@triton.jit
def rows_of_chunk(index, begin, length, cut, before_cut, CHUNK: tl.constexpr):
    """Return the first token of chunk ``index`` of a sequence and how many tokens it has."""
    behind = index >= before_cut
    start = tl.where(behind, cut + (index - before_cut) * CHUNK, index * CHUNK)
    end = tl.where(behind, length, cut)
    return begin + start, tl.minimum(end - start, CHUNK)


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
    q_ptr,  # [N, H * D], not normalised; so are the next one
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
    HALF: tl.constexpr,  # rows whose decays may be divided by each other: 32 in float32
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
    mask = inside[:, None] & (column >= 0)[None, :]
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


@triton.jit
def halves(x, OPERAND: tl.constexpr):
    """Split into two numbers of a narrower type that together keep its digits."""
    high = x.to(OPERAND)
    return high, (x - high.to(x.dtype)).to(OPERAND)


@triton.jit
def kda_starts_kernel(
    starts_ptr,  # [B, SEGMENTS, H, D, D] float32
    map_high,  # descriptors of [B * SEGMENTS * H * D, D] in blocks of D rows
    map_low,
    SEGMENTS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Lead the start of segment 1 through the maps of the segments behind it.

    What the survey left in ``starts`` for a later segment is where the one before it ends if it
    starts from nothing; from a state it ends a product further on.
    """
    head = tl.program_id(0)
    H = tl.num_programs(0)
    value = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    first = tl.program_id(2) * SEGMENTS * H + head
    elements = value[:, None] * D + tl.arange(0, D)[None, :]
    state = tl.load(starts_ptr + (first + H).to(tl.int64) * (D * D) + elements)
    for segment in tl.range(1, SEGMENTS - 1, num_stages=STAGES):
        place = first + segment * H
        start = starts_ptr + (place + H).to(tl.int64) * (D * D) + elements
        high, low = halves(state, map_high.dtype)
        mapped = map_high.load([place * D, 0])
        state = tl.dot(high, mapped, tl.load(start), input_precision="ieee")
        state = tl.dot(low, mapped, state, input_precision="ieee")
        state = tl.dot(high, map_low.load([place * D, 0]), state, input_precision="ieee")
        tl.store(start, state)


@triton.jit(
    do_not_specialize=["num_tokens", "num_sequences", "num_slots", "null_slot"],
    do_not_specialize_on_alignment=[
        "cu_seqlens_ptr", "slots_ptr", "continued_ptr", "checkpoint_ptr", "checkpoint_slots_ptr"
    ],
)  # fmt: skip
def kda_scan_kernel(
    out_ptr,  # [N, H * D]
    v,  # descriptor of [N, H * D] in blocks of CHUNK rows and BLOCK_V columns
    factors,  # descriptor of [chunks * H * 3 * CHUNK, D] in blocks of CHUNK rows
    solve,  # of [chunks * H * CHUNK, CHUNK], and the next one
    scores,
    decay_ptr,  # [chunks, H, D] float32
    lengths_ptr,  # [chunks, H, 2, CHUNK] float32
    state_ptr,  # [slots, H, D (values), D (keys)]
    starts_ptr,  # [B, SEGMENTS, H, D, D] float32, used if SEGMENTS > 1, and the next one
    maps_ptr,  # [2, B, SEGMENTS, H, D, D], written by the survey
    cu_seqlens_ptr,
    slots_ptr,  # [B]
    continued_ptr,  # [B], read if CONTINUED
    checkpoint_ptr,  # [B], read if CHECKPOINTS, and the next one
    checkpoint_slots_ptr,
    out_stride,
    state_stride,
    state_head_stride,
    num_tokens,
    num_sequences,
    num_slots,
    null_slot,
    VARLEN: tl.constexpr,
    CHECKPOINTS: tl.constexpr,
    CONTINUED: tl.constexpr,
    SEGMENTS: tl.constexpr,  # a sequence is walked in so many pieces at once
    SURVEY: tl.constexpr,  # find out how a segment maps states, or walk along it
    BLOCK_B: tl.constexpr,
    D: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Walk along a sequence for some values of a head; the state never leaves the registers."""
    head = tl.program_id(0)
    H = tl.num_programs(0)
    PARTS: tl.constexpr = D // BLOCK_V
    # A survey has programs for the values, and as many that start from the rows of the identity.
    identity = tl.program_id(1) >= PARTS
    value = (tl.program_id(1) % PARTS) * BLOCK_V + tl.arange(0, BLOCK_V)
    PIECES: tl.constexpr = SEGMENTS - SURVEY  # what comes behind the last one nobody asks
    mine = tl.program_id(2) // PIECES
    segment = tl.program_id(2) % PIECES
    sequence, begin, length, cut, before_cut, count = chunks_before(
        cu_seqlens_ptr, checkpoint_ptr, num_sequences, num_tokens,
        VARLEN, CHECKPOINTS, CHUNK, BLOCK_B,
    )  # fmt: skip
    first = tl.sum(tl.where(sequence < mine, count, 0), 0)
    begin = pick(begin, sequence, mine)
    length = pick(length, sequence, mine)
    cut = pick(cut, sequence, mine)
    before_cut = pick(before_cut, sequence, mine)
    count = pick(count, sequence, mine)
    per_segment = (count + SEGMENTS - 1) // SEGMENTS
    start = segment * per_segment
    end = tl.minimum(start + per_segment, count)
    slot = tl.load(slots_ptr + mine)
    padding = slot <= null_slot
    invalid = padding | (slot >= num_slots)
    key = tl.arange(0, D)
    elements = value[:, None] * D + key[None, :]
    known = (mine * SEGMENTS * H + head).to(tl.int64)  # of the first segment
    map_at = maps_ptr + (known + segment * H) * (D * D) + elements
    map_half = (tl.num_programs(2) // PIECES * SEGMENTS * H).to(tl.int64) * (D * D)
    start_after = starts_ptr + (known + (segment + 1) * H) * (D * D) + elements
    if SURVEY:
        # The first segment starts from a state that is known: nobody asks how it maps others.
        if identity & (segment == 0):
            return
        if (start >= end) | invalid:
            # A segment that is not there: nothing, so that what reads on reads numbers.
            zero = tl.zeros([BLOCK_V, D], COMPUTE)
            if identity:
                tl.store(map_at, zero.to(maps_ptr.dtype.element_ty))
                tl.store(map_at + map_half, zero.to(maps_ptr.dtype.element_ty))
            else:
                tl.store(start_after, zero)
                if segment == 0:
                    tl.store(starts_ptr + known * (D * D) + elements, zero)
            return
    if start >= end:
        return
    row = tl.arange(0, CHUNK)
    first_column = head * D + (tl.program_id(1) % PARTS) * BLOCK_V
    columns = head * D + value[:, None]
    if invalid:
        nothing = tl.where(padding, tl.zeros([BLOCK_V, CHUNK], COMPUTE), float("nan"))
        for index in range(start, end):
            token, tokens = rows_of_chunk(index, begin, length, cut, before_cut, CHUNK)
            at = token.to(tl.int64) + row
            tl.store(
                out_ptr + at[None, :] * out_stride + columns,
                nothing.to(out_ptr.dtype.element_ty),
                mask=(row < tokens)[None, :] & (value >= 0)[:, None],
            )
        return

    head_state = state_ptr + head * state_head_stride
    home = head_state + slot.to(tl.int64) * state_stride + elements
    OPERAND: tl.constexpr = factors.dtype
    state = tl.zeros([BLOCK_V, D], COMPUTE)
    if SURVEY or SEGMENTS == 1:
        if CONTINUED:
            if (tl.load(continued_ptr + mine) != 0) & (segment == 0):
                state = tl.load(home)
    if SURVEY:
        if identity:
            state = tl.where(value[:, None] == key[None, :], 1.0, 0.0)
        elif segment == 0:
            # The walk of the last segment will write into the slot that the first one reads.
            tl.store(starts_ptr + known * (D * D) + elements, state)
    elif SEGMENTS > 1:
        state = tl.load(starts_ptr + (known + segment * H) * (D * D) + elements)

    # Offsets within a chunk are the same for all chunks.
    out_ptr += row[None, :] * out_stride + columns
    for index in tl.range(start, end, num_stages=STAGES):
        token, tokens = rows_of_chunk(index, begin, length, cut, before_cut, CHUNK)
        chunk = (first + index) * H + head
        kg_rows = factors.load([3 * CHUNK * chunk, 0])
        kd_rows = factors.load([3 * CHUNK * chunk + 2 * CHUNK, 0])
        triangle = solve.load([CHUNK * chunk, 0])
        decay = tl.load(decay_ptr + chunk.to(tl.int64) * D + key)
        lengths = lengths_ptr + chunk.to(tl.int64) * (2 * CHUNK) + row
        k_length = tl.load(lengths)
        v_rows = v.load([token, first_column])
        v_tokens = tl.where(identity, 0, tokens)
        if v_tokens < CHUNK:
            # The rows behind the end are those of another sequence.
            v_rows = tl.where((row < v_tokens)[:, None], v_rows, 0.0)
        # All of it transposed, so that the state is the left factor and stays where it is.
        before = state.to(OPERAND)
        recalled = tl.dot(before, tl.trans(kg_rows), input_precision="ieee")
        error = (tl.trans(v_rows).to(COMPUTE) * k_length[None, :] - recalled).to(OPERAND)
        written = tl.dot(error, tl.trans(triangle), input_precision="ieee").to(OPERAND)
        if not SURVEY:
            qg_rows = factors.load([3 * CHUNK * chunk + CHUNK, 0])
            weights = scores.load([CHUNK * chunk, 0])
            o = tl.dot(before, tl.trans(qg_rows), input_precision="ieee")
            o = tl.dot(written, tl.trans(weights), o, input_precision="ieee")
            o *= tl.load(lengths + CHUNK)[None, :]
            mask = (row < tokens)[None, :] & (value >= 0)[:, None]
            out = out_ptr + token.to(tl.int64) * out_stride
            tl.store(out, o.to(out_ptr.dtype.element_ty), mask=mask)
        state = tl.dot(written, kd_rows, state * decay[None, :], input_precision="ieee")
        if CHECKPOINTS and not SURVEY:
            if index + 1 == before_cut:
                keep = tl.load(checkpoint_slots_ptr + mine)
                if (keep > null_slot) & (keep < num_slots):
                    tl.store(head_state + keep.to(tl.int64) * state_stride + elements, state)
    if SURVEY:
        if identity:
            high, low = halves(state, OPERAND)
            tl.store(map_at, high)
            tl.store(map_at + map_half, low)
        else:
            tl.store(start_after, state)
    elif end == count:
        tl.store(home, state)

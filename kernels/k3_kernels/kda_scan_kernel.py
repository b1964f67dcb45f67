"""Triton code of :func:`k3_kernels.kda_prefill`, second part: walk along the sequences.

Needs Triton. :mod:`k3_kernels.kda_prefill` describes the operator, derives the formulas and chooses
the constants below.
"""

# A test of a compile-time constant cannot be joined with one of a value.
# ruff: noqa: SIM102

from __future__ import annotations

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from k3_kernels.kda_chunk_rows_kernel import chunks_before, pick, rows_of_chunk

__all__ = ["TensorDescriptor", "halves", "kda_scan_kernel", "kda_starts_kernel"]


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

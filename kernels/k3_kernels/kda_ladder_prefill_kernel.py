"""Triton code of the prefill ladder: prepare chunks in parallel, then walk along them.

Needs Triton. :mod:`k3_kernels.kda_ladder_prefill` chooses the constants. The formulas are those of
lesson 05 and of :mod:`k3_kernels.kda_prefill`, whose kernels take several sequences, checkpoints
and the copy engine as well. These are the same idea with nothing around it.
"""

# A test of a compile-time constant cannot be joined with one of a value.
# ruff: noqa: SIM102

from __future__ import annotations

import triton
import triton.language as tl

from k3_kernels.kda_ladder_kernel import log_decay, sigmoid

__all__ = ["prepare_kernel", "walk_kernel"]


@triton.jit
def invert(a, CHUNK: tl.constexpr, LEVELS: tl.constexpr, TRIANGLE: tl.constexpr):
    """Return (I + a)^-1 for ``a [CHUNK, CHUNK]`` strictly lower, CHUNK = 2^LEVELS.

    From the inverses p, s of two diagonal blocks to that of the block twice as large::

        [[p, 0], [r, s]]^-1 = [[p^-1, 0], [-s^-1 r p^-1, s^-1]]
    """
    row = tl.arange(0, CHUNK)[:, None]
    column = tl.arange(0, CHUNK)[None, :]
    x = tl.where(row == column, 1.0, 0.0)
    for level in tl.static_range(LEVELS):
        size = 1 << level
        same = row // (2 * size) == column // (2 * size)
        below = tl.where(same & (row // size > column // size), a, 0.0)
        small = x.to(TRIANGLE)
        left = tl.dot(small, below.to(TRIANGLE), input_precision="ieee")
        x -= tl.dot(left.to(TRIANGLE), small, input_precision="ieee")
    return x


@triton.jit
def squares(
    rows,
    there,
    D: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Return the sum of squares of each row of a chunk."""
    total = tl.zeros([CHUNK], COMPUTE)
    for first in range(0, D, BLOCK_K):
        key = first + tl.arange(0, BLOCK_K)
        mask = there[:, None] & (key >= 0)[None, :]
        x = tl.load(rows + key[None, :], mask=mask, other=0.0).to(COMPUTE)
        total += tl.sum(x * x, 1)
    return total


@triton.jit(
    do_not_specialize=["num_tokens", "beta_stride"], do_not_specialize_on_alignment=["beta_ptr"]
)
def prepare_kernel(
    q_ptr,  # [T, H * D], not normalised; so is k
    k_ptr,
    gate_ptr,  # [T, H * D], raw
    beta_ptr,  # [T, H], raw
    A_log_ptr,  # [H]
    dt_bias_ptr,  # [H * D]
    kg_ptr,  # [chunks, H, CHUNK, D]: what the state is multiplied with for keys,
    qg_ptr,  # for queries,
    kd_ptr,  # and what it is updated with
    solve_ptr,  # [chunks, H, CHUNK, CHUNK]: the solved triangle,
    scores_ptr,  # and what rows read of each other's writes
    decay_ptr,  # [chunks, H, D] float32: of the whole chunk
    q_stride,
    k_stride,
    gate_stride,
    beta_stride,
    num_tokens,
    lower_bound,
    scale,
    l2_eps,
    D: tl.constexpr,
    CHUNK: tl.constexpr,
    LEVELS: tl.constexpr,
    SUB: tl.constexpr,  # rows whose decays may be divided by each other: 16 in float32
    BLOCK_K: tl.constexpr,  # keys that are in registers at a time
    TRIANGLE: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Everything about one chunk of one head in which the state does not occur."""
    head = tl.program_id(0)
    H = tl.num_programs(0)
    chunk = tl.program_id(1)
    row = tl.arange(0, CHUNK)
    token = chunk * CHUNK + row
    there = token < num_tokens
    q_rows = q_ptr + token.to(tl.int64)[:, None] * q_stride + head * D
    k_rows = k_ptr + token.to(tl.int64)[:, None] * k_stride + head * D
    gate_rows = gate_ptr + token.to(tl.int64)[:, None] * gate_stride + head * D
    beta = tl.load(beta_ptr + token.to(tl.int64) * beta_stride + head, mask=there, other=0.0)
    beta = tl.where(there, sigmoid(beta.to(COMPUTE)), 0.0)
    rate = tl.exp(tl.load(A_log_ptr + head).to(COMPUTE))
    q_factor = tl.rsqrt(squares(q_rows, there, D, BLOCK_K, CHUNK, COMPUTE) + l2_eps) * scale
    k_factor = tl.rsqrt(squares(k_rows, there, D, BLOCK_K, CHUNK, COMPUTE) + l2_eps)

    place = (chunk * H + head).to(tl.int64)
    kind = kg_ptr.dtype.element_ty
    block = row[:, None] // SUB
    # A running sum as a product: a scan over rows that lie in different warps costs several times
    # as much.
    upto = tl.where(row[:, None] >= row[None, :], 1.0, 0.0).to(TRIANGLE)
    a = tl.zeros([CHUNK, CHUNK], COMPUTE)
    scores = tl.zeros([CHUNK, CHUNK], COMPUTE)
    for first in range(0, D, BLOCK_K):
        key = first + tl.arange(0, BLOCK_K)
        mask = there[:, None] & (key >= 0)[None, :]
        q = tl.load(q_rows + key[None, :], mask=mask, other=0.0).to(COMPUTE) * q_factor[:, None]
        k = tl.load(k_rows + key[None, :], mask=mask, other=0.0).to(COMPUTE) * k_factor[:, None]
        raw = tl.load(gate_rows + key[None, :], mask=mask, other=0.0).to(COMPUTE)
        bias = tl.load(dt_bias_ptr + head * D + key).to(COMPUTE)
        # Rounded once for all, so that every sum below is of the same numbers.
        g = tl.where(mask, log_decay(raw, bias[None, :], rate, lower_bound), 0.0).to(TRIANGLE)
        G = tl.dot(upto, g, input_precision="ieee")
        g = g.to(COMPUTE)
        total = tl.sum(g, 0)
        tile = place * (CHUNK * D) + row[:, None] * D + key[None, :]
        tl.store(kg_ptr + tile, (k * tl.exp(G)).to(kind))
        tl.store(qg_ptr + tile, (q * tl.exp(G)).to(kind))
        tl.store(kd_ptr + tile, (k * tl.exp(total[None, :] - G)).to(kind))
        tl.store(decay_ptr + place * D + key, tl.exp(total))
        # e^(G_i - G_j), split at the first row of i's block: rows of earlier blocks have factors of
        # at most 1, those of the same block at most e^80.
        for this in tl.static_range(CHUNK // SUB):
            before = tl.sum(tl.where(block < this, g, 0.0), 0)[None, :]
            mine = tl.where(block == this, tl.exp(tl.minimum(G - before, 0.0)), 0.0)
            other = tl.where(block <= this, before - G, 0.0)
            right = tl.trans(tl.where(block <= this, k * tl.exp(other), 0.0).to(kind))
            a = tl.dot((k * mine).to(kind), right, a, input_precision="ieee")
            scores = tl.dot((q * mine).to(kind), right, scores, input_precision="ieee")
    column = row[None, :]
    square = place * (CHUNK * CHUNK) + row[:, None] * CHUNK + column
    scores = tl.where(row[:, None] >= column, scores, 0.0)
    tl.store(scores_ptr + square, scores.to(kind))
    a = tl.where(row[:, None] > column, a * beta[:, None], 0.0)
    solve = invert(a, CHUNK, LEVELS, TRIANGLE) * beta[None, :]
    tl.store(solve_ptr + square, solve.to(kind))


@triton.jit(do_not_specialize=["num_tokens", "num_chunks", "segment_chunks"])
def walk_kernel(
    out_ptr,  # [T, H * D]
    v_ptr,  # [T, H * D]
    kg_ptr,  # the next five as prepared
    qg_ptr,
    kd_ptr,
    solve_ptr,
    scores_ptr,
    decay_ptr,
    starts_ptr,  # [segments, H, D (values), D (keys)]
    ends_ptr,  # likewise: where the last segment leaves its state, or a survey every segment's
    maps_ptr,  # likewise, written by a survey
    out_stride,
    v_stride,
    num_tokens,
    num_chunks,
    segment_chunks,  # of each segment
    D: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_V: tl.constexpr,  # values of a program
    SURVEY: tl.constexpr,  # find out how segments map states, or walk along them
    STAGES: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Take some values of one head along a segment; the state stays in registers."""
    PARTS: tl.constexpr = D // BLOCK_V
    # A survey has programs for the values, and as many that start from rows of the identity.
    identity = tl.program_id(0) >= PARTS
    value = (tl.program_id(0) % PARTS) * BLOCK_V + tl.arange(0, BLOCK_V)
    head = tl.program_id(1)
    H = tl.num_programs(1)
    segment = tl.program_id(2)
    if SURVEY:
        if identity & (segment == 0):
            return  # the first segment starts from a state that is known
    row = tl.arange(0, CHUNK)
    key = tl.arange(0, D)
    columns = head * D + value
    elements = value[:, None] * D + key[None, :]
    own = (segment * H + head).to(tl.int64) * (D * D) + elements
    state = tl.load(starts_ptr + own).to(COMPUTE)
    if SURVEY:
        state = tl.where(identity, tl.where(value[:, None] == key[None, :], 1.0, 0.0), state)
    kind = kg_ptr.dtype.element_ty
    first = segment * segment_chunks
    last = tl.minimum(first + segment_chunks, num_chunks)
    for chunk in tl.range(first, last, num_stages=STAGES):
        place = (chunk * H + head).to(tl.int64)
        tile = place * (CHUNK * D) + row[:, None] * D + key[None, :]
        square = place * (CHUNK * CHUNK) + row[:, None] * CHUNK + row[None, :]
        kg = tl.load(kg_ptr + tile)
        kd = tl.load(kd_ptr + tile)
        solve = tl.load(solve_ptr + square)
        decay = tl.load(decay_ptr + place * D + key)
        token = chunk * CHUNK + row
        inside = (token < tl.where(identity, 0, num_tokens))[None, :] & (value >= 0)[:, None]
        token = token.to(tl.int64)[None, :]
        v = tl.load(v_ptr + token * v_stride + columns[:, None], mask=inside, other=0.0)
        # Transposed throughout: the state is the left factor and stays where it is.
        before = state.to(kind)
        error = v.to(COMPUTE) - tl.dot(before, tl.trans(kg), input_precision="ieee")
        written = tl.dot(error.to(kind), tl.trans(solve), input_precision="ieee").to(kind)
        if not SURVEY:
            qg = tl.load(qg_ptr + tile)
            scores = tl.load(scores_ptr + square)
            o = tl.dot(before, tl.trans(qg), input_precision="ieee")
            o = tl.dot(written, tl.trans(scores), o, input_precision="ieee")
            out = out_ptr + token * out_stride + columns[:, None]
            tl.store(out, o.to(out_ptr.dtype.element_ty), mask=inside)
        state = tl.dot(written, kd, state * decay[None, :], input_precision="ieee")
    if SURVEY:
        if identity:
            tl.store(maps_ptr + own, state)
        else:
            tl.store(ends_ptr + own, state)
    elif last == num_chunks:
        tl.store(ends_ptr + head * (D * D) + elements, state)

"""Triton code of :func:`k3_kernels.mla_decode`: attention on the cached rows themselves.

Needs Triton. :mod:`k3_kernels.mla_decode` describes the operator and chooses the constants below.

A cached row is key and value at once: a tile of rows is read once and multiplied twice, with the
queries over all its columns and with the probabilities over the latent ones.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["mla_decode_kernel", "mla_merge_kernel"]


@triton.jit
def block_of_rows(
    table_ptr, start, visible, BLOCK_N: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Return the blocks that hold BLOCK_N rows from ``start``: one, or one for each row."""
    if PAGE % BLOCK_N == 0:  # ``start`` is a multiple of BLOCK_N
        return tl.load(table_ptr + start // PAGE, mask=start < visible, other=0)
    else:
        rows = start + tl.arange(0, BLOCK_N)
        return tl.load(table_ptr + rows // PAGE, mask=rows < visible, other=0)


@triton.jit
def tile_of_rows(
    cache_ptr, blocks, start, mask, columns, block_stride, ROW_STRIDE: tl.constexpr,
    BLOCK_N: tl.constexpr, PAGE: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Load columns of cached rows; what is masked is 0, whatever the cache holds there."""
    if PAGE % BLOCK_N == 0:
        first = blocks.to(tl.int64) * block_stride + start % PAGE * ROW_STRIDE
        at = cache_ptr + first + tl.arange(0, BLOCK_N) * ROW_STRIDE
    else:
        rows = start + tl.arange(0, BLOCK_N)
        at = cache_ptr + (blocks.to(tl.int64) * block_stride + rows % PAGE * ROW_STRIDE)
    inside = mask[:, None]
    if COLUMNS != WIDTH:
        inside = inside & (columns < WIDTH)[None, :]
    return tl.load(at[:, None] + columns[None, :], mask=inside, other=0.0)


@triton.jit
def scores_of(q, tile, AXIS: tl.constexpr):
    """Multiply queries with cached rows: ``[pairs, rows]``, or ``[rows, pairs]`` for axis 0."""
    if AXIS == 1:
        return tl.dot(q, tl.trans(tile), input_precision="ieee")
    else:
        return tl.dot(tile, q, input_precision="ieee")


# Numbers that follow the batch and the room for contexts: no code of its own for each.
@triton.jit(
    do_not_specialize=["num_tokens", "num_splits", "table_stride", "lse_stride", "lse_head_stride"]
)
def mla_decode_kernel(
    out_ptr,  # [N, HEADS, num_splits, RANK]: attention over each part of the context
    lse_ptr,  # [N, HEADS, num_splits] float32: natural logarithm of the sum of e^score
    q_ptr,  # [N, HEADS, RANK]
    q_pe_ptr,  # [N, HEADS, WIDTH_PE], not read if that is 0
    cache_ptr,  # [blocks, PAGE, RANK + WIDTH_PE]
    table_ptr,  # [B, .] int32
    lengths_ptr,  # [B] or [B, T] int32
    out_stride,
    out_head_stride,
    out_split_stride,
    lse_stride,
    lse_head_stride,
    lse_split_stride,
    q_stride,
    q_head_stride,
    q_pe_stride,
    q_pe_head_stride,
    cache_block_stride,
    table_stride,
    lengths_stride,
    lengths_token_stride,  # 0 if a request has one length
    num_tokens,  # T: of each request
    num_splits,
    scale,  # of the scores, times log2(e)
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    WIDTH_PE: tl.constexpr,
    PAGE: tl.constexpr,
    ROW_STRIDE: tl.constexpr,  # of the cache: known, it takes no registers
    SPLIT: tl.constexpr,  # whether a merge follows, which leaves out what was not seen
    CAUSAL: tl.constexpr,  # a length is that of the last token, those before see one row less each
    HAS_LSE: tl.constexpr,
    BLOCK_M: tl.constexpr,  # (token, head) pairs of a program
    BLOCK_N: tl.constexpr,  # cached rows at a time
    COLUMNS: tl.constexpr,  # RANK and WIDTH_PE, filled up to powers of two
    COLUMNS_PE: tl.constexpr,
    STAGES: tl.constexpr,
    AXIS: tl.constexpr,  # 1: queries are the left operand; 0: cached rows are
    PDL: tl.constexpr,  # launched before the previous kernel has ended: wait for it
    COMPUTE: tl.constexpr,
):
    """One program: BLOCK_M rows of queries of one request over one part of its context."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    request = tl.program_id(1)
    split = tl.program_id(2)
    pairs = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    exists = pairs < num_tokens * HEADS
    tokens = pairs // HEADS
    heads = pairs % HEADS
    lengths = lengths_ptr + request * lengths_stride + tokens * lengths_token_stride
    limits = tl.load(lengths, mask=exists, other=0)
    if CAUSAL:
        limits = tl.where(exists, limits + tokens - num_tokens + 1, 0)
    visible = tl.maximum(tl.max(limits, 0), 0)
    # All parts are equally many tiles, the last ones perhaps none.
    part = ((visible + BLOCK_N - 1) // BLOCK_N + num_splits - 1) // num_splits * BLOCK_N
    first = split * part
    last = tl.minimum(first + part, visible)

    # Pairs lie along one axis of a tile; cached rows or columns along the other, which is AXIS.
    columns = tl.arange(0, COLUMNS)
    columns_pe = tl.arange(0, COLUMNS_PE)
    row = request.to(tl.int64) * num_tokens + tokens
    each = tl.expand_dims(exists, AXIS)
    inside = each & tl.expand_dims(columns < RANK, 1 - AXIS)
    at = tl.expand_dims(q_ptr + row * q_stride + heads * q_head_stride, AXIS)
    q = tl.load(at + tl.expand_dims(columns, 1 - AXIS), mask=inside, other=0.0).to(COMPUTE)
    if WIDTH_PE > 0:
        inside_pe = each & tl.expand_dims(columns_pe < WIDTH_PE, 1 - AXIS)
        at = tl.expand_dims(q_pe_ptr + row * q_pe_stride + heads * q_pe_head_stride, AXIS)
        at = at + tl.expand_dims(columns_pe, 1 - AXIS)
        q_pe = tl.load(at, mask=inside_pe, other=0.0).to(COMPUTE)

    table = table_ptr + request.to(tl.int64) * table_stride
    highest = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if AXIS == 1:
        mixed = tl.zeros([BLOCK_M, COLUMNS], tl.float32)
    else:
        mixed = tl.zeros([COLUMNS, BLOCK_M], tl.float32)
    # Asked for one step ahead: what a block number is needed for cannot start without it.
    blocks = block_of_rows(table, first, last, BLOCK_N, PAGE)
    for start in tl.range(first, last, BLOCK_N, num_stages=STAGES, disable_licm=True):
        rows = start + tl.arange(0, BLOCK_N)
        mask = rows < last
        tile = tile_of_rows(
            cache_ptr, blocks, start, mask, columns, cache_block_stride, ROW_STRIDE,
            BLOCK_N, PAGE, RANK, COLUMNS,
        ).to(COMPUTE)  # fmt: skip
        scores = scores_of(q, tile, AXIS)
        if WIDTH_PE > 0:
            tile_pe = tile_of_rows(
                cache_ptr + RANK, blocks, start, mask, columns_pe, cache_block_stride,
                ROW_STRIDE, BLOCK_N, PAGE, WIDTH_PE, COLUMNS_PE,
            ).to(COMPUTE)  # fmt: skip
            scores += scores_of(q_pe, tile_pe, AXIS)
        blocks = block_of_rows(table, start + BLOCK_N, last, BLOCK_N, PAGE)
        seen = tl.expand_dims(rows, 1 - AXIS) < tl.expand_dims(limits, AXIS)
        seen = seen & tl.expand_dims(mask, 1 - AXIS)
        scores = tl.where(seen, scores * scale, -float("inf"))
        new_highest = tl.maximum(highest, tl.max(scores, AXIS))
        # A query that has seen nothing yet has no highest score to compare with.
        base = tl.where(new_highest == -float("inf"), 0.0, new_highest)
        rescale = tl.exp2(highest - base)
        shares = tl.exp2(scores - tl.expand_dims(base, AXIS))
        total = total * rescale + tl.sum(shares, AXIS)
        mixed = mixed * tl.expand_dims(rescale, AXIS)
        if AXIS == 1:
            mixed = tl.dot(shares.to(COMPUTE), tile, mixed, input_precision="ieee")
        else:
            mixed = tl.dot(tl.trans(tile), shares.to(COMPUTE), mixed, input_precision="ieee")
        highest = new_highest

    # Once more, with a zero that only the device knows: otherwise the compiler keeps addresses and
    # masks in registers all through the loop, which has none to spare.
    pairs += tl.minimum(num_splits, 0)
    exists = pairs < num_tokens * HEADS
    heads = pairs % HEADS
    row = request.to(tl.int64) * num_tokens + pairs // HEADS
    inside = tl.expand_dims(exists, AXIS) & tl.expand_dims(columns < RANK, 1 - AXIS)
    found = total > 0
    total = tl.where(found, total, 1.0)
    mixed = mixed / tl.expand_dims(total, AXIS)
    if HAS_LSE:
        lse = tl.where(found, (highest + tl.log2(total)) * 0.6931471805599453, -float("inf"))
        at = lse_ptr + row * lse_stride + heads * lse_head_stride + split * lse_split_stride
        tl.store(at, lse, mask=exists)
    at = out_ptr + row * out_stride + heads * out_head_stride + split * out_split_stride
    at = tl.expand_dims(at, AXIS) + tl.expand_dims(columns, 1 - AXIS)
    if SPLIT:
        inside = inside & tl.expand_dims(found, AXIS)
    tl.store(at, mixed.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_splits"])
def mla_merge_kernel(
    out_ptr,  # [N, HEADS, RANK]
    lse_ptr,  # [N, HEADS] float32, written if HAS_LSE
    parts_ptr,  # [N, HEADS, num_splits, RANK] float32
    part_lse_ptr,  # [N, HEADS, num_splits] float32
    out_stride,
    out_head_stride,
    lse_stride,
    lse_head_stride,
    num_splits,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,  # the number of splits, filled up to a power of two
    COLUMNS: tl.constexpr,  # of a program
    HAS_LSE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: some columns of one token and head, over all parts of the context."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    pair = tl.program_id(0).to(tl.int64)
    token, head = pair // HEADS, pair % HEADS
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    splits = tl.arange(0, ROWS)
    at = part_lse_ptr + pair * num_splits + splits
    lse = tl.load(at, mask=splits < num_splits, other=-float("inf"))
    highest = tl.max(lse, 0)
    base = tl.where(highest == -float("inf"), 0.0, highest)
    shares = tl.exp(lse - base)
    total = tl.sum(shares, 0)
    at = parts_ptr + (pair * num_splits + splits)[:, None] * RANK + columns[None, :]
    inside = (columns < RANK)[None, :]
    parts = tl.load(at, mask=(shares > 0)[:, None] & inside, other=0.0)
    found = total > 0
    total = tl.where(found, total, 1.0)
    mixed = tl.sum(parts * shares[:, None], 0) / total
    at = out_ptr + token * out_stride + head * out_head_stride + columns
    tl.store(at, mixed.to(out_ptr.dtype.element_ty), mask=columns < RANK)
    if HAS_LSE:  # noqa: SIM102 - Triton decides only this one while it compiles
        if tl.program_id(1) == 0:
            lse_at = lse_ptr + token * lse_stride + head * lse_head_stride
            tl.store(lse_at, tl.where(found, base + tl.log(total), -float("inf")))

"""Triton code of :func:`k3_kernels.kda_conv`: convolve whole prompts, then move the windows on.

Needs Triton. :mod:`k3_kernels.kda_conv` describes the operator and chooses the constants below.
"""

from __future__ import annotations

import triton
import triton.language as tl

from k3_kernels.kda_step_kernel import sigmoid

__all__ = ["kda_conv_kernel", "kda_window_kernel"]

# What changes from call to call must not ask for a compilation.
COUNTS = ["num_tokens", "num_sequences", "num_slots", "null_slot"]
LISTS = ["cu_seqlens_ptr", "slots_ptr", "continued_ptr"]


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=LISTS)
def kda_conv_kernel(
    out_ptr,  # [N, C]
    x_ptr,  # [N, C]
    taps_ptr,  # [C, WIDTH]
    conv_ptr,  # [slots, C, columns]
    cu_seqlens_ptr,  # [B + 1], read if VARLEN
    slots_ptr,  # [B]
    continued_ptr,  # [B], read if CONTINUED
    out_stride,
    x_stride,
    taps_channel_stride,
    taps_tap_stride,
    conv_stride,
    conv_channel_stride,
    conv_column_stride,
    num_tokens,
    num_sequences,
    num_slots,
    null_slot,
    num_channels,
    VARLEN: tl.constexpr,
    CONTINUED: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Convolve some channels of some tokens, which may belong to several sequences."""
    token = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    present = token < num_tokens
    # The sequence of a token: how many of them end at it or before.
    begin = tl.zeros([BLOCK_T], tl.int32)
    mine = tl.zeros([BLOCK_T], tl.int32)
    if VARLEN:
        other = tl.arange(0, BLOCK_B)
        ends = tl.load(cu_seqlens_ptr + other + 1, mask=other < num_sequences, other=2147483647)
        mine = tl.sum((ends[None, :] <= token[:, None]).to(tl.int32), 1)
        present = present & (mine < num_sequences)
        begin = tl.load(cu_seqlens_ptr + mine, mask=present, other=0)
    slot = tl.load(slots_ptr + mine, mask=present, other=-1)
    padding = slot <= null_slot
    exists = present & (slot > null_slot) & (slot < num_slots)
    position = token - begin
    remembers = exists
    if CONTINUED:
        continued = tl.load(continued_ptr + mine, mask=present, other=0)
        remembers = remembers & (continued != 0)
    else:
        remembers = remembers & (position < 0)
    within = (channel < num_channels)[None, :]
    x = x_ptr + token[:, None].to(tl.int64) * x_stride + channel[None, :]
    window = conv_ptr + slot[:, None].to(tl.int64) * conv_stride
    window += channel[None, :] * conv_channel_stride
    y = tl.zeros([BLOCK_T, BLOCK_C], COMPUTE)
    for back in tl.static_range(WIDTH - 1, -1, -1):
        inside = (exists & (position >= back))[:, None] & within
        value = tl.load(x - back * x_stride, mask=inside, other=0.0)
        if back > 0:
            before = (remembers & (position < back))[:, None] & within
            column = (WIDTH - 1 - back + position)[:, None] * conv_column_stride
            value += tl.load(window + column, mask=before, other=0.0)
        weight = tl.load(
            taps_ptr + channel * taps_channel_stride + (WIDTH - 1 - back) * taps_tap_stride,
            mask=channel < num_channels,
            other=0.0,
        )
        y += value.to(COMPUTE) * weight.to(COMPUTE)[None, :]
    y = y * sigmoid(y)
    # Padding gives zeros; a slot that does not exist must not pass unnoticed.
    y = tl.where(exists[:, None], y, tl.where(padding[:, None], 0.0, float("nan")))
    out = out_ptr + token[:, None].to(tl.int64) * out_stride + channel[None, :]
    tl.store(out, y.to(out_ptr.dtype.element_ty), mask=present[:, None] & within)


@triton.jit(
    do_not_specialize=COUNTS,
    do_not_specialize_on_alignment=[*LISTS, "checkpoint_ptr", "checkpoint_slots_ptr"],
)
def kda_window_kernel(
    x_ptr,  # [N, C]
    conv_ptr,  # [slots, C, columns]
    cu_seqlens_ptr,  # [B + 1], read if VARLEN
    slots_ptr,  # [B]
    continued_ptr,  # [B], read if CONTINUED
    checkpoint_ptr,  # [B], read if CHECKPOINTS, and the next one
    checkpoint_slots_ptr,
    x_stride,
    conv_stride,
    conv_channel_stride,
    conv_column_stride,
    num_tokens,
    num_slots,
    null_slot,
    num_channels,
    VARLEN: tl.constexpr,
    CONTINUED: tl.constexpr,
    CHECKPOINTS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Store the windows after a sequence and at its checkpoint; a launch of its own.

    In the launch before, the programs of the first tokens read what this one overwrites.
    """
    mine = tl.program_id(1)
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    column = tl.arange(0, BLOCK_W)
    begin = 0
    length = num_tokens
    if VARLEN:
        begin = tl.load(cu_seqlens_ptr + mine)
        length = tl.load(cu_seqlens_ptr + mine + 1) - begin
    slot = tl.load(slots_ptr + mine)
    if (length <= 0) | (slot <= null_slot) | (slot >= num_slots):
        return
    mask = (column < WIDTH - 1)[:, None] & (channel < num_channels)[None, :]
    x = x_ptr + channel[None, :]
    at = column[:, None] * conv_column_stride + channel[None, :] * conv_channel_stride
    home = conv_ptr + slot.to(tl.int64) * conv_stride + at
    # Inputs before the first token: from the old window, or none at all.
    oldest = -WIDTH
    if CONTINUED:
        oldest = tl.where(tl.load(continued_ptr + mine) != 0, 0, -WIDTH)
    # Column c of the window after n tokens is the input at n - (WIDTH - 1) + c; before 0 it is what
    # the window held then.
    position = length - (WIDTH - 1) + column[:, None]
    row = (begin + position).to(tl.int64) * x_stride
    last = tl.load(x + row, mask=mask & (position >= 0), other=0.0)
    kept = length * conv_column_stride
    old = position < oldest
    last += tl.load(home + kept, mask=mask & old, other=0.0)
    if CHECKPOINTS:
        cut = tl.load(checkpoint_ptr + mine)
        keep = tl.load(checkpoint_slots_ptr + mine)
        position = cut - (WIDTH - 1) + column[:, None]
        row = (begin + position).to(tl.int64) * x_stride
        valid = (cut > 0) & (cut <= length) & (keep > null_slot) & (keep < num_slots)
        limit = tl.where(valid, WIDTH - 1, 0)
        cut_mask = mask & (column < limit)[:, None]
        earlier = tl.load(x + row, mask=cut_mask & (position >= 0), other=0.0)
        old = position < oldest
        earlier += tl.load(home + cut * conv_column_stride, mask=cut_mask & old, other=0.0)
    # All threads have read before one writes: the columns move within the window.
    tl.debug_barrier()
    tl.store(home, last, mask=mask)
    if CHECKPOINTS:
        tl.store(conv_ptr + keep.to(tl.int64) * conv_stride + at, earlier, mask=cut_mask)

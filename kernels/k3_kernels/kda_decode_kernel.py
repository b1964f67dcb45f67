"""Triton code of :func:`k3_kernels.kda_decode` for one token a request, projections to output.

Needs Triton. :mod:`k3_kernels.kda_decode` describes the operator and chooses the constants below;
:mod:`k3_kernels.kda_step_kernel` has the pieces and the shape of a state tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from k3_kernels.kda_step_kernel import (
    delta_step,
    find_slots,
    gated_norm,
    load_taps,
    load_window,
    shift_window,
    sigmoid,
    step_vectors,
    store_window,
)
from k3_kernels.prefetch_kernel import prefetch_rows

__all__ = ["kda_decode_kernel"]


@triton.jit
def tile_elements(BLOCK_V: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr):
    """Return where the elements ``[BLOCK_V, D / CHUNK, CHUNK]`` of a tile of a state are."""
    keys = tl.arange(0, D // CHUNK)[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    return tl.arange(0, BLOCK_V)[:, None, None] * D + keys[None, :, :]


@triton.jit
def prefetch_slot(
    conv_ptr,
    state_ptr,
    slot,
    head,
    H,
    conv_stride,
    conv_channel_stride,
    conv_column_stride,
    state_stride,
    state_head_stride,
    num_slots,
    null_slot,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    BYTES: tl.constexpr,  # of the head's state from its start
    LAST: tl.constexpr,  # and so many values at its end
):
    """Ask the second-level cache for a head's window and for the state that is read first."""
    if (slot > null_slot) & (slot >= 0) & (slot < num_slots):
        state = state_ptr + slot.to(tl.int64) * state_stride + head * state_head_stride
        prefetch_rows(state, 0, 1, BYTES)
        if LAST > 0 and BYTES + LAST * D * 4 <= D * D * 4:
            prefetch_rows(state + (D - LAST) * D, 0, 1, LAST * D * 4)
        if conv_channel_stride == 1:
            conv = conv_ptr + slot.to(tl.int64) * conv_stride + head * D
            size: tl.constexpr = D * conv_ptr.dtype.element_ty.primitive_bitwidth // 8
            for column in tl.static_range(WIDTH - 1):
                prefetch_rows(conv + column * conv_column_stride, H * D, 3, size)


# What changes from call to call must not ask for a compilation: counts that happen to be multiples
# of 16, and lists of numbers that happen to start at an address that is.
@triton.jit(
    do_not_specialize=["num_slots", "num_draft_slots", "num_columns", "null_slot", "beta_stride"],
    do_not_specialize_on_alignment=["beta_ptr", "slots_ptr", "accepted_ptr"],
)
def kda_decode_kernel(
    out_ptr,  # [B, H, D]
    qkv_ptr,  # [B, 3 * H * D]
    gate_ptr,  # [B, H * D], raw
    beta_ptr,  # [B, H], raw
    output_gate_ptr,  # [B, H * D], raw
    taps_ptr,  # [3 * H * D, WIDTH]
    A_log_ptr,  # [H]
    dt_bias_ptr,  # [H * D]
    norm_ptr,  # [D]
    conv_ptr,  # [slots, 3 * H * D, columns]
    state_ptr,  # [slots, H, D (values), D (keys)]
    slots_ptr,  # [B, draft slots]
    accepted_ptr,  # [B], read if HAS_ACCEPTED
    out_stride,
    qkv_stride,
    gate_stride,
    beta_stride,
    output_gate_stride,
    taps_channel_stride,
    taps_tap_stride,
    conv_stride,
    conv_channel_stride,
    conv_column_stride,
    state_stride,
    state_head_stride,
    slots_stride,
    slots_draft_stride,
    num_slots,
    num_draft_slots,
    num_columns,
    null_slot,
    lower_bound,
    scale,
    norm_eps,
    l2_eps,
    D: tl.constexpr,
    WIDTH: tl.constexpr,  # taps of the convolution
    BOUNDED: tl.constexpr,  # log-decay in (lower_bound, 0), or the softplus form
    HAS_ACCEPTED: tl.constexpr,
    DRAFT_SLOTS: tl.constexpr,  # a request has several slots, one per draft position
    EARLY: tl.constexpr,  # ask for the last tile before the first, into registers
    PDL: tl.constexpr,  # the launch may start before the one before it has ended
    PREFETCH: tl.constexpr,  # bytes of the state that are asked for before that one has ended
    PIN: tl.constexpr,  # ask for window and last tile where the compiler cannot move it down
    BLOCK_V: tl.constexpr,  # values that are in registers at a time
    CHUNK: tl.constexpr,  # keys of a row that neighbouring lanes share
    STAGES: tl.constexpr,  # STAGES - 1 tiles of the state are in flight, if there are several
    COMPUTE: tl.constexpr,  # tl.float32: everything between load and store
):
    """One token of one head of one request."""
    head = tl.program_id(0)
    H = tl.num_programs(0)
    row = tl.program_id(1).to(tl.int64)
    NUM_CHUNKS: tl.constexpr = D // CHUNK
    NUM_TILES: tl.constexpr = D // BLOCK_V
    # One tile for q, k, v and the gate, so that there is an element for every thread.
    channels = tl.arange(0, D)
    part = 2 * tl.arange(0, 2)[None, :, None] + tl.arange(0, 2)[None, None, :]
    is_qkv = part < 3
    is_gate = part == 3
    columns = (part * H + head) * D + channels[:, None, None]
    gate_columns = head * D + channels[:, None, None] + 0 * part
    if PDL:
        # The launch before this one may still be running: weights do not come from it.
        tl.extra.cuda.gdc_launch_dependents()
    if PREFETCH:
        # It may still change: past the first-level cache, so that the real load does not find it.
        guess = tl.load(slots_ptr + row * slots_stride, cache_modifier=".cg")
    dt_bias = tl.load(dt_bias_ptr + gate_columns, mask=is_gate, other=0.0).to(COMPUTE)
    taps = load_taps(taps_ptr, columns, is_qkv, taps_channel_stride, taps_tap_stride, WIDTH)
    rate = tl.exp(tl.load(A_log_ptr + head).to(COMPUTE))
    norm = tl.load(norm_ptr + channels).to(COMPUTE)
    if PREFETCH:
        prefetch_slot(
            conv_ptr, state_ptr, guess, head, H, conv_stride, conv_channel_stride,
            conv_column_stride, state_stride, state_head_stride, num_slots, null_slot, D, WIDTH,
            PREFETCH, BLOCK_V if EARLY else 0,
        )  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
    # The state's address waits for the slot number: ask for that first, then for all else.
    slot, start_slot, first, exists = find_slots(
        slots_ptr, accepted_ptr, row, slots_stride, slots_draft_stride, num_slots, num_draft_slots,
        num_columns, null_slot, WIDTH, HAS_ACCEPTED, DRAFT_SLOTS,
    )  # fmt: skip
    x = tl.load(qkv_ptr + row * qkv_stride + columns, mask=is_qkv, other=0.0)
    raw_gate = tl.load(gate_ptr + row * gate_stride + gate_columns, mask=is_gate, other=0.0)
    beta = tl.load(beta_ptr + row * beta_stride + head).to(COMPUTE)
    output_gate = tl.load(output_gate_ptr + row * output_gate_stride + head * D + channels)

    if PIN:
        # Before the branch below, which no load passes. Behind it, ptxas saves registers and moves
        # the state's loads past the convolution, which waits for the window: a third trip.
        valid = (slot > null_slot) & exists
        pinned_window = load_window(
            conv_ptr + slot.to(tl.int64) * conv_stride, columns, part < tl.where(valid, 3, 0),
            conv_channel_stride, conv_column_stride, first, WIDTH,
        )  # fmt: skip
        if EARLY:
            early = state_ptr + start_slot.to(tl.int64) * state_stride + head * state_head_stride
            elements = tile_elements(BLOCK_V, D, CHUNK) + (NUM_TILES - 1) * BLOCK_V * D
            there = elements < tl.where(valid, D * D, 0)
            pinned_state = tl.load(early + elements, mask=there)

    out_tile = out_ptr + row * out_stride + head * D + channels
    padding = slot <= null_slot
    if padding | (not exists):
        # Padding gives zeros; a slot that does not exist must not pass unnoticed.
        nothing = tl.where(padding, tl.zeros([D], COMPUTE), float("nan"))
        tl.store(out_tile, nothing.to(out_ptr.dtype.element_ty))
        return

    conv = conv_ptr + slot.to(tl.int64) * conv_stride
    if PIN:
        window = pinned_window
    else:
        window = load_window(
            conv, columns, is_qkv, conv_channel_stride, conv_column_stride, first, WIDTH
        )
    elements = tile_elements(BLOCK_V, D, CHUNK) + head * state_head_stride
    source = state_ptr + start_slot.to(tl.int64) * state_stride + elements
    target = state_ptr + slot.to(tl.int64) * state_stride + elements
    LOOPED: tl.constexpr = NUM_TILES - EARLY
    if EARLY:
        # Asked for before anything waits for the window; its turn comes at the end.
        if PIN:  # noqa: SIM108
            last_state = pinned_state
        else:
            last_state = tl.load(source + LOOPED * BLOCK_V * D)

    _convolved, q, k, decay, qk, v = step_vectors(
        window, x, taps, raw_gate, dt_bias, rate, is_gate, lower_bound, scale, l2_eps,
        BOUNDED, WIDTH, NUM_CHUNKS, CHUNK, COMPUTE,
    )  # fmt: skip
    beta = sigmoid(beta)
    if LOOPED == 0:
        o, _u, state = delta_step(last_state, q, k, qk, v, decay, beta)
        tl.store(target, state)
    else:
        v = tl.reshape(v, [NUM_TILES, BLOCK_V])
        tiles = tl.arange(0, NUM_TILES)[:, None]
        o = tl.zeros([NUM_TILES, BLOCK_V], COMPUTE)
        for tile in tl.range(0, LOOPED, num_stages=STAGES):
            state = tl.load(source + tile * BLOCK_V * D)
            v_tile = tl.sum(tl.where(tiles == tile, v, 0.0), 0)
            o_tile, _u, state = delta_step(state, q, k, qk, v_tile, decay, beta)
            tl.store(target + tile * BLOCK_V * D, state)
            # The norm needs the whole head: keep the outputs of all tiles.
            o = tl.where(tiles == tile, o_tile[None, :], o)
        if EARLY:
            v_tile = tl.sum(tl.where(tiles == LOOPED, v, 0.0), 0)
            o_tile, _u, state = delta_step(last_state, q, k, qk, v_tile, decay, beta)
            tl.store(target + LOOPED * BLOCK_V * D, state)
            o = tl.where(tiles == LOOPED, o_tile[None, :], o)
        o = tl.reshape(o, [D])
    o = gated_norm(o, norm, output_gate.to(COMPUTE), norm_eps, D)
    tl.store(out_tile, o.to(out_ptr.dtype.element_ty))

    # Elements of a small tile are held by several threads: all must have read before one writes.
    tl.debug_barrier()
    window = shift_window(window, x, WIDTH)
    store_window(conv, columns, is_qkv, conv_channel_stride, conv_column_stride, window, WIDTH)

"""Triton code of :func:`k3_kernels.kda_decode` for several tokens a request.

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

__all__ = ["kda_verify_kernel"]


# As in kda_decode_kernel: counts and lists that change must not ask for a compilation.
@triton.jit(
    do_not_specialize=[
        "num_slots", "num_draft_slots", "num_columns", "null_slot", "max_tokens", "beta_stride"
    ],
    do_not_specialize_on_alignment=["beta_ptr", "slots_ptr", "accepted_ptr", "cu_seqlens_ptr"],
)  # fmt: skip
def kda_verify_kernel(
    out_ptr,  # [N, H, D]
    qkv_ptr,  # [N, 3 * H * D]
    gate_ptr,  # [N, H * D], raw
    beta_ptr,  # [N, H], raw
    output_gate_ptr,  # [N, H * D], raw
    taps_ptr,  # [3 * H * D, WIDTH]
    A_log_ptr,  # [H]
    dt_bias_ptr,  # [H * D]
    norm_ptr,  # [D]
    conv_ptr,  # [slots, 3 * H * D, columns]
    state_ptr,  # [slots, H, D (values), D (keys)]
    slots_ptr,  # [B, draft slots]
    accepted_ptr,  # [B], read if HAS_ACCEPTED
    cu_seqlens_ptr,  # [B + 1]
    record_u_ptr,  # [B, tokens, H, D] float32, written if RECORD; so are the next two
    record_key_ptr,  # [B, tokens, H, D]
    record_gate_ptr,  # [B, tokens, H, D]
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
    record_u_stride,
    record_u_token_stride,
    record_key_stride,
    record_key_token_stride,
    record_gate_stride,
    record_gate_token_stride,
    num_slots,
    num_draft_slots,
    num_columns,
    max_tokens,  # room for drafts: records, or slots
    null_slot,
    lower_bound,
    scale,
    norm_eps,
    l2_eps,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    BOUNDED: tl.constexpr,
    HAS_ACCEPTED: tl.constexpr,
    DRAFT_SLOTS: tl.constexpr,  # keep the state after every token, each in a slot of its own
    RECORD: tl.constexpr,  # keep the state before the drafts, and what leads on from it
    PDL: tl.constexpr,
    CHUNK: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Several tokens of one head of one request; the state stays in registers in between."""
    head = tl.program_id(0)
    H = tl.num_programs(0)
    row = tl.program_id(1).to(tl.int64)
    NUM_CHUNKS: tl.constexpr = D // CHUNK
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    begin = tl.load(cu_seqlens_ptr + row).to(tl.int64)
    count = (tl.load(cu_seqlens_ptr + row + 1) - begin).to(tl.int32)
    slot, start_slot, first, exists = find_slots(
        slots_ptr, accepted_ptr, row, slots_stride, slots_draft_stride, num_slots, num_draft_slots,
        num_columns, null_slot, WIDTH, HAS_ACCEPTED, DRAFT_SLOTS,
    )  # fmt: skip
    if DRAFT_SLOTS or RECORD:
        exists = exists & (count <= max_tokens) & (count + WIDTH - 2 <= num_columns)
    if count <= 0:
        return
    channels = tl.arange(0, D)
    padding = slot <= null_slot
    if padding | (not exists):
        nothing = tl.where(padding, tl.zeros([D], COMPUTE), float("nan"))
        nothing = nothing.to(out_ptr.dtype.element_ty)
        for token in range(count):
            tl.store(out_ptr + (begin + token) * out_stride + head * D + channels, nothing)
        return

    part = 2 * tl.arange(0, 2)[None, :, None] + tl.arange(0, 2)[None, None, :]
    is_qkv = part < 3
    is_key = part == 1
    is_gate = part == 3
    columns = (part * H + head) * D + channels[:, None, None]
    head_columns = head * D + channels[:, None, None] + 0 * part
    conv = conv_ptr + slot.to(tl.int64) * conv_stride
    window = load_window(
        conv, columns, is_qkv, conv_channel_stride, conv_column_stride, first, WIDTH
    )
    keys = tl.arange(0, NUM_CHUNKS)[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    elements = channels[:, None, None] * D + keys[None, :, :] + head * state_head_stride
    state = tl.load(state_ptr + start_slot.to(tl.int64) * state_stride + elements)
    dt_bias = tl.load(dt_bias_ptr + head_columns, mask=is_gate, other=0.0).to(COMPUTE)
    taps = load_taps(taps_ptr, columns, is_qkv, taps_channel_stride, taps_tap_stride, WIDTH)
    rate = tl.exp(tl.load(A_log_ptr + head).to(COMPUTE))
    norm = tl.load(norm_ptr + channels).to(COMPUTE)
    if DRAFT_SLOTS or RECORD:
        # How many tokens will be accepted is not known: keep every input that may start a window.
        tl.debug_barrier()  # all threads have read the old window
        kept = shift_window(window, window[0], WIDTH)
        for column in tl.static_range(WIDTH - 2):
            at = columns * conv_channel_stride + column * conv_column_stride
            tl.store(conv + at, kept[column], mask=is_qkv)

    qkv = qkv_ptr + begin * qkv_stride
    raw_gates = gate_ptr + begin * gate_stride
    betas = beta_ptr + begin * beta_stride + head
    output_gates = output_gate_ptr + begin * output_gate_stride + head * D
    x = tl.load(qkv + columns, mask=is_qkv, other=0.0)
    raw_gate = tl.load(raw_gates + head_columns, mask=is_gate, other=0.0)
    beta = tl.load(betas)
    output_gate = tl.load(output_gates + channels)
    for token in range(count):
        # The next token's inputs are under way while this one is computed; the last has no next.
        following = tl.minimum(token + 1, count - 1)
        next_x = tl.load(qkv + following * qkv_stride + columns, mask=is_qkv, other=0.0)
        next_raw_gate = tl.load(
            raw_gates + following * gate_stride + head_columns, mask=is_gate, other=0.0
        )
        next_beta = tl.load(betas + following * beta_stride)
        next_output_gate = tl.load(output_gates + following * output_gate_stride + channels)
        convolved, q, k, decay, qk, v = step_vectors(
            window, x, taps, raw_gate, dt_bias, rate, is_gate, lower_bound, scale, l2_eps,
            BOUNDED, WIDTH, NUM_CHUNKS, CHUNK, COMPUTE,
        )  # fmt: skip
        o, u, state = delta_step(state, q, k, qk, v, decay, sigmoid(beta.to(COMPUTE)))
        o = gated_norm(o, norm, output_gate.to(COMPUTE), norm_eps, D)
        out_tile = out_ptr + (begin + token) * out_stride + head * D + channels
        tl.store(out_tile, o.to(out_ptr.dtype.element_ty))
        window = shift_window(window, x, WIDTH)
        if DRAFT_SLOTS or RECORD:
            at = columns * conv_channel_stride + (WIDTH - 2 + token) * conv_column_stride
            tl.store(conv + at, x, mask=is_qkv)
        if RECORD:
            u_row = record_u_ptr + row * record_u_stride + token * record_u_token_stride
            tl.store(u_row + head * D + channels, u)
            key_row = record_key_ptr + row * record_key_stride + token * record_key_token_stride
            tl.store(key_row + head_columns, convolved, mask=is_key)
            gate_row = record_gate_ptr + row * record_gate_stride
            tl.store(
                gate_row + token * record_gate_token_stride + head_columns, raw_gate, mask=is_gate
            )
        elif DRAFT_SLOTS:
            draft_slot = tl.load(slots_ptr + row * slots_stride + token * slots_draft_stride)
            if (draft_slot > null_slot) & (draft_slot < num_slots):
                tl.store(state_ptr + draft_slot.to(tl.int64) * state_stride + elements, state)
        x = next_x
        raw_gate = next_raw_gate
        beta = next_beta
        output_gate = next_output_gate

    if not (DRAFT_SLOTS or RECORD):
        tl.store(state_ptr + slot.to(tl.int64) * state_stride + elements, state)
        tl.debug_barrier()
        store_window(conv, columns, is_qkv, conv_channel_stride, conv_column_stride, window, WIDTH)

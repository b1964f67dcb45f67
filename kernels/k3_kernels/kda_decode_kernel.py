"""Triton code of :func:`k3_kernels.kda_decode`: one KDA step of a head, from projections to output.

Needs Triton. :mod:`k3_kernels.kda_decode` describes the operator and chooses the constants below.

A state tile is ``[BLOCK_V, K / CHUNK, CHUNK]`` instead of ``[BLOCK_V, K]``: the same elements at
the same addresses. Triton gives the last dimension to the lanes of a warp first, so CHUNK says how
many of them share a row. With 128 keys in one piece a row would take all 32 lanes and every sum
over keys five shuffles for each row; with pieces of 32 it takes 8 lanes, three shuffles, and most
of the sum happens within a thread.
"""

# Triton compiles `rows + (x,)` but no starred expression.
# ruff: noqa: RUF005

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["kda_decode_kernel", "kda_verify_kernel"]


LOG2_E = tl.constexpr(1.4426950408889634)

# -- pieces of a step ------------------------------------------------------------------------------


@triton.jit
def sigmoid(x):
    """Return 1 / (1 + e^-x) without an overflow.

    A root, squared, and powers of two are an instruction each; a division and e^x are five.
    """
    root = tl.rsqrt(1.0 + tl.exp2(tl.minimum(x * -LOG2_E, 115.0)))
    return root * root


@triton.jit
def decay_factor(raw, bias, rate, lower_bound, BOUNDED: tl.constexpr):
    """Return e^g for the raw gate of each key channel."""
    x = raw + bias
    if BOUNDED:
        return tl.exp2(sigmoid(rate * x) * (lower_bound * LOG2_E))
    # log(1 + e^x), from the side that cannot overflow
    softplus = tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))
    return tl.exp(-rate * softplus)


@triton.jit
def load_taps(taps_ptr, channels, mask, channel_stride, tap_stride, WIDTH: tl.constexpr):
    """Load the convolution's weights of some channels, one tile a tap."""
    taps = ()
    for tap in tl.static_range(WIDTH):
        at = channels * channel_stride + tap * tap_stride
        taps = taps + (tl.load(taps_ptr + at, mask=mask, other=0.0),)
    return taps


@triton.jit
def load_window(
    conv_ptr, channels, mask, channel_stride, column_stride, first, WIDTH: tl.constexpr
):
    """Load the WIDTH - 1 inputs before the current one, oldest first."""
    window = ()
    for column in tl.static_range(WIDTH - 1):
        at = channels * channel_stride + (first + column) * column_stride
        window = window + (tl.load(conv_ptr + at, mask=mask, other=0.0),)
    return window


@triton.jit
def shift_window(window, x, WIDTH: tl.constexpr):
    """Drop the oldest input and append ``x``."""
    shifted = ()
    for column in tl.static_range(1, WIDTH - 1):
        shifted = shifted + (window[column],)
    return shifted + (x,)


@triton.jit
def store_window(
    conv_ptr, channels, mask, channel_stride, column_stride, window, WIDTH: tl.constexpr
):
    """Store the last WIDTH - 1 inputs."""
    for column in tl.static_range(WIDTH - 1):
        at = channels * channel_stride + column * column_stride
        tl.store(conv_ptr + at, window[column], mask=mask)


@triton.jit
def short_conv(window, x, taps, WIDTH: tl.constexpr, COMPUTE: tl.constexpr):
    """Convolve and apply SiLU; rounded to the activations' type, as the unfused layer stores it."""
    y = x.to(COMPUTE) * taps[WIDTH - 1].to(COMPUTE)
    for column in tl.static_range(WIDTH - 1):
        y += window[column].to(COMPUTE) * taps[column].to(COMPUTE)
    return (y * sigmoid(y)).to(x.dtype)


@triton.jit
def gated_norm(o, weight, gate, eps, D: tl.constexpr):
    """Normalise the output ``[D]`` of a head, then open its gate."""
    return o * tl.rsqrt(tl.sum(o * o, 0) / D + eps) * weight * sigmoid(gate)


@triton.jit
def add_pairs(a, b, c, x, y, z):
    """Combine three sums that are taken in one reduction."""
    return a + x, b + y, c + z


@triton.jit
def l2_factors(q, k, eps):
    """Return 1 / |q|, 1 / |k| and q . k of one head, with one exchange between warps for all."""
    qq, kk, qk = tl.reduce((q * q, k * k, q * k), 0, add_pairs)
    return tl.rsqrt(qq + eps), tl.rsqrt(kk + eps), qk


@triton.jit
def step_vectors(
    window,
    x,
    taps,
    raw_gate,
    dt_bias,
    rate,
    is_gate,
    lower_bound,
    scale,
    l2_eps,
    BOUNDED: tl.constexpr,
    WIDTH: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """From the inputs ``[D, 2, 2]`` of a token to what the recurrence asks for.

    Returns the convolved tile, q, k and the decay as ``[K / CHUNK, CHUNK]``, q . k, and v ``[D]``.
    """
    convolved = short_conv(window, x, taps, WIDTH, COMPUTE)
    decay = decay_factor(raw_gate.to(COMPUTE), dt_bias, rate, lower_bound, BOUNDED)
    q_and_v, k_and_decay = tl.split(tl.where(is_gate, decay, convolved.to(COMPUTE)))
    q, v = tl.split(q_and_v)
    k, decay = tl.split(k_and_decay)
    inverse_q, inverse_k, qk = l2_factors(q, k, l2_eps)
    inverse_q *= scale
    qk *= inverse_q * inverse_k
    q = tl.reshape(q * inverse_q, [NUM_CHUNKS, CHUNK])
    k = tl.reshape(k * inverse_k, [NUM_CHUNKS, CHUNK])
    return convolved, q, k, tl.reshape(decay, [NUM_CHUNKS, CHUNK]), qk, v


@triton.jit
def delta_step(state, q, k, qk, v, decay, beta):
    """One token of the delta rule on a tile of values; returns o, u and the new state.

    Both products with the decayed state are taken at once: o = S_new^T q = S'^T q + (k . q) u.
    """
    state = state * decay[None, :, :]
    recalled = tl.sum(tl.sum(state * k[None, :, :], 1), 1)
    read = tl.sum(tl.sum(state * q[None, :, :], 1), 1)
    u = beta * (v - recalled)
    state += u[:, None, None] * k[None, :, :]
    return read + u * qk, u, state


# -- kernels ---------------------------------------------------------------------------------------


# What changes from call to call must not ask for a compilation: counts that happen to be multiples
# of 16, and lists of numbers that happen to start at an address that is.
COUNTS = ["num_slots", "num_draft_slots", "num_columns", "null_slot", "max_tokens", "beta_stride"]
LISTS = ["beta_ptr", "slots_ptr", "accepted_ptr", "cu_seqlens_ptr"]


@triton.jit(do_not_specialize=COUNTS[:4] + COUNTS[5:], do_not_specialize_on_alignment=LISTS[:3])
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
    BLOCK_V: tl.constexpr,  # values that are in registers at a time
    CHUNK: tl.constexpr,  # keys of a row that neighbouring lanes share
    STAGES: tl.constexpr,  # STAGES - 1 tiles of the state are in flight, if there are several
    LOAD_POLICY: tl.constexpr,  # of the cache, for the state, and the next one
    STORE_POLICY: tl.constexpr,
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
    dt_bias = tl.load(dt_bias_ptr + gate_columns, mask=is_gate, other=0.0).to(COMPUTE)
    taps = load_taps(taps_ptr, columns, is_qkv, taps_channel_stride, taps_tap_stride, WIDTH)
    rate = tl.exp(tl.load(A_log_ptr + head).to(COMPUTE))
    norm = tl.load(norm_ptr + channels).to(COMPUTE)
    if PDL:
        tl.extra.cuda.gdc_wait()
    # The state's address waits for the slot number: ask for that first, then for all else.
    slot = tl.load(slots_ptr + row * slots_stride)
    start_slot = slot
    first = 0
    exists = slot < num_slots
    if HAS_ACCEPTED:
        first = tl.maximum(tl.load(accepted_ptr + row) - 1, 0)
        exists = exists & (first + WIDTH - 1 <= num_columns)
        if DRAFT_SLOTS:
            exists = exists & (first < num_draft_slots)
            draft = tl.minimum(first, num_draft_slots - 1)
            start_slot = tl.load(slots_ptr + row * slots_stride + draft * slots_draft_stride)
            exists = exists & (start_slot > null_slot) & (start_slot < num_slots)
    x = tl.load(qkv_ptr + row * qkv_stride + columns, mask=is_qkv, other=0.0)
    raw_gate = tl.load(gate_ptr + row * gate_stride + gate_columns, mask=is_gate, other=0.0)
    beta = tl.load(beta_ptr + row * beta_stride + head).to(COMPUTE)
    output_gate = tl.load(output_gate_ptr + row * output_gate_stride + head * D + channels)

    out_tile = out_ptr + row * out_stride + head * D + channels
    padding = slot <= null_slot
    if padding | (not exists):
        # Padding gives zeros; a slot that does not exist must not pass unnoticed.
        nothing = tl.where(padding, tl.zeros([D], COMPUTE), float("nan"))
        tl.store(out_tile, nothing.to(out_ptr.dtype.element_ty))
        return

    conv = conv_ptr + slot.to(tl.int64) * conv_stride
    window = load_window(
        conv, columns, is_qkv, conv_channel_stride, conv_column_stride, first, WIDTH
    )
    keys = tl.arange(0, NUM_CHUNKS)[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    elements = tl.arange(0, BLOCK_V)[:, None, None] * D + keys[None, :, :]
    elements += head * state_head_stride
    source = state_ptr + start_slot.to(tl.int64) * state_stride + elements
    target = state_ptr + slot.to(tl.int64) * state_stride + elements
    LOOPED: tl.constexpr = NUM_TILES - EARLY
    if EARLY:
        # Asked for before anything waits for the window; its turn comes at the end.
        last_state = tl.load(source + LOOPED * BLOCK_V * D, eviction_policy=LOAD_POLICY)

    _convolved, q, k, decay, qk, v = step_vectors(
        window, x, taps, raw_gate, dt_bias, rate, is_gate, lower_bound, scale, l2_eps,
        BOUNDED, WIDTH, NUM_CHUNKS, CHUNK, COMPUTE,
    )  # fmt: skip
    beta = sigmoid(beta)
    if LOOPED == 0:
        o, _u, state = delta_step(last_state, q, k, qk, v, decay, beta)
        tl.store(target, state, eviction_policy=STORE_POLICY)
    else:
        v = tl.reshape(v, [NUM_TILES, BLOCK_V])
        tiles = tl.arange(0, NUM_TILES)[:, None]
        o = tl.zeros([NUM_TILES, BLOCK_V], COMPUTE)
        for tile in tl.range(0, LOOPED, num_stages=STAGES):
            state = tl.load(source + tile * BLOCK_V * D, eviction_policy=LOAD_POLICY)
            v_tile = tl.sum(tl.where(tiles == tile, v, 0.0), 0)
            o_tile, _u, state = delta_step(state, q, k, qk, v_tile, decay, beta)
            tl.store(target + tile * BLOCK_V * D, state, eviction_policy=STORE_POLICY)
            # The norm needs the whole head: keep the outputs of all tiles.
            o = tl.where(tiles == tile, o_tile[None, :], o)
        if EARLY:
            v_tile = tl.sum(tl.where(tiles == LOOPED, v, 0.0), 0)
            o_tile, _u, state = delta_step(last_state, q, k, qk, v_tile, decay, beta)
            tl.store(target + LOOPED * BLOCK_V * D, state, eviction_policy=STORE_POLICY)
            o = tl.where(tiles == LOOPED, o_tile[None, :], o)
        o = tl.reshape(o, [D])
    o = gated_norm(o, norm, output_gate.to(COMPUTE), norm_eps, D)
    tl.store(out_tile, o.to(out_ptr.dtype.element_ty))

    # Elements of a small tile are held by several threads: all must have read before one writes.
    tl.debug_barrier()
    window = shift_window(window, x, WIDTH)
    store_window(conv, columns, is_qkv, conv_channel_stride, conv_column_stride, window, WIDTH)


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=LISTS)
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
    slot = tl.load(slots_ptr + row * slots_stride)
    start_slot = slot
    first = 0
    exists = slot < num_slots
    if HAS_ACCEPTED:
        first = tl.maximum(tl.load(accepted_ptr + row) - 1, 0)
        exists = exists & (first + WIDTH - 1 <= num_columns)
        if DRAFT_SLOTS:
            exists = exists & (first < num_draft_slots)
            draft = tl.minimum(first, num_draft_slots - 1)
            start_slot = tl.load(slots_ptr + row * slots_stride + draft * slots_draft_stride)
            exists = exists & (start_slot > null_slot) & (start_slot < num_slots)
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

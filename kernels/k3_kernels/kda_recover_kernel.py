"""Triton code of :func:`k3_kernels.kda_recover`: commit the accepted tokens of a verify step.

Needs Triton. :mod:`k3_kernels.kda_recover` describes the operator and chooses the constants below.
"""

# Triton compiles `columns + (x,)` but no starred expression.
# And a test of a compile-time constant cannot be joined with one of a value.
# ruff: noqa: RUF005, SIM102

from __future__ import annotations

import triton
import triton.language as tl

from k3_kernels.kda_step_kernel import decay_factor
from k3_kernels.prefetch_kernel import prefetch_rows

__all__ = ["kda_recover_kernel"]


@triton.jit
def weights_after(count, k, decay, TOKENS: tl.constexpr):
    """Return what ``count`` tokens leave of each key ``[ROWS, K]`` and of the state before.

    What a token wrote has decayed by the tokens behind it, so this runs from the last to the first.
    """
    behind = tl.zeros_like(k[0]) + 1.0
    weights = ()
    for token in tl.static_range(TOKENS - 1, -1, -1):
        # Records of rejected tokens may hold anything.
        weights = (tl.where(token < count, k[token] * behind, 0.0),) + weights
        behind = tl.where(token < count, behind * decay[token], behind)
    return weights, behind


@triton.jit
def state_after(state, u, weights, behind, TOKENS: tl.constexpr):
    """State ``[ROWS, V / ROWS, K]`` from the one before, ``u`` and what is left of the keys."""
    written = u[0][:, :, None] * weights[0][:, None, :]
    for token in tl.static_range(1, TOKENS):
        written += u[token][:, :, None] * weights[token][:, None, :]
    return state * behind[:, None, :] + written


@triton.jit
def load_u(u_row, values, count, token_stride, D: tl.constexpr, TOKENS: tl.constexpr):
    """Load u of some values for every token, as a tuple."""
    u = ()
    for token in tl.static_range(TOKENS):
        # What is not there is not read, so that nothing in it can spoil a product with zero.
        there = values < tl.where(token < count, D, 0)
        u = u + (tl.load(u_row + token * token_stride + values, mask=there, other=0.0),)
    return u


@triton.jit
def load_columns(ptr, mask, first, column_stride, WIDTH: tl.constexpr):
    """Load WIDTH - 1 columns of a window from ``first`` on."""
    columns = ()
    for column in tl.static_range(WIDTH - 1):
        loaded = tl.load(ptr + (first + column) * column_stride, mask=mask)
        columns = columns + (loaded,)
    return columns


@triton.jit
def store_columns(ptr, mask, columns, column_stride, WIDTH: tl.constexpr):
    """Store WIDTH - 1 columns at the front of a window."""
    for column in tl.static_range(WIDTH - 1):
        tl.store(ptr + column * column_stride, columns[column], mask=mask)


# What changes from call to call must not ask for a compilation.
COUNTS = ["num_requests", "num_slots", "num_columns", "null_slot"]
LISTS = ["slots_ptr", "accepted_ptr", "final_slots_ptr", "boundary_ptr", "boundary_slots_ptr"]


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=LISTS)
def kda_recover_kernel(
    state_ptr,  # [layers, slots, H, D (values), D (keys)]
    u_ptr,  # [layers, B, tokens, H, D] float32
    key_ptr,  # [layers, B, tokens, H, D]
    gate_ptr,  # [layers, B, tokens, H, D]
    A_log_ptr,  # [layers, H]
    dt_bias_ptr,  # [layers, H * D]
    conv_ptr,  # [layers, slots, 3 * H * D, columns], touched if MOVE_WINDOW
    slots_ptr,  # [B]
    accepted_ptr,  # [B]
    final_slots_ptr,  # [B]
    boundary_ptr,  # [B], read if HAS_BOUNDARY
    boundary_slots_ptr,  # [B], read if HAS_BOUNDARY
    state_layer_stride,
    state_stride,
    state_head_stride,
    u_layer_stride,
    u_stride,
    u_token_stride,
    key_layer_stride,
    key_stride,
    key_token_stride,
    gate_layer_stride,
    gate_stride,
    gate_token_stride,
    A_log_layer_stride,
    dt_bias_layer_stride,
    conv_layer_stride,
    conv_stride,
    conv_channel_stride,
    conv_column_stride,
    num_requests,
    num_slots,
    num_columns,
    null_slot,
    lower_bound,
    l2_eps,
    D: tl.constexpr,
    TOKENS: tl.constexpr,  # that there are records of
    BOUNDED: tl.constexpr,
    HAS_BOUNDARY: tl.constexpr,
    MOVE_WINDOW: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
    PREFETCH: tl.constexpr,  # ask for state and records before the launch before has ended
    PIN: tl.constexpr,  # the compiler may not move loads down
    BLOCK_V: tl.constexpr,  # values of a program
    SLICE: tl.constexpr,  # and how many of them it takes at a time
    ROWS: tl.constexpr,  # warps of a program
    AHEAD: tl.constexpr,  # slices that are asked for before they are needed
    LATE_U: tl.constexpr,  # read u of a slice when its turn comes: the first brought the lines
    COMPUTE: tl.constexpr,
):
    """Commit a slice of values of one head of one request in one layer."""
    head = tl.program_id(1)
    H = tl.num_programs(1)
    row = (tl.program_id(2) % num_requests).to(tl.int64)
    layer = (tl.program_id(2) // num_requests).to(tl.int64)
    keys = tl.arange(0, D)
    if PREFETCH:
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()
        # It may still change: past the first-level cache, so that the real load does not find it.
        guess = tl.load(slots_ptr + row, cache_modifier=".cg")
        first = head * D + tl.program_id(0) * BLOCK_V
        u_start = u_ptr + layer * u_layer_stride + row * u_stride + first
        prefetch_rows(u_start, u_token_stride, TOKENS, BLOCK_V * 4)
        size: tl.constexpr = D * key_ptr.dtype.element_ty.primitive_bitwidth // 8
        key_start = key_ptr + layer * key_layer_stride + row * key_stride + head * D
        prefetch_rows(key_start, key_token_stride, TOKENS, size)
        gate_start = gate_ptr + layer * gate_layer_stride + row * gate_stride + head * D
        prefetch_rows(gate_start, gate_token_stride, TOKENS, size)
        if (guess > null_slot) & (guess >= 0) & (guess < num_slots):
            state_start = state_ptr + layer * state_layer_stride + head * state_head_stride
            state_start += guess.to(tl.int64) * state_stride + tl.program_id(0) * (BLOCK_V * D)
            prefetch_rows(state_start, 0, 1, BLOCK_V * D * 4)
    # Every row of a tile of vectors is the same: a row for each warp, so that no warp has to ask
    # another for its weights.
    channels = head * D + keys[None, :] + 0 * tl.arange(0, ROWS)[:, None]
    bias = tl.load(dt_bias_ptr + layer * dt_bias_layer_stride + channels).to(COMPUTE)
    rate = tl.exp(tl.load(A_log_ptr + layer * A_log_layer_stride + head).to(COMPUTE))
    if PDL:
        # The launch before this one may still be running: weights do not come from it.
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    slot = tl.load(slots_ptr + row)
    count = tl.load(accepted_ptr + row)
    final_slot = tl.load(final_slots_ptr + row)
    key_row = key_ptr + layer * key_layer_stride + row * key_stride + channels
    gate_row = gate_ptr + layer * gate_layer_stride + row * gate_stride + channels
    u_row = u_ptr + layer * u_layer_stride + row * u_stride + head * D
    k = ()
    decay = ()
    for token in tl.static_range(TOKENS):
        k = k + (tl.load(key_row + token * key_token_stride).to(COMPUTE),)
        decay = decay + (tl.load(gate_row + token * gate_token_stride).to(COMPUTE),)
    if PIN:
        # No load passes a barrier. Left alone, ptxas saves registers and moves each of these, and
        # those of the state, to where its value is needed: one trip to memory after another.
        tl.debug_barrier()

    exists = (slot > null_slot) & (slot < num_slots)
    exists = exists & (final_slot > null_slot) & (final_slot < num_slots)
    exists = exists & (count > 0) & (count <= TOKENS)
    if MOVE_WINDOW:
        exists = exists & (count + WIDTH - 2 <= num_columns)
    if not PIN:
        if not exists:
            return
    layer_state = state_ptr + layer * state_layer_stride + head * state_head_stride
    source = layer_state + slot.to(tl.int64) * state_stride
    final = layer_state + final_slot.to(tl.int64) * state_stride
    values = tl.arange(0, ROWS)[:, None] * (SLICE // ROWS) + tl.arange(0, SLICE // ROWS)[None, :]
    values += tl.program_id(0) * BLOCK_V
    elements = values[:, :, None] * D + keys[None, None, :]
    # On their way while the weights are worked out; so are later ones while these are used.
    ahead = ()
    for piece in tl.static_range(AHEAD):
        if piece * SLICE < BLOCK_V:
            if PIN:
                # In one block with the loads above, before a branch that none of them passes.
                there = elements < tl.where(exists, D * D, 0)
                early = tl.load(source + piece * (SLICE * D) + elements, mask=there)
                ahead = ahead + (early,)
            else:
                ahead = ahead + (tl.load(source + piece * (SLICE * D) + elements),)
    u = load_u(u_row, values, count, u_token_stride, D, TOKENS)
    if PIN:
        if not exists:
            return
    normalised = ()
    decays = ()
    for token in tl.static_range(TOKENS):
        inverse = tl.rsqrt(tl.sum(k[token] * k[token], 1) + l2_eps)
        normalised = normalised + (k[token] * inverse[:, None],)
        decays = decays + (decay_factor(decay[token], bias, rate, lower_bound, BOUNDED),)

    weights, behind = weights_after(count, normalised, decays, TOKENS)
    if HAS_BOUNDARY:
        boundary = tl.load(boundary_ptr + row)
        boundary_slot = tl.load(boundary_slots_ptr + row)
        inside = (boundary > 0) & (boundary <= count)
        inside = inside & (boundary_slot > null_slot) & (boundary_slot < num_slots)
        earlier_weights, earlier_behind = weights_after(boundary, normalised, decays, TOKENS)
        at_boundary = layer_state + boundary_slot.to(tl.int64) * state_stride
    for piece in tl.static_range(BLOCK_V // SLICE):
        if (piece + AHEAD) * SLICE < BLOCK_V:
            ahead = ahead + (tl.load(source + (piece + AHEAD) * (SLICE * D) + elements),)
        if LATE_U and piece > 0:
            u = load_u(u_row, values + piece * SLICE, count, u_token_stride, D, TOKENS)
        if (piece + 1) * SLICE < BLOCK_V and not LATE_U:
            next_values = values + (piece + 1) * SLICE
            next_u = load_u(u_row, next_values, count, u_token_stride, D, TOKENS)
        if HAS_BOUNDARY:
            if inside:
                earlier = state_after(ahead[piece], u, earlier_weights, earlier_behind, TOKENS)
                tl.store(at_boundary + piece * SLICE * D + elements, earlier)
        after = state_after(ahead[piece], u, weights, behind, TOKENS)
        tl.store(final + piece * SLICE * D + elements, after)
        if (piece + 1) * SLICE < BLOCK_V and not LATE_U:
            u = next_u

    if MOVE_WINDOW:
        if tl.program_id(0) == 0:
            part = tl.arange(0, 4)[:, None]
            is_qkv = part < 3
            conv = conv_ptr + layer * conv_layer_stride
            conv += ((part * H + head) * D + keys[None, :]) * conv_channel_stride
            old_window = conv + slot.to(tl.int64) * conv_stride
            last_columns = load_columns(old_window, is_qkv, count - 1, conv_column_stride, WIDTH)
            if HAS_BOUNDARY:
                first_column = tl.where(inside, boundary, 1) - 1
                earlier_columns = load_columns(
                    old_window, is_qkv, first_column, conv_column_stride, WIDTH
                )
            # All threads have read before one writes: the windows may be the same.
            tl.debug_barrier()
            new_window = conv + final_slot.to(tl.int64) * conv_stride
            store_columns(new_window, is_qkv, last_columns, conv_column_stride, WIDTH)
            if HAS_BOUNDARY:
                if inside:
                    new_window = conv + boundary_slot.to(tl.int64) * conv_stride
                    store_columns(new_window, is_qkv, earlier_columns, conv_column_stride, WIDTH)

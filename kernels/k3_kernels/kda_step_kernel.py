"""What a KDA step does to one token of one head, as pieces of a kernel.

Needs Triton. :mod:`k3_kernels.kda_decode_kernel` and :mod:`k3_kernels.kda_verify_kernel` are built
of them; the other KDA kernels take the gates from here.

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

__all__ = [
    "LOG2_E",
    "add_pairs",
    "decay_factor",
    "delta_step",
    "find_slots",
    "gated_norm",
    "l2_factors",
    "load_taps",
    "load_window",
    "shift_window",
    "short_conv",
    "sigmoid",
    "step_vectors",
    "store_window",
]

LOG2_E = tl.constexpr(1.4426950408889634)


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
def find_slots(
    slots_ptr,
    accepted_ptr,
    row,
    slots_stride,
    slots_draft_stride,
    num_slots,
    num_draft_slots,
    num_columns,
    null_slot,
    WIDTH: tl.constexpr,
    HAS_ACCEPTED: tl.constexpr,
    DRAFT_SLOTS: tl.constexpr,
):
    """Find out where a request lives and what it starts from.

    Returns its slot, the slot of the state it starts from, the first column of its window, and
    whether all of that exists.
    """
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
    return slot, start_slot, first, exists


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

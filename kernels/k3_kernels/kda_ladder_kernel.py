"""Triton code of the first kernel of the KDA ladders: the delta rule, token by token.

Needs Triton. :mod:`k3_kernels.kda_ladder` uses it for decoding and
:mod:`k3_kernels.kda_ladder_prefill` for prompts. It is written to be read: one tile of the state,
one loop over tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["log_decay", "rule_kernel", "sigmoid", "unit"]


@triton.jit
def sigmoid(x):
    """Return 1 / (1 + e^-x) without an overflow."""
    return 1.0 / (1.0 + tl.exp(tl.minimum(-x, 80.0)))


@triton.jit
def unit(x, eps):
    """Scale a vector to length 1."""
    return x * tl.rsqrt(tl.sum(x * x, 0) + eps)


@triton.jit
def log_decay(raw, bias, rate, lower_bound):
    """Return K3's gate: between ``lower_bound`` and 0."""
    return lower_bound * sigmoid(rate * (raw + bias))


@triton.jit(
    do_not_specialize=["num_tokens", "beta_stride"],
    do_not_specialize_on_alignment=["slots_ptr", "beta_ptr"],
)
def rule_kernel(
    out_ptr,  # [N, H, D]
    q_ptr,  # [N, H * D] after convolution and SiLU, not normalised; so is k
    k_ptr,
    v_ptr,  # [N, H * D]
    gate_ptr,  # [N, H * D], raw
    beta_ptr,  # [N, H], raw
    A_log_ptr,  # [H]
    dt_bias_ptr,  # [H * D]
    state_ptr,  # [slots, H, D (values), D (keys)]
    slots_ptr,  # [sequences]
    out_stride,
    q_stride,
    k_stride,
    v_stride,
    gate_stride,
    beta_stride,
    state_stride,
    num_tokens,  # of each sequence
    lower_bound,
    scale,
    l2_eps,
    D: tl.constexpr,
    BLOCK_V: tl.constexpr,  # values of a program
    STAGES: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Take some values of one head through the tokens of a sequence; values never mix."""
    key = tl.arange(0, D)
    value = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    keys = head * D + key
    values = head * D + value
    slot = tl.load(slots_ptr + sequence).to(tl.int64)
    at = state_ptr + slot * state_stride + values[:, None] * D + key[None, :]
    state = tl.load(at)
    rate = tl.exp(tl.load(A_log_ptr + head).to(COMPUTE))
    bias = tl.load(dt_bias_ptr + keys).to(COMPUTE)
    for token in tl.range(0, num_tokens, num_stages=STAGES):
        row = (sequence * num_tokens + token).to(tl.int64)
        q = tl.load(q_ptr + row * q_stride + keys).to(COMPUTE)
        k = tl.load(k_ptr + row * k_stride + keys).to(COMPUTE)
        v = tl.load(v_ptr + row * v_stride + values).to(COMPUTE)
        raw = tl.load(gate_ptr + row * gate_stride + keys).to(COMPUTE)
        beta = sigmoid(tl.load(beta_ptr + row * beta_stride + head).to(COMPUTE))
        q = unit(q, l2_eps) * scale
        k = unit(k, l2_eps)
        state = state * tl.exp(log_decay(raw, bias, rate, lower_bound))[None, :]  # forget
        error = v - tl.sum(state * k[None, :], 1)  # look up
        state += (beta * error)[:, None] * k[None, :]  # write
        o = tl.sum(state * q[None, :], 1)  # read
        tl.store(out_ptr + row * out_stride + values, o.to(out_ptr.dtype.element_ty))
    tl.store(at, state)

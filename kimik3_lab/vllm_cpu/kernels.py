"""Plain PyTorch in place of the Triton kernels that vLLM's K3 model calls.

Needs torch. :mod:`kimik3_lab.vllm_cpu.patches` puts these functions where vLLM has its own, so
names and arguments are vLLM's; arguments that only steer a kernel are accepted and ignored.

The arithmetic is the reference's: gate, L2 norm, delta rule, residual mixture and the layer norm
that follows it are the very functions that vLLM would be asked to judge. So ``make test-vllm`` says
nothing about those; ``tests/oracle`` does. What happens around them is vLLM's, and judged: which
state belongs to which request, what is projected, convolved, gated, routed and added.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from kimik3_lab.reference import kda, mxfp4
from kimik3_lab.reference.norms import rms_norm
from kimik3_lab.reference.residuals import mix

__all__ = [
    "attn_res",
    "chunk_kda_prefill",
    "fused_recurrent_kda",
    "fused_recurrent_kda_packed_decode",
    "routed_experts",
    "unpacked_experts",
]

#: Slot of the cache that belongs to nobody: vLLM points rows there that only pad a batch.
NULL_SLOT = 0


# -- Kimi Delta Attention --------------------------------------------------------------------------


def chunk_kda_prefill(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    raw_g: Tensor,
    raw_beta: Tensor,
    A_log: Tensor,
    g_bias: Tensor,
    lower_bound: float | None,
    state_cache: Tensor,
    state_indices: Tensor,
    has_initial_state: Tensor,
    cu_seqlens: Tensor,
    out: Tensor | None = None,
    checkpoint_state: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Prefill: sequences of any length, of which some begin and some continue.

    Parameters
    ----------
    q, k, v, raw_g
        ``[1, T, H, D]``: all sequences behind each other, after the convolution; the gate before
        its activation.
    raw_beta
        ``[1, T, H]``: before the sigmoid.
    state_cache
        ``[slots, H, V, K]``, float32; changed in place.
    state_indices, has_initial_state
        ``[N]``: slot of each sequence, and whether what lies there is its own.
    cu_seqlens
        ``[N + 1]``: where each sequence begins.
    """
    if checkpoint_state is not None:
        raise NotImplementedError("checkpoints within a prefill need vLLM's GPU kernels")
    new = ~has_initial_state[: len(cu_seqlens) - 1]
    state_cache[state_indices[: len(new)][new].long()] = 0.0
    o = _advance(q, k, v, raw_g, raw_beta, A_log, g_bias, lower_bound,
                 state_cache, state_indices, cu_seqlens, out)  # fmt: skip
    return o, None


def fused_recurrent_kda(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    raw_g: Tensor,
    raw_beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    ssm_state_indices: Tensor,
    num_accepted_tokens: Tensor | None = None,
    out: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Decode steps that share a batch with a prefill; arguments as for the prefill."""
    if num_accepted_tokens is not None:
        raise NotImplementedError("speculative decoding is not part of the CPU plugin")
    o = _advance(q, k, v, raw_g, raw_beta, A_log, dt_bias, lower_bound,
                 initial_state, ssm_state_indices, cu_seqlens, out)  # fmt: skip
    return o, initial_state


def fused_recurrent_kda_packed_decode(
    *,
    mixed_qkv: Tensor,
    raw_g: Tensor,
    raw_beta: Tensor,
    initial_state: Tensor,
    state_indices: Tensor,
    **rest: Any,
) -> tuple[Tensor, Tensor]:
    """One token for each sequence; ``mixed_qkv [N, 3 H D]`` holds q, k and v side by side."""
    q, k, v = mixed_qkv.unflatten(-1, (3, *raw_g.shape[-2:])).unsqueeze(0).unbind(-3)
    starts = torch.arange(len(mixed_qkv) + 1)
    return fused_recurrent_kda(
        q=q, k=k, v=v, raw_g=raw_g, raw_beta=raw_beta, initial_state=initial_state,
        ssm_state_indices=state_indices, cu_seqlens=starts, **rest,
    )  # fmt: skip


def _advance(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    raw_g: Tensor,
    raw_beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
    states: Tensor,
    slots: Tensor,
    starts: Tensor,
    out: Tensor | None,
) -> Tensor:
    """Run each sequence from its slot of ``states``, leave its new state there."""
    o = torch.empty_like(v) if out is None else out
    q, k = kda.l2norm(q) * q.shape[-1] ** -0.5, kda.l2norm(k)
    g = kda.gate(raw_g, A_log, dt_bias, lower_bound)
    beta = torch.sigmoid(raw_beta.to(g.dtype))
    bounds = starts.tolist()
    for slot, start, stop in zip(slots.tolist(), bounds, bounds[1:], strict=False):
        rows = slice(start, stop)
        if start == stop or slot == NULL_SLOT:
            o[:, rows] = 0.0
            continue
        before = kda.from_cache_layout(states[slot : slot + 1])
        # Token by token, where the reference prefills in chunks: both forms have to agree.
        o[:, rows], after = kda.recurrent(
            q[:, rows], k[:, rows], v[:, rows], g[:, rows], beta[:, rows], before
        )
        states[slot] = kda.to_cache_layout(after).squeeze(0)
    return o


# -- attention residuals ---------------------------------------------------------------------------


def attn_res(
    prefix: Tensor,
    delta: Tensor | None,
    blocks: Tensor,
    norm_weight: Tensor,
    qk_weight: Tensor,
    output_norm_weight: Tensor | None,
    num_blocks: int,
    block_write_idx: int,
    eps: float,
    output_norm_eps: float,
    *,
    quant_dtype: torch.dtype | None = None,
) -> Tensor:
    """Add a sublayer's output, keep the sum as a block, mix all blocks, normalise the mixture.

    Parameters
    ----------
    prefix
        ``[N, H]``: the running sum; changed in place.
    delta
        ``[N, H]``: what to add to it.
    blocks
        ``[N, blocks, H]``, of which the first ``num_blocks`` are valid; changed in place if
        ``block_write_idx`` is not negative.
    """
    if quant_dtype is not None:
        raise NotImplementedError(f"activations in {quant_dtype} need vLLM's GPU kernels")
    if delta is not None:
        prefix += delta
    if block_write_idx >= 0:
        blocks[:, block_write_idx] = prefix
    if num_blocks:
        sources = [*blocks[:, :num_blocks].unbind(1), prefix]
        mixed = mix(sources, qk_weight, norm_weight, eps)
    else:
        mixed = prefix.clone()
    if output_norm_weight is None:
        return mixed
    return rms_norm(mixed, output_norm_weight, output_norm_eps)


# -- routed experts --------------------------------------------------------------------------------


def routed_experts(
    z: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, expert_ids: Tensor, activation: Any
) -> Tensor:
    """Weighted sum over the chosen experts, one expert after another.

    Written apart from ``reference.moe.routed_sum``, which is judged by it.

    Parameters
    ----------
    z
        ``[N, latent]``.
    w13
        ``[E, 2 I, latent]``: w1 over w3.
    w2
        ``[E, latent, I]``.
    weights, expert_ids
        ``[N, top_k]``.
    activation
        Maps ``[n, 2 I]`` to ``[n, I]``.

    Examples
    --------
    >>> one = torch.ones(1, 1)
    >>> w13, w2 = torch.ones(2, 2, 1), torch.tensor([[[1.0]], [[10.0]]])
    >>> picks = torch.tensor([[1]])
    >>> routed_experts(one, w13, w2, 0.5 * one, picks, lambda x: x[:, :1] + x[:, 1:])
    tensor([[10.]])
    """
    total = torch.zeros_like(z, dtype=torch.float32)
    for expert_id in expert_ids.unique().tolist():
        rows, choice = (expert_ids == expert_id).nonzero(as_tuple=True)
        y = activation(z[rows] @ w13[expert_id].T) @ w2[expert_id].T
        total[rows] += y.float() * weights[rows, choice, None].float()
    return total


def unpacked_experts(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Turn each pair ``*.weight_packed`` and ``*.weight_scale`` into one ``*.weight``, bfloat16.

    The two may come in either order and from different files; other weights pass through.

    Raises
    ------
    ValueError
        If one of a pair never comes.

    Examples
    --------
    >>> packed, scale = mxfp4.quantize(torch.full((1, 32), 3.0))
    >>> pairs = [("w1.weight_scale", scale), ("norm", scale), ("w1.weight_packed", packed)]
    >>> [(name, weight[0, 0].item()) for name, weight in unpacked_experts(pairs)]
    [('norm', 126), ('w1.weight', 3.0)]
    """
    waiting: dict[str, dict[str, Tensor]] = {}
    for name, weight in weights:
        base, _, part = name.rpartition("_")
        if not base.endswith(".weight") or part not in ("packed", "scale"):
            yield name, weight
            continue
        pair = waiting.setdefault(base, {})
        pair[part] = weight
        if len(pair) == 2:
            del waiting[base]
            yield base, mxfp4.dequantize(pair["packed"], pair["scale"], torch.bfloat16)
    if waiting:
        name, pair = next(iter(waiting.items()))
        raise ValueError(f"{name} came with {next(iter(pair))} only: an expert needs both parts")

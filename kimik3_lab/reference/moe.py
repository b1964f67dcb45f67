"""Stable LatentMoE: a router over many experts that work in a narrower, latent space.

Needs torch. Lesson 02 studies the router, lesson 03 the dispatch and the experts.

A token is projected once from the hidden width to the latent width, 16 of 896 experts see it there,
their weighted sum is normalised and projected back, and two shared experts see the token itself.

Source: vLLM 0.33.0, ``vllm/models/kimi_k3/nvidia/model.py`` and ``SituAndMul``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kimik3_lab.config import K3Config
from kimik3_lab.reference.norms import RMSNorm, compute_dtype

__all__ = [
    "MLP",
    "Expert",
    "LatentMoE",
    "Router",
    "Routing",
    "route",
    "routed_sum",
    "situ",
]


class Routing(NamedTuple):
    """Which experts each token goes to, and how much each of them counts.

    ``expert_ids`` is int64 ``[N, top_k]``, best first; ``weights`` is float32 or wider,
    ``[N, top_k]``.

    Examples
    --------
    >>> Routing(torch.tensor([[3, 0]]), torch.tensor([[0.75, 0.25]])).expert_ids.tolist()
    [[3, 0]]
    """

    expert_ids: Tensor
    weights: Tensor


def route(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor,
    top_k: int,
    renormalize: bool = True,
    scale: float = 1.0,
) -> Routing:
    """Choose ``top_k`` experts for each token.

    The bias, which balances load, takes part in the choice only: weights come from the unbiased
    scores. Of two experts with equal scores the one with the lower id wins.

    Parameters
    ----------
    hidden
        ``[N, H]``: the full-width input of the layer, not the latent.
    weight
        ``[E, H]``.
    bias
        ``[E]`` (``e_score_correction_bias``), float32 or wider.
    top_k
        Experts for a token.
    renormalize
        Whether the weights of a token sum to ``scale``.
    scale
        ``routed_scaling_factor``.

    Returns
    -------
    Routing
        Logits, scores and weights are float32 or wider: in bfloat16 some tokens pick others.

    Raises
    ------
    ValueError
        If there are fewer than ``top_k`` experts.

    Examples
    --------
    >>> hidden, weight = torch.zeros(1, 2), torch.zeros(4, 2)
    >>> route(hidden, weight, torch.tensor([0.0, 0.3, 0.0, 0.1]), top_k=2)
    Routing(expert_ids=tensor([[1, 3]]), weights=tensor([[0.5000, 0.5000]]))
    """
    if not 0 < top_k <= weight.shape[0]:
        raise ValueError(f"top_k must be from 1 to {weight.shape[0]} experts, got {top_k}")
    dtype = compute_dtype(hidden.dtype)
    scores = torch.sigmoid(hidden.to(dtype) @ weight.to(dtype).mT)
    preference = scores + bias.to(dtype)
    expert_ids = preference.argsort(dim=-1, descending=True, stable=True)[..., :top_k]
    weights = scores.gather(-1, expert_ids)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return Routing(expert_ids, weights * scale)


def situ(gate: Tensor, up: Tensor, beta: float = 4.0, linear_beta: float = 25.0) -> Tensor:
    """SiTU: a SwiGLU whose two halves are softly bounded, at ``beta`` and ``linear_beta``.

    ``[beta tanh(gate / beta) sigmoid(gate)] [linear_beta tanh(up / linear_beta)]``; the sigmoid
    sees the unbounded gate, and no output exceeds ``beta * linear_beta`` = 100.

    Parameters
    ----------
    gate, up
        ``[..., D]``.

    Returns
    -------
    Tensor
        ``[..., D]`` in the type of ``gate``; computed in float32 or wider.

    Examples
    --------
    >>> situ(torch.tensor([1e9, -1e9, 0.0]), torch.tensor([1e9, 1e9, 1e9])).tolist()
    [100.0, -0.0, 0.0]
    """
    dtype = compute_dtype(gate.dtype)
    a, b = gate.to(dtype), up.to(dtype)
    bounded_gate = beta * torch.tanh(a / beta) * torch.sigmoid(a)
    return (bounded_gate * (linear_beta * torch.tanh(b / linear_beta))).to(gate.dtype)


def routed_sum(
    z: Tensor, routing: Routing, experts: Sequence[Callable[[Tensor], Tensor]]
) -> Tensor:
    """Weighted sum of the chosen experts' outputs.

    Sorting the (token, choice) pairs by expert puts the tokens of one expert next to each other, so
    each expert that got any runs once, on all of them.

    Parameters
    ----------
    z
        ``[N, latent]``.
    routing
        For these N tokens.
    experts
        Maps from ``[n, latent]`` to ``[n, latent]``, by id.

    Returns
    -------
    Tensor
        ``[N, latent]``, float32 or wider: still the raw sum, which the norm must see complete.

    Examples
    --------
    >>> routing = Routing(torch.tensor([[1, 0]]), torch.tensor([[0.75, 0.25]]))
    >>> routed_sum(torch.tensor([[4.0]]), routing, [lambda z: 10 * z, lambda z: z])
    tensor([[13.]])
    """
    top_k = routing.expert_ids.shape[-1]
    order = routing.expert_ids.flatten().argsort(stable=True)
    counts = routing.expert_ids.flatten().bincount(minlength=len(experts))
    tokens = order.div(top_k, rounding_mode="floor")
    weights = routing.weights.flatten()[order].unsqueeze(-1)
    total = torch.zeros_like(z, dtype=weights.dtype)
    start = 0
    for expert_id, count in enumerate(counts.tolist()):
        if count:
            rows = slice(start, start + count)
            output = experts[expert_id](z[tokens[rows]])
            total.index_add_(0, tokens[rows], weights[rows] * output)
            start += count
    return total


class Router(nn.Module):
    """:func:`route` with its weight and selection bias."""

    def __init__(
        self,
        config: K3Config,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        shape = (config.num_experts, config.hidden_size)
        self.weight = nn.Parameter(torch.zeros(shape, dtype=dtype, device=device))
        # Made float32 from the start: a bias that once was bfloat16 has lost what ranks experts.
        bias = torch.zeros(config.num_experts, dtype=compute_dtype(dtype), device=device)
        self.e_score_correction_bias = nn.Parameter(bias)

    def forward(self, hidden: Tensor) -> Routing:
        """Route ``hidden [N, H]``."""
        config = self.config
        return route(
            hidden,
            self.weight,
            self.e_score_correction_bias,
            config.num_experts_per_token,
            config.moe_renormalize,
            config.routed_scaling_factor,
        )


class MLP(nn.Module):
    """Feed-forward with :func:`situ`: the dense layer 0, and the shared experts run as one."""

    def __init__(
        self,
        config: K3Config,
        width: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.betas = (config.activation_situ_beta, config.activation_situ_linear_beta)
        self.gate_proj = nn.Linear(hidden, width, bias=False, dtype=dtype, device=device)
        self.up_proj = nn.Linear(hidden, width, bias=False, dtype=dtype, device=device)
        self.down_proj = nn.Linear(width, hidden, bias=False, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[N, H]`` to ``[N, H]``."""
        return self.down_proj(situ(self.gate_proj(x), self.up_proj(x), *self.betas))


class Expert(nn.Module):
    """One routed expert in the latent space: ``w1`` is the gate, ``w3`` the rest, ``w2`` back."""

    def __init__(
        self,
        config: K3Config,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        latent, width = config.routed_expert_hidden_size, config.moe_intermediate_size
        self.betas = (config.activation_situ_beta, config.activation_situ_linear_beta)
        self.w1 = nn.Linear(latent, width, bias=False, dtype=dtype, device=device)
        self.w2 = nn.Linear(width, latent, bias=False, dtype=dtype, device=device)
        self.w3 = nn.Linear(latent, width, bias=False, dtype=dtype, device=device)

    def forward(self, z: Tensor) -> Tensor:
        """Map ``[n, latent]`` to ``[n, latent]``."""
        return self.w2(situ(self.w1(z), self.w3(z), *self.betas))


class LatentMoE(nn.Module):
    """Router, latent experts and shared experts of one layer."""

    def __init__(
        self,
        config: K3Config,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        hidden, latent = config.hidden_size, config.routed_expert_hidden_size
        to = {"dtype": dtype, "device": device}
        self.gate = Router(config, **to)
        self.routed_expert_down_proj = nn.Linear(hidden, latent, bias=False, **to)
        self.routed_expert_norm = RMSNorm(latent, config.rms_norm_eps, **to)
        self.routed_expert_up_proj = nn.Linear(latent, hidden, bias=False, **to)
        self.shared_experts = MLP(config, config.shared_intermediate_size, **to)
        self.experts = nn.ModuleList(Expert(config, **to) for _ in range(config.num_experts))

    def forward(self, hidden: Tensor) -> Tensor:
        """Map ``[N, H]`` to ``[N, H]``."""
        z = self.routed_expert_down_proj(hidden)
        total = routed_sum(z, self.gate(hidden), self.experts).to(z.dtype)
        routed = self.routed_expert_up_proj(self.routed_expert_norm(total))
        return routed + self.shared_experts(hidden)

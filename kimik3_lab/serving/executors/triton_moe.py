"""An MoE layer on the Triton kernels: routing, dispatch, experts, and the sum with its norm.

Needs torch, and Triton when it runs. Lesson 10 turns its switch; lessons 03 and 04 explain it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from k3_kernels import (
    BF16Experts,
    MXFP4Experts,
    moe_experts,
    pack_mxfp4,
    route,
    row_norm,
    situ_and_mul,
)
from torch import Tensor

from kimik3_lab.config import K3Config
from kimik3_lab.reference import mxfp4
from kimik3_lab.reference.moe import MLP, Expert, LatentMoE
from kimik3_lab.serving.executors.triton_linear import JoinedLinear, Skinny, join_columns

__all__ = ["TritonMLP", "TritonMoE", "pack_experts"]


def pack_experts(moe: LatentMoE, config: K3Config) -> MXFP4Experts | BF16Experts:
    """Bring a layer's experts into the form that the kernels read.

    Parameters
    ----------
    moe : LatentMoE
        Of the reference.
    config : K3Config
        Its ``expert_dtype`` says how the checkpoint keeps experts: ``"mxfp4"`` or ``"bf16"``.

    Raises
    ------
    ValueError
        If the experts are to be MXFP4 and their weights do not lie on its grid: packing them would
        make another model. They do if they were loaded from an MXFP4 checkpoint.

    Examples
    --------
    >>> moe = LatentMoE(K3Config.micro())
    >>> packed = pack_experts(moe, moe.gate.config)
    >>> packed.num_experts, packed.hidden_size, packed.intermediate_size
    (4, 32, 32)
    """
    experts = cast(list[Expert], list(moe.experts))
    with torch.no_grad():
        gate_up = torch.stack([torch.cat((e.w1.weight, e.w3.weight)) for e in experts])
        down = torch.stack([e.w2.weight for e in experts])
    if config.expert_dtype != "mxfp4":
        return BF16Experts(gate_up, down)
    parts: list[Tensor] = []
    for weight in (gate_up, down):
        packed, scale = mxfp4.quantize(weight)
        if not torch.equal(mxfp4.dequantize(packed, scale, weight.dtype), weight):
            raise ValueError(
                "these experts are to be MXFP4 and their weights are not on its grid: load them "
                "from an MXFP4 checkpoint, or give the model a configuration with "
                "expert_dtype='bf16'"
            )
        parts += packed, scale
    return pack_mxfp4(*parts)


class TritonMLP:
    """A dense feed-forward: gate and up in one product, SiTU in one launch."""

    def __init__(self, mlp: MLP, skinny: Skinny) -> None:
        self.mlp, self.skinny = mlp, skinny
        self.inputs = JoinedLinear([mlp.gate_proj, mlp.up_proj], skinny)

    def __call__(self, x: Tensor, mixer: object = None) -> Tensor:
        """Map ``[N, H]`` to ``[N, H]``."""
        beta, linear_beta = self.mlp.betas
        inner = situ_and_mul(*self.inputs(x), beta=beta, linear_beta=linear_beta)
        self.skinny.counters.launches += 1
        return self.skinny.linear(inner, self.mlp.down_proj.weight)

    def weights(self) -> list[Tensor]:
        """Weights of its products."""
        return [self.inputs.weight, self.mlp.down_proj.weight]


class TritonMoE:
    """One MoE layer.

    The latent of the routed experts and both halves of the shared ones come from one product; the
    routed sum and the shared experts' activations lie side by side, so that one product brings both
    back and adds them.

    Parameters
    ----------
    moe : LatentMoE
        Its weights are used. A module with packed experts (``packed``) keeps those.
    config : K3Config
        Shape of the model.
    deferred_finalize : bool
        Leave the weighted sum over a token's experts to the norm that reads it, which saves an
        operator and a trip of the sum through memory (vLLM #53152). Otherwise the sum is rounded
        to the type of the activations and normalised by an operator of its own.
    skinny : Skinny
        Computes the products, and counts launches.

    Attributes
    ----------
    watch : callable or None
        Shown the expert ids ``[N, k]`` of every call: who counts loads sets it.
    """

    def __init__(
        self,
        moe: LatentMoE,
        config: K3Config,
        *,
        deferred_finalize: bool,
        skinny: Skinny,
    ) -> None:
        self.moe, self.config, self.skinny = moe, config, skinny
        self.deferred_finalize = deferred_finalize
        packed = getattr(moe, "packed", None)
        self.experts = pack_experts(moe, config) if packed is None else packed
        self.watch: Callable[[Tensor], None] | None = None
        shared = moe.shared_experts
        latent = moe.routed_expert_down_proj
        self._latent = latent.out_features
        self.inputs = JoinedLinear([latent, shared.gate_proj, shared.up_proj], skinny)
        self.outputs = join_columns([moe.routed_expert_up_proj, shared.down_proj])

    def __call__(self, hidden: Tensor, mixer: object = None) -> Tensor:
        """Map ``[N, H]`` to ``[N, H]``."""
        moe, config = self.moe, self.config
        routing = route(
            self.skinny.linear(hidden, moe.gate.weight, wide=True),
            moe.gate.e_score_correction_bias,
            config.num_experts_per_token,
            renormalize=config.moe_renormalize,
            scale=config.routed_scaling_factor,
        )
        if self.watch is not None:
            self.watch(routing.expert_ids)
        norm = moe.routed_expert_norm
        latent, gate, up = self.inputs(hidden)
        inner = hidden.new_empty(len(hidden), self.outputs.shape[1])
        routed, shared = torch.split(inner, [self._latent, gate.shape[-1]], -1)
        beta, linear_beta = config.activation_situ_beta, config.activation_situ_linear_beta
        total = moe_experts(
            latent,
            self.experts,
            *routing,
            beta=beta,
            linear_beta=linear_beta,
            norm_weight=norm.weight if self.deferred_finalize else None,
            eps=norm.eps,
            out=routed if self.deferred_finalize else None,
        )
        self.skinny.counters.launches += 3
        if not self.deferred_finalize:
            row_norm(total, norm.weight, eps=norm.eps, out=routed)
            self.skinny.counters.launches += 1
        situ_and_mul(gate, up, beta=beta, linear_beta=linear_beta, out=shared)
        return self.skinny.linear(inner, self.outputs)

    def weights(self) -> list[Tensor]:
        """Weights of its dense products."""
        return [self.moe.gate.weight.detach(), self.inputs.weight, self.outputs]

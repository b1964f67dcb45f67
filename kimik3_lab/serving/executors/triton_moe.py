"""An MoE layer on the Triton kernels: routing, dispatch, experts, and the sum with its norm.

Needs torch, and Triton when it runs. Lesson 10 turns its switch; lessons 03 and 04 explain it.
"""

from __future__ import annotations

from typing import cast

import torch
from k3_kernels import BF16Experts, MXFP4Experts, moe_experts, pack_mxfp4, route
from torch import Tensor

from kimik3_lab.config import K3Config
from kimik3_lab.reference import mxfp4
from kimik3_lab.reference.moe import Expert, LatentMoE
from kimik3_lab.reference.norms import compute_dtype
from kimik3_lab.serving.executors.step_counters import StepCounters

__all__ = ["TritonMoE", "pack_experts"]


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


class TritonMoE:
    """One MoE layer.

    Parameters
    ----------
    moe : LatentMoE
        Its projections, router and shared experts are used where they are.
    config : K3Config
        Shape of the model.
    deferred_finalize : bool
        Leave the weighted sum over a token's experts to the norm that reads it, which saves an
        operator and a trip of the sum through memory (vLLM #53152). Otherwise the sum is rounded
        to the type of the activations and normalised by PyTorch.
    counters : StepCounters
        Where launches are counted.
    """

    def __init__(
        self,
        moe: LatentMoE,
        config: K3Config,
        *,
        deferred_finalize: bool,
        counters: StepCounters,
    ) -> None:
        self.moe, self.config, self.counters = moe, config, counters
        self.deferred_finalize = deferred_finalize
        self.experts = pack_experts(moe, config)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Map ``[N, H]`` to ``[N, H]``."""
        moe, config = self.moe, self.config
        wide = compute_dtype(hidden.dtype)
        logits = hidden.to(wide) @ moe.gate.weight.to(wide).mT
        routing = route(
            logits,
            moe.gate.e_score_correction_bias,
            config.num_experts_per_token,
            renormalize=config.moe_renormalize,
            scale=config.routed_scaling_factor,
        )
        norm = moe.routed_expert_norm
        routed = moe_experts(
            moe.routed_expert_down_proj(hidden),
            self.experts,
            *routing,
            beta=config.activation_situ_beta,
            linear_beta=config.activation_situ_linear_beta,
            norm_weight=norm.weight if self.deferred_finalize else None,
            eps=norm.eps,
        )
        self.counters.launches += 2
        if not self.deferred_finalize:
            routed = norm(routed)
            self.counters.launches += 1
        out: Tensor = moe.routed_expert_up_proj(routed) + moe.shared_experts(hidden)
        return out

"""Weights to start training from.

Needs torch. Matrices keep the length of their input, those that write to the residual stream halve
it; attention-residual queries are zero, so that at first every source counts alike; decay rates are
those of :mod:`kimik3_lab.reference.initialization`, spread from a token to hundreds.
"""

from __future__ import annotations

import torch

from kimik3_lab.config import K3Config
from kimik3_lab.reference.initialization import random_model
from kimik3_lab.reference.model import K3ForCausalLM

__all__ = ["untrained_model"]

_GAIN = K3Config.released().initializer_range * K3Config.released().hidden_size ** 0.5
_WRITERS = ("o_proj.weight", "down_proj.weight", "routed_expert_up_proj.weight", ".w2.weight")


@torch.no_grad()
def untrained_model(config: K3Config, seed: int) -> K3ForCausalLM:
    """Make it, in float32.

    Examples
    --------
    >>> model = untrained_model(K3Config.micro(), seed=0)
    >>> model.model.output_attn_res_proj.weight.abs().max().item()
    0.0
    """
    model = random_model(config, seed)
    for name, parameter in model.named_parameters():
        if name.endswith("res_proj.weight") or name.endswith("e_score_correction_bias"):
            parameter.zero_()
        elif name.endswith(("layernorm.weight", "norm.weight")):
            parameter.fill_(1.0)
        elif "embed_tokens" in name:
            parameter.mul_(0.5)
        elif "lm_head" in name:
            parameter.mul_(0.02 / (_GAIN * config.hidden_size**-0.5))
        elif name.endswith("conv1d.weight"):
            parameter.mul_(0.4)
            parameter[..., -1] += 1.0
        elif parameter.ndim == 2 and "f_b_proj" not in name:
            parameter.mul_((0.5 if name.endswith(_WRITERS) else 1.0) / _GAIN)
    return model

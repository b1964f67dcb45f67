"""Random weights for small members of the family: untrained, but every mechanism is at work.

Needs torch. Tests and lessons make models of their own with it; training starts from it too.

The released ``initializer_range`` of 0.02 belongs to the released width: there a matrix multiplies
the length of its input by ``0.02 * sqrt(7168)`` = 1.7. At width 128 the same 0.02 would shrink it
to a quarter, layer after layer, and the logits would say nothing. So the *gain* is kept, not 0.02.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kimik3_lab.config import K3Config
from kimik3_lab.reference.model import K3ForCausalLM

__all__ = ["initialize", "random_model"]

_RELEASED_WIDTH = K3Config.released().hidden_size


def random_model(
    config: K3Config,
    seed: int = 0,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> K3ForCausalLM:
    """Make a model and :func:`initialize` it.

    Examples
    --------
    >>> one, same = (random_model(K3Config.micro(), seed=1) for _ in range(2))
    >>> one.generate([0, 5, 9], 4) == same.generate([0, 5, 9], 4)
    True
    """
    model = K3ForCausalLM.uninitialized(config, dtype=dtype, device=device)
    initialize(model, seed)
    return model


@torch.no_grad()
def initialize(model: K3ForCausalLM, seed: int = 0) -> None:
    """Fill ``model`` with random weights that depend on ``seed`` only, not on its type or device.

    - matrices: normal, with the released gain; the embedding has unit variance;
    - norm weights: 1 with a tenth of noise, so that a test notices a norm left out;
    - attention-residual queries: scores of about unit variance, so that sources get unequal shares;
    - ``A_log``: log of a rate uniform in 1 to 16 as in the Hugging Face model, zero in the padding;
      ``dt_bias`` and ``f_b_proj`` small enough that rate times gate input spreads over the
      sigmoid: some channels forget at once, some over hundreds of tokens, few stay saturated;
    - router bias: wide enough to make some experts popular and some rare.

    What is bfloat16 on disk is rounded to it, so that saving and loading change nothing.

    Examples
    --------
    >>> model = K3ForCausalLM(K3Config.micro())
    >>> initialize(model, seed=7)
    >>> again = random_model(K3Config.micro(), seed=7)
    >>> bool((model.lm_head.weight == again.lm_head.weight).all())
    True
    """
    generator = torch.Generator().manual_seed(seed)
    config = model.config
    for name, parameter in model.named_parameters():
        value = _draw(name, tuple(parameter.shape), config, generator)
        if not _is_float32_on_disk(name):
            value = value.to(torch.bfloat16)
        parameter.copy_(value)


def _draw(
    name: str, shape: tuple[int, ...], config: K3Config, generator: torch.Generator
) -> Tensor:
    def normal(std: float) -> Tensor:
        return torch.randn(shape, generator=generator) * std

    def uniform(low: float, high: float) -> Tensor:
        return torch.rand(shape, generator=generator) * (high - low) + low

    if name.endswith("A_log"):
        a_log = uniform(1.0, 16.0).log()
        a_log[config.linear_attn_config.num_heads :] = 0.0
        return a_log
    if name.endswith("dt_bias"):
        return uniform(-0.8, 0.2)
    if name.endswith("e_score_correction_bias"):
        return normal(0.2)
    if name.endswith("conv1d.weight"):
        return normal(shape[-1] ** -0.5)
    if name.endswith("res_proj.weight"):
        return normal(shape[-1] ** -0.5)
    if "embed_tokens" in name:
        return normal(1.0)
    if len(shape) == 1:
        return 1.0 + normal(0.1)
    gain = config.initializer_range * math.sqrt(_RELEASED_WIDTH)
    if name.endswith("f_b_proj.weight"):
        gain /= 10  # what it puts out is multiplied by a rate of up to 16
    return normal(gain * shape[-1] ** -0.5)


def _is_float32_on_disk(name: str) -> bool:
    endings = ("A_log", "dt_bias", "o_norm.weight", "conv1d.weight", "e_score_correction_bias")
    return name.endswith(endings)

"""Experts and routings to measure with: random ones, and a check that ranks add up to one.

Needs torch and Triton. :mod:`kimik3_lab.parallel.gpu_layer` runs them.
"""

from __future__ import annotations

from typing import Literal

import torch
from k3_kernels import MXFP4Experts, moe_experts, pack_mxfp4
from k3_kernels.moe_weights import random_mxfp4
from torch import Tensor

from kimik3_lab.config import K3Config
from kimik3_lab.parallel.groups import Ranks
from kimik3_lab.reference.moe import Routing

__all__ = ["Parallel", "check_experts", "draw_routing", "random_experts"]

Parallel = Literal["tp", "ep"]
#: Exponents of scales, as bytes: 2 to the power of -9 to -6, as the released experts have.
_SCALES = (118, 122)


def draw_routing(
    tokens: int,
    config: K3Config,
    load: Literal["uniform", "skewed"],
    generator: torch.Generator,
    order: Tensor | None = None,
) -> Routing:
    """Draw the experts of each token.

    Uniform: every expert alike. Skewed: expert e is ``(e + 1) ** -0.6`` as popular as the first, so
    that the popular ones lie together, which is the worst for whole experts in their order.

    Parameters
    ----------
    generator
        On the device of the result; the same seed gives the same choice on every rank.
    order
        int64 ``[E]``: the place that each expert was moved to.

    Returns
    -------
    Routing
        int32 ids, and float32 weights that add up to 1.

    Examples
    --------
    >>> drawn = draw_routing(3, K3Config.micro(), "uniform", torch.Generator().manual_seed(0))
    >>> drawn.expert_ids.shape, drawn.expert_ids.dtype
    (torch.Size([3, 2]), torch.int32)
    """
    device, experts = generator.device, config.num_experts
    log_popularity = torch.zeros(experts, device=device)
    if load == "skewed":
        log_popularity = -0.6 * (1 + torch.arange(experts, device=device)).log()
    # The largest of logarithms with Gumbel noise: a draw without repetition (arXiv:1903.06059).
    noise = torch.rand(tokens, experts, device=device, generator=generator).clamp(1e-20, 1 - 1e-7)
    top_k = config.num_experts_per_token
    ids = (log_popularity - (-noise.log()).log()).topk(top_k, -1).indices
    if order is not None:
        ids = order[ids]
    score = 0.1 + torch.rand(tokens, top_k, device=device, generator=generator)
    return Routing(ids.to(torch.int32), score / score.sum(-1, keepdim=True))


def random_experts(
    experts: int, latent: int, width: int, device: torch.device, generator: torch.Generator
) -> MXFP4Experts:
    """Draw experts in the form that the kernels read."""
    return random_mxfp4(experts, latent, width, device=device, generator=generator)


def check_experts(
    config: K3Config, ranks: Ranks, tokens: int, device: torch.device, dtype: torch.dtype
) -> dict[Parallel, float]:
    """Compare the sum over ranks of real MXFP4 experts with one rank that holds all of them.

    Returns
    -------
    dict
        By kind of parallelism, ``||sum - one|| / ||one||``.
    """
    experts, latent = config.num_experts, config.routed_expert_hidden_size
    inner = config.moe_intermediate_size
    generator = torch.Generator(device).manual_seed(11)

    def draw(*shape: int, span: tuple[int, int] = (0, 256)) -> Tensor:
        return torch.randint(*span, shape, dtype=torch.uint8, device=device, generator=generator)

    gate_up, down = draw(experts, 2 * inner, latent // 2), draw(experts, latent, inner // 2)
    gate_up_scale = draw(experts, 2 * inner, latent // 32, span=_SCALES)
    down_scale = draw(experts, latent, inner // 32, span=_SCALES)
    x = torch.randn(tokens, latent, device=device, generator=generator).to(dtype)
    routing = draw_routing(tokens, config, "uniform", generator)
    one = moe_experts(x, pack_mxfp4(gate_up, gate_up_scale, down, down_scale), *routing)

    width, held = ranks.share(inner), ranks.share(experts)

    def halves(rows: Tensor) -> Tensor:
        """Take this rank's rows of gate and of up."""
        parts = rows.unflatten(1, (2, inner))[:, :, width.start : width.stop]
        return parts.flatten(1, 2).contiguous()

    def some(columns: Tensor, per: int) -> Tensor:
        return columns[..., width.start // per : width.stop // per].contiguous()

    sliced = pack_mxfp4(halves(gate_up), halves(gate_up_scale), some(down, 2), some(down_scale, 32))
    chosen = slice(held.start, held.stop)
    whole = pack_mxfp4(gate_up[chosen], gate_up_scale[chosen], down[chosen], down_scale[chosen])
    parts: dict[Parallel, Tensor] = {
        "tp": moe_experts(x, sliced, *routing),
        "ep": moe_experts(x, whole, *routing, first_expert=held.start),
    }
    norm = one.float().norm()
    return {
        kind: float((ranks.all_reduce(part.float()) - one.float()).norm() / norm)
        for kind, part in parts.items()
    }

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
from kimik3_lab.parallel.layer_shape import Parallel
from kimik3_lab.reference.moe import Routing

__all__ = ["check_experts", "draw_mxfp4", "draw_routing", "random_experts", "split_mxfp4"]

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

    Raises
    ------
    ValueError
        If the load is unknown.

    Examples
    --------
    >>> drawn = draw_routing(3, K3Config.micro(), "uniform", torch.Generator().manual_seed(0))
    >>> drawn.expert_ids.shape, drawn.expert_ids.dtype
    (torch.Size([3, 2]), torch.int32)
    """
    if load not in ("uniform", "skewed"):
        raise ValueError(f"load must be 'uniform' or 'skewed', got {load!r}")
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


def draw_mxfp4(
    config: K3Config, device: torch.device, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw a layer's experts in a checkpoint's form, which :func:`split_mxfp4` cuts for a rank.

    Returns
    -------
    gate_up, gate_up_scale, down, down_scale
        uint8, as :func:`k3_kernels.pack_mxfp4` takes them.
    """
    experts, latent = config.num_experts, config.routed_expert_hidden_size
    inner = config.moe_intermediate_size

    def draw(*shape: int, span: tuple[int, int] = (0, 256)) -> Tensor:
        return torch.randint(*span, shape, dtype=torch.uint8, device=device, generator=generator)

    gate_up, down = draw(experts, 2 * inner, latent // 2), draw(experts, latent, inner // 2)
    gate_up_scale = draw(experts, 2 * inner, latent // 32, span=_SCALES)
    down_scale = draw(experts, latent, inner // 32, span=_SCALES)
    return gate_up, gate_up_scale, down, down_scale


def split_mxfp4(
    raw: tuple[Tensor, Tensor, Tensor, Tensor], kind: Parallel, ranks: Ranks
) -> MXFP4Experts:
    """Pack this rank's slices of all experts, or its whole experts."""
    gate_up, gate_up_scale, down, down_scale = raw
    held = ranks.share(len(gate_up))
    if kind == "ep":
        return pack_mxfp4(*(part[held.start : held.stop] for part in raw))
    inner = 2 * down.shape[-1]
    width = ranks.share(inner)

    def halves(rows: Tensor) -> Tensor:
        """Take this rank's rows of gate and of up."""
        parts = rows.unflatten(1, (2, inner))[:, :, width.start : width.stop]
        return parts.flatten(1, 2).contiguous()

    def some(columns: Tensor, per: int) -> Tensor:
        return columns[..., width.start // per : width.stop // per].contiguous()

    return pack_mxfp4(halves(gate_up), halves(gate_up_scale), some(down, 2), some(down_scale, 32))


def check_experts(
    config: K3Config, ranks: Ranks, tokens: int, device: torch.device, dtype: torch.dtype
) -> dict[Parallel, float]:
    """Compare the sum over ranks of real MXFP4 experts with one rank that holds all of them.

    Returns
    -------
    dict
        By kind of parallelism, ``||sum - one|| / ||one||``.
    """
    generator = torch.Generator(device).manual_seed(11)
    raw = draw_mxfp4(config, device, generator)
    x = torch.randn(
        tokens, config.routed_expert_hidden_size, device=device, generator=generator
    ).to(dtype)
    routing = draw_routing(tokens, config, "uniform", generator)
    one = moe_experts(x, split_mxfp4(raw, "tp", Ranks()), *routing)
    kinds: tuple[Parallel, ...] = ("tp", "ep")
    first = {"tp": 0, "ep": ranks.share(config.num_experts).start}
    parts = {
        kind: moe_experts(x, split_mxfp4(raw, kind, ranks), *routing, first_expert=first[kind])
        for kind in kinds
    }
    norm = one.float().norm()
    return {
        kind: float((ranks.all_reduce(part.float()) - one.float()).norm() / norm)
        for kind, part in parts.items()
    }

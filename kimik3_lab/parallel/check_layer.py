"""Whether a layer over ranks is the layer of one rank: a check before anything is timed.

Needs torch and Triton. :mod:`kimik3_lab.parallel.measure` runs it with few experts, and records
what it finds. :class:`~kimik3_lab.parallel.gpu_layer.GpuLayer` draws weights on each rank for
itself, which is enough for times; here they are slices of one layer's.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kimik3_lab.config import K3Config
from kimik3_lab.parallel.gpu_experts import draw_mxfp4, draw_routing, split_mxfp4
from kimik3_lab.parallel.gpu_layer import GpuLayer
from kimik3_lab.parallel.groups import Ranks
from kimik3_lab.parallel.layer_shape import LayerShape, Parallel

__all__ = ["check_layer", "slice_of"]


class _Prompt(GpuLayer):
    """Few tokens that are a prompt all the same."""

    prefill_from = 1


def slice_of(
    one: GpuLayer, kind: Parallel, ranks: Ranks, raw: tuple[Tensor, Tensor, Tensor, Tensor]
) -> GpuLayer:
    """Make this rank's part of a layer that one rank holds whole; weights and states are copied.

    Parameters
    ----------
    one
        The whole layer.
    kind
        Slices of every expert, or whole ones.
    raw
        Its experts as :func:`~kimik3_lab.parallel.gpu_experts.draw_mxfp4` returns them.
    """
    config = one.shape.config
    shape = LayerShape.of(config, kind, ranks)
    made = type(one)(shape, one.tokens, device=one.device, dtype=one.dtype)
    heads = ranks.share(config.linear_attn_config.num_heads)
    dim, shared = one.head_dim, ranks.share(config.shared_intermediate_size)

    def cut(x: Tensor, blocks: int, chosen: range, axis: int = 0) -> Tensor:
        """Copy a range of each of some blocks that lie behind each other."""
        split = x.unflatten(axis, (blocks, -1))
        part = split.narrow(axis + 1, chosen.start, len(chosen))
        # A copy even where the part has no gaps: kernels write states in place.
        return part.flatten(axis, axis + 1).clone(memory_format=torch.contiguous_format)

    channels = range(heads.start * dim, heads.stop * dim)
    for name in ("gate", "bias", "down", "up", "query"):
        setattr(made, name, getattr(one, name))
    made.shared_in = cut(one.shared_in, 2, shared)
    made.shared_out = cut(one.shared_out, 1, shared, 1)
    made.qkvg = cut(one.qkvg, 4, channels)
    low, beta = one.decay_beta[:dim], one.decay_beta[dim:]
    made.decay_beta = torch.cat((low, beta[heads.start : heads.stop]))
    made.decay_up, made.dt_bias = cut(one.decay_up, 1, channels), cut(one.dt_bias, 1, channels)
    made.o = cut(one.o, 1, channels, 1)
    made.a_log = cut(one.a_log, 1, heads)
    made.taps = cut(one.taps, 3, channels).T.contiguous().T
    made.state = cut(one.state, 1, heads, 1)
    made.window = cut(one.window, 3, channels, 1).transpose(1, 2).contiguous().transpose(1, 2)
    made.experts = split_mxfp4(raw, kind, ranks)
    for name in ("hidden", "latent", "blocks", "prefix", "delta"):
        setattr(made, name, getattr(one, name))
    return made


@torch.inference_mode()
def check_layer(
    config: K3Config,
    ranks: Ranks,
    tokens: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    prompt: bool = False,
) -> dict[str, float]:
    """Compare a layer over ranks with one rank that holds all of it.

    Parameters
    ----------
    tokens
        T.
    prompt
        They are one prompt; otherwise so many requests that decode.

    Returns
    -------
    dict
        ``||ranks - one|| / ||one||`` of the MoE layer (``"tp moe"``), of the same with the shared
        experts beside the exchange (``"tp moe overlap"``) and of the whole layer (``"tp whole"``);
        ``"ep ..."`` of whole experts.
    """
    generator = torch.Generator(device).manual_seed(11)
    raw = draw_mxfp4(config, device, generator)
    make = _Prompt if prompt else GpuLayer
    one = make(LayerShape.of(config, "tp", Ranks()), tokens, device=device, dtype=dtype)
    one.experts = split_mxfp4(raw, "tp", Ranks())
    one.a_log.normal_(generator=generator)
    one.dt_bias.normal_(generator=generator)
    one.taps.normal_(generator=generator)
    one.state.normal_(generator=generator)
    routing = draw_routing(tokens, config, "uniform", generator)
    # The whole layer changes states in place, so each rank's part of them is cut first.
    kinds: tuple[Parallel, ...] = ("tp", "ep")
    parts = {kind: slice_of(one, kind, ranks, raw) for kind in kinds}
    expected = {
        "moe": one.moe(one.hidden, Ranks(), routing), "whole": one.whole(Ranks(), routing)
    }  # fmt: skip

    def error(found: Tensor, name: str) -> float:
        wanted = expected[name].float()
        return float((found.float() - wanted).norm() / wanted.norm())

    errors = {}
    for kind, part in parts.items():
        moe: Callable[..., Tensor] = part.moe
        errors[f"{kind} moe"] = error(moe(part.hidden, ranks, routing), "moe")
        errors[f"{kind} moe overlap"] = error(moe(part.hidden, ranks, routing, overlap=True), "moe")
        errors[f"{kind} whole"] = error(part.whole(ranks, routing), "whole")
    return errors

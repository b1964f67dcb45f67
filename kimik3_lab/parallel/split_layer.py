"""A layer's parts over ranks, built from the reference's: each rank copies what it keeps.

Needs torch. :mod:`kimik3_lab.parallel.model` puts a whole model together from them. A layer is the
reference's own :class:`~kimik3_lab.reference.model.DecoderLayer` with smaller parts in it, and each
part ends in a sum over ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Literal

from torch import Tensor, nn

from kimik3_lab.config import K3Config
from kimik3_lab.parallel.dispatch import AllToAllMoE, all_to_all
from kimik3_lab.parallel.experts import columns, rows, split_mlp
from kimik3_lab.parallel.groups import Ranks
from kimik3_lab.parallel.moe import SplitMoE, expert_parallel, tensor_parallel
from kimik3_lab.reference.kda import KimiDeltaAttention
from kimik3_lab.reference.mixer import Mixer
from kimik3_lab.reference.mla import MultiHeadLatentAttention
from kimik3_lab.reference.model import DecoderLayer

__all__ = ["ExpertLayout", "split_kda", "split_layer", "split_mla", "with_heads"]

#: ``"sliced"``: slices of every expert. ``"whole"``: whole experts, all tokens on every rank.
#: ``"all_to_all"``: whole experts, tokens shared out.
ExpertLayout = Literal["sliced", "whole", "all_to_all"]


def split_kda(attention: KimiDeltaAttention, config: K3Config, ranks: Ranks) -> nn.Module:
    """Take this rank's heads of a KDA layer; the ranks' outputs are to be added.

    A rank without heads gets a module that returns zeros and keeps no state.
    """
    heads = ranks.share(attention.num_heads)
    if not heads:
        return _Nothing(config.hidden_size)
    made = KimiDeltaAttention(with_heads(config, kda=len(heads)), attention.layer_id, device="meta")
    width = _scaled(heads, attention.head_dim)
    for name in ("q_proj", "k_proj", "v_proj", "g_proj", "f_b_proj"):
        setattr(made, name, rows(getattr(attention, name), width))
    for name in ("q_conv1d", "k_conv1d", "v_conv1d"):
        getattr(made, name).weight = _kept(getattr(attention, name).weight, width)
    made.b_proj = rows(attention.b_proj, heads)
    made.A_log = _kept(attention.A_log, heads)
    made.dt_bias = _kept(attention.dt_bias, width)
    made.o_proj = columns(attention.o_proj, width)
    made.f_a_proj, made.o_norm = attention.f_a_proj, attention.o_norm
    return made


def split_mla(attention: MultiHeadLatentAttention, config: K3Config, ranks: Ranks) -> nn.Module:
    """Take this rank's heads of an MLA layer; the ranks' outputs are to be added.

    The cached rows belong to all heads and are not split here, see :mod:`kimik3_lab.parallel.dcp`.
    """
    heads = ranks.share(config.num_attention_heads)
    made = MultiHeadLatentAttention.__new__(MultiHeadLatentAttention)
    nn.Module.__init__(made)
    made.config, made.layer_id = with_heads(config, mla=len(heads)), attention.layer_id
    value = _scaled(heads, config.v_head_dim)
    made.q_b_proj = rows(attention.q_b_proj, _scaled(heads, config.qk_head_dim))
    made.kv_b_proj = rows(
        attention.kv_b_proj, _scaled(heads, config.qk_nope_head_dim + config.v_head_dim)
    )
    made.g_proj, made.o_proj = rows(attention.g_proj, value), columns(attention.o_proj, value)
    for name in ("q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm"):
        setattr(made, name, getattr(attention, name))
    return made


def split_layer(
    layer: DecoderLayer,
    config: K3Config,
    ranks: Ranks,
    experts: ExpertLayout = "sliced",
    slots: Sequence[Sequence[int]] | None = None,
) -> DecoderLayer:
    """Make this rank's part of a layer: the same wiring, smaller parts, a sum behind each.

    Parameters
    ----------
    experts
        How the routed experts are spread.
    slots
        The experts of each rank, if they are whole; see
        :func:`~kimik3_lab.parallel.moe.expert_parallel`.
    """
    made = DecoderLayer.__new__(DecoderLayer)
    nn.Module.__init__(made)
    made.starts_block, made._ffn = layer.starts_block, layer._ffn
    for name in (
        "input_layernorm", "post_attention_layernorm", "self_attention_res_norm",
        "self_attention_res_proj", "mlp_res_norm", "mlp_res_proj",
    ):  # fmt: skip
        setattr(made, name, getattr(layer, name))
    attention = layer.self_attn
    if isinstance(attention, KimiDeltaAttention):
        part = split_kda(attention, config, ranks)
    else:
        part = split_mla(attention, config, ranks)
    made.self_attn = _Added(part, ranks)
    if layer._ffn == "mlp":
        made.mlp = _Added(split_mlp(layer.mlp, ranks), ranks)
    else:
        made.block_sparse_moe = _Experts(
            _split_experts(layer.block_sparse_moe, config, ranks, experts, slots)
        )
    return made


# -- parts -----------------------------------------------------------------------------------------


class _Added(nn.Module):
    """A part of a sublayer, and the sum of all parts."""

    def __init__(self, part: nn.Module, ranks: Ranks) -> None:
        super().__init__()
        self.part, self.ranks = part, ranks

    def forward(self, *inputs: object) -> Tensor:
        return self.ranks.all_reduce(self.part(*inputs))


class _Nothing(nn.Module):
    """The part of a rank that has no head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, x: Tensor, mixer: Mixer) -> Tensor:
        return x.new_zeros(len(x), self.width)


class _Experts(nn.Module):
    """A MoE layer over ranks where the wiring wants a module."""

    def __init__(self, moe: SplitMoE | AllToAllMoE) -> None:
        super().__init__()
        self.moe = moe

    def forward(self, hidden: Tensor) -> Tensor:
        return self.moe(hidden)


def _split_experts(
    moe: nn.Module,
    config: K3Config,
    ranks: Ranks,
    experts: ExpertLayout,
    slots: Sequence[Sequence[int]] | None,
) -> SplitMoE | AllToAllMoE:
    if experts == "sliced":
        return tensor_parallel(moe, config, ranks)
    return (expert_parallel if experts == "whole" else all_to_all)(moe, config, ranks, slots)


def _kept(weight: Tensor, chosen: range) -> nn.Parameter:
    return nn.Parameter(weight[chosen.start : chosen.stop].detach().clone(), requires_grad=False)


def _scaled(chosen: range, width: int) -> range:
    """Channels of some heads."""
    return range(chosen.start * width, chosen.stop * width)


def with_heads(config: K3Config, *, mla: int | None = None, kda: int | None = None) -> K3Config:
    """Copy a configuration with other numbers of heads, unchecked: a rank may have none."""
    made = copy.copy(config)
    if mla is not None:
        object.__setattr__(made, "num_attention_heads", mla)
    if kda is not None:
        linear = copy.copy(config.linear_attn_config)
        object.__setattr__(linear, "num_heads", kda)
        object.__setattr__(made, "linear_attn_config", linear)
    return made

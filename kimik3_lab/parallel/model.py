"""A whole Kimi K3 over ranks, built from the reference's weights: each rank copies what it keeps.

Needs torch. What is split and what every rank keeps whole is vLLM's choice, as
:mod:`kimik3_lab.performance.placement` counts it: heads, feed-forward widths and the vocabulary are
split; what leads into a low-rank or latent space, the norms and the attention residuals are whole.

A layer is the reference's own :class:`~kimik3_lab.reference.model.DecoderLayer` with smaller parts
in it. Each part ends in a sum over ranks, so between parts every rank has the same numbers, and the
residual stream with its mixtures runs on every rank as if it were alone.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from kimik3_lab.config import K3Config
from kimik3_lab.parallel.dcp import RankMixer
from kimik3_lab.parallel.dispatch import AllToAllMoE, all_to_all
from kimik3_lab.parallel.experts import columns, rows, split_mlp
from kimik3_lab.parallel.groups import Ranks
from kimik3_lab.parallel.moe import SplitMoE, expert_parallel, tensor_parallel
from kimik3_lab.reference.kda import KimiDeltaAttention
from kimik3_lab.reference.mixer import Mixer
from kimik3_lab.reference.mla import MultiHeadLatentAttention
from kimik3_lab.reference.model import DecoderLayer, K3ForCausalLM
from kimik3_lab.reference.norms import compute_dtype
from kimik3_lab.reference.residuals import ResidualStream
from kimik3_lab.reference.state import SequenceState

__all__ = ["ExpertLayout", "ParallelK3", "split_kda", "split_layer", "split_mla"]

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
    made = KimiDeltaAttention(
        _with_heads(config, kda=len(heads)), attention.layer_id, device="meta"
    )
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
    made.config, made.layer_id = _with_heads(config, mla=len(heads)), attention.layer_id
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


class ParallelK3:
    """One rank of a K3; all ranks call it together with the same tokens and get the same logits.

    Parameters
    ----------
    model
        The whole model. This rank copies its parts; those kept whole are shared with it.
    ranks
        The ranks that hold it.
    experts
        How the routed experts are spread.
    slots
        By MoE layer, the experts of each rank, if they are whole; None for those in order.
    context_parallel
        Split the cached MLA rows over the ranks, too.

    Raises
    ------
    ValueError
        If ``experts`` is unknown or ``slots`` do not fit.

    Examples
    --------
    One rank is the reference:

    >>> from kimik3_lab.reference.initialization import random_model
    >>> model = random_model(K3Config.micro(), seed=0)
    >>> ParallelK3(model).generate([0, 7, 9], 4) == model.generate([0, 7, 9], 4)
    True
    """

    def __init__(
        self,
        model: K3ForCausalLM,
        ranks: Ranks | None = None,
        *,
        experts: ExpertLayout = "sliced",
        slots: dict[int, Sequence[Sequence[int]]] | None = None,
        context_parallel: bool = False,
    ) -> None:
        if experts not in ("sliced", "whole", "all_to_all"):
            raise ValueError(f"experts must be 'sliced', 'whole' or 'all_to_all', got {experts!r}")
        if slots and experts == "sliced":
            raise ValueError("slots say where whole experts lie: set experts='whole'")
        if odd := sorted(set(slots or ()) - set(model.config.moe_layer_ids)):
            raise ValueError(f"slots name layer {odd[0]}, which has no routed experts to place")
        self.ranks = ranks = ranks or Ranks()
        self.config = config = model.config
        self.context_parallel = context_parallel
        body, slots = model.model, slots or {}
        self.layers = [
            split_layer(layer, config, ranks, experts, slots.get(layer_id))
            for layer_id, layer in enumerate(body.layers)
        ]
        self._body, self.device, self.dtype = body, model.device, model.dtype
        self._vocabulary = ranks.share(config.vocab_size)
        span = slice(self._vocabulary.start, self._vocabulary.stop)
        self._embedding = body.embed_tokens.weight[span].detach().clone()
        self._head = model.lm_head.weight[span].detach().clone()

    def new_state(self) -> SequenceState:
        """State of a sequence on this rank: its heads' KDA states, and MLA rows."""
        heads = len(self.ranks.share(self.config.linear_attn_config.num_heads))
        local = _with_heads(self.config, kda=heads)
        return SequenceState.empty(local, dtype=self.dtype, device=self.device)

    def new_mixer(self) -> RankMixer:
        """Mixer of a new sequence on this rank."""
        return RankMixer(
            self.new_state(),
            self.ranks,
            num_heads=self.config.num_attention_heads,
            context_parallel=self.context_parallel,
        )

    @torch.inference_mode()
    def __call__(
        self, token_ids: Tensor, mixer: Mixer, *, logits_at: Tensor | None = None
    ) -> Tensor:
        """Run one step; arguments and result are those of :meth:`K3ForCausalLM.forward`.

        Raises
        ------
        ValueError
            If ``token_ids`` is not a flat int64 tensor with at least one token, or one of them is
            not in the vocabulary: no rank has its row, and zeros would be taken for it.
        """
        self._check(token_ids)
        body = self._body
        stream = ResidualStream(self._embed(token_ids), body.norm.eps)
        for layer in self.layers:
            layer(stream, mixer)
        x = stream.read(body.output_attn_res_proj.weight, body.output_attn_res_norm.weight)
        hidden = body.norm(x)
        if logits_at is not None:
            hidden = hidden[logits_at]
        wide = compute_dtype(hidden.dtype)
        local = hidden.to(wide) @ self._head.to(wide).mT
        return self.ranks.all_gather(local, self.ranks.sizes(self.config.vocab_size), dim=1)

    def generate(
        self,
        prompt_ids: Sequence[int],
        max_tokens: int = 16,
        *,
        stop_token_ids: Collection[int] | None = None,
    ) -> list[int]:
        """Continue a prompt greedily, as :meth:`K3ForCausalLM.generate` does."""
        stops = {self.config.eos_token_id} if stop_token_ids is None else set(stop_token_ids)
        mixer = self.new_mixer()
        step = torch.tensor(list(prompt_ids), device=self.device)
        output: list[int] = []
        while len(output) < max_tokens:
            last = torch.tensor([len(step) - 1], device=self.device)
            step = self(step, mixer, logits_at=last).argmax(-1)
            output.append(int(step))
            if output[-1] in stops:
                break
        return output

    def _check(self, token_ids: Tensor) -> None:
        if token_ids.ndim != 1 or token_ids.dtype != torch.int64 or not len(token_ids):
            raise ValueError(
                "token_ids must be a flat int64 tensor with at least one token, got "
                f"{token_ids.dtype} {tuple(token_ids.shape)}: concatenate sequences, do not pad"
            )
        low, high = (int(end) for end in token_ids.aminmax())
        if low < 0 or high >= self.config.vocab_size:
            raise ValueError(
                f"token ids must be from 0 to {self.config.vocab_size - 1}, got "
                f"{low if low < 0 else high}"
            )

    def _embed(self, token_ids: Tensor) -> Tensor:
        """Look up the rows that are here, zeros for the others; one rank has each."""
        here = self._vocabulary
        local = token_ids - here.start
        known = (local >= 0) & (local < len(here))
        found = self._embedding[local.clamp(0, len(here) - 1)] * known.unsqueeze(-1)
        return self.ranks.all_reduce(found)


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


def _with_heads(config: K3Config, *, mla: int | None = None, kda: int | None = None) -> K3Config:
    """Copy a configuration with other numbers of heads, unchecked: a rank may have none."""
    made = copy.copy(config)
    if mla is not None:
        object.__setattr__(made, "num_attention_heads", mla)
    if kda is not None:
        linear = copy.copy(config.linear_attn_config)
        object.__setattr__(linear, "num_heads", kda)
        object.__setattr__(made, "linear_attn_config", linear)
    return made

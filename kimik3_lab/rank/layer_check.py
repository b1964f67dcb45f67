"""Each part of each step against the reference in float32, fed with the executor's own inputs.

Needs torch. ``tests/kernels/test_rank_slice.py`` asks it, with the smallest model on a CPU and at
K3's widths on a GPU.

Logits of a whole model cannot be compared closely in bfloat16. K3 chooses 16 of 896 experts, and
where the sixteenth and the seventeenth are nearly a tie, the last bit of an input decides. With
random weights up to one choice in a hundred turns in the first MoE layer and a quarter in the
fourth, and the logits of a correct model are 30 to 45 per cent away from those of float32. So
nothing is left to build up here: every sublayer is told what the executor's sublayer read, in this
step and, where it looks back, in those before; and an MoE layer is told the chosen experts, which
are compared for themselves. What is left is the rounding of one sublayer, about two per cent at
most, and a wrong slot, a wrong length or a wrong block is far above it.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from kimik3_lab.rank.step_trace import Frame, StepTrace
from kimik3_lab.reference import mxfp4
from kimik3_lab.reference.model import DecoderLayer
from kimik3_lab.reference.moe import situ
from kimik3_lab.reference.norms import compute_dtype
from kimik3_lab.reference.residuals import ResidualStream
from kimik3_lab.reference.state import SequenceMixer, SequenceState
from kimik3_lab.serving.executors.torch_executor import TorchExecutor

__all__ = ["LayerCheck", "row_error"]


def row_error(ours: Tensor, theirs: Tensor) -> float:
    """Largest relative error of a row. Rows that are nearly zero count as a tenth of the others.

    Examples
    --------
    >>> round(row_error(torch.tensor([[1.0, 0.0], [0.0, 2.0]]),
    ...                 torch.tensor([[1.0, 0.0], [0.0, 1.0]])), 3)
    1.0
    """
    size = theirs.norm(dim=-1)
    least = 0.1 * size.square().mean().sqrt()
    found = (ours.to(theirs.dtype) - theirs).norm(dim=-1) / size.clamp(min=least)
    return float("inf") if found.isnan().any() else float(found.max())


class LayerCheck:
    """Watches an executor and compares every part of its steps.

    Parameters
    ----------
    executor
        A fresh one. Its model's experts exist as codes (``keep_codes``), or as modules. No request
        may begin with a prefix hit, of which there is nothing to be seen.

    Attributes
    ----------
    worst : dict of str to (float, str)
        For each part the largest error so far, and where.
    num_recorded : int
        Steps among those compared that were replayed.
    num_behind : int
        Steps that began behind drafts of which some were rejected.
    """

    def __init__(self, executor: TorchExecutor) -> None:
        self.executor, self.model, self.config = executor, executor.model, executor.model.config
        self.trace = StepTrace(executor)
        self.worst: dict[str, tuple[float, str]] = {}
        self.num_recorded = self.num_behind = self._num_steps = 0
        self._wide = compute_dtype(self.model.dtype)
        self._read: dict[tuple[int, int], Tensor] = {}  # by slot and layer
        self._reached: dict[int, int] = {}  # tokens that a slot's request has computed at most
        self._copies: dict[nn.Module, nn.Module] = {}
        self._moe: dict[int, list[tuple[Tensor, Tensor, Tensor]]] = {}

    @torch.inference_mode()
    def step(self) -> None:
        """Compare the steps since the last call, while their pages are as they were left."""
        for frame in self.trace.frames:
            self._num_steps += 1
            self.num_recorded += frame.recorded
            for s in frame.segments:
                self.num_behind += 0 < s.start < self._reached.get(s.slot, 0)
                self._reached[s.slot] = s.stop
            self._stream(frame)
            for layer_id in range(self.config.num_hidden_layers):
                self._attention(frame, layer_id)
                self._ffn(frame, layer_id)
            if frame.taps:
                self._draft_rows(frame)
        self.trace.frames.clear()

    @torch.inference_mode()
    def errors(self) -> dict[str, float]:
        """Compare the experts, all steps at once, and return the largest error of each part."""
        for layer_id, rows in self._moe.items():
            x, experts, ours = (torch.cat(parts) for parts in zip(*rows, strict=True))
            self._experts(layer_id, x, experts, ours)
        self._moe.clear()
        return {name: error for name, (error, _) in self.worst.items()}

    # -- parts -------------------------------------------------------------------------------

    def _stream(self, frame: Frame) -> None:
        """Compare inputs of all sublayers, taps and logits, given the outputs of all sublayers."""
        body = self._float(self.model.model.embed_tokens)
        stream = ResidualStream(body(frame.token_ids), self.model.model.norm.eps)
        for layer_id, layer in enumerate(self.model.model.layers):
            for kind, projection, norm, normed in (
                ("attention", "self_attention_res_proj", "self_attention_res_norm",
                 "input_layernorm"),
                ("ffn", "mlp_res_proj", "mlp_res_norm", "post_attention_layernorm"),
            ):  # fmt: skip
                x, y = getattr(frame, kind)[layer_id]
                read = self._mixed(stream, layer, projection, norm, normed)
                self._note("stream", x, read, f"layer {layer_id} {kind}")
                if kind == "attention" and layer.starts_block:
                    stream.start_block()
                stream.add(y.to(self._wide))
            if layer_id in frame.taps:
                self._note("taps", frame.taps[layer_id], stream.prefix, f"layer {layer_id}")
        hidden = self._mixed(
            stream, self.model.model, "output_attn_res_proj", "output_attn_res_norm", "norm"
        )
        theirs = self._float(self.model.lm_head)(hidden[frame.sampled_rows()])
        if len(theirs):
            self._note("logits", frame.logits, theirs, "head")

    def _mixed(
        self, stream: ResidualStream, owner: nn.Module, projection: str, norm: str, normed: str
    ) -> Tensor:
        query, key = getattr(owner, projection).weight, getattr(owner, norm).weight
        read = stream.read(query.to(self._wide), key.to(self._wide))
        found: Tensor = self._float(getattr(owner, normed))(read)
        return found

    def _attention(self, frame: Frame, layer_id: int) -> None:
        """Compare a layer that looks back, request by request, from its first token on."""
        x, y = frame.attention[layer_id]
        attention = self._float(self.model.model.layers[layer_id].self_attn)
        kind, first = "KDA" if self.config.is_kda_layer(layer_id) else "MLA", 0
        for s in frame.segments:
            rows, key = slice(first, first + s.count), (s.slot, layer_id)
            first += s.count
            before = self._read[key][: s.start] if s.start else x[:0]
            self._read[key] = known = torch.cat((before, x[rows]))
            state = SequenceState.empty(self.config, dtype=self._wide, device=x.device)
            theirs = attention(known.to(self._wide), SequenceMixer(state, form="prefill"))
            where = f"layer {layer_id}, {s.kind} of {s.count} behind {s.start}"
            self._note(kind, y[rows], theirs[s.start :], where)

    def _ffn(self, frame: Frame, layer_id: int) -> None:
        x, y = frame.ffn[layer_id]
        layer = self.model.model.layers[layer_id]
        if self.config.is_moe_layer(layer_id):
            self._moe.setdefault(layer_id, []).append((x, frame.experts[layer_id], y))
        else:
            theirs = self._float(layer.mlp)(x.to(self._wide))
            self._note("dense", y, theirs, f"layer {layer_id}")

    def _experts(self, layer_id: int, x: Tensor, chosen: Tensor, ours: Tensor) -> None:
        """Compare the choice, and what the chosen experts say."""
        config, layer = self.config, self.model.model.layers[layer_id]
        moe, gate = layer.block_sparse_moe, layer.block_sparse_moe.gate
        x = x.to(self._wide)
        score = torch.sigmoid(x @ gate.weight.to(self._wide).mT)
        preference = score + gate.e_score_correction_bias.to(self._wide)
        top_k = config.num_experts_per_token
        short = preference.topk(top_k).values.min(-1).values - preference.gather(-1, chosen).amin(
            -1
        )
        alike = chosen.sort(-1).values.diff(dim=-1).eq(0).any()
        self._worse("router", float("inf") if alike else float(short.max()), f"layer {layer_id}")
        weights = score.gather(-1, chosen)
        if config.moe_renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        weights = weights * config.routed_scaling_factor
        latent = self._float(moe.routed_expert_down_proj)(x)
        total = torch.zeros_like(latent)
        for expert in chosen.unique().tolist():
            rows, place = (chosen == expert).nonzero(as_tuple=True)
            said = self._expert(layer, expert, latent[rows])
            total.index_add_(0, rows, weights[rows, place].unsqueeze(-1) * said)
        routed = self._float(moe.routed_expert_up_proj)(self._float(moe.routed_expert_norm)(total))
        theirs = routed + self._float(moe.shared_experts)(x)
        self._note("experts", ours, theirs, f"layer {layer_id}")

    def _expert(self, layer: DecoderLayer, index: int, z: Tensor) -> Tensor:
        moe, config = layer.block_sparse_moe, self.config
        codes = getattr(moe, "_codes", None)
        if codes is None:
            found: Tensor = self._float(moe.experts[index])(z)
            return found
        gate_up, gate_up_scale, down, down_scale = (part[index] for part in codes)
        gate, up = (z @ mxfp4.dequantize(gate_up, gate_up_scale, z.dtype).mT).chunk(2, -1)
        betas = config.activation_situ_beta, config.activation_situ_linear_beta
        return situ(gate, up, *betas) @ mxfp4.dequantize(down, down_scale, z.dtype).mT

    def _draft_rows(self, frame: Frame) -> None:
        """Compare what the drafter has kept of the tokens that count, given its taps."""
        executor, first = self.executor, 0
        proposer = executor.proposer
        proposer = getattr(proposer, "proposer", proposer)  # behind a script
        drafter = self._float(proposer.drafter)
        joined = torch.cat([frame.taps[i] for i in drafter.config.target_layer_ids], -1)
        context = drafter.context_norm(drafter.context_proj(joined.to(self._wide)))
        page = executor.cache.page_size
        for s, kept in zip(frame.segments, frame.kept, strict=True):
            positions = torch.arange(s.start, s.start + kept, device=context.device)
            blocks = executor.cache.block_table[0, s.slot, positions // page]
            cells = blocks * page + positions % page
            for index, layer in enumerate(drafter.layers):
                theirs = layer.self_attn.latent(context[first : first + kept], positions)
                ours = proposer.latent[index].flatten(0, 1)[cells]
                self._note("draft rows", ours, theirs, f"draft layer {index}, {kept} of {s.start}")
            first += s.count

    # -- bookkeeping -------------------------------------------------------------------------

    def _float(self, module: nn.Module) -> nn.Module:
        """Return a copy of a module in float32 or wider."""
        if module not in self._copies:
            self._copies[module] = copy.deepcopy(module).to(self._wide)
        return self._copies[module]

    def _note(self, name: str, ours: Tensor, theirs: Tensor | None, where: str) -> None:
        assert theirs is not None
        self._worse(name, row_error(ours, theirs), where)

    def _worse(self, name: str, error: float, where: str) -> None:
        if name not in self.worst or error > self.worst[name][0]:
            self.worst[name] = error, f"step {self._num_steps}, {where}"

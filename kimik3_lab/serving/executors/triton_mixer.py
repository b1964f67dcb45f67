"""The mixer on the Triton kernels: what a KDA layer does between its projections, in one call.

Needs torch, and Triton when it runs. Lesson 10 turns the backend; lessons 05 and 06 explain the
kernels. The memory is that of :class:`~kimik3_lab.serving.executors.paged_cache.PagedCache`, whose
layout was made for them: a row of the cache is a slot of :mod:`k3_kernels`.

:func:`k3_kernels.kda_decode` takes raw projections and returns what goes to ``o_proj``, so it does
not fit the seam between convolution and recurrence that the reference has. This mixer is therefore
called once for a layer (:meth:`TritonMixer.kda_block`). Attention is in
:mod:`~kimik3_lab.serving.executors.triton_attention`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from k3_kernels import KDARecords, gated_norm, kda_conv, kda_decode, kda_prefill, kda_recover
from torch import Tensor
from torch.nn.functional import pad

from kimik3_lab.config import K3Config
from kimik3_lab.serving.executors.execution import ExecutionConfig
from kimik3_lab.serving.executors.kda_states import CommitTensors
from kimik3_lab.serving.executors.paged_cache import PagedCache
from kimik3_lab.serving.executors.paged_mixer import PagedMixer
from kimik3_lab.serving.executors.pinned import to_device
from kimik3_lab.serving.executors.step_metadata import StepMetadata
from kimik3_lab.serving.executors.step_parts import Decodes, Prefill
from kimik3_lab.serving.executors.triton_attention import (
    chunk_expanded,
    expanding_pays,
    paged_absorbed,
)
from kimik3_lab.serving.executors.triton_kda_inputs import KdaInputs, KdaWeights

__all__ = ["TritonMixer"]

#: Rows of the cache start at 0, and all of them may be in use: padding is below.
_NO_SLOT = -1


@dataclass
class _Call:
    """Rows that go through one kernel together. Numbers are int32, as the kernels want them."""

    rows: slice
    kind: str
    #: For each state group: ``[B, S]`` or ``[B]``.
    slots: list[Tensor]
    num_tokens: int = 1
    cu_seqlens: Tensor | None = None
    num_accepted: Tensor | None = None
    continued: Tensor | None = None
    checkpoint_at: Tensor | None = None
    checkpoint_slots: list[Tensor] = field(default_factory=list)
    num_checkpoints: int = 0
    #: For each state group that has layers, the records of all of them.
    records: dict[int, KDARecords] = field(default_factory=dict)

    @property
    def num_sequences(self) -> int:
        return len(self.slots[0])


class TritonMixer(PagedMixer):
    """A :class:`PagedMixer` whose layers run on :mod:`k3_kernels`.

    Parameters
    ----------
    config : K3Config
        Shape of the model; KDA heads of 16, 32, 64 or 128.
    cache : PagedCache
        float32, float16 or bfloat16; recurrent states are float32.
    layers : dict of int to KdaWeights
        Of every KDA layer.
    execution : ExecutionConfig, optional
        The switches.

    Raises
    ------
    TypeError
        If the cache is float64, which the kernels do not compute.
    """

    def __init__(
        self,
        config: K3Config,
        cache: PagedCache,
        layers: dict[int, KdaWeights],
        execution: ExecutionConfig | None = None,
    ) -> None:
        super().__init__(config, cache, execution)
        if cache.recurrent.dtype != torch.float32:
            raise TypeError(
                f"the kernels keep KDA states in float32, this cache has {cache.recurrent.dtype}: "
                "load the model in float32 or bfloat16, or use backend='reference'"
            )
        self.layers = layers
        # A recorded step comes again, and brings its records with it.
        self._calls: WeakKeyDictionary[StepMetadata, list[_Call]] = WeakKeyDictionary()
        self._positions: dict[int, int] = {}  # of a layer among those of its group
        # Of each state group; one that has no layers, because there are too few, is not among them.
        self._members: dict[int, list[int]] = {}
        for layer_id in config.kda_layer_ids:
            members = self._members.setdefault(cache.kda_layer(layer_id).group, [])
            self._positions[layer_id] = len(members)
            members.append(layer_id)
        self._decay = {
            group: (
                torch.stack([layers[i].A_log for i in members]),
                torch.stack([layers[i].dt_bias for i in members]),
            )
            for group, members in self._members.items()
        }

    # -- a layer ---------------------------------------------------------------------------------

    def kda_block(self, layer_id: int, inputs: KdaInputs) -> Tensor:
        """Run convolution, delta rule and gated norm over the rows of the step.

        Parameters
        ----------
        layer_id : int
            0-based.
        inputs : KdaInputs
            Projections of the N rows.

        Returns
        -------
        Tensor
            ``[N, H, D]`` for ``o_proj``.
        """
        calls = self._prepare(inputs.qkv.dtype)
        out = torch.empty_like(inputs.output_gate, memory_format=torch.contiguous_format)
        gathers = self.step.is_mixed and self.execution.mixed_batch == "gather"
        for call in calls:
            operator = self._decode if call.kind != "prefill" else self._prefill
            if not gathers:
                operator(layer_id, call, inputs.rows(call.rows), out[call.rows])
                continue
            index = torch.arange(call.rows.start, call.rows.stop, device=out.device)
            rows, result = inputs.rows(index), out[index]
            operator(layer_id, call, rows, result)
            out.index_copy_(0, index, result)
            self.counters.gather_bytes += rows.nbytes + result.nbytes
        return out

    def _decode(self, layer_id: int, call: _Call, inputs: KdaInputs, out: Tensor) -> None:
        """One launch for all requests: one token each, or the same number of drafts to verify."""
        weights, layer = self.layers[layer_id], self.cache.kda_layer(layer_id)
        records = None
        if call.records:
            records = call.records[layer.group].layer(self._positions[layer_id])
        kda_decode(
            inputs.qkv, inputs.gate, inputs.beta, inputs.output_gate,
            weights.taps, weights.A_log, weights.dt_bias, weights.norm,
            layer.conv, layer.recurrent, call.slots[layer.group],
            cu_seqlens=call.cu_seqlens, num_accepted=call.num_accepted, records=records,
            lower_bound=weights.lower_bound, norm_eps=weights.norm_eps, null_slot=_NO_SLOT, out=out,
        )  # fmt: skip
        self.counters.launches += 1
        if records is None:
            self.counters.kda_state_writes += call.num_sequences * call.num_tokens

    def _prefill(self, layer_id: int, call: _Call, inputs: KdaInputs, out: Tensor) -> None:
        """Run all chunks of prompts of the step together, whatever their lengths."""
        weights, layer = self.layers[layer_id], self.cache.kda_layer(layer_id)
        slots, checkpoints = call.slots[layer.group], call.checkpoint_at
        where: dict[str, Any] = {
            "cu_seqlens": call.cu_seqlens,
            # Rows of requests that begin were emptied before the step.
            "has_initial_state": call.continued,
            "checkpoint_at": checkpoints,
            "checkpoint_slots": None if checkpoints is None else call.checkpoint_slots[layer.group],
            "null_slot": _NO_SLOT,
        }
        mixed = kda_conv(inputs.qkv, weights.taps, layer.conv, slots, **where)
        q, k, v = mixed.view(len(mixed), 3, *inputs.gate.shape[1:]).unbind(1)
        in_place = self.execution.kda_prefill_in_place or checkpoints is not None
        states, where["state_slots"] = layer.recurrent, slots
        if not in_place:  # a checkpoint's row has no place among gathered states
            states = states.index_select(0, slots)
            where["state_slots"] = torch.arange(len(slots), dtype=torch.int32, device=slots.device)
        o = kda_prefill(
            q, k, v, inputs.gate, inputs.beta, weights.A_log, weights.dt_bias,
            states, lower_bound=weights.lower_bound, **where,
        )  # fmt: skip
        target = out if in_place else None
        normed = gated_norm(o, inputs.output_gate, weights.norm, eps=weights.norm_eps, out=target)
        if not in_place:
            layer.recurrent.index_copy_(0, slots.long(), states)
            out.copy_(normed)
            self.counters.kda_state_bytes_copied += 2 * states.nbytes
            self.counters.launches += 3
        self.counters.launches += 3
        self.counters.kda_state_writes += call.num_sequences + call.num_checkpoints

    def mla(
        self, layer_id: int, q: Tensor, latent: Tensor, kv_b: Tensor, config: K3Config
    ) -> Tensor:
        """See :meth:`kimik3_lab.reference.mixer.Mixer.mla`."""
        group, cached = self.cache.mla_layer(layer_id)
        cached.index_copy_(0, self.step.cell_mapping[group], latent)
        pages = cached.view(-1, self.cache.page_size, cached.shape[-1])
        out = q.new_empty(*q.shape[:2], config.v_head_dim)
        for part in self.step.parts:
            rows = part.rows
            if isinstance(part, Decodes):
                lengths = part.lengths
            elif not expanding_pays(rows.stop - rows.start, part.stop, config):
                lengths = torch.full((1,), part.stop, dtype=torch.int32, device=q.device)
            else:
                seen = latent[rows]
                if part.start:
                    seen = cached.index_select(0, part.contexts[group][0].cells)
                out[rows] = chunk_expanded(q[rows], seen, kv_b)
                self.counters.launches += 1
                continue
            table = part.block_tables[group]
            paged_absorbed(q[rows], pages, table, lengths, kv_b, out=out[rows])
            self.counters.launches += 1
        return out

    # -- what is the same for all layers of a step -----------------------------------------------

    def _prepare(self, dtype: torch.dtype) -> list[_Call]:
        calls = self._calls.get(self.step)
        if calls is None:
            self._calls[self.step] = calls = []
            prefills = []
            for part in self.step.parts:
                if isinstance(part, Decodes):
                    calls.append(self._decode_call(part, dtype))
                else:
                    prefills.append(part)
            if prefills:
                calls.append(self._prefill_call(prefills))
        return calls

    def _decode_call(self, part: Decodes, dtype: torch.dtype) -> _Call:
        count, size = part.num_tokens, len(part.num_accepted)
        call = _Call(part.rows, part.kind, [rows.int() for rows in part.state_rows], count)
        if self.cache.num_scratch:
            call.num_accepted = part.num_accepted.int()
        if count == 1:
            return call
        device = part.num_accepted.device
        call.cu_seqlens = torch.arange(size + 1, dtype=torch.int32, device=device) * count
        if not self.cache.num_scratch:
            linear = self.config.linear_attn_config
            call.records = {
                group: KDARecords.empty(
                    size, count, linear.num_heads, linear.head_dim,
                    dtype=dtype, device=device, layers=len(members),
                )
                for group, members in self._members.items()
            }  # fmt: skip
        return call

    def _prefill_call(self, parts: Sequence[Prefill]) -> _Call:
        def numbers(values: list[int]) -> Tensor:
            return to_device(values, self.cache.conv.device, dtype=torch.int32)

        first, last = parts[0].rows.start, parts[-1].rows.stop
        groups = range(self.cache.num_state_groups)
        call = _Call(
            slice(first, last),
            "prefill",
            [numbers([p.state_rows[g] for p in parts]) for g in groups],
        )
        call.continued = torch.ones_like(call.slots[0])
        call.cu_seqlens = numbers([p.rows.start - first for p in parts] + [last - first])
        call.num_checkpoints = sum(p.checkpoint_at > 0 for p in parts)
        if call.num_checkpoints:
            call.checkpoint_at = numbers([p.checkpoint_at for p in parts])
            call.checkpoint_slots = [
                numbers([p.checkpoint_rows[g] if p.checkpoint_at else _NO_SLOT for p in parts])
                for g in groups
            ]
        return call

    # -- after verification ----------------------------------------------------------------------

    def commit_tensors(self, commits: CommitTensors) -> None:
        """See :meth:`PagedMixer.commit_tensors`: one launch for all layers of a state group."""
        low, number = 0, len(commits.num_accepted)
        for call in self._calls.get(self.step, []):
            if call.records:
                # A recorded step may have empty requests behind the others.
                high = min(low + call.num_sequences, number)
                self._commit_call(call, commits.members(low, high))
                self.counters.recovery_commits += high - low
                low = high

    def _commit_call(self, call: _Call, members: CommitTensors) -> None:
        size, empty = len(members.num_accepted), (0, call.num_sequences - len(members.num_accepted))
        count, boundary = pad(members.num_accepted.int(), empty, value=1), members.boundary
        targets: Tensor | None = None
        if boundary is not None and members.boundary_rows is not None:
            targets = members.boundary_rows.where(boundary > 0, _NO_SLOT).int()
            targets, boundary = pad(targets, empty, value=_NO_SLOT), pad(boundary.int(), empty)
        for group, layer_ids in self._members.items():
            A_log, dt_bias = self._decay[group]
            depth, slots = len(layer_ids), call.slots[group][:, 0].contiguous()
            kda_recover(
                self.cache.recurrent[:depth], call.records[group], slots,
                count, A_log, dt_bias, boundary=boundary,
                boundary_slots=None if targets is None else targets[group],
                conv_state=self.cache.conv[:depth], conv_width=self.cache.history + 1,
                lower_bound=self.layers[layer_ids[0]].lower_bound, null_slot=_NO_SLOT,
            )  # fmt: skip
            self.counters.launches += 1
            written = size + members.num_boundaries
            self.counters.kda_state_writes += depth * written
            window = self.cache.conv[0, 0, :, : self.cache.history].nbytes
            self.counters.conv_bytes_copied += depth * written * window

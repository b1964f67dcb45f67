"""What every part of a model read and returned in the steps of an executor.

Needs torch. :mod:`kimik3_lab.rank.layer_check` compares it with the reference, part by part.

A recorded step runs no Python, but its tensors stay where they were when it was recorded: whoever
keeps hold of them reads there what the last replay has written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kimik3_lab.serving.executors.cuda_graphs import DecodeGraphs
from kimik3_lab.serving.executors.step_parts import Segment
from kimik3_lab.serving.executors.torch_executor import TorchExecutor
from kimik3_lab.serving.executors.triton_model import TritonK3
from kimik3_lab.serving.executors.triton_moe import TritonMoE

__all__ = ["Frame", "StepTrace"]


@dataclass
class Frame:
    """One step.

    Attributes
    ----------
    segments : sequence of Segment
        Its rows.
    recorded : bool
        Whether a recording was replayed for it.
    token_ids : Tensor
        int64 ``[N]``.
    attention, ffn : dict of int to (Tensor, Tensor)
        For each layer what the sublayer read and returned, ``[N, hidden]``.
    experts : dict of int to Tensor
        For each MoE layer the chosen experts, ``[N, k]``.
    taps : dict of int to Tensor
        What the drafter is given, ``[N, hidden]``.
    logits : Tensor
        Of the rows that are sampled from.
    kept : list of int
        For each request the rows that count: all but those of rejected drafts.
    """

    segments: Sequence[Segment] = ()
    recorded: bool = False
    token_ids: Tensor = field(default_factory=lambda: torch.empty(0))
    attention: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    ffn: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    experts: dict[int, Tensor] = field(default_factory=dict)
    taps: dict[int, Tensor] = field(default_factory=dict)
    logits: Tensor = field(default_factory=lambda: torch.empty(0))
    kept: list[int] = field(default_factory=list)
    is_sampled: list[bool] = field(default_factory=list)

    def sampled_rows(self) -> list[int]:
        """Rows of the step that logits are wanted of."""
        rows: list[int] = []
        last = 0
        for segment, sampled in zip(self.segments, self.is_sampled, strict=True):
            last += segment.count
            if sampled:
                rows += range(last - 1 - segment.num_drafts, last)
        return rows

    def settle(self, positions: Sequence[int], counts: Sequence[int]) -> None:
        """Note who was sampled from, which the lengths of their texts tell, and what was kept."""
        waiting = list(zip(positions, counts, strict=True))
        for s in self.segments:
            sampled = bool(waiting) and s.stop - s.num_drafts == waiting[0][0]
            count = waiting.pop(0)[1] if sampled else 0
            self.is_sampled.append(sampled)
            self.kept.append(count if s.num_drafts else s.count)
        assert not waiting, (self.segments, positions)

    def copy(self, segments: Sequence[Segment], logits: Tensor, *, recorded: bool) -> Frame:
        """Copy the rows of these requests, before the next step overwrites them."""
        count = sum(s.count for s in segments)

        def rows(x: Tensor) -> Tensor:
            return x[:count].clone()

        def pairs(parts: dict[int, tuple[Tensor, Tensor]]) -> dict[int, tuple[Tensor, Tensor]]:
            return {i: (rows(x), rows(y)) for i, (x, y) in parts.items()}

        return Frame(
            list(segments),
            recorded,
            rows(self.token_ids),
            pairs(self.attention),
            pairs(self.ffn),
            {i: rows(x).long() for i, x in self.experts.items()},
            {i: rows(x) for i, x in self.taps.items()},
            logits.clone(),
        )


class StepTrace:
    """Keeps a :class:`Frame` of every step of an executor, from now on.

    Parameters
    ----------
    executor
        Nothing is running in it, and none of its steps is recorded yet. It cannot be used without
        being watched afterwards.

    Attributes
    ----------
    frames : list of Frame
        The steps so far. Whoever reads them may clear the list.
    """

    def __init__(self, executor: TorchExecutor) -> None:
        self.frames: list[Frame] = []
        self._executor, self._frame = executor, Frame()
        # The logits of a recording stay where they are, and tell which one was replayed.
        self._by_logits: dict[int, Frame] = {}
        compute = executor.compute
        inner = compute.compute if isinstance(compute, DecodeGraphs) else compute
        if isinstance(inner, TritonK3):
            self._watch_kernels(inner)
        else:
            self._watch_modules(executor)
        watched = self._watched(inner)
        if isinstance(compute, DecodeGraphs):
            compute.compute = watched
        else:
            executor.compute = watched
        verifier = executor.verifier

        def verify(
            logits: Tensor, drafts: Any, params: Any, streams: Any, positions: Sequence[int],
            **kwargs: Any,
        ) -> list[list[int]]:  # fmt: skip
            frame = self._by_logits[logits.data_ptr()] if logits.numel() else self._frame
            recorded = executor.graphs is not None and executor.graphs.best is not None
            frame = frame.copy(executor.last_segments, logits, recorded=recorded)
            self.frames.append(frame)
            said = verifier(logits, drafts, params, streams, positions, **kwargs)
            frame.settle(positions, [len(tokens) for tokens in said])
            return said

        executor.verifier = verify

    def _watched(self, compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(token_ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            frame = self._frame = Frame(token_ids=token_ids)
            logits = compute(token_ids, *args, **kwargs)
            frame.taps = {i: tap for i, tap in (kwargs.get("taps") or {}).items()}
            if logits.numel():
                self._by_logits[logits.data_ptr()] = frame
            return logits

        return call

    def _watch_kernels(self, model: TritonK3) -> None:
        """Put a watcher around each part of the Triton backend."""

        def watch(part: Any, layer_id: int, kind: str) -> Any:
            def call(x: Tensor, *args: Any) -> Tensor:
                y: Tensor = part(x, *args)
                getattr(self._frame, kind)[layer_id] = x, y
                return y

            return call

        for layer_id, ffn in enumerate(model._ffn):
            if isinstance(ffn, TritonMoE):
                ffn.watch = lambda ids, i=layer_id: self._frame.experts.__setitem__(i, ids)
        for kind, parts in (("attention", model._attention), ("ffn", model._ffn)):
            parts[:] = [watch(part, i, kind) for i, part in enumerate(parts)]  # type: ignore[index]

    def _watch_modules(self, executor: TorchExecutor) -> None:
        """Put a hook on each module of the reference."""

        def hook(module: torch.nn.Module, layer_id: int, kind: str) -> None:
            def note(_: torch.nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
                if kind == "experts":
                    self._frame.experts[layer_id] = output.expert_ids
                else:
                    getattr(self._frame, kind)[layer_id] = inputs[0], output

            module.register_forward_hook(note)

        for layer_id, layer in enumerate(executor.model.model.layers):
            ffn = getattr(layer, layer._ffn)
            hook(layer.self_attn, layer_id, "attention")
            hook(ffn, layer_id, "ffn")
            if layer._ffn == "block_sparse_moe":
                hook(ffn.gate, layer_id, "experts")

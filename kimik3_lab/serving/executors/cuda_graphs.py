"""Replay a decode step instead of launching its kernels one by one.

Needs torch; recording needs a CUDA device. Lesson 10 turns the switch.

A step of few tokens is over before the processor has asked for its next kernel: some hundreds of
launches of a few microseconds each. A CUDA graph is recorded once and started with one launch. But
it repeats the same kernels on the same addresses, so everything that differs from step to step has
to lie in buffers of its own, which are filled before each replay; and what decides shapes has to be
the same: the number of requests, the tokens of each, and the length of the contexts, which are
padded to a power of two. Each combination gets a graph when it first occurs. vLLM records graphs at
start-up, for a list of batch sizes (``vllm/v1/worker/gpu/cudagraph_utils.py``).

Steps with a prompt in them, or with requests of several numbers of drafts, are computed as always.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import fields
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kimik3_lab.serving.executors.paged_cache import PagedCache
from kimik3_lab.serving.executors.paged_mixer import PagedMixer
from kimik3_lab.serving.executors.step_counters import StepCounters
from kimik3_lab.serving.executors.step_metadata import Context, Decodes, StepMetadata

__all__ = ["CudaRecorder", "DecodeGraphs", "Recorder"]

#: Contexts are padded to at least this many rows.
_SHORTEST = 64


class Recorder(Protocol):
    """Records a function without arguments and returns what repeats it."""

    def __call__(
        self, function: Callable[[], None], warm_up: Callable[[], None]
    ) -> Callable[[], None]:
        """Record ``function``.

        ``warm_up`` may be called before, as often as is needed: it runs the same kernels and
        leaves no trace.
        """


class CudaRecorder:
    """Records CUDA graphs that share one pool of memory.

    Raises
    ------
    RuntimeError
        If there is no CUDA device.
    """

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise RuntimeError("CUDA graphs need a CUDA device: leave cuda_graphs at False")
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(
        self, function: Callable[[], None], warm_up: Callable[[], None]
    ) -> Callable[[], None]:
        """See :class:`Recorder`. Kernels are compiled before, because recording cannot wait."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                warm_up()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            function()
        return graph.replay


class _Shape(NamedTuple):
    """What decides the shapes of a step: requests, rows of each, padded context, tapped layers."""

    num_requests: int
    num_tokens: int
    length: int
    taps: tuple[int, ...]


class _Recorded:
    """One graph with its buffers."""

    def __init__(self, step: StepMetadata, shape: _Shape) -> None:
        (part,) = step.parts
        assert isinstance(part, Decodes)
        self.shape = shape
        self.token_ids = torch.zeros_like(step.positions)
        self.logits: Tensor | None = None
        self.taps: dict[int, Tensor | None] = dict.fromkeys(shape.taps)
        self.cost = StepCounters()
        self.replay: Callable[[], None] | None = None
        size = (shape.num_requests, shape.length)
        hidden = (shape.num_requests, shape.num_tokens, shape.length)
        self.part = dataclasses.replace(
            part,
            state_rows=tuple(torch.full_like(rows, -1) for rows in part.state_rows),
            num_accepted=torch.ones_like(part.num_accepted),
            contexts=[
                [
                    Context(
                        part.rows,
                        contexts[0].cells.new_zeros(size),
                        torch.zeros(hidden, dtype=torch.bool, device=step.positions.device),
                    )
                ]
                for contexts in part.contexts
            ],
        )
        #: The step that the recorded kernels read.
        self.step = copy.copy(step)
        self.step.parts = [self.part]
        self.step.positions = torch.zeros_like(step.positions)
        self.step.cell_mapping = torch.zeros_like(step.cell_mapping)
        self.step.records = {}

    def fill(self, token_ids: Tensor, step: StepMetadata) -> None:
        """Copy what differs from step to step into the buffers."""
        (part,) = step.parts
        assert isinstance(part, Decodes)
        self.token_ids.copy_(token_ids)
        self.step.positions.copy_(step.positions)
        self.step.cell_mapping.copy_(step.cell_mapping)
        self.part.num_accepted.copy_(part.num_accepted)
        for rows, new in zip(self.part.state_rows, part.state_rows, strict=True):
            rows.copy_(new)
        for (ours,), (theirs,) in zip(self.part.contexts, part.contexts, strict=True):
            length = theirs.cells.shape[-1]
            ours.cells[:, :length] = theirs.cells
            ours.cells[:, length:] = 0
            assert ours.hidden is not None
            if theirs.hidden is None:
                ours.hidden[..., :length] = False
            else:
                ours.hidden[..., :length] = theirs.hidden
            ours.hidden[..., length:] = True


class DecodeGraphs:
    """Wraps what computes a step, and replays it where that can be done.

    Parameters
    ----------
    compute : callable
        Maps ``(token_ids, mixer, logits_at=..., taps=...)`` to logits, on the GPU and without
        waiting for it: :class:`~kimik3_lab.serving.executors.triton_model.TritonK3`. The reference
        model looks at its routing on the processor and cannot be recorded.
    cache : PagedCache
        That the mixer works on.
    recorder : Recorder, optional
        A :class:`CudaRecorder` if left out.
    max_graphs : int
        Graphs to keep; the one that was not used for the longest time is dropped for a new one.

    Attributes
    ----------
    num_recordings, num_replays : int
        Graphs made, and steps that one was replayed for.
    """

    def __init__(
        self,
        compute: Callable[..., Tensor],
        cache: PagedCache,
        *,
        recorder: Recorder | None = None,
        max_graphs: int = 64,
    ) -> None:
        self._compute, self._cache = compute, cache
        self._recorder = recorder or CudaRecorder()
        self._max_graphs = max_graphs
        self._graphs: OrderedDict[_Shape, _Recorded] = OrderedDict()
        self.num_recordings = 0
        self.num_replays = 0

    def __call__(
        self,
        token_ids: Tensor,
        mixer: PagedMixer,
        *,
        logits_at: Tensor | None = None,
        taps: dict[int, Tensor | None] | None = None,
    ) -> Tensor:
        """Compute a step.

        After a replay ``mixer.step`` is the recorded step, which holds the same numbers. Logits and
        taps are the graph's own and stay as they are until the next call.
        """
        shape = self._shape(mixer.step, logits_at, taps)
        if shape is None:
            return self._compute(token_ids, mixer, logits_at=logits_at, taps=taps)
        recorded, step = self._graphs.get(shape), mixer.step
        if recorded is None:
            recorded = self._record(shape, mixer)
        self._graphs.move_to_end(shape)
        recorded.fill(token_ids, step)
        assert recorded.replay is not None
        recorded.replay()
        mixer.step = recorded.step
        self._add(dataclasses.replace(recorded.cost, launches=1))
        self.num_replays += 1
        if taps is not None:
            taps.update(recorded.taps)
        assert recorded.logits is not None
        return recorded.logits

    @staticmethod
    def _shape(
        step: StepMetadata, logits_at: Tensor | None, taps: dict[int, Tensor | None] | None
    ) -> _Shape | None:
        """Describe a step that can be recorded; None for any other."""
        if len(step.parts) != 1 or not isinstance(part := step.parts[0], Decodes):
            return None
        if any(len(contexts) != 1 for contexts in part.contexts):
            return None
        if logits_at is not None and len(logits_at) != step.num_rows:
            return None  # a resumed request of which one token is missing, and more will follow
        longest = max(contexts[0].cells.shape[-1] for contexts in part.contexts)
        length = max(_SHORTEST, 1 << (longest - 1).bit_length())
        return _Shape(len(part.num_accepted), part.num_tokens, length, tuple(taps or ()))

    def _record(self, shape: _Shape, mixer: PagedMixer) -> _Recorded:
        recorded = _Recorded(mixer.step, shape)

        def run() -> None:
            # A step of its own for each run: what a mixer works out for it from the buffers has to
            # be worked out while recording, too.
            mixer.step = recorded.step = copy.copy(recorded.step)
            recorded.step.records = {}
            before = self._cache.counters.snapshot()
            recorded.logits = self._compute(
                recorded.token_ids, mixer, taps=recorded.taps if shape.taps else None
            )
            recorded.cost = self._cache.counters - before
            self._add(recorded.cost, sign=-1)  # it is counted when it is replayed

        def warm_up() -> None:  # while the buffers name no request's rows
            run()
            self._cache.latent[:, 0] = 0  # where tokens without a request were written

        recorded.replay = self._recorder(run, warm_up)
        self._graphs[shape] = recorded
        self.num_recordings += 1
        if len(self._graphs) > self._max_graphs:
            self._graphs.popitem(last=False)
        return recorded

    def _add(self, cost: StepCounters, *, sign: int = 1) -> None:
        counters = self._cache.counters
        for field in fields(cost):
            total = getattr(counters, field.name) + sign * getattr(cost, field.name)
            setattr(counters, field.name, total)

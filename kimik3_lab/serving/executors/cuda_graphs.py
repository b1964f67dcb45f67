"""Replay a decode step instead of launching its kernels one by one.

Needs torch; recording needs a CUDA device. Lesson 10 turns the switch.

A step of few tokens is over before the processor has asked for its next kernel: some hundreds of
launches of a few microseconds each. A CUDA graph is recorded once and started with one launch. But
it repeats the same kernels on the same addresses, so everything that differs from step to step has
to lie in a buffer of its own, which is filled before each replay; and what decides shapes has to be
the same: the number of requests, which are filled up with empty ones to a power of two, the tokens
of each, and the length of the contexts, of which a power of two is the bound. Each combination gets
a graph when it first occurs. vLLM records graphs at start-up, for a list of batch sizes
(``vllm/v1/worker/gpu/cudagraph_utils.py``).

Steps with a prompt in them, or with requests of several numbers of drafts, are computed as always.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import TypeAlias

from torch import Tensor

from kimik3_lab.serving.executors.graph_recordings import (
    Ahead,
    CudaRecorder,
    GraphShape,
    Recorder,
    Recording,
    padded_size,
)
from kimik3_lab.serving.executors.paged_cache import PagedCache
from kimik3_lab.serving.executors.paged_mixer import PagedMixer
from kimik3_lab.serving.executors.step_counters import StepCounters
from kimik3_lab.serving.executors.step_metadata import StepMetadata
from kimik3_lab.serving.executors.step_parts import Segment

__all__ = [
    "AfterForward",
    "Ahead",
    "CudaRecorder",
    "DecodeGraphs",
    "Recorder",
    "Recording",
    "padded_size",
]

#: Contexts are padded to at least this many rows.
_SHORTEST = 64

#: Told of taps and step inside the recording: what a drafter keeps of a step is recorded with it.
AfterForward: TypeAlias = Callable[[dict[int, Tensor | None], StepMetadata], None]


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
    after : callable, optional
        Called after the forward pass of every step that is recorded, inside the recording.

    Attributes
    ----------
    shortest : int
        Contexts are bounded by at least this: more means fewer recordings.
    num_recordings, num_replays : int
        Graphs made, and steps that one was replayed for.
    best : Tensor or None
        For the rows of the last replay the most probable token, -1 where the logits are not finite;
        None after a step that was not replayed.
    settled : Tensor or None
        After the replay of a step that was planned ahead and settles: its new tokens, see
        :meth:`~kimik3_lab.serving.executors.async_tables.SeatTables.settle`. Rows of empty requests
        may come behind them.
    """

    def __init__(
        self,
        compute: Callable[..., Tensor],
        cache: PagedCache,
        *,
        recorder: Recorder | None = None,
        max_graphs: int = 64,
        after: AfterForward | None = None,
    ) -> None:
        self.compute, self._cache = compute, cache
        self.recorder = recorder or CudaRecorder()
        self._max_graphs = max_graphs
        self._graphs: OrderedDict[GraphShape, Recording] = OrderedDict()
        self.after = after
        self.shortest = _SHORTEST
        self.num_recordings = 0
        self.num_replays = 0
        self.best: Tensor | None = None
        self.settled: Tensor | None = None

    def __call__(
        self,
        token_ids: Tensor,
        mixer: PagedMixer,
        *,
        logits_at: Tensor | None = None,
        taps: dict[int, Tensor | None] | None = None,
    ) -> Tensor:
        """Compute a step whose metadata are on the device, in ``mixer.step``.

        After a replay ``mixer.step`` is the recorded step, which holds the same numbers and perhaps
        empty requests behind them. Logits and taps are the graph's own and stay as they are until
        the next call.
        """
        self.best = self.settled = None
        count = None if logits_at is None else len(logits_at)
        shape = self._shape(mixer.step.segments, count, taps)
        if shape is None:
            return self.compute(token_ids, mixer, logits_at=logits_at, taps=taps)
        step = mixer.step
        recorded = self._recorded(shape, mixer, step.segments)
        recorded.fill_eagerly(token_ids, step)
        return self._replay(recorded, mixer, len(token_ids), taps)

    def replay(
        self,
        segments: Sequence[Segment],
        token_ids: Sequence[int],
        mixer: PagedMixer,
        *,
        num_logits: int,
        taps: dict[int, Tensor | None] | None = None,
        ahead: Ahead | None = None,
    ) -> Tensor | None:
        """Compute a step from its plan on the host, if it can be recorded; None otherwise.

        With ``ahead`` the graph fills in what the plan leaves open, and chooses the tokens.
        """
        self.best = self.settled = None
        recorded = self.recording(
            segments, token_ids, mixer, num_logits=num_logits, taps=taps, ahead=ahead
        )
        if recorded is None:
            return None
        logits = self._replay(recorded, mixer, len(token_ids), taps)
        if ahead is not None and ahead.settles:
            self.settled = recorded.settled
        return logits

    def recording(
        self,
        segments: Sequence[Segment],
        token_ids: Sequence[int],
        mixer: PagedMixer,
        *,
        num_logits: int,
        taps: dict[int, Tensor | None] | None = None,
        ahead: Ahead | None = None,
    ) -> Recording | None:
        """Find or make the recording of a step and fill its buffer; None if there can be none."""
        shape = self._shape(segments, num_logits, taps)
        if shape is None:
            return None
        if ahead is not None:
            shape = shape._replace(is_ahead=True)
        recorded = self._recorded(shape, mixer, segments, ahead)
        recorded.fill_packed(token_ids, segments, settles=ahead is not None and ahead.settles)
        return recorded

    def _shape(
        self,
        segments: Sequence[Segment],
        num_logits: int | None,
        taps: dict[int, Tensor | None] | None,
    ) -> GraphShape | None:
        """Describe a step that can be recorded; None for any other."""
        first = segments[0]
        if first.kind == "prefill" or any(s.order[:2] != first.order[:2] for s in segments):
            return None
        if num_logits not in (None, len(segments) * first.count):
            return None  # a resumed request of which one token is missing, and more will follow
        longest = max(s.stop for s in segments)
        bound = max(self.shortest, 1 << (longest - 1).bit_length())
        return GraphShape(padded_size(len(segments)), first.count, bound, tuple(taps or ()))

    def _recorded(
        self,
        shape: GraphShape,
        mixer: PagedMixer,
        segments: Sequence[Segment],
        ahead: Ahead | None = None,
    ) -> Recording:
        recorded = self._graphs.get(shape)
        if recorded is None:
            recorded = self._record(shape, mixer, segments[0], ahead)
        self._graphs.move_to_end(shape)
        return recorded

    def _replay(
        self,
        recorded: Recording,
        mixer: PagedMixer,
        num_rows: int,
        taps: dict[int, Tensor | None] | None,
    ) -> Tensor:
        assert recorded.replay is not None
        recorded.replay()
        mixer.step = recorded.step
        writes = recorded.cost.kda_state_writes * num_rows // recorded.num_rows
        self._add(dataclasses.replace(recorded.cost, launches=1, kda_state_writes=writes))
        self.num_replays += 1
        if taps is not None:
            taps.update(recorded.taps)
        assert recorded.logits is not None and recorded.best is not None
        if num_rows < recorded.num_rows:  # empty requests wrote to the null block
            self._cache.latent[:, 0] = 0
        self.best = recorded.best[:num_rows]
        return recorded.logits[:num_rows]

    def _record(
        self, shape: GraphShape, mixer: PagedMixer, like: Segment, ahead: Ahead | None
    ) -> Recording:
        recorded = Recording(self._cache, shape, like)
        rows = None if ahead is None else recorded.rows  # no part of the graph

        def run() -> None:
            # A step of its own for each run: what a mixer works out for it from the buffer has to
            # be worked out while recording, too.
            mixer.step = recorded.step = recorded.new_step()
            before = self._cache.counters.snapshot()
            if ahead is not None:
                ahead.tables.fill_in(recorded.step, recorded.numbers)
            recorded.logits = self.compute(
                recorded.numbers[: recorded.num_rows],
                mixer,
                taps=recorded.taps if shape.taps else None,
            )
            largest, best = recorded.logits.max(-1)
            recorded.best = best.where(largest.isfinite(), -1)
            if ahead is not None and rows is not None:
                enabled = recorded.numbers[-1:]
                recorded.settled = ahead.tables.settle(rows, recorded.best, enabled)
            if self.after is not None and shape.taps:
                self.after(recorded.taps, recorded.step)
            recorded.cost = self._cache.counters - before
            self._add(recorded.cost, sign=-1)  # it is counted when it is replayed

        def warm_up() -> None:  # while the buffer names no request's rows
            run()
            self._cache.latent[:, 0] = 0  # where tokens without a request were written

        recorded.replay = self.recorder(run, warm_up)
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

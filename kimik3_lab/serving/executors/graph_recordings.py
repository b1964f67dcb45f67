"""One recorded decode step: what is recorded with, and the buffer that is filled before a replay.

Needs torch; recording needs a CUDA device. Part of
:mod:`~kimik3_lab.serving.executors.cuda_graphs`, which says when to record and when to replay.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kimik3_lab.serving.executors.async_sampler import SampledRows
from kimik3_lab.serving.executors.async_tables import SeatTables
from kimik3_lab.serving.executors.paged_cache import PagedCache
from kimik3_lab.serving.executors.pinned import to_device
from kimik3_lab.serving.executors.step_counters import StepCounters
from kimik3_lab.serving.executors.step_metadata import StepMetadata, step_numbers
from kimik3_lab.serving.executors.step_parts import Decodes, Segment, StateRows

__all__ = [
    "Ahead", "CudaRecorder", "GraphShape", "Recorder", "Recording", "no_collection", "padded_size",
]  # fmt: skip


def padded_size(number: int) -> int:
    """Return the requests of the graph that serves ``number``: the next power of two.

    Examples
    --------
    >>> [padded_size(n) for n in (1, 2, 3, 9)]
    [1, 2, 4, 16]
    """
    return 1 << (number - 1).bit_length()


class Recorder(Protocol):
    """Records a function without arguments and returns what repeats it."""

    def __call__(
        self, function: Callable[[], None], warm_up: Callable[[], None]
    ) -> Callable[[], None]:
        """Record ``function``.

        ``warm_up`` may be called before, as often as is needed: it runs the same kernels and
        leaves no trace.
        """


@contextmanager
def no_collection() -> Iterator[None]:
    """Hold Python's garbage collector: it must find no older graph while a new one is recorded.

    To free a graph is not permitted then, and what was recorded so far would be lost. An executor
    that nobody needs any more is such garbage, since its parts know each other.
    """
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


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
        with no_collection(), torch.cuda.graph(graph, pool=self._pool):
            function()
        return graph.replay


class GraphShape(NamedTuple):
    """What decides shapes: requests, rows of each, bound of the contexts, tapped layers.

    A step that is planned ahead has a graph of its own, with more in it.
    """

    num_requests: int
    num_tokens: int
    bound: int
    taps: tuple[int, ...]
    is_ahead: bool = False


class Ahead(NamedTuple):
    """For a step that is planned before the last one has answered.

    Attributes
    ----------
    tables : SeatTables
        Know what the plan leaves open.
    settles : bool
        Whether its tokens are the most probable ones: then the graph moves the tables on.
    """

    tables: SeatTables
    settles: bool


class Recording:
    """One graph with its buffer: ``replay()`` computes the step that was filled in last."""

    def __init__(self, cache: PagedCache, shape: GraphShape, like: Segment) -> None:
        self.cache, self.shape = cache, shape
        self.num_rows = shape.num_requests * shape.num_tokens
        #: A request that is not there: its row of the block table names null blocks only.
        self.empty = Segment(
            cache.padding_slot,
            0,
            shape.num_tokens,
            shape.num_tokens - 1,
            [StateRows([-1] * len(states.rows)) for states in like.states],
        )
        self.segments = [self.empty] * shape.num_requests
        # The last one is 1 if the tables of a step ahead are to be moved on.
        numbers = [*step_numbers([0] * self.num_rows, self.segments), 0]
        self.numbers = torch.tensor(numbers, dtype=torch.int64, device=cache.conv.device)
        self.logits: Tensor | None = None
        self.best: Tensor | None = None
        #: New tokens of a step ahead, see :meth:`~.async_tables.SeatTables.settle`.
        self.settled: Tensor | None = None
        self.taps: dict[int, Tensor | None] = dict.fromkeys(shape.taps)
        self.cost = StepCounters()
        self.replay: Callable[[], None] | None = None
        self.step = self.new_step()

    def new_step(self) -> StepMetadata:
        """Take the buffer apart; what is worked out on the way is recorded, too."""
        return StepMetadata(self.cache, self.segments, numbers=self.numbers, bound=self.shape.bound)

    @cached_property
    def rows(self) -> SampledRows:
        """Where each request's rows are: the same in every replay, but for the seats."""
        (part,), count = self.step.parts, self.shape.num_tokens
        assert isinstance(part, Decodes)
        firsts = torch.arange(0, self.num_rows, count, device=self.numbers.device)
        counts = torch.full_like(firsts, count)
        return SampledRows(firsts, counts - 1, counts, part.slots, count - 1)

    def fill_packed(
        self, token_ids: Sequence[int], segments: Sequence[Segment], *, settles: bool = False
    ) -> None:
        """Send all integers of a step in one copy."""
        missing = self.shape.num_requests - len(segments)
        numbers = step_numbers(
            [*token_ids, *[0] * (missing * self.shape.num_tokens)],
            [*segments, *[self.empty] * missing],
        )
        numbers.append(int(settles))
        to_device(numbers, out=self.numbers)

    def fill_eagerly(self, token_ids: Tensor, step: StepMetadata) -> None:
        """Copy each tensor of a step to its place."""
        (part,), (ours,) = step.parts, self.step.parts
        assert isinstance(part, Decodes) and isinstance(ours, Decodes)
        if len(part.slots) < self.shape.num_requests:
            self.fill_packed([], [])
        self.numbers[: len(token_ids)].copy_(token_ids)
        pairs = [
            (self.step.positions, step.positions),
            (self.step.row_slots, step.row_slots),
            (ours.slots, part.slots),
            (ours.starts, part.starts),
            (ours.num_accepted, part.num_accepted),
            *zip(ours.state_rows, part.state_rows, strict=True),
        ]
        for target, source in pairs:
            target[: len(source)].copy_(source)

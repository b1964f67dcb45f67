"""Time GPU calls side by side: CUDA graphs, inputs that are not in the cache, median of replays.

Needs PyTorch and a CUDA device.

A launch from Python takes longer than a small kernel runs, so the calls are recorded into a graph
and the graph is replayed. A kernel whose inputs were just read finds them in the L2 cache, which a
serving engine does not offer: between two calls of one operator it streams other layers' weights.
So every call of a graph works on another input set, and before each replay, outside the timed
region, a buffer several times the size of the cache is read. Small weights that all calls share
stay cached. Implementations take turns, replay by replay, so that a change of the GPU's clock meets
all of them.

The calls of a graph follow each other as kernels of a model's step do: a kernel that is launched to
start before its predecessor has ended (programmatic dependent launch) gains here what it gains
there, and the time of a call is what it adds to the chain.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

__all__ = ["Timing", "input_sets", "relative_error", "time_side_by_side"]

#: The rotation and the buffer read between replays are so many times the L2 cache.
CACHE_MULTIPLE = 4
#: More sets than this make recording slow and the result no better.
MAX_SETS = 256


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call over the replays: median and the 10th and 90th percentile."""

    median_us: float
    p10_us: float
    p90_us: float
    calls_per_replay: int
    replays: int
    graph: bool = True


def input_sets(bytes_per_call: float, *, most: int = MAX_SETS) -> int:
    """Return over how many different input sets to rotate: two at least."""
    return max(2, min(most, math.ceil(CACHE_MULTIPLE * _cache_bytes() / bytes_per_call)))


def relative_error(result: torch.Tensor, reference: torch.Tensor) -> float:
    """Return ||result - reference|| / ||reference||, infinite if anything is not a number."""
    error = (result.double() - reference.double()).norm() / reference.double().norm()
    return float(error.nan_to_num(nan=math.inf))


def time_side_by_side(
    calls: Mapping[str, Callable[[int], object]], sets: int, *, seconds: float = 0.15
) -> dict[str, Timing]:
    """Time every call over all input sets, in turns.

    Parameters
    ----------
    calls
        By name; each takes the index of an input set.
    sets
        How many sets there are.
    seconds
        GPU time to spend on each call, and at least seven replays.
    """
    recorded = {name: _Recorded(call, sets) for name, call in calls.items()}
    flush = torch.ones(CACHE_MULTIPLE * _cache_bytes() // 4, dtype=torch.float32, device="cuda")
    for run in recorded.values():  # once more before timing: the first replay uploads the graph
        run.replay_us(flush)
    slowest = max((run.replay_us(flush) for run in recorded.values()), default=0.0)
    replays = max(7, min(100, int(seconds * 1e6 / max(slowest, 1.0))))
    times: dict[str, list[float]] = {name: [] for name in recorded}
    for _ in range(replays):
        for name, run in recorded.items():
            times[name].append(run.replay_us(flush) / run.calls)
    result = {}
    for name, run in recorded.items():
        deciles = statistics.quantiles(times[name], n=10)
        middle = statistics.median(times[name])
        result[name] = Timing(middle, deciles[0], deciles[-1], run.calls, replays, run.graphed)
    return result


class _Recorded:
    """Calls over all sets, as a graph if the implementation can be captured."""

    def __init__(self, call: Callable[[int], object], sets: int) -> None:
        self._call, self._sets = call, sets
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for index in range(min(2, sets)):  # compiles, fills the allocator
                call(index)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self.calls = sets
        self._graph: torch.cuda.CUDAGraph | None = None
        # Two milliseconds a graph, so that its start costs little per call.
        rounds = max(1, min(math.ceil(64 / sets), math.ceil(2e3 / (self._eager_us() * sets))))
        self.calls = sets * rounds
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._run()
            self._graph = graph
        except RuntimeError as error:
            # Only a call that cannot be captured (it waits for the GPU) is worth timing eagerly.
            if "captur" not in str(error).lower():
                raise
            torch.cuda.synchronize()

    @property
    def graphed(self) -> bool:
        return self._graph is not None

    def _run(self) -> None:
        for index in range(self.calls):
            self._call(index % self._sets)

    def _eager_us(self) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self._call(0)
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3

    def replay_us(self, flush: torch.Tensor) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.sum()  # reads only: written lines would have to leave the cache in the timed region
        start.record()
        if self._graph is None:
            self._run()
        else:
            self._graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3


def _cache_bytes() -> int:
    if not torch.cuda.is_available():
        return 60 << 20  # an H200's, so that inputs can be made and looked at without one
    return torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size

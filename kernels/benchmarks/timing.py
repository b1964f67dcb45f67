"""Time short GPU calls: CUDA graph, inputs that are not in the cache, median of many replays.

Needs PyTorch and a CUDA device. Used by every benchmark of this package.

A launch from Python takes longer than a small kernel runs, so the calls are recorded into a graph
and the graph is replayed. A kernel whose inputs were just read finds them in the L2 cache, which a
serving engine does not offer: between two calls of one operator it streams other layers' weights.
The calls of one graph therefore walk over inputs that together are several times the cache.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

__all__ = ["BANDWIDTH", "Timing", "input_sets", "relative_error", "time_calls"]

#: Bytes a second that a copy reaches on an H200, the yardstick of the floors (measured: 4.27e12).
BANDWIDTH = 4.3e12


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call over the replays: median and the 10th and 90th percentile."""

    median_us: float
    p10_us: float
    p90_us: float
    calls_per_replay: int
    replays: int


def input_sets(bytes_per_call: int, *, cache_multiple: int = 4) -> int:
    """Return how many different inputs to rotate over so that none is still in the L2 cache."""
    cache = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    return max(2, math.ceil(cache_multiple * cache / bytes_per_call))


def time_calls(
    calls: Sequence[Callable[[], object]], *, min_calls: int = 50, seconds: float = 0.2
) -> Timing:
    """Time ``calls``, which do the same work on different inputs and write into given buffers.

    Parameters
    ----------
    calls
        One per input set. They must not allocate much: the graph keeps what they allocate.
    min_calls
        The graph repeats ``calls`` until it has so many, so that starting it costs little per call.
    seconds
        Time to spend replaying, and at least 20 replays.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls[:2]:  # compiles
            call()
    torch.cuda.synchronize()
    repeats = math.ceil(min_calls / len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for call in calls:
                call()
    per_replay = repeats * len(calls)
    for _ in range(3):
        graph.replay()
    first = _replay_ms(graph)
    replays = max(20, min(2000, int(seconds * 1e3 / first)))
    times = [_replay_ms(graph) * 1e3 / per_replay for _ in range(replays)]
    deciles = statistics.quantiles(times, n=10)
    return Timing(statistics.median(times), deciles[0], deciles[-1], per_replay, replays)


def _replay_ms(graph: torch.cuda.CUDAGraph) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def relative_error(result: torch.Tensor, reference: torch.Tensor) -> float:
    """Return ||result - reference|| / ||reference||, infinite if anything is not a number."""
    error = (result.double() - reference).norm() / reference.norm()
    return float(error.nan_to_num(nan=math.inf))

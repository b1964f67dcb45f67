"""Time what several ranks do together: eager or in a CUDA graph, the slowest rank counts.

Needs torch. :mod:`kimik3_lab.parallel.measure` uses it. All ranks must ask for the same timings in
the same order, because what is timed exchanges tensors.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from kimik3_lab.parallel.groups import Ranks

__all__ = ["eager_us", "graph_us", "graphs_us", "slowest"]

#: Replays or rounds of which the median is taken.
ROUNDS = 7


def slowest(ranks: Ranks, times: list[float]) -> list[float]:
    """Largest of each time over ranks."""
    if ranks.size == 1:
        return times
    every = torch.tensor(times, dtype=torch.float64)
    if dist.get_backend() == "nccl":
        every = every.cuda()
    dist.all_reduce(every, dist.ReduceOp.MAX)
    return every.tolist()


def eager_us(
    ranks: Ranks, call: Callable[[int], object], calls: int, *, rounds: int = ROUNDS
) -> float:
    """Microseconds of a call when the host launches each: median of rounds of ``calls``.

    On a GPU the host's time to launch counts where it is longer than the work. On the CPU it is
    wall-clock time.
    """
    call(0)
    times = []
    for _ in range(rounds):
        _meet(ranks)
        start = time.perf_counter()
        for index in range(calls):
            call(index)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / calls * 1e6)
    return slowest(ranks, [statistics.median(times)])[0]


def graph_us(ranks: Ranks, call: Callable[[int], object], calls: int, *, repeats: int = 1) -> float:
    """Time one call, as :func:`graphs_us` does several."""
    return graphs_us(ranks, {"it": call}, calls, repeats=repeats)["it"]


def graphs_us(
    ranks: Ranks,
    variants: Mapping[str, Callable[[int], object]],
    calls: int,
    *,
    repeats: int = 1,
) -> dict[str, float]:
    """Microseconds of a call in captured graphs of ``calls * repeats``: median of replays.

    Parameters
    ----------
    variants
        By name; each gets 0 to ``calls - 1``: inputs that differ, so that what one call read is no
        longer in the cache when it comes again. Their replays take turns, so that a change of the
        clock meets all of them.
    """
    graphs = {name: _captured(call, calls, repeats) for name, call in variants.items()}
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for graph in graphs.values():
        graph.replay()
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            _meet(ranks)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) * 1e3 / (calls * repeats))
    graphs.clear()
    medians = [statistics.median(found) for found in times.values()]
    return dict(zip(times, slowest(ranks, medians), strict=True))


def _captured(call: Callable[[int], object], calls: int, repeats: int) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for index in range(calls):  # compiles, opens connections, fills the allocator
            call(index)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # NCCL's watchdog thread asks for events meanwhile, which a global capture would not allow.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(repeats):
            for index in range(calls):
                call(index)
    return graph


def _meet(ranks: Ranks) -> None:
    ranks.barrier()
    if torch.cuda.is_available():
        torch.cuda.synchronize()

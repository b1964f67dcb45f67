"""Several replicas behind a router, each simulated in a process of its own.

Needs the standard library; tqdm when it shows progress. Used by ``k3lab simulate --replicas``, by
the planner and by lesson 12.

First the router sends every request to a replica, then the replicas are simulated, all at once. So
the router cannot see how busy a replica really is; it keeps a book
(:mod:`kimik3_lab.simulation.load_estimate`). What comes out does not depend on the number of
processes: the seed of a replica follows from its number.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kimik3_lab.benchmark.trace_request import BLOCK_TOKENS
from kimik3_lab.simulation.arrivals import simulate_arrivals
from kimik3_lab.simulation.latency_sketch import LatencySketch
from kimik3_lab.simulation.load_estimate import Pace
from kimik3_lab.simulation.requests import SimulationRequest
from kimik3_lab.simulation.results import SimulationResult
from kimik3_lab.simulation.router import Router, RouterName, Routing, route
from kimik3_lab.simulation.spec import SimulationSpec

if TYPE_CHECKING:
    from multiprocessing.sharedctypes import SynchronizedArray

__all__ = ["FleetResult", "simulate_fleet"]

#: Names that a router remembers for a replica at most: some 20 MB.
_INDEX_LIMIT = 200_000
_POLL_S = 0.25


@dataclass
class FleetResult:
    """What a fleet came to. Names are those of :class:`SimulationResult`, over all replicas.

    Attributes
    ----------
    replicas
        Outcome of each replica.
    router
        Who chose.
    requests_per_replica
        How many each replica got.
    expected_hit_ratio, expected_e2e_s
        What the router expected: share of the prompt tokens that are cached, and mean latency. Far
        from what was simulated, its choices by load were guesses.
    latencies
        ``ttft_ms``, ``tpot_ms``, ``itl_ms`` and ``e2e_s`` over all replicas.
    notes
        What a reader must know.
    """

    replicas: list[SimulationResult]
    router: str
    requests_per_replica: list[int]
    expected_hit_ratio: float
    expected_e2e_s: float
    latencies: dict[str, LatencySketch] = field(repr=False)
    notes: tuple[str, ...] = ()

    def _sum(self, name: str) -> int:
        return sum(getattr(result, name) for result in self.replicas)

    @property
    def attempted(self) -> int:
        """Requests that were sent."""
        return self._sum("attempted")

    @property
    def completed(self) -> int:
        """Requests that ended."""
        return self._sum("completed")

    @property
    def cancelled(self) -> int:
        """Requests in flight when the run ended."""
        return self._sum("cancelled")

    @property
    def refused(self) -> int:
        """Requests that an engine would not take."""
        return self._sum("refused")

    @property
    def completed_in_window(self) -> int:
        """Requests that ended inside the window."""
        return self._sum("completed_in_window")

    @property
    def duration_s(self) -> float:
        """When the last replica had ended, seconds."""
        return max(result.duration_s for result in self.replicas)

    @property
    def output_tokens_per_s(self) -> float | None:
        """Output tokens of the requests that ended in the window, over the longest window."""
        length = max(result.window.duration for result in self.replicas)
        return self._sum("output_tokens_in_window") / length if length else None

    @property
    def utilization(self) -> float:
        """Share of the run in which a replica was computing, on average over the replicas."""
        seconds = sum(result.totals.seconds for result in self.replicas)
        return min(seconds / (self.duration_s * len(self.replicas)), 1.0) if seconds else 0.0

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that requests found in a cache."""
        return sum(result.totals.cached_tokens for result in self.replicas)

    @property
    def imbalance(self) -> float:
        """Requests of the replica that got most, over the mean; 1 is even."""
        counts = self.requests_per_replica
        return max(counts) * len(counts) / sum(counts) if sum(counts) else 1.0

    def latency(self, name: str, statistic: str = "mean") -> float | None:
        """One latency over all replicas, see :meth:`SimulationResult.latency`."""
        from dataclasses import replace

        return replace(self.replicas[0], latencies=self.latencies).latency(name, statistic)

    def row(self, ttft_statistic: str = "mean") -> dict[str, Any]:
        """Flat figures, as :meth:`SimulationResult.row`."""
        return {
            "latency_s": self.latency("e2e_s"),
            "ttft_ms": self.latency("ttft_ms", ttft_statistic),
            "tpot_ms": self.latency("tpot_ms"),
            "output_tokens_per_s": self.output_tokens_per_s,
            "completed_requests": self.completed_in_window,
            "replicas": len(self.replicas),
            "router": self.router,
            "requests_per_replica": self.requests_per_replica,
            "imbalance": self.imbalance,
            "cached_tokens": self.cached_tokens,
        }


def simulate_fleet(
    spec: SimulationSpec,
    requests: Iterable[SimulationRequest],
    *,
    replicas: int,
    router: RouterName | Router = "round-robin",
    processes: int | None = None,
    seed: int = 0,
    warmup_s: float = 0.0,
    duration_s: float | None = None,
    keep_records: bool = False,
    progress: bool = False,
) -> FleetResult:
    """Simulate replicas behind a router.

    Parameters
    ----------
    spec
        One replica; all are alike.
    requests
        Sorted by ``arrival_s``.
    replicas
        How many.
    router
        ``round-robin``, ``least-loaded``, ``prefix-aware``, or a router of one's own.
    processes
        Replicas simulated at a time, as many as there are processors if left out. 1 stays in this
        process.
    seed, warmup_s, duration_s, keep_records
        As for :func:`~kimik3_lab.simulation.arrivals.simulate_arrivals`. Replica ``i`` has the seed
        ``seed + i``.
    progress
        Show a bar of requests that have been sent.

    Raises
    ------
    ValueError
        If there is no such router, or a number makes no sense.

    Examples
    --------
    >>> from kimik3_lab.serving.presets import MAIN_2026_09_13
    >>> asked = [SimulationRequest(str(i), 0.2 * i, 4000, 50) for i in range(12)]
    >>> fleet = simulate_fleet(SimulationSpec(MAIN_2026_09_13), asked, replicas=3, processes=1)
    >>> fleet.completed, fleet.requests_per_replica
    (12, [4, 4, 4])
    """
    if processes is not None and processes < 1:
        raise ValueError(f"processes must be at least 1, got {processes}")
    cache = spec.cache_config
    index = min(cache.num_usable_tokens // BLOCK_TOKENS, _INDEX_LIMIT)
    caches = cache.enable_prefix_caching
    routing = route(requests, router, replicas, Pace.of(spec), index_blocks=index if caches else 0)
    options = {"warmup_s": warmup_s, "duration_s": duration_s, "keep_records": keep_records}
    jobs = [(spec, share, seed + i, options) for i, share in enumerate(routing.shares)]
    counts = [len(share) for share in routing.shares]
    workers = min(processes or os.cpu_count() or 1, replicas)
    with _progress(sum(counts), show=progress) as bar:
        results = _simulate_here(jobs, bar) if workers == 1 else _simulate_apart(jobs, workers, bar)
    latencies = {name: LatencySketch() for name in results[0].latencies}
    for result in results:
        for name, sketch in result.latencies.items():
            latencies[name].merge(sketch)
    return FleetResult(
        results,
        router if isinstance(router, str) else type(router).__name__,
        counts,
        routing.expected_hit_ratio,
        routing.expected_e2e_s,
        latencies,
        _notes(router, routing, caches=caches),
    )


_Job = tuple[SimulationSpec, Sequence[SimulationRequest], int, dict[str, Any]]


def _simulate_here(jobs: Sequence[_Job], bar: Any) -> list[SimulationResult]:
    def counted(requests: Sequence[SimulationRequest]) -> Iterator[SimulationRequest]:
        for request in requests:
            yield request
            if bar is not None:
                bar.update()

    return [
        simulate_arrivals(spec, counted(share), seed=seed, **options)
        for spec, share, seed, options in jobs
    ]


def _simulate_apart(jobs: Sequence[_Job], workers: int, bar: Any) -> list[SimulationResult]:
    """Simulate in processes that are started afresh: a fork would copy threads half-way."""
    context = multiprocessing.get_context("spawn")
    sent = context.Array("L", len(jobs))
    with ProcessPoolExecutor(
        workers, mp_context=context, initializer=_begin, initargs=(sent,)
    ) as pool:
        futures = [pool.submit(_work, number, job) for number, job in enumerate(jobs)]
        try:
            waiting = set(futures)
            while waiting:
                ended, waiting = wait(waiting, timeout=_POLL_S)
                for future in ended:
                    future.result()  # an error of a replica ends all
                if bar is not None:
                    bar.update(sum(sent[:]) - bar.n)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        return [future.result() for future in futures]


#: How far each replica is; set in a worker process only.
_sent: SynchronizedArray[int] | None = None


def _begin(sent: SynchronizedArray[int]) -> None:
    global _sent
    _sent = sent


def _work(number: int, job: _Job) -> SimulationResult:
    spec, share, seed, options = job

    def counted() -> Iterator[SimulationRequest]:
        for request in share:
            yield request
            if _sent is not None:
                _sent[number] += 1

    return simulate_arrivals(spec, counted(), seed=seed, **options)


def _notes(router: RouterName | Router, routing: Routing, *, caches: bool) -> tuple[str, ...]:
    notes = []
    if router == "prefix-aware" and not caches:
        notes.append("prefix caching is off in this preset: prefix-aware is least-loaded then")
    if any(not share for share in routing.shares):
        notes.append("a replica got no request: take fewer replicas, or a longer load")
    return tuple(notes)


@contextmanager
def _progress(total: int, *, show: bool) -> Iterator[Any]:
    if not show:
        yield None
        return
    from tqdm.auto import tqdm

    with tqdm(total=total, unit="req", desc="simulated", leave=False, disable=None) as bar:
        yield bar

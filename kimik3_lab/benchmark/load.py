"""Drive one cell: a fixed number of streams (closed loop) or a fixed rate (open loop).

Needs the standard library and :mod:`kimik3_lab.benchmark.openai_stream`. Lesson 12 compares the two
loops: a closed loop slows down with the server, an open loop does not.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from typing import Literal

from kimik3_lab.benchmark.config import BenchmarkConfig, Load
from kimik3_lab.benchmark.openai_stream import Endpoint
from kimik3_lab.benchmark.records import RequestRecord
from kimik3_lab.benchmark.workloads import PromptRequest

__all__ = ["CellRun", "ClientHealth", "StopReason", "arrival_times", "run_cell"]

StopReason = Literal["max_requests", "max_duration", "max_errors"]


@dataclass(frozen=True, slots=True)
class ClientHealth:
    """How far the client itself may have disturbed the measurement.

    Attributes
    ----------
    cpu_fraction
        CPU time of the client's event loop over the length of the cell; near 1 the client is the
        bottleneck.
    loop_lag_p99_ms
        How late a timer of the event loop fires (99th percentile): tokens may be stamped that late.
    send_delay_max_ms
        Open loop: the most that a request was sent behind its schedule.
    """

    cpu_fraction: float
    loop_lag_p99_ms: float
    send_delay_max_ms: float | None = None


@dataclass(frozen=True, slots=True)
class CellRun:
    """Raw outcome of a cell: every request, its length in seconds, why it ended."""

    records: list[RequestRecord]
    elapsed: float
    stop_reason: StopReason
    health: ClientHealth


class _TooManyErrors(Exception):
    pass


class _Prefetch:
    """Prepares requests ahead in a thread: making a long prompt must not delay other streams."""

    def __init__(self, source: Iterator[PromptRequest], body: Callable[[PromptRequest], bytes]):
        self._source, self._body = source, body
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="bench-prompts")
        self._ready: deque[Future[tuple[PromptRequest, bytes]]] = deque()

    def _prepare(self) -> tuple[PromptRequest, bytes]:
        request = next(self._source)
        return request, self._body(request)

    async def fill(self, depth: int) -> None:
        """Prepare ``depth`` requests and wait for them."""
        self._ready.extend(self._pool.submit(self._prepare) for _ in range(depth))
        await asyncio.gather(*map(asyncio.wrap_future, self._ready))

    async def take(self) -> tuple[PromptRequest, bytes]:
        """Return the next request and order one more."""
        self._ready.append(self._pool.submit(self._prepare))
        return await asyncio.wrap_future(self._ready.popleft())

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def arrival_times(
    rate: float, arrival: Literal["poisson", "constant"], seed: int | str
) -> Iterator[float]:
    """Yield arrival times in seconds, without end.

    Parameters
    ----------
    rate
        Mean arrivals a second.
    arrival
        ``"poisson"``: exponential gaps, the first included. ``"constant"``: every ``1 / rate``
        seconds from 0 on.
    seed
        Same seed, same times.

    Examples
    --------
    >>> from itertools import islice
    >>> list(islice(arrival_times(4, "constant", 0), 3))
    [0.0, 0.25, 0.5]
    """
    if arrival == "constant":
        step = 0
        while True:
            yield step / rate
            step += 1
    rng = random.Random(f"{seed}/arrivals")
    moment = 0.0
    while True:
        moment += rng.expovariate(rate)
        yield moment


async def run_cell(
    endpoint: Endpoint,
    config: BenchmarkConfig,
    load: Load,
    requests: Iterator[PromptRequest],
    *,
    seed: int | str = 0,
    max_requests: int | None = None,
    max_duration: float | None = None,
    on_end: Callable[[RequestRecord], None] = lambda record: None,
) -> CellRun:
    """Send load until the cell has its requests or its time is up.

    Parameters
    ----------
    requests
        Source of prompts, without end.
    seed
        For the arrival times of an open loop.
    max_requests, max_duration
        When the cell ends.
    on_end
        Called with each record that has completed or failed.
    """
    records: list[RequestRecord] = []
    prefetch = _Prefetch(requests, endpoint.body)
    errors = 0
    stop_reason: StopReason = "max_requests"

    async def send(scheduled: float | None) -> None:
        nonlocal errors
        request, body = await prefetch.take()
        record = RequestRecord(
            index=len(records),
            start=time.perf_counter() - origin,
            scheduled=scheduled,
            requested_prompt_tokens=request.prompt_tokens,
            requested_output_tokens=request.output_tokens,
        )
        records.append(record)
        await endpoint.stream(body, record, origin)
        on_end(record)
        if record.status == "failed":
            errors += 1
            if errors >= config.max_errors:
                raise _TooManyErrors

    remaining = repeat(None) if max_requests is None else repeat(None, max_requests)

    async def closed_stream() -> None:
        for _ in remaining:  # shared: each stream takes the next request when it is free
            await send(None)

    async def open_loop(group: asyncio.TaskGroup, rate: float) -> None:
        for _, moment in zip(remaining, arrival_times(rate, config.arrival, seed), strict=False):
            await asyncio.sleep(moment - (time.perf_counter() - origin))
            group.create_task(send(moment))

    async def drive() -> None:
        nonlocal stop_reason
        try:
            async with asyncio.TaskGroup() as group:
                if load.request_rate is not None:
                    group.create_task(open_loop(group, load.request_rate))
                for _ in range(load.concurrency or 0):
                    group.create_task(closed_stream())
        except* _TooManyErrors:
            stop_reason = "max_errors"

    try:
        await prefetch.fill(load.concurrency or 16)
    except BaseException:
        prefetch.close()
        raise
    lag = _LagMeter()
    sampler = asyncio.create_task(lag.run())
    cpu, origin = time.thread_time(), time.perf_counter()
    try:
        async with asyncio.timeout(max_duration):
            await drive()
    except TimeoutError:
        stop_reason = "max_duration"
    finally:
        elapsed = time.perf_counter() - origin
        cpu = time.thread_time() - cpu
        sampler.cancel()
        prefetch.close()
    delays = [r.start - r.scheduled for r in records if r.scheduled is not None]
    health = ClientHealth(
        cpu_fraction=round(cpu / elapsed, 4),
        loop_lag_p99_ms=round(lag.p99() * 1e3, 3),
        send_delay_max_ms=round(max(delays) * 1e3, 3) if delays else None,
    )
    return CellRun(records, elapsed, stop_reason, health)


class _LagMeter:
    """Measures how late the event loop runs its timers."""

    def __init__(self, interval: float = 0.02) -> None:
        self.interval = interval
        self.lags: list[float] = []

    async def run(self) -> None:
        while True:
            due = time.perf_counter() + self.interval
            await asyncio.sleep(self.interval)
            self.lags.append(time.perf_counter() - due)

    def p99(self) -> float:
        return sorted(self.lags)[int(0.99 * len(self.lags))] if self.lags else 0.0

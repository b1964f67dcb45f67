"""Run a benchmark: check the endpoint, then one cell after another.

Needs aiohttp and tqdm. Used by lessons 00, 10 and 12 and by ``k3lab bench``. Measures any
OpenAI-compatible server and shares no code with the lab's own.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from kimik3_lab.benchmark.config import BenchmarkConfig, Load
from kimik3_lab.benchmark.load import CellRun, ClientHealth, StopReason, run_cell
from kimik3_lab.benchmark.metrics import summarise
from kimik3_lab.benchmark.openai_stream import Endpoint
from kimik3_lab.benchmark.records import RequestRecord
from kimik3_lab.benchmark.summary import Summary
from kimik3_lab.benchmark.window import Window
from kimik3_lab.provenance import provenance

__all__ = ["BenchmarkResult", "CellResult", "Progress", "run_benchmark", "run_benchmark_async"]


@dataclass
class CellResult:
    """One load level: what was sent, what came back, what it means.

    Attributes
    ----------
    load
        Concurrency or request rate.
    stream
        Name of the cell's prompt stream; with the workload's seed it gives the same prompts again.
    elapsed
        Length of the cell in seconds.
    stop_reason
        ``"max_requests"``, ``"max_duration"`` or ``"max_errors"``.
    health
        Whether the client kept up.
    records
        Every request.
    summary
        Of the window.
    """

    load: Load
    stream: str
    elapsed: float
    stop_reason: StopReason
    health: ClientHealth
    records: list[RequestRecord] = field(repr=False)
    summary: Summary

    @property
    def warnings(self) -> list[str]:
        """What a reader must know before quoting a number of this cell."""
        warnings = list(self.summary.notes)
        health = self.health
        if health.cpu_fraction > 0.7 or health.loop_lag_p99_ms > 20:
            warnings.append(
                f"the client was busy (CPU {health.cpu_fraction:.0%} of a core, timers up to "
                f"{health.loop_lag_p99_ms:.0f} ms late at p99): part of the latency is its own"
            )
        if (health.send_delay_max_ms or 0) > 50:
            warnings.append(
                f"requests were sent up to {health.send_delay_max_ms:.0f} ms behind the schedule"
            )
        if self.stop_reason == "max_errors":
            warnings.append("stopped early: too many requests failed")
        return warnings


@dataclass
class BenchmarkResult:
    """A whole run, as :mod:`kimik3_lab.benchmark.report` saves and loads it.

    Attributes
    ----------
    configuration
        :meth:`BenchmarkConfig.as_dict`.
    url, model
        What was measured.
    cells
        In the order they ran; fewer than configured if errors stopped the run.
    provenance
        Of the client: versions, machine, date, command.
    """

    configuration: dict[str, Any]
    url: str
    model: str
    cells: list[CellResult]
    provenance: dict[str, Any]

    @property
    def stopped_early(self) -> bool:
        """Whether errors ended the run."""
        return any(cell.stop_reason == "max_errors" for cell in self.cells)

    @property
    def errors(self) -> dict[str, int]:
        """Each error text with its number of requests, most frequent first."""
        counts: dict[str, int] = {}
        for cell in self.cells:
            for record in cell.records:
                if record.error:
                    counts[record.error] = counts.get(record.error, 0) + 1
        return dict(sorted(counts.items(), key=lambda item: -item[1]))


@dataclass
class Progress:
    """Where a run stands; written by the run, read by whoever shows it."""

    cell: int = -1
    ended: int = 0
    failed: int = 0
    began: float = 0.0

    def next_cell(self) -> None:
        """Begin the next cell."""
        self.ended = self.failed = 0
        self.began = perf_counter()
        self.cell += 1

    def count(self, record: RequestRecord) -> None:
        """Count a request that has completed or failed."""
        self.ended += 1
        self.failed += record.status == "failed"


def run_benchmark(config: BenchmarkConfig, *, progress: bool = True) -> BenchmarkResult:
    """Run a benchmark and wait for it; works in scripts and inside Jupyter's running event loop.

    The load runs on an event loop of its own in a thread. The calling thread only draws the bar,
    ten times a second, so drawing never delays a token's time stamp.

    Parameters
    ----------
    config
        What to run.
    progress
        Show a bar for each cell (never when the output is not a terminal or a notebook).

    Raises
    ------
    EndpointError
        If the endpoint is down, refuses the key or lacks the model; raised before any load.
    WorkloadError
        If the prompts cannot be made.

    Examples
    --------
    >>> from kimik3_lab.benchmark import BenchmarkConfig, EndpointError, Workload
    >>> config = BenchmarkConfig("http://127.0.0.1:9", Workload.synthetic(8, 4),
    ...                          concurrency=(1,), max_requests=10)
    >>> try:
    ...     run_benchmark(config)
    ... except EndpointError as error:
    ...     print(str(error)[:41])
    no answer from http://127.0.0.1:9/v1/mode
    """
    state = Progress()
    future: Future[BenchmarkResult] = Future()
    handle: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = []

    async def main() -> BenchmarkResult:
        task = asyncio.current_task()
        assert task is not None
        handle.append((asyncio.get_running_loop(), task))
        return await run_benchmark_async(config, state)

    def target() -> None:
        try:
            future.set_result(asyncio.run(main()))
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=target, name="benchmark", daemon=True)
    thread.start()
    try:
        _show_until_done(config, state, future, progress)
    except BaseException:  # Ctrl-C or the notebook's stop button: end the load too
        for loop, task in handle:
            if not loop.is_closed():
                loop.call_soon_threadsafe(task.cancel)
        thread.join(timeout=10)
        raise
    thread.join()
    return future.result()


async def run_benchmark_async(
    config: BenchmarkConfig, progress: Progress | None = None
) -> BenchmarkResult:
    """Run a benchmark on the running event loop, which should have nothing else to do.

    Parameters
    ----------
    config
        What to run.
    progress
        Kept up to date while the run goes on.

    Raises
    ------
    EndpointError, WorkloadError
        As for :func:`run_benchmark`.
    """
    progress = progress or Progress()
    cells: list[CellResult] = []
    async with Endpoint(config) as endpoint:
        await endpoint.check()
        for number, load in enumerate(config.loads):
            cells.append(await _run_one(endpoint, config, number, load, progress))
            if cells[-1].stop_reason == "max_errors":
                break
        model = endpoint.model
    return BenchmarkResult(
        configuration=config.as_dict(),
        url=config.url,
        model=model,
        cells=cells,
        provenance=provenance(device=config.device),
    )


async def _run_one(
    endpoint: Endpoint, config: BenchmarkConfig, number: int, load: Load, progress: Progress
) -> CellResult:
    stream = f"cell-{number}"
    if config.warmup_requests:
        # Prompts that no measured request has, and that no earlier run left in a cache.
        warmup = config.workload.requests(f"warm-up-{secrets.token_hex(4)}")
        streams = min(load.concurrency or 1, config.warmup_requests)
        await run_cell(endpoint, config, Load(streams), warmup, max_requests=config.warmup_requests)
    progress.next_cell()
    run = await run_cell(
        endpoint,
        config,
        load,
        config.workload.requests(stream),
        seed=f"{config.workload.seed}/{stream}",
        max_requests=config.max_requests,
        max_duration=config.max_duration,
        on_end=progress.count,
    )
    # Off the event loop's thread: intervals take a moment.
    summary = await asyncio.to_thread(summarise, run.records, _window(config, run))
    return CellResult(load, stream, run.elapsed, run.stop_reason, run.health, run.records, summary)


def _window(config: BenchmarkConfig, run: CellRun) -> Window:
    """By time if time ended the cell, otherwise by requests, as guidellm does."""
    if run.stop_reason == "max_duration":
        assert config.max_duration is not None
        return Window.of_duration(config.max_duration, config.warmup, config.cooldown)
    return Window.of_requests(run.records, config.warmup, config.cooldown)


def _show_until_done(
    config: BenchmarkConfig, state: Progress, future: Future[BenchmarkResult], progress: bool
) -> None:
    from tqdm.auto import tqdm

    cell, bar = -1, None
    try:
        while not wait([future], timeout=0.1).done:
            if not progress:
                continue
            if state.cell != cell:
                if bar is not None:
                    _complete(bar)
                cell = state.cell
                total, unit = (
                    (config.max_requests, "req") if config.max_requests
                    else (config.max_duration, "s")
                )  # fmt: skip
                # disable=None: silent when the output is neither a terminal nor a notebook.
                bar = tqdm(
                    total=total, unit=unit, desc=config.loads[cell].label, leave=False, disable=None
                )
            if bar is not None and not bar.disable:
                if config.max_requests:
                    bar.n = state.ended
                else:
                    assert config.max_duration is not None
                    elapsed = perf_counter() - state.began
                    bar.n = round(min(elapsed, config.max_duration), 1)
                bar.set_postfix(done=state.ended - state.failed, failed=state.failed)
        if bar is not None and not future.exception():
            _complete(bar)
    finally:
        if bar is not None:
            bar.close()


def _complete(bar: Any) -> None:
    """Fill a bar and take it away: a notebook keeps one that ends short, in red, as a failure."""
    bar.n = bar.total
    bar.close()

"""An open loop on a simulated machine: requests come when they come, as in a trace.

Needs the standard library and the scheduler. Lesson 12 replays public traces with it. Requests are
taken from the iterable one at a time and forgotten when they have ended, so a run of hours takes no
more memory than one of minutes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sized

from kimik3_lab.benchmark.window import Window
from kimik3_lab.simulation.drive import drive
from kimik3_lab.simulation.requests import SimulationRequest, in_order
from kimik3_lab.simulation.results import SimulationResult
from kimik3_lab.simulation.run_log import RunLog
from kimik3_lab.simulation.spec import SimulationSpec

__all__ = ["Queue", "simulate_arrivals"]


class Queue:
    """Requests in the order of their arrival.

    Parameters
    ----------
    requests
        Sorted by ``arrival_s``.
    delay_s
        Seconds that a request takes from the client to the scheduler.

    Examples
    --------
    >>> queue = Queue([SimulationRequest("a", 0.5, 10, 5)])
    >>> queue.next_arrival(), queue.take().request_id, queue.next_arrival()
    (0.5, 'a', inf)
    """

    def __init__(self, requests: Iterable[SimulationRequest], *, delay_s: float = 0.0) -> None:
        self._delay = delay_s
        self._coming = in_order(requests)
        self._next = next(self._coming, None)

    def next_arrival(self) -> float:
        """See :class:`kimik3_lab.simulation.door.Arrivals`."""
        return math.inf if self._next is None else self._next.arrival_s + self._delay

    def take(self) -> SimulationRequest:
        """See :class:`kimik3_lab.simulation.door.Arrivals`."""
        taken = self._next
        if taken is None:
            raise IndexError("no request is left; ask next_arrival first")
        self._next = next(self._coming, None)
        return taken

    def ended(self, request: SimulationRequest, moment: float) -> None:
        """See :class:`kimik3_lab.simulation.door.Arrivals`: an open loop does not care."""


def simulate_arrivals(
    spec: SimulationSpec,
    requests: Iterable[SimulationRequest],
    *,
    seed: int = 0,
    warmup_s: float = 0.0,
    duration_s: float | None = None,
    keep_records: bool = False,
    progress: bool = False,
) -> SimulationResult:
    """Simulate requests that arrive at set times.

    Parameters
    ----------
    spec
        What is simulated.
    requests
        Sorted by ``arrival_s``; any iterable, read as the run goes on. A request that can never
        run, for example because it is longer than the context, is counted as refused.
    seed
        Of the accepted lengths: the same seed gives the same run.
    warmup_s
        Seconds at the start that do not count.
    duration_s
        Seconds after which the run stops and cancels what is in flight. Left out, it goes on until
        all requests have ended.
    keep_records
        Keep every request in full; memory then grows with the run.
    progress
        Show a bar on a terminal.

    Raises
    ------
    ValueError
        If a number makes no sense, or the requests are not sorted.

    Examples
    --------
    >>> from kimik3_lab.serving.presets import MAIN_2026_09_13
    >>> asked = [SimulationRequest(str(i), 0.5 * i, 4000, 100) for i in range(10)]
    >>> result = simulate_arrivals(SimulationSpec(MAIN_2026_09_13), asked)
    >>> result.completed, result.latencies["e2e_s"].count
    (10, 10)
    """
    if not 0.0 <= warmup_s < math.inf:
        raise ValueError(f"warmup_s must be 0 or more seconds, got {warmup_s}")
    stop_s = math.inf if duration_s is None else duration_s
    if not stop_s > warmup_s:
        raise ValueError(
            f"duration_s must be more than warmup_s={warmup_s}, or nothing counts; got {duration_s}"
        )
    engine, executor = spec.make_engine(seed)
    log = RunLog(Window(warmup_s, stop_s), keep_records=keep_records)
    total = len(requests) if isinstance(requests, Sized) else None
    ended = drive(
        engine,
        executor,
        Queue(requests, delay_s=spec.scenario.turnaround_s),
        log,
        stop_s=stop_s,
        progress=progress,
        total_requests=total,
    )
    log.window = Window(warmup_s, min(stop_s, ended))
    return SimulationResult.from_log(
        log,
        executor.totals,
        preset=spec.preset.name,
        load="open loop",
        seed=seed,
        duration_s=ended,
    )

"""A closed loop on a simulated machine: guidellm's concurrent profile, as the post used it.

Needs the standard library and the scheduler. Lesson 11 reproduces the published points with it;
lesson 12 shows what a closed loop hides.

So many streams start together; each sends its next request the moment its last one has ended. The
window leaves out a tenth at each end (:class:`kimik3_lab.benchmark.window.Window`), so throughput
comes out as a count of requests, like the published one.
"""

from __future__ import annotations

import heapq
import math

from kimik3_lab.benchmark.window import Window
from kimik3_lab.simulation.drive import drive
from kimik3_lab.simulation.requests import SimulationRequest
from kimik3_lab.simulation.results import SimulationResult
from kimik3_lab.simulation.run_log import RunLog
from kimik3_lab.simulation.spec import SimulationSpec

__all__ = ["OUTPUT_TOKENS", "PROMPT_TOKENS", "Streams", "simulate_closed_loop"]

#: The published workload.
PROMPT_TOKENS, OUTPUT_TOKENS = 8000, 1000


class Streams:
    """Streams of requests of one size, each waiting for its last answer.

    Parameters
    ----------
    concurrency
        Streams. All start at 0.
    prompt_tokens, output_tokens
        Of each request; prompts share nothing.
    delay_s
        Seconds that a request takes from the client to the scheduler.
    max_requests
        How many are sent in all.

    Examples
    --------
    >>> streams = Streams(2, 10, 5)
    >>> first, second = streams.take(), streams.take()
    >>> streams.next_arrival()
    inf
    >>> streams.ended(second, 1.5)
    >>> streams.take().arrival_s
    1.5
    """

    def __init__(
        self,
        concurrency: int,
        prompt_tokens: int,
        output_tokens: int,
        *,
        delay_s: float = 0.0,
        max_requests: int | None = None,
    ) -> None:
        self._lengths = prompt_tokens, output_tokens
        self._delay = delay_s
        self._left = math.inf if max_requests is None else max_requests
        self._number = 0
        self._due = [0.0] * concurrency  # a heap

    def next_arrival(self) -> float:
        """See :class:`kimik3_lab.simulation.door.Arrivals`."""
        return self._due[0] + self._delay if self._due and self._left else math.inf

    def take(self) -> SimulationRequest:
        """See :class:`kimik3_lab.simulation.door.Arrivals`."""
        moment = heapq.heappop(self._due)
        self._left -= 1
        self._number += 1
        return SimulationRequest(f"request-{self._number}", moment, *self._lengths)

    def ended(self, request: SimulationRequest, moment: float) -> None:
        """See :class:`kimik3_lab.simulation.door.Arrivals`."""
        heapq.heappush(self._due, moment)


def simulate_closed_loop(
    spec: SimulationSpec,
    concurrency: int,
    duration_s: float = 150.0,
    *,
    seed: int = 0,
    prompt_tokens: int = PROMPT_TOKENS,
    output_tokens: int = OUTPUT_TOKENS,
    warmup: float = 0.1,
    cooldown: float = 0.1,
    max_requests: int | None = None,
    keep_records: bool = True,
    cold: bool = False,
    progress: bool = False,
) -> SimulationResult:
    """Simulate one cell of a closed-loop benchmark.

    Parameters
    ----------
    spec
        What is simulated.
    concurrency
        Streams.
    duration_s
        Seconds after which the client stops and cancels what is in flight.
    seed
        Of the accepted lengths: the same seed gives the same run.
    prompt_tokens, output_tokens
        Of each request.
    warmup, cooldown
        Shares of the duration that the window leaves out.
    max_requests
        End earlier, when so many requests have ended; the window stays that of ``duration_s``.
    keep_records
        Keep every request in full; without it memory does not grow with the run.
    cold
        Whether this is the first cell after the start of the server.
    progress
        Show a bar on a terminal.

    Raises
    ------
    ValueError
        If a number makes no sense, or no request of that size could run.

    Examples
    --------
    >>> from kimik3_lab.serving.presets import V0_27_1
    >>> result = simulate_closed_loop(SimulationSpec(V0_27_1), 1)
    >>> result.totals.kinds["prefill"].tokens // result.totals.kinds["prefill"].steps <= 1024
    True
    """
    if type(concurrency) is not int or concurrency < 1:
        raise ValueError(f"concurrency must be a whole number of at least 1, got {concurrency!r}")
    if not 0.0 < duration_s < math.inf:
        raise ValueError(f"duration_s must be a positive number of seconds, got {duration_s}")
    if warmup < 0 or cooldown < 0 or not warmup + cooldown < 1:
        raise ValueError(
            "warmup and cooldown are shares of the run and must leave a window between them, got "
            f"{warmup} and {cooldown}"
        )
    engine, executor = spec.make_engine(seed, cold=cold)
    streams = Streams(
        concurrency,
        prompt_tokens,
        output_tokens,
        delay_s=spec.scenario.turnaround_s,
        max_requests=max_requests,
    )
    log = RunLog(Window.of_duration(duration_s, warmup, cooldown), keep_records=keep_records)
    ended = drive(engine, executor, streams, log, stop_s=duration_s, progress=progress)
    if log.refused:
        reason = next((r.error for r in log.records if r.error), "the engine refused the request")
        raise ValueError(f"no request of this size can run: {reason}")
    return SimulationResult.from_log(
        log,
        executor.totals,
        preset=spec.preset.name,
        load=f"c={concurrency}",
        seed=seed,
        duration_s=ended,
    )

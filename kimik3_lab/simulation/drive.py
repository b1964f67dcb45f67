"""The loop of a simulated run: requests arrive, the engine steps, a client writes down.

Needs the standard library and the scheduler; tqdm when it shows progress. Closed loops and traces
differ in who says when the next request comes (:class:`Arrivals`), nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

from kimik3_lab.serving.engine import Engine
from kimik3_lab.simulation.door import Arrivals, Door
from kimik3_lab.simulation.executor import SimulatedExecutor
from kimik3_lab.simulation.run_log import RunLog

if TYPE_CHECKING:
    from tqdm.auto import tqdm

__all__ = ["SimulationError", "drive"]


class SimulationError(RuntimeError):
    """A run that cannot go on; the message says why and what to change."""


def drive(
    engine: Engine,
    executor: SimulatedExecutor,
    arrivals: Arrivals,
    log: RunLog,
    *,
    stop_s: float = math.inf,
    progress: bool = False,
    total_requests: int | None = None,
) -> float:
    """Run until nothing is left to do, or the clock passes ``stop_s``.

    A request takes part from the first step that starts when it has reached the scheduler. What
    comes out of a step reaches the client at its end; after ``stop_s`` nobody listens any more, and
    what is in flight is cancelled.

    Parameters
    ----------
    engine, executor
        The engine must have been made with this executor.
    progress
        Show a bar: of simulated seconds if the run has a set end, else of finished requests.
    total_requests
        For that bar.

    Returns
    -------
    float
        When the run ended, in seconds.

    Raises
    ------
    SimulationError
        If requests are left and none of them can be scheduled, or a step cannot be priced.
    """
    clock, step = executor.clock, engine.step
    caches = engine.scheduler.cache_config.enable_prefix_caching
    door = Door(engine, log)
    in_flight = door.in_flight
    with _progress(stop_s, total_requests, show=progress) as bar:
        while True:
            door.let_in(arrivals, clock.now)
            if not in_flight:
                moment = arrivals.next_arrival()
                if moment >= stop_s:  # infinity if there is none
                    break
                clock.wait_until(moment)
                continue
            began = clock.now
            news = step()
            now = clock.now
            if now == began:
                _wait_or_give_up(engine, executor, arrivals, stop_s)
                continue
            if now > stop_s:
                break
            for item in news:
                request_id = item.request_id
                log.chunk(request_id, now, len(item.new_token_ids))
                if item.finish_reason is None:
                    continue
                asked = in_flight.pop(request_id)
                cached = executor.num_cached_tokens(request_id) if caches else None
                log.finish(request_id, now, item.finish_reason, cached)
                arrivals.ended(asked, now)
                if bar is not None and stop_s == math.inf:
                    bar.update()
            if bar is not None and stop_s < math.inf:
                bar.update(now - began)
    ended = min(clock.now, stop_s) if in_flight or stop_s < math.inf else clock.now
    log.stop(ended)
    return ended


def _wait_or_give_up(
    engine: Engine, executor: SimulatedExecutor, arrivals: Arrivals, stop_s: float
) -> None:
    """Deal with a step that took no time: it failed, or nobody could be scheduled."""
    if executor.error is not None:
        raise SimulationError(f"a step cannot be priced: {executor.error}") from executor.error
    moment = arrivals.next_arrival()
    if moment < stop_s:
        executor.clock.wait_until(moment)
        return
    raise SimulationError(
        f"{len(engine.scheduler.requests)} requests are left and a step plans nothing for any of "
        "them: this configuration starves them"
    )


@contextmanager
def _progress(
    stop_s: float, total_requests: int | None, *, show: bool
) -> Iterator[tqdm[NoReturn] | None]:
    """Show a progress bar on a terminal, else nothing."""
    if not show:
        yield None
        return
    from tqdm.auto import tqdm

    timed = stop_s < math.inf
    with tqdm(
        total=round(stop_s) if timed else total_requests,
        unit="s" if timed else "req",
        desc="simulated",
        bar_format="{l_bar}{bar}| {n:.0f}/{total}{unit} [{elapsed}<{remaining}]" if timed else None,
        leave=False,
        disable=None,
    ) as bar:
        yield bar

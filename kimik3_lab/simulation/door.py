"""Where requests wait before the scheduler sees them: a long queue must not take much memory.

Needs the standard library and the scheduler. Used by :mod:`kimik3_lab.simulation.drive`.

A request in the scheduler's queue holds all tokens of its prompt; on an overloaded machine
thousands wait. The scheduler takes them in order and only as many in a step as get a state of their
own, so those further behind cannot matter to it, and are kept here as a few numbers each.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Protocol

from kimik3_lab.serving.engine import Engine
from kimik3_lab.serving.request_queue import FCFSRequestQueue
from kimik3_lab.serving.scheduler import Scheduler
from kimik3_lab.simulation.data_parallel import LockstepScheduler
from kimik3_lab.simulation.requests import SimulationRequest, make_request
from kimik3_lab.simulation.run_log import RunLog

__all__ = ["Arrivals", "Door", "most_admissions"]


class Arrivals(Protocol):
    """Who sends requests, and when."""

    def next_arrival(self) -> float:
        """Moment at which the next request reaches the scheduler; infinity if none is known."""
        ...

    def take(self) -> SimulationRequest:
        """Take that request; its ``arrival_s`` is the moment at which it was sent."""
        ...

    def ended(self, request: SimulationRequest, moment: float) -> None:
        """Hear that a request has got its last token."""
        ...


def most_admissions(scheduler: Scheduler) -> float:
    """Most requests that a step can take from the queue; infinity if that depends on the queue.

    Each of them takes a block for its state and for those of its drafts in every state group, even
    if all of its prompt is cached.

    Examples
    --------
    >>> from kimik3_lab.serving.presets import V0_27_1
    >>> most_admissions(Scheduler(V0_27_1.scheduler_config(9216), V0_27_1.cache_config(541)))
    20
    """
    config, cache = scheduler.scheduler_config, scheduler.cache_config
    sees_all = (
        isinstance(scheduler, LockstepScheduler)  # deals requests out as they come; has no queue
        or not isinstance(scheduler.waiting, FCFSRequestQueue)  # by priority, or one's own queue
        or config.batching != "continuous"
        or config.long_prefill_token_threshold > 0  # may be a fair share among all
        or config.prefill_schedule_interval > 1  # holds prompts back for those who wait
    )
    if sees_all or not cache.num_kda_groups:
        return math.inf
    scratch = config.num_speculative_tokens if cache.speculative_states == "slots" else 0
    blocks = cache.num_kda_groups * (1 + scratch)
    return min(config.active_seqs_limit, cache.num_usable_blocks // blocks)


class Door:
    """Lets requests into an engine as they come, and no more than can matter to it.

    Attributes
    ----------
    in_flight : dict of str to SimulationRequest
        Those that have come and not ended, whether inside or not.
    """

    def __init__(self, engine: Engine, log: RunLog) -> None:
        self._engine, self._log = engine, log
        self._most_waiting = most_admissions(engine.scheduler)
        self._outside: deque[tuple[SimulationRequest, int]] = deque()
        self.in_flight: dict[str, SimulationRequest] = {}

    def let_in(self, arrivals: Arrivals, now: float) -> None:
        """Take all requests that have come by ``now``, and fill the scheduler's queue."""
        log = self._log
        while arrivals.next_arrival() <= now:
            asked = arrivals.take()
            self._outside.append((asked, log.attempted))
            self.in_flight[asked.request_id] = asked
            log.sent(
                asked.request_id,
                asked.arrival_s,
                asked.prompt_tokens,
                asked.output_tokens,
                scheduled=asked.arrival_s,
            )
        while self._outside and self._engine.scheduler.num_waiting < self._most_waiting:
            asked, number = self._outside.popleft()
            try:
                self._engine.add_request(make_request(asked, number))
            except ValueError as error:  # longer than the context, or than the cache
                log.refuse(asked.request_id, str(error))
                del self.in_flight[asked.request_id]

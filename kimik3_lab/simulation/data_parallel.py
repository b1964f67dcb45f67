"""Schedulers of data-parallel copies that step together.

Needs the scheduler. :class:`~kimik3_lab.simulation.spec.SimulationSpec` makes one where ``dp`` is
above 1; lesson 12's planner meets it in the layout TP8 DP2 EP16.

In vLLM every data-parallel copy of the trunk has a scheduler and a cache of its own, and a request
stays on the copy that it was given to. The experts belong to all copies, so these step in
lock-step: each plans for itself, and the next step starts when the slowest is done.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kimik3_lab.serving.config import CacheConfig, SchedulerConfig
from kimik3_lab.serving.outputs import (
    EngineCoreOutput,
    ModelRunnerOutput,
    SchedulerOutput,
    SchedulerStats,
)
from kimik3_lab.serving.request import Request
from kimik3_lab.serving.scheduler import Scheduler

__all__ = ["LockstepOutput", "LockstepScheduler"]

#: How much more a waiting request counts on a copy whose cache is fuller than this share: nothing
#: there, and three requests' worth where it is full. Numbers of vLLM 0.27.1 to 0.33.0,
#: ``v1/engine/core_client.py``, ``DPLBAsyncMPClient.get_core_engine_for_request``.
_FULL_FROM, _FULL_WEIGHT = 0.5, 6.0


@dataclass(slots=True)
class LockstepOutput(SchedulerOutput):
    """A step of all copies; ``copies`` holds the plan of each, which may be empty."""

    copies: list[SchedulerOutput] = field(default_factory=list, repr=False)


class LockstepScheduler:
    """One scheduler for each copy, behind the methods of one (``Scheduler``).

    Blocks, seats and tokens of a step are those of a copy. A new request goes to the copy with
    the fewest requests, where those that wait count for more if the cache is rather full; copies
    that are alike take turns. What copies have cached is not looked at. All of it as in vLLM, but
    that the front end there may know counts that are a moment old.

    Parameters
    ----------
    copies
        Schedulers with equal settings.

    Examples
    --------
    >>> copies = [Scheduler(SchedulerConfig(4, 8, 64), CacheConfig(num_blocks=9)) for _ in "ab"]
    >>> both = LockstepScheduler(copies)
    >>> for name in ("x", "y", "z"):
    ...     both.add_request(Request(name, [5] * 6))
    >>> [list(copy.requests) for copy in copies], both.schedule().total_num_scheduled_tokens
    ([['x', 'z'], ['y']], 14)
    """

    def __init__(self, copies: Sequence[Scheduler]) -> None:
        if not copies:
            raise ValueError("no scheduler to step with: give one for each copy")
        self.copies = tuple(copies)
        self._first = 0  # copy that is looked at first
        self.requests: Mapping[str, Request] = ChainMap(*(copy.requests for copy in self.copies))

    @property
    def scheduler_config(self) -> SchedulerConfig:
        """Settings of each copy."""
        return self.copies[0].scheduler_config

    @property
    def cache_config(self) -> CacheConfig:
        """Settings of each copy's cache."""
        return self.copies[0].cache_config

    def add_request(self, request: Request) -> None:
        """Give ``request`` to the copy with the least to do (``Scheduler.add_request``)."""
        if request.request_id in self.requests:
            raise ValueError(f"request id {request.request_id!r} is in use by another request")
        order = self.copies[self._first :] + self.copies[: self._first]
        min(order, key=_load).add_request(request)
        self._first = (self._first + 1) % len(self.copies)

    def abort(self, request_id: str) -> EngineCoreOutput | None:
        """End a request for its client, wherever it is."""
        news = (copy.abort(request_id) for copy in self.copies if request_id in copy.requests)
        return next(news, None)

    def has_requests(self) -> bool:
        """Whether any copy has a request that has not ended."""
        return any(copy.has_requests() for copy in self.copies)

    @property
    def num_waiting(self) -> int:
        """Requests without a seat, on all copies."""
        return sum(copy.num_waiting for copy in self.copies)

    @property
    def num_running(self) -> int:
        """Requests with a seat, on all copies."""
        return sum(copy.num_running for copy in self.copies)

    def schedule(self) -> LockstepOutput:
        """Plan the next step of every copy."""
        step = LockstepOutput(copies=[copy.schedule() for copy in self.copies])
        for output in step.copies:
            step.scheduled_new_reqs += output.scheduled_new_reqs
            step.scheduled_cached_reqs += output.scheduled_cached_reqs
            step.num_scheduled_tokens |= output.num_scheduled_tokens
            step.total_num_scheduled_tokens += output.total_num_scheduled_tokens
            step.scheduled_spec_decode_tokens |= output.scheduled_spec_decode_tokens
            step.preempted_req_ids |= output.preempted_req_ids
            step.finished_req_ids |= output.finished_req_ids
            step.scheduled += output.scheduled
        return step

    def update_from_output(
        self, output: LockstepOutput, result: ModelRunnerOutput
    ) -> list[EngineCoreOutput]:
        """Book the tokens of a step on every copy."""
        news: list[EngineCoreOutput] = []
        for copy, own in zip(self.copies, output.copies, strict=True):
            news += copy.update_from_output(own, result)
        return news

    def update_draft_token_ids(self, drafts: Mapping[str, Sequence[int]]) -> None:
        """Set the drafts that each copy is to verify; it passes over requests of others."""
        for copy in self.copies:
            copy.update_draft_token_ids(drafts)

    def fail_step(self, output: LockstepOutput) -> list[EngineCoreOutput]:
        """Give up the step on every copy."""
        news: list[EngineCoreOutput] = []
        for copy, own in zip(self.copies, output.copies, strict=True):
            news += copy.fail_step(own)
        return news

    def make_stats(self) -> SchedulerStats:
        """Count over all copies; the use of the cache is their mean, drafts are left out."""
        stats = [copy.make_stats() for copy in self.copies]
        return SchedulerStats(
            num_running_reqs=sum(one.num_running_reqs for one in stats),
            num_waiting_reqs=sum(one.num_waiting_reqs for one in stats),
            kv_cache_usage=sum(one.kv_cache_usage for one in stats) / len(stats),
            num_preemptions=sum(one.num_preemptions for one in stats),
            prefix_cache_queries=sum(one.prefix_cache_queries for one in stats),
            prefix_cache_hits=sum(one.prefix_cache_hits for one in stats),
        )


def _load(copy: Scheduler) -> float:
    """How busy a copy is, in requests."""
    waiting, usage = copy.num_waiting, copy.kv_cache_manager.usage
    fullness = max(0.0, usage - _FULL_FROM) if waiting else 0.0
    return waiting + copy.num_running + _FULL_WEIGHT * waiting * fullness

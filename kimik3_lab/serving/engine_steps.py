"""The steps of an engine: plan, compute, book; one at a time, or one ahead of the other.

Needs the standard library only. Lesson 10 runs it inside the engine. Both loops are vLLM's, see
``EngineCore.step`` and ``step_with_batch_queue`` in ``vllm/v1/engine/core.py``.

With ``async_scheduling`` the next step is planned and handed to the executor before the last one
has answered. The device then always has work, and the host does its own meanwhile. Whoever ended in
the step that is still to be answered is computed once more for nothing: its rows are *wasted*, and
what comes of them is thrown away.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kimik3_lab.serving.outputs import (
    AsyncModelRunnerOutput,
    EngineCoreOutput,
    ModelRunnerOutput,
    SchedulerOutput,
)
from kimik3_lab.serving.scheduler import Scheduler

__all__ = ["EngineSteps"]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A step that was handed to the executor. ``samples`` are the requests that get a token."""

    plan: SchedulerOutput
    samples: frozenset[str]
    output: AsyncModelRunnerOutput


@dataclass(frozen=True, slots=True)
class _Answered:
    """The output of an executor that answers at once."""

    output: ModelRunnerOutput

    def get_output(self) -> ModelRunnerOutput:
        return self.output


class EngineSteps:
    """Plans steps, has them computed, and books their results in order.

    Parameters
    ----------
    scheduler : Scheduler
        Plans each step.
    executor : Executor
        Computes each step. If the scheduler plans ahead, and the executor has
        ``execute_model_async``, two steps are in flight at a time.

    Attributes
    ----------
    num_steps, num_failed_steps : int
        Steps begun, and those of them that raised. A plan without tokens only brings the executor
        news of who has left, while it waits for what is in flight; it is no step.
    num_scheduled_tokens, num_generated_tokens, num_wasted_tokens : int
        Rows of the steps that answered, tokens that came of them, and rows of requests that had
        ended before the answer.
    """

    def __init__(self, scheduler: Scheduler, executor: Any) -> None:
        self.scheduler, self.executor = scheduler, executor
        self.num_steps = 0
        self.num_failed_steps = 0
        self.num_scheduled_tokens = 0
        self.num_generated_tokens = 0
        self.num_wasted_tokens = 0
        self._in_flight: deque[_InFlight] = deque()

    @property
    def num_in_flight(self) -> int:
        """Steps that were handed to the executor and not answered yet."""
        return len(self._in_flight)

    @property
    def runs_ahead(self) -> bool:
        """Whether a step is planned before the last one has answered."""
        return self.scheduler.scheduler_config.async_scheduling and hasattr(
            self.executor, "execute_model_async"
        )

    def step(self) -> list[EngineCoreOutput]:
        """Plan a step and hand it over; then book the oldest one, if it is its turn."""
        if not self.scheduler.has_requests():
            return self._answer() if self._in_flight else []
        plan = self.scheduler.schedule()
        self.num_steps += bool(plan.scheduled)
        ahead = self.runs_ahead
        try:
            output = self._execute(plan, ahead=ahead)
        except Exception:
            _log_failure([plan])
            try:
                # Those before it have done nothing wrong, and their requests want their tokens.
                news = self.drain()
            finally:  # also if that is interrupted
                failed = self._fail([plan])
            return [*news, *failed]
        except BaseException:  # an interrupt: end the requests too, then let it through
            before = self._take_in_flight()
            self._fail([*(step.plan for step in before), plan])
            _let_finish(before)
            raise
        samples = frozenset(r.request_id for r in plan.scheduled if not r.is_prefill_chunk)
        step = _InFlight(plan, samples, output)
        if not ahead:
            return self._answer(step)
        if plan.scheduled:
            self._in_flight.append(step)
            if len(self._in_flight) == 1:
                return []  # there is room for one more before anybody waits
        # Nothing may be ready to be planned before what is in flight has answered.
        return self._answer() if self._in_flight else []

    def drain(self) -> list[EngineCoreOutput]:
        """Book all steps in flight without planning another."""
        news: list[EngineCoreOutput] = []
        while self._in_flight:
            news += self._answer()
        return news

    def _execute(self, plan: SchedulerOutput, *, ahead: bool) -> AsyncModelRunnerOutput:
        if ahead:
            output: AsyncModelRunnerOutput = self.executor.execute_model_async(plan)
            return output
        return _Answered(self.executor.execute_model(plan))

    def _take_in_flight(self) -> list[_InFlight]:
        steps = list(self._in_flight)
        self._in_flight.clear()
        return steps

    def _answer(self, step: _InFlight | None = None) -> list[EngineCoreOutput]:
        """Wait for a step, the oldest in flight if left out, and book it."""
        ahead = step is None
        step = step or self._in_flight.popleft()
        try:
            result = step.output.get_output()
            self._check_result(step, result)
        except BaseException as error:
            # What runs behind it may have read what it left: blocks by their hash, states, tokens.
            behind = self._take_in_flight()
            plans = [step.plan, *(later.plan for later in behind)]
            failed = self._fail(plans, late=ahead)  # before waiting, which may be interrupted
            _let_finish(behind)
            if not isinstance(error, Exception):
                raise
            _log_failure(plans)
            return failed
        plan = step.plan
        counts = plan.num_scheduled_tokens.values()
        for request, num_tokens in zip(plan.scheduled, counts, strict=True):
            if request.is_finished:
                self.num_wasted_tokens += num_tokens
        news = self.scheduler.update_from_output(plan, result)
        if not ahead:
            take_drafts = getattr(self.executor, "take_draft_token_ids", None)
            if take_drafts is not None:
                self.scheduler.update_draft_token_ids(take_drafts())
        self.num_scheduled_tokens += plan.total_num_scheduled_tokens
        self.num_generated_tokens += sum(len(item.new_token_ids) for item in news)
        return news

    def _fail(
        self, plans: Sequence[SchedulerOutput], *, late: bool = False
    ) -> list[EngineCoreOutput]:
        """Give steps up: their requests end with an error.

        A step that fails when it is answered may have left hashes of blocks that nobody computed,
        also with requests that have lost their blocks since; then all hashes are forgotten.
        """
        self.num_failed_steps += sum(bool(plan.scheduled) for plan in plans)
        if late or len(plans) > 1:
            self.scheduler.kv_cache_manager.block_pool.forget_all_hashes()
        return [news for plan in plans for news in self.scheduler.fail_step(plan)]

    def _check_result(self, step: _InFlight, result: ModelRunnerOutput) -> None:
        """Refuse a result that would leave a request without progress or with too many tokens."""
        sampled = dict(zip(result.req_ids, result.sampled_token_ids, strict=True))
        for request in step.plan.scheduled:
            if request.is_finished:
                continue  # ended or aborted while the step ran
            samples = request.request_id in step.samples
            if bool(sampled.get(request.request_id)) != samples:
                raise RuntimeError(
                    f"the executor returned {sampled.get(request.request_id)} for {request!r}, "
                    f"expected {'a new token' if samples else 'an empty list inside the prompt'}"
                )


def _let_finish(steps: Sequence[_InFlight]) -> None:
    """Wait for steps whose outputs nobody wants any more: the executor keeps them until then."""
    for step in steps:
        with contextlib.suppress(Exception):
            step.output.get_output()


def _log_failure(plans: Sequence[SchedulerOutput]) -> None:
    _logger.exception(
        "a step of %d requests and %d tokens failed; its requests end with an error",
        len({request.request_id for plan in plans for request in plan.scheduled}),
        sum(plan.total_num_scheduled_tokens for plan in plans),
    )

"""An executor that computes nothing and says how long it would have taken.

Needs the standard library, the scheduler and the cost model's counts. Lesson 11 puts it in the
place of the model: :class:`kimik3_lab.serving.Engine` drives it as it drives a real one, with the
same scheduler and the same cache, and its decisions are the real ones.

It knows of each request what a real executor must know, the number of its tokens, and finds out
from the :class:`SchedulerOutput` alone what a step holds: chunks of prompts, and *decode rows* (the
last known token of a request, with the drafts behind it). These counts go to the cost model, the
answer moves the clock. Tokens are made up; how many drafts were right is drawn (``acceptance``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from kimik3_lab.performance.step_work import StepWork, work_of_all
from kimik3_lab.serving.outputs import (
    CachedRequestData,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
)
from kimik3_lab.simulation.acceptance import AcceptanceModel
from kimik3_lab.simulation.clock import VirtualClock
from kimik3_lab.simulation.data_parallel import LockstepOutput
from kimik3_lab.simulation.totals import StepTotals

__all__ = ["SimulatedExecutor", "StepCost", "StepCosts"]

#: Ids of sampled tokens begin here, above those of all prompts of the simulator.
_SAMPLED = 1 << 50
#: What every draft is; -1 would say that there is none.
_DRAFT = _SAMPLED - 1


class StepCost(Protocol):
    """Seconds of a step (:class:`kimik3_lab.performance.step_cost.StepCost`)."""

    @property
    def total_s(self) -> float:
        """All of it."""
        ...

    @property
    def parts(self) -> Mapping[str, float]:
        """Seconds by named part."""
        ...


class StepCosts(Protocol):
    """What turns counts into seconds (:class:`kimik3_lab.performance.step_cost.CostModel`)."""

    def step_cost(self, work: StepWork) -> StepCost:
        """Cost of one step."""
        ...

    def lockstep_cost(self, works: Sequence[StepWork]) -> StepCost:
        """Cost of a step of all data-parallel copies; asked only where there are several."""
        ...


class _Row:
    """A request as the executor sees it."""

    __slots__ = ("cached", "draw", "has_drafts", "known", "token")

    def __init__(self, known: int, cached: int, token: int, draw: Callable[[int], int]) -> None:
        self.known = known  # tokens that it has, prompt and sampled
        self.cached = cached  # those of the prompt that it found in the prefix cache
        self.token = token  # what each sampled one is: nobody else's, so nothing is shared
        self.draw = draw  # how many of so many drafts are right
        self.has_drafts = False  # or those to verify are placeholders, and all wrong


class SimulatedExecutor:
    """Prices each step and moves a clock on (``Executor`` protocol of the engine).

    Parameters
    ----------
    costs : CostModel
        Seconds of a step.
    num_speculative_tokens : int
        K; 0 without a drafter.
    acceptance : AcceptanceModel, optional
        Needed with a drafter.
    clock : VirtualClock, optional
        A new one at 0 if left out.
    cold_start_s : float
        Seconds that the first step takes longer, because kernels are compiled for it.

    Attributes
    ----------
    clock : VirtualClock
        At the end of the last step.
    totals : StepTotals
        What the steps came to.
    error : Exception or None
        Why a step could not be priced; the engine only logs it.

    Raises
    ------
    ValueError
        If there are drafts and no ``acceptance``, or one for fewer drafts.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> from kimik3_lab.serving import CacheConfig, Engine, Scheduler, SchedulerConfig
    >>> costs = SimpleNamespace(  # a microsecond for each row
    ...     step_cost=lambda work: SimpleNamespace(total_s=work.num_tokens * 1e-6, parts={}))
    >>> executor = SimulatedExecutor(costs)
    >>> engine = Engine(Scheduler(SchedulerConfig(4, 64, 64), CacheConfig(9)), executor)
    >>> [len(result.token_ids) for result in engine.generate([[5] * 30], progress=False)]
    [16]
    >>> round(executor.clock.now * 1e6)  # 30 rows of the prompt, then one for each token but one
    45
    """

    def __init__(
        self,
        costs: StepCosts,
        num_speculative_tokens: int = 0,
        acceptance: AcceptanceModel | None = None,
        clock: VirtualClock | None = None,
        cold_start_s: float = 0.0,
    ) -> None:
        k = num_speculative_tokens
        if acceptance is None:
            acceptance = AcceptanceModel([])
        if acceptance.num_drafts < k:
            raise ValueError(
                f"num_speculative_tokens={k} needs an acceptance model for {k} drafts, got one for "
                f"{acceptance.num_drafts}"
            )
        self.costs = costs
        self.num_speculative_tokens = k
        self.acceptance = acceptance
        self.clock = clock or VirtualClock()
        self.totals = StepTotals()
        self.error: Exception | None = None
        self._cold_start_s = cold_start_s
        self._rows: dict[str, _Row] = {}
        self._num_requests = 0
        self._placeholders = [_DRAFT] * k
        self._drafts: dict[str, list[int]] = {}

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Count the step, move the clock on by its cost, and answer with made-up tokens."""
        self._drop(scheduler_output)
        self._admit(scheduler_output)
        works: list[StepWork] = []
        if isinstance(scheduler_output, LockstepOutput):
            answers = [self._compute(output) for output in scheduler_output.copies]
            works = [of_copy for of_copy, _ in answers]
            work, result = work_of_all(works), ModelRunnerOutput([], [])
            for _, answer in answers:
                result.req_ids += answer.req_ids
                result.sampled_token_ids += answer.sampled_token_ids
        else:
            work, result = self._compute(scheduler_output)
        if not work.num_tokens:  # nobody could be scheduled, so the machine does nothing
            return result
        try:
            cost = self.costs.lockstep_cost(works) if works else self.costs.step_cost(work)
            seconds, parts = cost.total_s, cost.parts
            if self._cold_start_s:
                seconds, parts = seconds + self._cold_start_s, {**parts, **self._warm_up()}
            self.clock.advance(seconds)
        except Exception as error:
            self.error = error
            raise
        self.totals.count(work, seconds, parts)
        return result

    def _warm_up(self) -> dict[str, float]:
        """Say what the first step takes longer; later ones do not."""
        cold, self._cold_start_s = self._cold_start_s, 0.0
        return {"cold_start": cold}

    def num_cached_tokens(self, request_id: str) -> int:
        """Prompt tokens that a request found cached; ask at the latest when it has just ended."""
        return self._rows[request_id].cached

    def take_draft_token_ids(self) -> dict[str, list[int]]:
        """Drafts for the next step: placeholders, for each request that has sampled a token."""
        drafts, self._drafts = self._drafts, {}
        return drafts

    def _drop(self, output: SchedulerOutput) -> None:
        """Forget what has ended; who was preempted has no drafts any more."""
        rows = self._rows
        for request_id in output.preempted_req_ids:
            rows[request_id].has_drafts = False
            self.totals.preemptions += 1
        for request_id in output.finished_req_ids:
            rows.pop(request_id, None)  # one that never ran is not known here

    def _admit(self, output: SchedulerOutput) -> None:
        """Begin a row for each request that is seen for the first time."""
        for data in output.scheduled_new_reqs:
            self._rows[data.req_id] = _Row(
                known=len(data.prompt_token_ids),
                cached=data.num_computed_tokens,
                token=_SAMPLED + self._num_requests,
                draw=self.acceptance.stream(data.req_id),
            )
            self._num_requests += 1
            self.totals.cached_tokens += data.num_computed_tokens

    def _compute(self, output: SchedulerOutput) -> tuple[StepWork, ModelRunnerOutput]:
        """Count what the step holds, and sample for each request that has caught up."""
        k, rows, totals = self.num_speculative_tokens, self._rows, self.totals
        counts, all_drafts = output.num_scheduled_tokens, output.scheduled_spec_decode_tokens
        decode_tokens = decode_seqs = decode_context = 0
        prefill_tokens = prefill_seqs = prefill_pairs = num_logits = 0
        sampled: list[list[int]] = []
        req_ids: list[str] = []
        seen: list[CachedRequestData | NewRequestData]
        seen = [*output.scheduled_cached_reqs, *output.scheduled_new_reqs]
        for data in seen:
            request_id, start = data.req_id, data.num_computed_tokens
            row, count = rows[request_id], counts[request_id]
            num_drafts = len(all_drafts[request_id]) if request_id in all_drafts else 0
            if count == 1 + num_drafts and start:
                decode_tokens += count
                decode_seqs += 1
                decode_context += start
            else:
                prefill_tokens += count
                prefill_seqs += 1
                prefill_pairs += count * start + count * (count + 1) // 2
            req_ids.append(request_id)
            if start + count - num_drafts < row.known:  # inside the prompt
                sampled.append([])
                continue
            num_logits += 1 + num_drafts
            num_sampled = 1
            if num_drafts:
                totals.draft_tokens += num_drafts
                if row.has_drafts:
                    accepted = row.draw(num_drafts)
                    totals.verifications += 1
                    totals.accepted_tokens += accepted
                    num_sampled += accepted
            row.known += num_sampled
            totals.sampled_tokens += num_sampled
            sampled.append([row.token] * num_sampled)
            if k:
                row.has_drafts = True
                self._drafts[request_id] = self._placeholders
        work = StepWork(
            num_tokens=decode_tokens + prefill_tokens,
            num_prefill_tokens=prefill_tokens,
            num_prefill_seqs=prefill_seqs,
            num_decode_tokens=decode_tokens,
            num_decode_seqs=decode_seqs,
            decode_context=decode_context,
            prefill_pairs=prefill_pairs,
            num_logits=num_logits,
            num_draft_seqs=len(req_ids) if k else 0,
            num_speculative_tokens=k,
        )
        return work, ModelRunnerOutput(req_ids, sampled)

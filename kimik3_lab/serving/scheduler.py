"""The scheduler: who computes how many tokens in the next step.

Needs the standard library only. Lesson 08 builds it up and lesson 09 adds speculation. Names and
rules are vLLM V1's, see ``vllm/v1/core/sched/scheduler.py``.

The whole policy fits in a few sentences. A step has a budget of tokens. Running requests are served
first, in order; each takes what it lacks (known tokens, and drafts to verify) as far as the budget
goes. If blocks run out, the request at the end of the running list loses its own and will be
computed anew. Only if nobody lost blocks in this step, waiting requests take seats and the rest of
the budget, each behind the prefix that is cached already. Prefill and decode are not told apart, so
a step mixes both. Drafts count as computed until the result says which of them were wrong.
"""

from __future__ import annotations

from itertools import islice

from kimik3_lab.serving.chunking import Chunking
from kimik3_lab.serving.config import CacheConfig, SchedulerConfig
from kimik3_lab.serving.outputs import SchedulerOutput
from kimik3_lab.serving.prefill_cadence import PrefillCadence
from kimik3_lab.serving.request import Request, RequestStatus
from kimik3_lab.serving.request_book import RequestBook
from kimik3_lab.serving.step_plan import StepPlan

__all__ = ["Scheduler"]


class Scheduler(RequestBook):
    """Plans steps and books their results (``vllm.v1.core.sched.scheduler.Scheduler``).

    Requests come and go by :meth:`add_request`, :meth:`abort` and :meth:`update_from_output` of the
    :class:`~kimik3_lab.serving.request_book.RequestBook`.

    Parameters
    ----------
    scheduler_config, cache_config, refuse_starvation
        See :class:`~kimik3_lab.serving.request_book.RequestBook`.

    Examples
    --------
    >>> scheduler = Scheduler(SchedulerConfig(4, 8, 64), CacheConfig(num_blocks=9))
    >>> scheduler.add_request(Request("a", [5] * 10))
    >>> scheduler.add_request(Request("b", [5] * 3))
    >>> scheduler.schedule().num_scheduled_tokens  # the budget of 8 cuts a's prompt
    {'a': 8}
    >>> scheduler.schedule().num_scheduled_tokens
    {'a': 2, 'b': 3}
    """

    def __init__(
        self,
        scheduler_config: SchedulerConfig,
        cache_config: CacheConfig,
        *,
        refuse_starvation: bool = True,
    ) -> None:
        super().__init__(scheduler_config, cache_config, refuse_starvation=refuse_starvation)
        self._num_seats = scheduler_config.active_seqs_limit
        self._chunking = Chunking(scheduler_config, cache_config)
        self._cadence = PrefillCadence(scheduler_config.prefill_schedule_interval)
        self._batch: list[Request] = []

    def schedule(self) -> SchedulerOutput:
        """Plan the next step and book it: ``num_computed_tokens`` moves on at once.

        Whoever calls this must execute the plan and hand the result to :meth:`update_from_output`,
        or give it up with :meth:`fail_step`. Then every step while :meth:`has_requests` is true
        holds at least one token, so all requests come to their end.
        """
        self.kv_cache_manager.new_step_starts()
        self._chunking.new_step_starts(len(self.requests))
        self._cadence.new_step_starts(self.running)
        plan = StepPlan(self.scheduler_config)
        num_preemptions = self.num_preemptions
        prefills = self._schedule_running(plan)
        if self.num_preemptions == num_preemptions:
            prefills |= self._schedule_waiting(plan, prefills=prefills)
        self._cadence.step_ends(executes=bool(plan.output.scheduled), prefills=prefills)
        return self._finish_plan(plan.output)

    def _schedule_running(self, plan: StepPlan) -> bool:
        """Serve the running requests in order. Returns whether one of them is inside its prompt."""
        config, running, budget = self.scheduler_config, self.running, plan.budget
        num_new_tokens_of, holds_prefills = self._chunking.running, self._cadence.holds
        manager = self.kv_cache_manager
        allocate_slots = manager.allocate_slots
        prefills, index = False, 0
        while index < len(running) and budget.remaining > 0:
            request = running[index]
            index += 1
            if request.num_output_placeholders and _ends_in_flight(request):
                continue
            if holds_prefills and request.is_prefill_chunk:
                continue
            num_new_tokens = num_new_tokens_of(request, budget.remaining)
            if num_new_tokens == 0:  # its last token has not come back yet, or no block fits
                continue
            while (block_ids := allocate_slots(request, num_new_tokens)) is None:
                position = self._victim()
                victim = running.pop(position)
                was_scheduled = plan.take_back(victim)
                if was_scheduled and config.forget_unscheduled_hashes:
                    manager.forget_uncomputed(victim, victim.num_computed_tokens)
                # The place of the next request, which was computed wrongly once (#49097).
                index -= position < index if config.exact_preemption_index else was_scheduled
                self._preempt(victim)
                if victim is request:
                    break
            if block_ids is not None:
                prefills |= request.is_prefill_chunk
                plan.go_on(request, num_new_tokens, block_ids)
            elif not config.continue_after_self_preemption:
                break
        return prefills

    def _schedule_waiting(self, plan: StepPlan, *, prefills: bool) -> bool:
        """Give seats and the rest of the budget to waiting requests, in the order of the policy.

        Returns whether one of them begins a prompt.
        """
        config, manager, budget = self.scheduler_config, self.kv_cache_manager, plan.budget
        num_decodes, begins_prompts = len(plan.output.scheduled), False
        passed_over: list[Request] = []
        members = self._static_batch() if config.batching == "static" else None
        while self.waiting and budget.remaining > 0 and len(self.running) < self._num_seats:
            request = self.waiting.peek_request()
            if members is not None and request.request_id not in members:
                if not members:
                    break
                passed_over.append(self.waiting.pop_request())
                continue
            if request.num_stale_output_tokens:  # what is in flight might be sampled twice
                passed_over.append(self.waiting.pop_request())
                continue
            hit = manager.get_computed_blocks(request)
            num_hit_tokens = hit.num_tokens if hit else 0
            request.shared_prefix_boundary = hit.shared_prefix_boundary if hit else 0
            begins_prompt = num_hit_tokens < request.num_tokens - 1
            if begins_prompt and self._cadence.holds:
                break
            chunk = self._chunking.waiting(
                request,
                num_hit_tokens,
                budget.remaining,
                num_decodes=num_decodes,
                prefills=prefills,
            )
            if chunk is None or not manager.allocate_slots(
                request,
                chunk.num_tokens,
                hit,
                full_sequence_must_fit=config.scheduler_reserve_full_isl,
                keep_watermark=bool(self.running),
            ):
                break  # nobody overtakes
            self.waiting.pop_request()
            if members is not None:
                members.remove(request.request_id)
            request.num_computed_tokens = num_hit_tokens
            if hit is not None and request.num_cached_tokens is None:  # not after a preemption
                request.num_cached_tokens = num_hit_tokens
            manager.record_admission(request)
            plan.begin(request, chunk, manager.get_block_ids(request.request_id))
            request.status = RequestStatus.RUNNING
            self.running.append(request)
            begins_prompts |= begins_prompt
        for request in reversed(passed_over):
            self.waiting.prepend_request(request)
        self._cadence.admission_ends(len(self.waiting) - len(passed_over))
        return begins_prompts

    def _static_batch(self) -> set[str]:
        """Members of the static batch that have no seat; draws the next batch if the last is over.

        Nobody joins a batch, so its members can be told by identity: a later request of the same id
        is another one.
        """
        batch = [r for r in self._batch if self.requests.get(r.request_id) is r]
        if not batch:
            batch = list(islice(self.waiting, self.scheduler_config.max_num_seqs))
        self._batch = batch
        return {r.request_id for r in batch if r.status is not RequestStatus.RUNNING}

    def _victim(self) -> int:
        """Position of the running request that must give way: the last one, or the least urgent."""
        if self.scheduler_config.policy == "fcfs":
            return len(self.running) - 1
        urgency = [(request.priority, request.arrival_time) for request in self.running]
        if self.scheduler_config.preempt_latest_of_equals:
            # Whoever has come furthest among equals keeps its blocks, so somebody gets to an end.
            return max(range(len(urgency)), key=lambda position: (urgency[position], position))
        return urgency.index(max(urgency))

    def _finish_plan(self, output: SchedulerOutput) -> SchedulerOutput:
        """Add what the executor must know besides, and take all that is planned for computed."""
        manager = self.kv_cache_manager
        output.total_num_scheduled_tokens = sum(output.num_scheduled_tokens.values())
        if self.running:
            first = self.running[0].request_id
            output.num_common_prefix_blocks = manager.get_num_common_prefix_blocks(first)
        if self.cache_config.prefill_checkpoints == "internal":
            output.prefill_checkpoints = manager.get_prefill_checkpoints(output.scheduled)
        output.kv_cache_block_copies = manager.take_kv_cache_block_copies()
        output.preempted_req_ids, self._preempted_req_ids = self._preempted_req_ids, set()
        output.finished_req_ids, self._finished_req_ids = self._finished_req_ids, set()
        self._update_after_schedule(output)
        return output

    def _update_after_schedule(self, output: SchedulerOutput) -> None:
        """Move on what was scheduled; drafts that turn out wrong will be taken back."""
        counts = output.num_scheduled_tokens.values()
        for request, num_tokens in zip(output.scheduled, counts, strict=True):
            computed = request.num_computed_tokens + num_tokens
            request.num_computed_tokens = computed
            request.num_in_flight_tokens += num_tokens
            known = request.num_tokens + request.num_output_placeholders
            request.is_prefill_chunk = computed < known


def _ends_in_flight(request: Request) -> bool:
    """Whether the steps in flight are sure to bring the last token, all drafts rejected."""
    sure = request.num_computed_tokens + 2 - request.num_output_placeholders
    return sure >= request.num_prompt_tokens + request.max_tokens

"""The scheduler: who computes how many tokens in the next step.

Needs the standard library only. Lesson 08 builds it up and lesson 09 adds speculation. Names and
rules are vLLM V1's, see ``vllm/v1/core/sched/scheduler.py``.

The whole policy fits in a few sentences. A step has a budget of tokens. Running requests are served
first, in order; each takes what it lacks (``num_tokens - num_computed_tokens``) as far as the
budget goes. If blocks run out, the request at the end of the running list loses its own and will be
computed anew. Only if nobody lost blocks in this step, waiting requests take seats and the rest of
the budget. Prefill and decode are not told apart, so a step mixes both.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice

from kimik3_lab.serving import outputs
from kimik3_lab.serving.admission import check_can_finish
from kimik3_lab.serving.config import CacheConfig, SchedulerConfig
from kimik3_lab.serving.kv_cache_manager import KVCacheManager
from kimik3_lab.serving.outputs import EngineCoreOutput, ModelRunnerOutput, SchedulerOutput
from kimik3_lab.serving.request import Request, RequestStatus

__all__ = ["Scheduler"]


class Scheduler:
    """Plans steps and books their results (``vllm.v1.core.sched.scheduler.Scheduler``).

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

    def __init__(self, scheduler_config: SchedulerConfig, cache_config: CacheConfig) -> None:
        self.scheduler_config = scheduler_config
        self.cache_config = cache_config
        self.kv_cache_manager = KVCacheManager(cache_config)
        self.requests: dict[str, Request] = {}  # all that have not ended
        self.waiting: OrderedDict[str, Request] = OrderedDict()  # anyone leaves in constant time
        self.running: list[Request] = []
        self.num_preemptions = 0
        self._static_batch: set[str] = set()
        # What the executor has not been told yet.
        self._preempted_req_ids: set[str] = set()
        self._finished_req_ids: set[str] = set()

    # -- requests come and go ----------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Put ``request`` at the end of the waiting queue.

        Raises ValueError if its id is in use or if it could never be computed to its end
        (:func:`~kimik3_lab.serving.admission.check_can_finish`).
        """
        if request.request_id in self.requests:
            raise ValueError(f"request id {request.request_id!r} is in use by another request")
        check_can_finish(request, self.scheduler_config, self.cache_config)
        self.requests[request.request_id] = request
        self.waiting[request.request_id] = request

    def abort(self, request_id: str) -> EngineCoreOutput | None:
        """End a request for its client. Returns its last news, None if there is no such request."""
        return next(iter(self.finish_requests([request_id], RequestStatus.FINISHED_ABORTED)), None)

    def finish_requests(
        self, request_ids: Iterable[str], status: RequestStatus
    ) -> list[EngineCoreOutput]:
        """End requests from outside with a finished ``status``; ids of no request are passed over.

        Returns the last news of each request that was ended.
        """
        ended = [self.requests[i] for i in dict.fromkeys(request_ids) if i in self.requests]
        for request in ended:
            request.status = status
        self._release(ended)
        return [EngineCoreOutput.from_request(request, []) for request in ended]

    def _release(self, ended: list[Request]) -> None:
        """Take back what ended requests hold. Linear in the running list if one of them ran."""
        ran = False
        for request in ended:
            self.kv_cache_manager.free(request)
            del self.requests[request.request_id]
            ran |= self.waiting.pop(request.request_id, None) is None
            self._static_batch.discard(request.request_id)
            self._finished_req_ids.add(request.request_id)
        if ran:
            self.running = [request for request in self.running if not request.is_finished]

    # -- one step ----------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        """Plan the next step and book it: ``num_computed_tokens`` moves on at once.

        Whoever calls this must execute the plan and hand the result to :meth:`update_from_output`,
        or give it up with :meth:`fail_step`. Then every step while :meth:`has_requests` is true
        holds at least one token, so all requests come to their end.
        """
        output = SchedulerOutput()
        budget = self.scheduler_config.max_num_batched_tokens
        num_preemptions = self.num_preemptions
        budget = self._schedule_running(output, budget)
        if self.num_preemptions == num_preemptions:
            self._schedule_waiting(output, budget)

        for request_id, num_tokens in output.num_scheduled_tokens.items():
            self.requests[request_id].num_computed_tokens += num_tokens
        output.total_num_scheduled_tokens = sum(output.num_scheduled_tokens.values())
        output.preempted_req_ids, self._preempted_req_ids = self._preempted_req_ids, set()
        output.finished_req_ids, self._finished_req_ids = self._finished_req_ids, set()
        return output

    def _schedule_running(self, output: SchedulerOutput, budget: int) -> int:
        """Serve the running requests in order. Returns the budget left."""
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            num_new_tokens = self._num_new_tokens(request, budget)
            if num_new_tokens == 0:  # its last token has not come back yet
                index += 1
                continue
            new_block_ids = self.kv_cache_manager.allocate_slots(request, num_new_tokens)
            while new_block_ids is None:
                # Requests that this step already serves stand before the victim and are safe.
                victim = self.running.pop()
                self._preempt(victim)
                if victim is request:
                    return budget
                new_block_ids = self.kv_cache_manager.allocate_slots(request, num_new_tokens)
            data = outputs.CachedRequestData.from_request(request, new_block_ids)
            output.scheduled_cached_reqs.append(data)
            output.num_scheduled_tokens[request.request_id] = num_new_tokens
            budget -= num_new_tokens
            index += 1
        return budget

    def _schedule_waiting(self, output: SchedulerOutput, budget: int) -> None:
        """Give seats and the rest of the budget to waiting requests, first come, first served."""
        config = self.scheduler_config
        static = config.batching == "static"
        if static and not self._static_batch:  # the last batch has ended: draw the next one
            self._static_batch.update(islice(self.waiting, config.max_num_seqs))
        while self.waiting and budget > 0 and len(self.running) < config.max_num_seqs:
            request = next(iter(self.waiting.values()))
            if static and request.request_id not in self._static_batch:
                break
            num_new_tokens = self._num_new_tokens(request, budget)
            block_ids = self.kv_cache_manager.allocate_slots(
                request, num_new_tokens, full_sequence_must_fit=True
            )
            if block_ids is None:
                break  # nobody overtakes
            self.waiting.popitem(last=False)
            self.running.append(request)
            if request.status is RequestStatus.PREEMPTED:
                resumed = outputs.CachedRequestData.from_request(request, block_ids)
                output.scheduled_cached_reqs.append(resumed)
            else:
                new = outputs.NewRequestData.from_request(request, block_ids)
                output.scheduled_new_reqs.append(new)
            request.status = RequestStatus.RUNNING
            output.num_scheduled_tokens[request.request_id] = num_new_tokens
            budget -= num_new_tokens

    def _num_new_tokens(self, request: Request, budget: int) -> int:
        """Tokens that ``request`` lacks, cut by the threshold and by the budget."""
        num_new_tokens = request.num_tokens - request.num_computed_tokens
        threshold = self.scheduler_config.long_prefill_token_threshold
        if 0 < threshold < num_new_tokens:
            num_new_tokens = threshold
        return min(num_new_tokens, budget)

    def _preempt(self, request: Request) -> None:
        """Preempt by recompute: blocks go, output tokens stay, first in the waiting queue."""
        self.kv_cache_manager.free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting[request.request_id] = request
        self.waiting.move_to_end(request.request_id, last=False)
        self._preempted_req_ids.add(request.request_id)

    # -- the result of a step ----------------------------------------------------------------

    def update_from_output(
        self, output: SchedulerOutput, result: ModelRunnerOutput
    ) -> list[EngineCoreOutput]:
        """Book the sampled tokens of a step and end the requests that are done.

        Returns news of each request that has a new token, in the order of the step. Requests that
        were aborted while the step ran are passed over.
        """
        sampled = dict(zip(result.req_ids, result.sampled_token_ids, strict=True))
        news, ended = [], []
        for request_id in output.num_scheduled_tokens:
            request = self.requests.get(request_id)
            # A request that is not running has taken the id of one that was aborted meanwhile.
            if request is None or request.status is not RequestStatus.RUNNING:
                continue
            new_token_ids = request.append_output_token_ids(
                sampled[request_id], self.scheduler_config.max_model_len
            )
            if new_token_ids:
                news.append(EngineCoreOutput.from_request(request, new_token_ids))
            if request.is_finished:
                ended.append(request)
        self._release(ended)
        return news

    def fail_step(self, output: SchedulerOutput) -> list[EngineCoreOutput]:
        """Give up a step that could not be executed: its requests end with ``error``.

        Nobody knows what the executor heard before it failed, so the next step says it again.
        """
        self._preempted_req_ids |= output.preempted_req_ids
        self._finished_req_ids |= output.finished_req_ids
        return self.finish_requests(output.num_scheduled_tokens, RequestStatus.FINISHED_ERROR)

    # -- questions ---------------------------------------------------------------------------

    def has_requests(self) -> bool:
        """Whether any request has not ended."""
        return bool(self.requests)

    @property
    def num_waiting(self) -> int:
        """Requests without a seat, preempted ones included."""
        return len(self.waiting)

    @property
    def num_running(self) -> int:
        """Requests with a seat."""
        return len(self.running)

    def make_stats(self) -> outputs.SchedulerStats:
        """Count requests and blocks at this moment."""
        usage = self.kv_cache_manager.usage
        counts = self.num_running, self.num_waiting
        return outputs.SchedulerStats(*counts, usage, self.num_preemptions)

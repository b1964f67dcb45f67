"""Requests on their way through the scheduler: they arrive, get tokens, give way, and end.

Needs the standard library only. Lesson 08 uses it as part of the scheduler. In vLLM this is the
other half of ``vllm/v1/core/sched/scheduler.py``: what happens to a request before and after the
step that :class:`~kimik3_lab.serving.scheduler.Scheduler` plans.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kimik3_lab.serving.admission import check_can_finish, check_configs
from kimik3_lab.serving.config import CacheConfig, SchedulerConfig
from kimik3_lab.serving.kv_cache_manager import KVCacheManager
from kimik3_lab.serving.outputs import (
    EngineCoreOutput,
    ModelRunnerOutput,
    SchedulerOutput,
    SchedulerStats,
)
from kimik3_lab.serving.request import Request, RequestStatus
from kimik3_lab.serving.request_queue import create_request_queue
from kimik3_lab.serving.spec_decode import SpecDecodingCounter

__all__ = ["RequestBook"]


class RequestBook:
    """All requests that have not ended, and the cache that they share.

    Parameters
    ----------
    scheduler_config, cache_config
        What a step and the cache may hold.
    refuse_starvation : bool
        Refuse settings and requests that cannot come to an end. vLLM accepts some of them, so a
        replay of its decisions has to.

    Attributes
    ----------
    requests : dict of str to Request
        By id.
    waiting : RequestQueue
        Those without a seat, preempted ones included, in the order of their admission.
    running : list of Request
        Those with a seat, in the order in which they got it.
    """

    def __init__(
        self,
        scheduler_config: SchedulerConfig,
        cache_config: CacheConfig,
        *,
        refuse_starvation: bool = True,
    ) -> None:
        self.scheduler_config = config = scheduler_config
        self.cache_config = cache_config
        self._refuse_starvation = refuse_starvation
        if refuse_starvation:
            check_configs(config, cache_config)
        states = cache_config.speculative_states == "slots"
        self.kv_cache_manager = KVCacheManager(
            cache_config,
            max_model_len=config.max_model_len,
            num_lookahead_tokens=config.num_lookahead_tokens,
            num_speculative_blocks=config.num_speculative_tokens if states else 0,
            drops_eagle_block=config.drops_eagle_block,
            keeps_junctions=cache_config.keeps_junctions(
                reads_hidden_states=config.reads_hidden_states
            ),
            num_hash_lookahead_tokens=config.num_hash_lookahead_tokens,
            watermark=config.watermark,
        )
        self.requests: dict[str, Request] = {}
        self.waiting = create_request_queue(config.policy)
        self.running: list[Request] = []
        self.num_preemptions = 0
        self._caches_verified_tokens = (
            cache_config.enable_prefix_caching
            and config.cache_verified_tokens
            and config.num_speculative_tokens > 0
        )
        self._spec_decoding = SpecDecodingCounter(config.num_speculative_tokens)
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
        if self._refuse_starvation:
            check_can_finish(request, self.scheduler_config, self.cache_config)
        self.requests[request.request_id] = request
        self.waiting.add_request(request)

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
            ran |= not self.waiting.remove_request(request)
            self._finished_req_ids.add(request.request_id)
        if ran:
            self.running = [request for request in self.running if not request.is_finished]

    def _preempt(self, request: Request) -> None:
        """Preempt by recompute: blocks go, output tokens stay, back to the waiting queue."""
        self.kv_cache_manager.free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.spec_token_ids = []
        request.num_stale_output_tokens = request.num_in_flight_tokens
        request.num_output_placeholders = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.prepend_request(request)
        self._preempted_req_ids.add(request.request_id)

    def update_draft_token_ids(self, drafts: Mapping[str, Sequence[int]]) -> None:
        """Set the drafts that the next step is to verify; those for a prompt are of no use.

        Raises
        ------
        ValueError
            If a request is given more than ``num_speculative_tokens``: there is no room for them.
        """
        most = self.scheduler_config.num_speculative_tokens
        for request_id, token_ids in drafts.items():
            if len(token_ids) > most:
                raise ValueError(
                    f"request {request_id}: {len(token_ids)} drafts, but num_speculative_tokens is "
                    f"{most}"
                )
            request = self.requests.get(request_id)
            if request is not None:
                request.spec_token_ids = [] if request.is_prefill_chunk else list(token_ids)

    # -- the result of a step ----------------------------------------------------------------

    def update_from_output(
        self, output: SchedulerOutput, result: ModelRunnerOutput
    ) -> list[EngineCoreOutput]:
        """Book the sampled tokens of a step and end the requests that are done.

        Returns news of each request that has a new token, in the order of the step. Requests that
        were aborted while the step ran are passed over. Steps are answered in their order.
        """
        sampled = dict(zip(result.req_ids, result.sampled_token_ids, strict=True))
        # Nobody asked for them in most steps.
        logprobs = (
            dict(zip(result.req_ids, result.logprobs, strict=True)) if result.logprobs else {}
        )
        drafts = output.scheduled_spec_decode_tokens
        news, ended = [], []
        for request, num_tokens in zip(
            output.scheduled, output.num_scheduled_tokens.values(), strict=True
        ):
            request.num_in_flight_tokens -= num_tokens
            is_stale = request.num_stale_output_tokens > 0
            if is_stale:
                request.num_stale_output_tokens -= num_tokens
            if request.status > RequestStatus.PREEMPTED:
                continue
            token_ids = sampled[request.request_id]
            if not token_ids:
                continue
            if drafts and request.request_id in drafts:
                scheduled, num_accepted = drafts[request.request_id], len(token_ids) - 1
                self._spec_decoding.observe_draft(
                    scheduled,
                    num_accepted,
                    placeholders=self.scheduler_config.async_scheduling,
                )
                if not is_stale:
                    self._reject(request, len(scheduled) - num_accepted)
            new_token_ids = self._book(request, token_ids, is_stale=is_stale)
            item = EngineCoreOutput.from_request(request, new_token_ids)
            if logprobs and request.sampling_params.logprobs is not None:
                item.new_logprobs = logprobs[request.request_id][: len(new_token_ids)]
            news.append(item)
            if request.status > RequestStatus.PREEMPTED:
                ended.append(request)
        if ended:
            self._release(ended)
        return news

    @staticmethod
    def _reject(request: Request, num_rejected: int) -> None:
        """Take back what rejected drafts had moved on."""
        request.num_computed_tokens -= num_rejected
        if request.num_output_placeholders:
            request.num_output_placeholders -= num_rejected

    def _book(self, request: Request, token_ids: list[int], *, is_stale: bool) -> list[int]:
        """Append sampled tokens; return those up to the end of the request."""
        running = request.status is RequestStatus.RUNNING
        new_token_ids = request.append_output_token_ids(
            token_ids, self.scheduler_config.max_model_len
        )
        if self._caches_verified_tokens and running and not is_stale:
            # Tokens behind the end of the request were computed for nothing.
            request.num_computed_tokens -= len(token_ids) - len(new_token_ids)
            final = request.num_computed_tokens - request.num_in_flight_tokens
            self.kv_cache_manager.cache_blocks(request, final)
        return new_token_ids

    def fail_step(self, output: SchedulerOutput) -> list[EngineCoreOutput]:
        """Give up a step that could not be executed: its requests end with ``error``.

        Nobody knows what the executor heard before it failed, so the next step says it again.
        """
        counts = output.num_scheduled_tokens.values()
        for request, num_tokens in zip(output.scheduled, counts, strict=True):
            self.kv_cache_manager.forget_uncomputed(
                request, request.num_computed_tokens - num_tokens
            )
        self.kv_cache_manager.forget_copies(output.kv_cache_block_copies)
        self._preempted_req_ids |= output.preempted_req_ids
        self._finished_req_ids |= output.finished_req_ids
        failed = [r.request_id for r in output.scheduled if self.requests.get(r.request_id) is r]
        news = self.finish_requests(failed, RequestStatus.FINISHED_ERROR)
        # An executor that has heard of the end no longer knows whom else it is told about.
        self._preempted_req_ids -= self._finished_req_ids
        return news

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

    def make_stats(self) -> SchedulerStats:
        """Count requests and blocks at this moment."""
        manager = self.kv_cache_manager
        return SchedulerStats(
            num_running_reqs=self.num_running,
            num_waiting_reqs=self.num_waiting,
            kv_cache_usage=manager.usage,
            num_preemptions=self.num_preemptions,
            prefix_cache_queries=manager.prefix_cache_stats.queries,
            prefix_cache_hits=manager.prefix_cache_stats.hits,
            spec_decoding_stats=(
                self._spec_decoding.stats() if self._spec_decoding.num_spec_tokens else None
            ),
        )

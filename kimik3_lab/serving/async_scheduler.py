"""Plan a step before the last one has answered.

Needs the standard library only. Lesson 09 shows what the placeholders stand for. Names are vLLM's,
see ``vllm/v1/core/sched/async_scheduler.py``.

A step that samples will bring one token, and one for each accepted draft. Until it does, the
scheduler counts a placeholder for each of them, so that the next step can be planned as if they
were known; the executor fills in the real ones. The drafts of the next step are -1 for the same
reason. When the answer comes, placeholders of rejected drafts are taken off again.
"""

from __future__ import annotations

from kimik3_lab.serving.config import CacheConfig, SchedulerConfig
from kimik3_lab.serving.outputs import SchedulerOutput
from kimik3_lab.serving.request import Request, RequestStatus
from kimik3_lab.serving.scheduler import Scheduler

__all__ = ["AsyncScheduler", "make_scheduler"]


class AsyncScheduler(Scheduler):
    """A scheduler whose :meth:`schedule` may run ahead of :meth:`update_from_output`.

    Examples
    --------
    >>> scheduler = AsyncScheduler(
    ...     SchedulerConfig(1, 8, 64, async_scheduling=True), CacheConfig(num_blocks=9))
    >>> scheduler.add_request(Request("a", [5] * 3, max_tokens=4))
    >>> [scheduler.schedule().num_scheduled_tokens for _ in range(3)]
    [{'a': 3}, {'a': 1}, {'a': 1}]
    """

    def _update_after_schedule(self, output: SchedulerOutput) -> None:
        super()._update_after_schedule(output)
        placeholders = [-1] * self.scheduler_config.num_speculative_tokens
        drafts = output.scheduled_spec_decode_tokens
        for request in output.scheduled:
            if not request.is_prefill_chunk:
                num_drafts = len(drafts.get(request.request_id, ()))
                request.num_output_placeholders += 1 + num_drafts
                request.spec_token_ids = placeholders

    def _book(self, request: Request, token_ids: list[int], *, is_stale: bool) -> list[int]:
        running = request.status is RequestStatus.RUNNING
        if not is_stale and request.num_output_placeholders:
            request.num_output_placeholders -= len(token_ids)
        new_token_ids = super()._book(request, token_ids, is_stale=is_stale)
        if running:
            # Now that its tokens are known, blocks that they fill can be found.
            final = request.num_computed_tokens - request.num_output_placeholders
            self.kv_cache_manager.cache_blocks(request, final)
        return new_token_ids


def make_scheduler(
    scheduler_config: SchedulerConfig, cache_config: CacheConfig, *, refuse_starvation: bool = True
) -> Scheduler:
    """Make the scheduler that ``scheduler_config.async_scheduling`` asks for."""
    kind = AsyncScheduler if scheduler_config.async_scheduling else Scheduler
    return kind(scheduler_config, cache_config, refuse_starvation=refuse_starvation)

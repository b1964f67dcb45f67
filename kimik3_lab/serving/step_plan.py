"""A step while it is being planned: who is in it, and what is left to hand out.

Needs the standard library only. Lesson 08 prints the finished plan. vLLM keeps these lists as local
variables of ``Scheduler.schedule``.
"""

from __future__ import annotations

from kimik3_lab.serving.budget import TokenBudget
from kimik3_lab.serving.chunking import Chunk
from kimik3_lab.serving.outputs import CachedRequestData, NewRequestData, SchedulerOutput
from kimik3_lab.serving.request import Request, RequestStatus
from kimik3_lab.serving.scheduler_config import SchedulerConfig

__all__ = ["StepPlan"]

BlockIds = tuple[list[int], ...]


class StepPlan:
    """Collects the decisions of one step.

    Attributes
    ----------
    output : SchedulerOutput
        What the executor will get.
    budget : TokenBudget
        What is left for the requests that come later.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.output = SchedulerOutput()
        self.budget = TokenBudget(config)

    def go_on(self, request: Request, num_new_tokens: int, new_block_ids: BlockIds) -> None:
        """Schedule a running request, with those of its drafts that found room."""
        output, computed = self.output, request.num_computed_tokens
        output.scheduled_cached_reqs.append(
            CachedRequestData(request.request_id, False, new_block_ids, computed)
        )
        output.scheduled.append(request)
        output.num_scheduled_tokens[request.request_id] = num_new_tokens
        self.budget.spend(num_new_tokens)
        if request.spec_token_ids:
            known = request.num_tokens + request.num_output_placeholders
            num_drafts = computed + num_new_tokens - known
            if num_drafts > 0:
                drafts = request.spec_token_ids[:num_drafts]
                output.scheduled_spec_decode_tokens[request.request_id] = drafts
            request.spec_token_ids = []

    def begin(self, request: Request, chunk: Chunk, block_ids: BlockIds) -> None:
        """Schedule a request that takes a seat: for the first time, or after a preemption."""
        output, request_id = self.output, request.request_id
        if request.status is RequestStatus.PREEMPTED:
            computed, tokens = request.num_computed_tokens, request.all_token_ids
            data = CachedRequestData(request_id, True, block_ids, computed, tokens)
            output.scheduled_cached_reqs.append(data)
        else:
            output.scheduled_new_reqs.append(NewRequestData.from_request(request, block_ids))
        output.scheduled.append(request)
        output.num_scheduled_tokens[request_id] = chunk.num_tokens
        if chunk.num_padding:
            output.scheduled_spec_decode_tokens[request_id] = [-1] * chunk.num_padding
        self.budget.spend(chunk.num_tokens)

    def take_back(self, victim: Request) -> bool:
        """Strike a running request out. Returns whether it was in the plan."""
        output = self.output
        num_tokens = output.num_scheduled_tokens.pop(victim.request_id, None)
        if num_tokens is None:
            return False
        index = output.scheduled.index(victim)
        del output.scheduled[index], output.scheduled_cached_reqs[index]
        output.scheduled_spec_decode_tokens.pop(victim.request_id, None)
        self.budget.give_back(num_tokens)
        return True

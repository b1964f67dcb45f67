"""Run a scenario through vLLM's scheduler with a model runner that only counts, and write it down.

Needs vLLM. The runner samples a token for each request whose scheduled tokens reach the end of what
is known of it, and accepts as many draft tokens as the scenario says.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from oracle import STOP_TOKEN, make_request, make_scheduler
from scenarios import expand
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

__all__ = ["MAX_STEPS", "Run", "record"]

#: Where a run is cut: one that has not ended by then (some cannot) is compared that far.
MAX_STEPS = 160


@dataclass
class _Plan:
    """A scheduled step that has not been processed, with what its execution depends on."""

    step: int
    output: Any
    requests: dict[str, Request]
    samples: set[str]  # ids that get a token: those that are not in the middle of their prompt


class Run:
    """A scenario in progress, one step at a time."""

    def __init__(self, scenario: dict[str, Any]) -> None:
        self.scenario = scenario
        self.config = scenario["config"]
        self.scheduler = make_scheduler(self.config)
        self.stop_after: dict[str, int] = {}
        self.plans: deque[_Plan] = deque()

    def ended(self, step: int) -> bool:
        """Whether nobody is left, nor will come in ``step`` or later."""
        later = any(int(n) >= step for n in self.scenario["arrivals"])
        return not self.scheduler.requests and not later

    def step(self, n: int) -> dict[str, Any]:
        """Run step ``n`` and describe it."""
        scheduler = self.scheduler
        known = set(scheduler.requests)
        self._abort("aborts", n)
        for request in self.scenario["arrivals"].get(str(n), []):
            if request.get("stop_after"):
                self.stop_after[request["id"]] = request["stop_after"]
            prompt = expand(request["prompt"])
            scheduler.add_request(make_request(scheduler, request, prompt))
        known |= set(scheduler.requests)

        plan = self._schedule(n)
        row = _describe(plan)
        self._abort("aborts_in_flight", n)
        asynchronous = self.config.get("async_scheduling", False)
        self.plans.append(plan)
        if not asynchronous or len(self.plans) == 2 or not plan.output.num_scheduled_tokens:
            row["sampled"] = self._process(self.plans.popleft())
        running = scheduler.running
        row["finished"] = sorted(i for i in known if i not in scheduler.requests)
        row["running"] = [request.request_id for request in running]
        row["waiting"] = len(scheduler.requests) - len(running)
        row["computed"] = {request.request_id: request.num_computed_tokens for request in running}
        pool = scheduler.kv_cache_manager.block_pool
        row["free_blocks"] = pool.get_num_free_blocks()
        return row

    def _abort(self, key: str, n: int) -> None:
        ids = [
            i for i in self.scenario.get(key, {}).get(str(n), []) if i in self.scheduler.requests
        ]
        if ids:
            self.scheduler.finish_requests(ids, RequestStatus.FINISHED_ABORTED)

    def _schedule(self, n: int) -> _Plan:
        requests = dict(self.scheduler.requests)
        output = self.scheduler.schedule()
        samples = {i for i in output.num_scheduled_tokens if not requests[i].is_prefill_chunk}
        return _Plan(n, output, requests, samples)

    def _process(self, plan: _Plan) -> dict[str, int]:
        """Hand a plan's tokens to the scheduler, and drafts for the next step."""
        ids = list(plan.output.num_scheduled_tokens)
        tokens = [self._tokens(plan, i) if i in plan.samples else [] for i in ids]
        counts = {i: len(t) for i, t in zip(ids, tokens, strict=True) if t}  # vLLM cuts the lists
        self.scheduler.update_from_output(
            plan.output,
            ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
                sampled_token_ids=tokens,
            ),
        )
        k = self.config["k"]
        if k and not self.config.get("async_scheduling", False):
            live = [i for i in ids if i in plan.samples and i in self.scheduler.requests]
            self.scheduler.update_draft_token_ids(DraftTokenIds(live, [[7] * k for _ in live]))
        return counts

    def _tokens(self, plan: _Plan, request_id: str) -> list[int]:
        accepts = self.scenario.get("accepts") or [self.scenario["accept"]]
        drafts = plan.output.scheduled_spec_decode_tokens.get(request_id, ())
        count = 1 + min(accepts[plan.step % len(accepts)], len(drafts))
        tokens = [100 + (plan.step + i) % 800 for i in range(count)]
        stop = self.stop_after.get(request_id, 0) - plan.requests[request_id].num_output_tokens
        if 1 <= stop <= count:
            tokens[stop - 1] = STOP_TOKEN
        return tokens


def _describe(plan: _Plan) -> dict[str, Any]:
    output = plan.output
    new = output.scheduled_new_reqs
    return {
        "step": plan.step,
        "scheduled": dict(output.num_scheduled_tokens),
        "total": output.total_num_scheduled_tokens,
        "spec": {i: len(tokens) for i, tokens in output.scheduled_spec_decode_tokens.items()},
        "sampled": {},
        "prefix_hit": {r.req_id: r.num_computed_tokens for r in new if r.num_computed_tokens},
        "new_req_blocks": {r.req_id: [len(group) for group in r.block_ids] for r in new},
        "preempted": sorted(output.preempted_req_ids or ()),
    }


def record(scenario: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what vLLM decides in each step of ``scenario``."""
    run = Run(scenario)
    trace: list[dict[str, Any]] = []
    while len(trace) < MAX_STEPS and not run.ended(len(trace)):
        trace.append(run.step(len(trace)))
    return trace

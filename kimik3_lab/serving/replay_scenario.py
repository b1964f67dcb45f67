"""Recorded decisions of vLLM's scheduler, and the same run on ours.

Needs the standard library only. A *scenario* says how a scheduler is set up, which requests arrive
when, and how many drafts are accepted; its *trace* has a row for each step. The model behind it
only counts: it returns a token for each request whose scheduled tokens reach the end of what is
known of it, and accepts drafts as the scenario says.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kimik3_lab.serving.async_scheduler import make_scheduler
from kimik3_lab.serving.outputs import ModelRunnerOutput, SchedulerOutput
from kimik3_lab.serving.request import Request, RequestStatus, SamplingParams
from kimik3_lab.serving.vllm_rules import VllmRules

__all__ = ["Scenario", "ScenarioRun", "expand_prompt", "same_decision"]

Row = dict[str, Any]

#: The end-of-sequence token of a request with ``stop_after``.
STOP_TOKEN = 2
#: What the recorder fills into the drafts; their values decide nothing.
DRAFT_TOKEN = 7


@dataclass(frozen=True)
class Scenario:
    """One recorded run: ``name``, what was set up, and a row for each step."""

    name: str
    spec: Mapping[str, Any]
    trace: Sequence[Row]


def expand_prompt(pieces: Sequence[Sequence[Any]]) -> list[int]:
    """Spell a prompt out: ``["range", start, n]`` counts up, ``["const", token, n]`` repeats.

    >>> expand_prompt([["range", 10, 3], ["const", 7, 2]])
    [10, 11, 12, 7, 7]
    """
    prompt: list[int] = []
    for kind, value, count in pieces:
        if kind not in ("range", "const"):
            raise ValueError(f"a piece of a prompt is a range or a const, got {kind!r}")
        prompt += range(value, value + count) if kind == "range" else [value] * count
    return prompt


@dataclass(frozen=True, slots=True)
class _Plan:
    """A scheduled step, and what its execution will return."""

    step: int
    output: SchedulerOutput
    samples: frozenset[str]


class ScenarioRun:
    """Runs a scenario on our scheduler, with the rules of one version of vLLM.

    Parameters
    ----------
    spec : mapping
        The scenario: ``config``, ``accept`` or ``accepts``, ``arrivals``, ``aborts``.
    rules : VllmRules
        Of the version to follow.
    """

    def __init__(self, spec: Mapping[str, Any], rules: VllmRules) -> None:
        self.spec = spec
        self.config: Mapping[str, Any] = spec["config"]
        self.scheduler = make_scheduler(*rules.configs(self.config), refuse_starvation=False)
        self._stop_after: dict[str, int] = {}
        self._arrivals = {
            int(step): [self._request(request) for request in requests]
            for step, requests in spec["arrivals"].items()
        }
        self._plans: deque[_Plan] = deque()

    def rows(self, num_steps: int) -> Iterator[Row]:
        """Run ``num_steps`` steps and describe each as the recorder does."""
        for step in range(num_steps):
            yield self._step(step)

    @property
    def ended(self) -> bool:
        """Whether no request is left."""
        return not self.scheduler.requests

    def _step(self, step: int) -> Row:
        scheduler = self.scheduler
        known = set(scheduler.requests)
        self._abort("aborts", step)
        for request in self._arrivals.get(step, ()):
            scheduler.add_request(request)
        known |= scheduler.requests.keys()
        output = scheduler.schedule()
        samples = [r.request_id for r in output.scheduled if not r.is_prefill_chunk]
        row = _describe(step, output)
        self._plans.append(_Plan(step, output, frozenset(samples)))
        self._abort("aborts_in_flight", step)
        overlaps = self.config.get("async_scheduling", False) and output.num_scheduled_tokens
        if not overlaps or len(self._plans) == 2:
            row["sampled"] = self._answer(self._plans.popleft())
        running = scheduler.running
        row["finished"] = sorted(i for i in known if i not in scheduler.requests)
        row["running"] = [request.request_id for request in running]
        row["waiting"] = scheduler.num_waiting
        row["computed"] = {request.request_id: request.num_computed_tokens for request in running}
        row["free_blocks"] = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return row

    def _request(self, request: Mapping[str, Any]) -> Request:
        stop_after = request.get("stop_after")
        if stop_after:
            self._stop_after[request["id"]] = stop_after
        return Request(
            request["id"],
            expand_prompt(request["prompt"]),
            SamplingParams(max_tokens=request["max_tokens"], ignore_eos=not stop_after),
            eos_token_id=STOP_TOKEN,
            priority=request.get("priority", 0),
            arrival_time=request.get("arrival_time", 0.0),
        )

    def _abort(self, key: str, step: int) -> None:
        ids = self.spec.get(key, {}).get(str(step), ())
        self.scheduler.finish_requests(ids, RequestStatus.FINISHED_ABORTED)

    def _answer(self, plan: _Plan) -> dict[str, int]:
        """Return the tokens of a plan to the scheduler, and drafts for the next one."""
        ids = list(plan.output.num_scheduled_tokens)
        tokens = {i: self._tokens(plan, i) if i in plan.samples else [] for i in ids}
        result = ModelRunnerOutput(ids, list(tokens.values()))
        counts = {i: len(sampled) for i, sampled in tokens.items() if sampled}
        self.scheduler.update_from_output(plan.output, result)
        if not self.config.get("async_scheduling", False):
            drafts = [DRAFT_TOKEN] * self.config.get("k", 0)
            self.scheduler.update_draft_token_ids({i: drafts for i in ids if i in plan.samples})
        return counts

    def _tokens(self, plan: _Plan, request_id: str) -> list[int]:
        accepts = self.spec.get("accepts") or [self.spec.get("accept", 0)]
        drafts = plan.output.scheduled_spec_decode_tokens.get(request_id, ())
        count = 1 + min(accepts[plan.step % len(accepts)], len(drafts))
        tokens = [100 + (plan.step + i) % 800 for i in range(count)]
        if request_id in self._stop_after:
            request = next(r for r in plan.output.scheduled if r.request_id == request_id)
            stop = self._stop_after[request_id] - request.num_output_tokens
            if 1 <= stop <= count:
                tokens[stop - 1] = STOP_TOKEN
        return tokens


def _describe(step: int, output: SchedulerOutput) -> Row:
    new = [(r.req_id, r.num_computed_tokens, r.block_ids) for r in output.scheduled_new_reqs]
    resumed = [
        (r.req_id, r.num_computed_tokens, r.new_block_ids)
        for r in output.scheduled_cached_reqs
        if r.resumed_from_preemption
    ]
    row = {
        "step": step,
        "scheduled": dict(output.num_scheduled_tokens),
        "total": output.total_num_scheduled_tokens,
        "spec": {i: len(drafts) for i, drafts in output.scheduled_spec_decode_tokens.items()},
        "sampled": {},
        "preempted": sorted(output.preempted_req_ids),
    }
    for name, begun in (("", new), ("resumed_", resumed)):
        row[f"{name}prefix_hit"] = {i: hit for i, hit, _ in begun if hit}
        row[f"{name}new_req_blocks"] = {i: [len(g) for g in tables] for i, _, tables in begun}
    return row


def same_decision(field: str, recorded: Any, replayed: Row) -> bool:
    """Whether a recorded value is what we decided.

    vLLM's second model runner is sent requests that come back as if they were new, its first one is
    not. Which of them a recorder gets depends on its machine, so either listing will do.
    """
    value = replayed[field]
    if field not in ("prefix_hit", "new_req_blocks"):
        return bool(recorded == value)
    return bool(recorded in (value, value | replayed[f"resumed_{field}"]))

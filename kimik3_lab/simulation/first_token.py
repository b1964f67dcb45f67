"""What lay between a request and its first token, read off the steps of a simulated run.

Needs the standard library and the scheduler. The recipe ``find_why_ttft_is_high`` tells causes of
a late first token apart by these signs; on a real server most of them are metrics or lines of the
log.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kimik3_lab.benchmark.records import RequestRecord
from kimik3_lab.benchmark.window import Window
from kimik3_lab.serving.outputs import ModelRunnerOutput, SchedulerOutput
from kimik3_lab.simulation.arrivals import Queue
from kimik3_lab.simulation.drive import drive
from kimik3_lab.simulation.requests import SimulationRequest
from kimik3_lab.simulation.run_log import RunLog
from kimik3_lab.simulation.spec import SimulationSpec

__all__ = ["FirstToken", "watch_first_token"]


@dataclass(frozen=True, slots=True)
class _Step:
    """A step: when, whose tokens, and how full the engine was after it was planned."""

    start: float
    end: float
    tokens: dict[str, int]
    hits: dict[str, int]
    preempted: frozenset[str]
    num_running: int
    kv_cache_usage: float


@dataclass(frozen=True)
class FirstToken:
    """One request up to its first token.

    Attributes
    ----------
    ttft_s
        Time to first token.
    queue_s
        From its arrival to the first step that computes something of it. Like vLLM's
        ``request_queue_time_seconds`` this knows nothing of a second wait after a preemption.
    prefill_s
        The rest: ``request_prefill_time_seconds``.
    idle_s
        Part of ``prefill_s`` in which no step computed anything of it.
    steps, tokens_per_step
        Steps that did, and their mean tokens of it.
    prompt_tokens, cached_tokens
        Length of its prompt, and how much of that it found in the prefix cache.
    neighbour_tokens
        Tokens of others, mean over all steps from its arrival to its first token.
    seats, seats_taken
        ``max_num_seqs``, and the most requests that ran at a time meanwhile.
    kv_cache_usage
        Highest share of the cache's blocks that were taken meanwhile.
    preemptions
        How often it lost its blocks.
    """

    ttft_s: float
    queue_s: float
    prefill_s: float
    idle_s: float
    steps: int
    tokens_per_step: float
    prompt_tokens: int
    cached_tokens: int
    neighbour_tokens: float
    seats: int
    seats_taken: int
    kv_cache_usage: float
    preemptions: int


def watch_first_token(
    spec: SimulationSpec, requests: Sequence[SimulationRequest], request_id: str, *, seed: int = 0
) -> FirstToken:
    """Simulate requests and say what one of them met before its first token.

    Parameters
    ----------
    spec
        What is simulated.
    requests
        Sorted by ``arrival_s``.
    request_id
        The one to watch.
    seed
        Of the accepted lengths.

    Raises
    ------
    ValueError
        If there is no such request, or it got no token.

    Examples
    --------
    v0.27.1 leaves a step 1,024 of its 8,192 tokens, so a prompt of 8,000 takes eight:

    >>> from kimik3_lab.serving.presets import V0_27_1
    >>> asked = [SimulationRequest("a", 0.0, 8000, 10)]
    >>> found = watch_first_token(SimulationSpec(V0_27_1), asked, "a")
    >>> found.steps, found.tokens_per_step
    (8, 1000.0)
    """
    places = {request.request_id: place for place, request in enumerate(requests)}
    if request_id not in places:
        raise ValueError(
            f"no request {request_id!r} to watch; there are {', '.join(list(places)[:5])}"
        )
    records, steps, seats = _run(spec, requests, seed)
    record = records[places[request_id]]
    if record.first_token is None:
        raise ValueError(f"request {request_id} got no token: {record.error or record.status}")
    arrived, first = record.start, record.first_token
    until = [step for step in steps if step.end > arrived and step.start < first]
    own = [step for step in until if request_id in step.tokens]
    begun = own[0].start
    busy = sum(step.end - step.start for step in own)
    others = [sum(step.tokens.values()) - step.tokens.get(request_id, 0) for step in until]
    return FirstToken(
        ttft_s=first - arrived,
        queue_s=begun - arrived,
        prefill_s=first - begun,
        idle_s=max(first - begun - busy, 0.0),
        steps=len(own),
        tokens_per_step=sum(step.tokens[request_id] for step in own) / len(own),
        prompt_tokens=requests[places[request_id]].prompt_tokens,
        cached_tokens=own[0].hits.get(request_id, 0),
        neighbour_tokens=sum(others) / len(others),
        seats=seats,
        seats_taken=max(step.num_running for step in until),
        kv_cache_usage=max(step.kv_cache_usage for step in until),
        preemptions=sum(request_id in step.preempted for step in until),
    )


def _run(
    spec: SimulationSpec, requests: Sequence[SimulationRequest], seed: int
) -> tuple[list[RequestRecord], list[_Step], int]:
    """Run to the end and keep every step."""
    engine, executor = spec.make_engine(seed)
    scheduler, execute = engine.scheduler, executor.execute_model
    steps: list[_Step] = []

    def execute_and_note(scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        start = executor.clock.now
        result = execute(scheduler_output)
        stats = scheduler.make_stats()
        steps.append(
            _Step(
                start,
                executor.clock.now,
                dict(scheduler_output.num_scheduled_tokens),
                {
                    data.req_id: data.num_computed_tokens
                    for data in scheduler_output.scheduled_new_reqs
                },
                frozenset(scheduler_output.preempted_req_ids),
                stats.num_running_reqs,
                stats.kv_cache_usage,
            )
        )
        return result

    executor.execute_model = execute_and_note  # type: ignore[method-assign]
    log = RunLog(Window(0.0, math.inf), keep_records=True)
    drive(engine, executor, Queue(requests, delay_s=spec.scenario.turnaround_s), log)
    return log.records, steps, scheduler.scheduler_config.max_num_seqs * spec.parallel.dp

"""A machine whose steps are easy to price by hand, and a run that keeps all its steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kimik3_lab.benchmark.window import Window
from kimik3_lab.performance.scenarios import Scenario
from kimik3_lab.performance.step_work import StepWork
from kimik3_lab.serving.outputs import ModelRunnerOutput, SchedulerOutput
from kimik3_lab.serving.presets import V0_27_1
from kimik3_lab.simulation import SimulatedExecutor, SimulationSpec
from kimik3_lab.simulation.door import Arrivals
from kimik3_lab.simulation.drive import drive
from kimik3_lab.simulation.run_log import RunLog


class Cost(NamedTuple):
    total_s: float
    parts: dict[str, float]


class Prices:
    """Seconds of a step: so much, and so much for each row of a prompt and each other row."""

    def __init__(self, step: float = 1.0, prefill: float = 0.0, decode: float = 0.0) -> None:
        self.step, self.prefill, self.decode = step, prefill, decode

    def step_cost(self, work: StepWork) -> Cost:
        work.check()
        parts = {
            "step": self.step,
            "rows": work.num_prefill_tokens * self.prefill + work.num_decode_tokens * self.decode,
        }
        return Cost(sum(parts.values()), parts)


@dataclass(frozen=True)
class Priced(SimulationSpec):
    """A specification with hand-made prices in the place of the cost model."""

    prices: Prices = field(default_factory=Prices)

    def make_costs(self) -> Prices:
        return self.prices


def plain(prices: Prices | None = None, **more: Any) -> Priced:
    """A machine without a drafter, and without the delay of a network."""
    settings = {"num_speculative_tokens": 0, "speculative_method": None}
    return drafting(prices, scheduler={**settings, **more.pop("scheduler", {})}, **more)


def drafting(prices: Prices | None = None, **more: Any) -> Priced:
    """The same with the drafter of the preset."""
    choices = {"acceptance_length": 3.4, "acceptance_spread": 0.0, "turnaround_s": 0.0}
    scenario = Scenario(**{**choices, **more.pop("choices", {})})
    preset = more.pop("preset", V0_27_1)
    return Priced(preset, scenario=scenario, prices=prices or Prices(), **more)


class Step(NamedTuple):
    """What one step was asked, what came out, and when."""

    scheduled: dict[str, int]
    starts: dict[str, int]
    drafts: dict[str, int]
    sampled: dict[str, int]
    work: StepWork
    start: float
    end: float
    preempted: frozenset[str]


@dataclass
class Recorded:
    """A finished run and all its steps."""

    steps: list[Step]
    log: RunLog
    executor: SimulatedExecutor
    ended: float


def record(
    spec: SimulationSpec,
    arrivals: Arrivals,
    *,
    seed: int = 0,
    window: Window | None = None,
    make: Callable[..., SimulatedExecutor] = SimulatedExecutor,
    **options: Any,
) -> Recorded:
    """Run to the end and keep every step."""
    engine, executor = spec.make_engine(seed)
    if make is not SimulatedExecutor:
        executor = make(executor.costs, executor.num_speculative_tokens, executor.acceptance)
        engine.executor = executor
    steps: list[Step] = []
    price, compute = executor.costs.step_cost, executor.execute_model
    works: list[StepWork] = []

    class Listening:
        def step_cost(self, work: StepWork) -> Any:
            works.append(work)
            return price(work)

    def execute_model(output: SchedulerOutput) -> ModelRunnerOutput:
        start = executor.clock.now
        result = compute(output)
        seen = (*output.scheduled_cached_reqs, *output.scheduled_new_reqs)
        sampled = zip(result.req_ids, map(len, result.sampled_token_ids), strict=True)
        drafts = output.scheduled_spec_decode_tokens
        if output.num_scheduled_tokens:
            steps.append(
                Step(
                    dict(output.num_scheduled_tokens),
                    {data.req_id: data.num_computed_tokens for data in seen},
                    {request_id: len(ids) for request_id, ids in drafts.items()},
                    dict(sampled),
                    works[-1],
                    start,
                    executor.clock.now,
                    frozenset(output.preempted_req_ids),
                )
            )
        return result

    executor.costs = Listening()
    executor.execute_model = execute_model  # type: ignore[method-assign]
    log = RunLog(window or Window(0.0, 1e9), keep_records=True)
    ended = drive(engine, executor, arrivals, log, **options)
    return Recorded(steps, log, executor, ended)


def check_steps(run: Recorded) -> None:
    """Refuse a run that computed a token twice, left one out, or counted its work wrongly."""
    position: dict[str, int] = {}
    tokens = 0
    for step in run.steps:
        for request_id in step.preempted:
            position[request_id] = 0
        rows = context = pairs = logits = decode_seqs = 0
        for request_id, count in step.scheduled.items():
            start, drafts = step.starts[request_id], step.drafts.get(request_id, 0)
            if start != position.get(request_id, start):
                raise AssertionError(f"{request_id} goes on at {start}, it was at {position}")
            sampled = step.sampled[request_id]
            if sampled > 1 + drafts:
                raise AssertionError(f"{request_id} sampled {sampled} tokens of {drafts} drafts")
            if sampled:
                logits += 1 + drafts
                position[request_id] = start + count - drafts + sampled - 1
            else:
                position[request_id] = start + count
            if start and count == 1 + drafts:
                decode_seqs, rows, context = decode_seqs + 1, rows + count, context + start
            else:
                pairs += sum(range(start + 1, start + count + 1))
        tokens += sum(step.scheduled.values())
        work = step.work
        counted = (work.num_tokens, work.num_decode_tokens, work.num_decode_seqs,
                   work.decode_context, work.prefill_pairs, work.num_logits)  # fmt: skip
        by_hand = (sum(step.scheduled.values()), rows, decode_seqs, context, pairs, logits)
        if counted != by_hand:
            raise AssertionError(f"a step of {by_hand} was priced as {counted}")
    if tokens != run.executor.totals.tokens:
        raise AssertionError(f"{tokens} rows were computed, {run.executor.totals.tokens} counted")
    for record in run.log.records:
        if record.status == "completed":
            needed = record.prompt_tokens + record.output_tokens - 1
            if not needed <= position[f"request-{record.index + 1}"] <= needed + 8:
                raise AssertionError(f"{record} ended at {position}")

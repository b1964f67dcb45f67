"""Answer checks of lesson 08. Needs the standard library only.

Both judge by what a scheduler decides: the first by the lab's, and by steps that vLLM itself has
recorded (``data/golden/vllm_scheduler``); the second by the gaps that a run has.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from kimik3_lab import paths
from kimik3_lab.serving import (
    CacheConfig,
    ModelRunnerOutput,
    Request,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
    replay,
)
from kimik3_lab.serving.replay_scenario import ScenarioRun
from kimik3_lab.serving.vllm_rules import VllmRules
from kimik3_lab.teaching import timeline

__all__ = ["check_1", "check_2"]

Plan = Callable[[Sequence[int], Sequence[int], int, int, int], Sequence[int]]
Threshold = Callable[[int, int, int, int, int], int]

#: A recording without priorities, drafts only in some scenarios.
_RECORDING, _VERSION = "random_0.33.0.json.gz", "0.33.0"
_RANDOM_RUNS = 60
#: Enough blocks that they never decide anything.
_PLENTY = 2_000


def check_1(plan: Plan) -> None:
    """Check exercise 1: every step of random runs, and of runs that vLLM has recorded.

    Raises
    ------
    AssertionError
        With the state before the step, what was handed out and what should have been.
    """
    steps = sum(_follow(plan, seed) for seed in range(_RANDOM_RUNS))
    recorded = sum(_compare(plan, spec, trace, rules) for spec, trace, rules in _recorded())
    assert recorded, f"{_RECORDING} has no scenario in which only tokens and seats decide"
    print(
        f"exercise 1: right in {steps:,} steps of {_RANDOM_RUNS} random runs, and in {recorded} "
        f"steps that vLLM {_VERSION} has recorded"
    )


def _judge(
    plan: Plan,
    running: Sequence[int],
    waiting: Sequence[int],
    knobs: tuple[int, int, int],
    expected: Sequence[int],
    judge: str,
) -> None:
    """Hold one step against what ``judge`` gives."""
    budget, seats, threshold = knobs
    answer = plan(list(running), list(waiting), budget, seats, threshold)
    state = (
        f"running lack {list(running)}, waiting lack {list(waiting)}, budget {budget}, "
        f"{seats} seats, threshold {threshold}"
    )
    wanted = len(running) + len(waiting)
    assert answer is not None, f"{state}: expected {wanted} numbers, got None"
    given = list(answer)
    assert len(given) == wanted, f"{state}: expected {wanted} numbers, got {len(given)}"
    assert given == list(expected), f"{state}: {judge} gives {list(expected)}, got {given}"


def _follow(plan: Plan, seed: int) -> int:
    """Judge every step of a random run of the lab's scheduler; return their number."""
    draw = random.Random(seed)
    seats, budget = draw.choice((1, 2, 4, 8)), draw.choice((8, 16, 64))
    threshold = draw.choice((0, 0, 3, 6, 12))
    config = SchedulerConfig(seats, budget, 4096, long_prefill_token_threshold=threshold)
    scheduler = Scheduler(config, CacheConfig(_PLENTY))
    coming = {
        f"r{number}": (draw.randint(0, 12), draw.randint(1, 90), draw.randint(1, 9))
        for number in range(draw.randint(1, 9))
    }
    step = 0
    while coming or scheduler.has_requests():
        for name in [name for name, (when, _, _) in coming.items() if when <= step]:
            _, prompt, output = coming.pop(name)
            scheduler.add_request(Request(name, [5] * prompt, max_tokens=output))
        if scheduler.has_requests():
            order, running, waiting = _state(scheduler)
            output_of_step = scheduler.schedule()
            counts = output_of_step.num_scheduled_tokens
            expected = [counts.get(name, 0) for name in order]
            used = threshold if len(order) > 1 else 0
            _judge(plan, running, waiting, (budget, seats, used), expected, "the scheduler")
            scheduler.update_from_output(output_of_step, _answer(output_of_step))
        step += 1
    return step


def _answer(output: SchedulerOutput) -> ModelRunnerOutput:
    """Return a token for everybody whose last known token was computed."""
    tokens = [[] if request.is_prefill_chunk else [7] for request in output.scheduled]
    return ModelRunnerOutput(list(output.num_scheduled_tokens), tokens)


def _state(scheduler: Scheduler) -> tuple[list[str], list[int], list[int]]:
    """Names in order, and what running and waiting requests lack."""
    running, waiting = list(scheduler.running), list(scheduler.waiting)
    names = [request.request_id for request in (*running, *waiting)]
    return (
        names,
        [request.num_tokens - request.num_computed_tokens for request in running],
        [request.num_tokens - request.num_computed_tokens for request in waiting],
    )


@functools.cache
def _recorded() -> list[tuple[Mapping[str, Any], Sequence[Mapping[str, Any]], VllmRules]]:
    """Find recorded scenarios in which blocks decide nothing; set up with blocks in plenty."""
    recording = replay.load(paths.data_dir() / "golden" / "vllm_scheduler" / _RECORDING)
    found = []
    for scenario in recording.scenarios:
        config = scenario.spec["config"]
        if config.get("spec") or config.get("policy", "fcfs") != "fcfs":
            continue
        plain = {**config, "num_blocks": _PLENTY, "prefix_caching": False, "kda": False}
        spec = {**scenario.spec, "config": plain}
        rows = ScenarioRun(spec, recording.rules).rows(len(scenario.trace))
        pairs = zip(scenario.trace, rows, strict=True)
        if not spec.get("aborts") and all(a["scheduled"] == b["scheduled"] for a, b in pairs):
            found.append((spec, scenario.trace, recording.rules))
    return found


def _compare(
    plan: Plan, spec: Mapping[str, Any], trace: Sequence[Mapping[str, Any]], rules: VllmRules
) -> int:
    """Judge the steps of a recorded scenario by vLLM's own decisions; return their number."""
    run = ScenarioRun(spec, rules)
    config = run.scheduler.scheduler_config
    rows = run.rows(len(trace))
    seen = 0
    for number, recorded in enumerate(trace):
        order, running, waiting = _state(run.scheduler)
        for request in _arrivals(spec, number):
            order.append(request["id"])
            waiting.append(sum(count for _, _, count in request["prompt"]))
        expected = [recorded["scheduled"].get(name, 0) for name in order]
        threshold = config.long_prefill_token_threshold if len(order) > 1 else 0
        knobs = (config.max_num_batched_tokens, config.max_num_seqs, threshold)
        if order:
            _judge(plan, running, waiting, knobs, expected, f"vLLM {_VERSION}")
            seen += 1
        next(rows)
    return seen


def _arrivals(spec: Mapping[str, Any], step: int) -> Iterator[Mapping[str, Any]]:
    yield from spec["arrivals"].get(str(step), ())


def check_2(largest_threshold: Threshold) -> None:
    """Check exercise 2: the longest gap of a run keeps the bound, and one token more breaks it.

    All times are whole microseconds.

    Raises
    ------
    AssertionError
        Naming the case, the answer and the gap that it leads to.
    """
    cases = (
        (100_000, 20_000, 50, 8, 1),
        (100_000, 20_000, 50, 8, 3),
        (50_000, 20_000, 50, 64, 2),
        (30_000, 20_000, 70, 15, 4),
        (23_999, 20_000, 50, 40, 40),
        (21_000, 20_000, 50, 21, 2),
        (20_000, 20_000, 50, 1, 1),
    )
    for case in cases:
        bound, fixed, per_token, decoders, prompts = case
        answer = largest_threshold(*case)
        name = f"bound {bound} µs, {fixed} + {per_token} a token, {decoders} decode, {prompts} come"
        assert isinstance(answer, int) and answer >= 0, (
            f"{name}: expected a number of tokens, got {answer!r}"
        )
        most = bound // per_token
        assert answer <= most, f"{name}: {answer} tokens alone take longer; at most {most} do not"
        if answer:
            gap = _longest_gap(answer, *case[1:])
            assert gap <= bound, f"{name}: with {answer} somebody waits {gap} µs"
        gap = _longest_gap(answer + 1, *case[1:])
        assert gap > bound, f"{name}: {answer + 1} keeps the bound too, with {gap} µs"
    print(f"exercise 2: right in {len(cases)} runs")


def _longest_gap(threshold: int, fixed: int, per_token: int, decoders: int, prompts: int) -> int:
    """Longest time between two tokens of a decoding request while prompts are computed."""
    config = SchedulerConfig(
        decoders + prompts, 1_000_000, 65_536, long_prefill_token_threshold=threshold
    )
    scheduler = Scheduler(config, CacheConfig(10 * _PLENTY))
    requests = [Request(f"d{number}", [5], max_tokens=12) for number in range(decoders)]
    requests += [
        Request(f"p{number}", [5] * (3 * threshold), max_tokens=1, arrival_time=1.0)
        for number in range(prompts)
    ]
    run = timeline.run(
        scheduler, requests, seconds_per_step=lambda step: fixed + per_token * step.tokens
    )
    times = run.token_times["d0"]
    return round(max(later - earlier for earlier, later in pairwise(times)))

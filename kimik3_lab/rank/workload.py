"""A closed loop of scripted requests through the real scheduler, timed as a client would time it.

Needs torch through the executor. The rank ladder measures its cells with it.

Latency, TTFT and TPOT are those of :class:`kimik3_lab.benchmark.RequestRecord`; there is no server
and no network between.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kimik3_lab.rank.acceptance import Script
from kimik3_lab.rank.step_floor import Rows
from kimik3_lab.serving.engine import Engine
from kimik3_lab.serving.executors.torch_executor import TorchExecutor
from kimik3_lab.serving.outputs import ModelRunnerOutput, SchedulerOutput
from kimik3_lab.serving.request import Request
from kimik3_lab.serving.sampling_params import SamplingParams

__all__ = ["ObservedExecutor", "RequestTimes", "Step", "run_cell"]


@dataclass
class RequestTimes:
    """Seconds since the cell began.

    Examples
    --------
    >>> times = RequestTimes(start=1.0, first=1.5, end=2.0, tokens=3)
    >>> times.ttft, times.tpot, times.e2e
    (0.5, 0.25, 1.0)
    """

    start: float
    first: float = 0.0
    end: float = 0.0
    tokens: int = 0

    @property
    def ttft(self) -> float:
        """Time to the first token."""
        return self.first - self.start

    @property
    def tpot(self) -> float:
        """Time for each token after the first."""
        return (self.end - self.first) / (self.tokens - 1)

    @property
    def e2e(self) -> float:
        """Time to the last one."""
        return self.end - self.start


@dataclass(frozen=True)
class Step:
    """One step: its rows, and the seconds that the executor took."""

    rows: tuple[Rows, ...]
    seconds: float

    @property
    def decodes(self) -> bool:
        """Whether no prompt is in it."""
        return not any(r.is_prompt for r in self.rows)


@dataclass
class ObservedExecutor:
    """An executor whose steps are written down. Everything else of it shows through."""

    executor: TorchExecutor
    steps: list[Step] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.executor, name)

    def execute_model(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Compute a step; note when it began and ended."""
        before = time.perf_counter()
        result = self.executor.execute_model(output)
        seconds = time.perf_counter() - before
        if output.num_scheduled_tokens:
            segments = self.executor.last_segments
            rows = tuple(Rows(s.start, s.count, s.num_drafts) for s in segments)
            self.steps.append(Step(rows, seconds))
        return result


def run_cell(
    engine: Engine,
    script: Script,
    *,
    prompt_tokens: int,
    output_tokens: int,
    concurrency: int,
    num_requests: int,
    first_request: int = 0,
    progress: Callable[[int], object] | None = None,
) -> tuple[list[RequestTimes], float]:
    """Keep ``concurrency`` requests going until ``num_requests`` are done.

    Parameters
    ----------
    engine
        Nothing is running in it.
    script
        Its texts are the prompts.
    prompt_tokens, output_tokens
        Of each request.
    concurrency, num_requests, first_request
        Requests at a time, in all, and the number of the first one, which chooses its text.
    progress
        Told the number of new tokens after each step.

    Returns
    -------
    times, elapsed
        Of each request in its order, and the seconds of the cell.
    """
    for i in range(num_requests):
        length = prompt_tokens + output_tokens + 4 * script.num_drafts
        script.write(first_request + i, length, prompt_tokens)
    prompts = [script.tokens(first_request + i, 0, prompt_tokens) for i in range(num_requests)]
    times: dict[str, RequestTimes] = {}
    waiting = list(range(num_requests))
    begin = time.perf_counter()

    def send() -> None:
        index = waiting.pop(0)
        name = f"cell-{first_request + index}"
        params = SamplingParams(
            max_tokens=output_tokens, ignore_eos=True, seed=first_request + index
        )
        times[name] = RequestTimes(time.perf_counter() - begin)
        engine.add_request(Request(name, prompts[index], params))

    for _ in range(min(concurrency, num_requests)):
        send()
    while engine.has_unfinished_requests():
        news = engine.step()
        now = time.perf_counter() - begin
        for item in news:
            record = times[item.request_id]
            if not record.tokens:
                record.first = now
            record.tokens += len(item.new_token_ids)
            record.end = now
            if item.finish_reason == "error":
                raise RuntimeError(f"request {item.request_id} failed: see the engine's log")
            if item.finish_reason is not None and waiting:
                send()
        if progress is not None:
            progress(sum(len(item.new_token_ids) for item in news))
    return list(times.values()), time.perf_counter() - begin


def decode_seconds(steps: Sequence[Step], num_requests: int) -> list[float]:
    """Seconds of the steps in which so many requests decode and no prompt is computed."""
    return [s.seconds for s in steps if s.decodes and len(s.rows) == num_requests]

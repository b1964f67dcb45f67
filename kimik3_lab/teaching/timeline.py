"""Drive the real scheduler without a model, and keep what it decided in every step.

Needs the standard library and the simulator's clock. Lessons 07, 08 and 09 draw it
(``plots_schedule``).

A schedule does not depend on what tokens say, only on how many there are and on how many drafts are
accepted. So a lesson can run thousands of steps of Kimi K3's size on a laptop: the tokens are made
up here, everything else is :class:`kimik3_lab.serving.Scheduler` itself. Give a
``seconds_per_step`` and a step takes time on a virtual clock, which turns decisions into latencies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kimik3_lab.serving.outputs import ModelRunnerOutput, SchedulerOutput
from kimik3_lab.serving.request import Request
from kimik3_lab.serving.scheduler import Scheduler
from kimik3_lab.simulation.clock import VirtualClock

__all__ = ["Row", "Step", "Timeline", "run"]

_TOKEN = 7  # what every made-up token is; nothing depends on it


@dataclass(frozen=True)
class Row:
    """What one request did in one step, in tokens.

    Attributes
    ----------
    prefill
        Tokens computed whose successor is known: prompt, or what is computed anew.
    decode
        1 if the last known token was computed, so that a new one came out.
    drafts, accepted
        Draft tokens verified, and those of them that were right.
    """

    prefill: int
    decode: int
    drafts: int = 0
    accepted: int = 0

    @property
    def tokens(self) -> int:
        """Rows that the request took of the step."""
        return self.prefill + self.decode + self.drafts


@dataclass(frozen=True)
class Step:
    """One step: its rows by request, and the scheduler after it.

    ``start`` and ``end`` are seconds on the virtual clock; ``waiting`` and ``running`` count
    requests, ``free_blocks`` blocks of the pool, ``hits`` are tokens found in the prefix cache by
    requests that began here.
    """

    number: int
    start: float
    end: float
    rows: Mapping[str, Row]
    preempted: frozenset[str]
    finished: frozenset[str]
    hits: Mapping[str, int]
    running: int
    waiting: int
    free_blocks: int

    @property
    def tokens(self) -> int:
        """Rows of the whole step."""
        return sum(row.tokens for row in self.rows.values())


@dataclass
class Timeline:
    """All steps of a run, and when each request got its tokens.

    Attributes
    ----------
    steps
        In order.
    arrivals
        Seconds at which each request came.
    token_times
        For each request, the end of the step that brought each of its tokens.
    """

    steps: list[Step] = field(default_factory=list)
    arrivals: dict[str, float] = field(default_factory=dict)
    token_times: dict[str, list[float]] = field(default_factory=dict)

    def time_to_first_token(self, request_id: str) -> float:
        """Seconds from arrival to the first token (TTFT)."""
        return self.token_times[request_id][0] - self.arrivals[request_id]

    def time_per_output_token(self, request_id: str) -> float:
        """Seconds from the first to the last token, over the tokens in between (TPOT)."""
        times = self.token_times[request_id]
        return (times[-1] - times[0]) / max(len(times) - 1, 1)

    @property
    def seconds(self) -> float:
        """Length of the run."""
        return self.steps[-1].end if self.steps else 0.0

    @property
    def output_tokens_per_second(self) -> float:
        """Throughput over the whole run."""
        return sum(map(len, self.token_times.values())) / self.seconds if self.seconds else 0.0

    def steps_to_first_token(self, request_id: str) -> int:
        """Count the steps that computed something of the request, up to its first token."""
        first = self.token_times[request_id][0]
        return sum(request_id in step.rows and step.end <= first for step in self.steps)


def run(
    scheduler: Scheduler,
    requests: Sequence[Request],
    *,
    accepted: Callable[[str, int], int] | int = 0,
    seconds_per_step: Callable[[Step], float] | None = None,
    max_steps: int = 100_000,
) -> Timeline:
    """Serve ``requests`` to the end and keep every step.

    Parameters
    ----------
    scheduler
        Any configuration without asynchronous scheduling; with a drafter, K made-up drafts are
        proposed after every step.
    requests
        A request takes part from the first step that starts at or after its ``arrival_time``
        (seconds on the virtual clock); all of them from the start if that is 0.
    accepted
        Drafts that are accepted of those verified: a number, or a function of request id and step.
    seconds_per_step
        Length of a step. It sees the step with ``end == start``. By default a step lasts 1, so that
        times count steps.
    max_steps
        A guard.

    Raises
    ------
    RuntimeError
        If requests are left and a step plans nothing for any of them, or after ``max_steps``.

    Examples
    --------
    Two prompts of 6 and 3 tokens through a budget of 8:

    >>> from kimik3_lab.serving import CacheConfig, SchedulerConfig
    >>> scheduler = Scheduler(SchedulerConfig(4, 8, 64), CacheConfig(num_blocks=9))
    >>> timeline = run(scheduler, [Request("a", [5] * 6), Request("b", [5] * 3)])
    >>> timeline.steps[0].rows
    {'a': Row(prefill=5, decode=1, drafts=0, accepted=0), 'b': Row(prefill=2, decode=0, drafts=0, \
accepted=0)}
    >>> timeline.time_to_first_token("b")
    2.0
    """
    if scheduler.scheduler_config.async_scheduling:
        raise ValueError("a timeline needs async_scheduling=False: each step is answered at once")
    timeline = Timeline()
    coming = sorted(requests, key=lambda request: request.arrival_time)
    timeline.arrivals = {request.request_id: request.arrival_time for request in coming}
    known = {request.request_id: request for request in coming}
    clock, number = VirtualClock(), 0
    while coming or scheduler.has_requests():
        if not scheduler.has_requests():
            clock.wait_until(coming[0].arrival_time)
        while coming and coming[0].arrival_time <= clock.now:
            scheduler.add_request(coming.pop(0))
        step, result, plan = _take_step(scheduler, known, number, clock.now, accepted)
        if not step.rows and not coming:
            raise RuntimeError(
                f"step {number} planned nothing for {len(scheduler.requests)} unfinished requests: "
                "this configuration starves them"
            )
        clock.advance(seconds_per_step(step) if seconds_per_step else 1.0)
        end = clock.now
        news = scheduler.update_from_output(plan, result)
        for item in news:
            times = timeline.token_times.setdefault(item.request_id, [])
            times += [end] * len(item.new_token_ids)
        timeline.steps.append(
            replace(
                step,
                end=end,
                finished=frozenset(item.request_id for item in news if item.finished),
                running=scheduler.num_running,
                waiting=scheduler.num_waiting,
                free_blocks=scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
            )
        )
        _propose(scheduler, plan)
        number += 1
        if number >= max_steps:
            raise RuntimeError(f"{len(scheduler.requests)} requests are left after {number} steps")
    return timeline


def _take_step(
    scheduler: Scheduler,
    known: Mapping[str, Request],
    number: int,
    clock: float,
    accepted: Callable[[str, int], int] | int,
) -> tuple[Step, ModelRunnerOutput, SchedulerOutput]:
    """Plan a step, and make up what a model would answer."""
    plan = scheduler.schedule()
    rows: dict[str, Row] = {}
    sampled: list[list[int]] = []
    for request_id, count in plan.num_scheduled_tokens.items():
        drafts = len(plan.scheduled_spec_decode_tokens.get(request_id, ()))
        if known[request_id].is_prefill_chunk:
            rows[request_id] = Row(prefill=count, decode=0)
            sampled.append([])
            continue
        right = accepted(request_id, number) if callable(accepted) else accepted
        right = min(right, drafts)
        rows[request_id] = Row(count - 1 - drafts, 1, drafts, right)
        sampled.append([_TOKEN] * (1 + right))
    new = plan.scheduled_new_reqs
    step = Step(
        number=number,
        start=clock,
        end=clock,
        rows=rows,
        preempted=frozenset(plan.preempted_req_ids),
        finished=frozenset(),
        hits={data.req_id: data.num_computed_tokens for data in new if data.num_computed_tokens},
        running=scheduler.num_running,
        waiting=scheduler.num_waiting,
        free_blocks=scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
    )
    return step, ModelRunnerOutput(list(rows), sampled), plan


def _propose(scheduler: Scheduler, plan: SchedulerOutput) -> None:
    """Propose K made-up drafts for everyone who is past its prompt."""
    k = scheduler.scheduler_config.num_speculative_tokens
    if k:
        scheduler.update_draft_token_ids({i: [_TOKEN] * k for i in plan.num_scheduled_tokens})

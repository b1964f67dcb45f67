"""How busy a replica must be by now, from what a router has sent it.

Needs the standard library and the cost model. The routers of :mod:`kimik3_lab.simulation.router`
decide by it; lesson 12 compares it with what the replicas then did.

A router in front of real servers knows what it has sent and what has come back. Here replicas are
simulated afterwards, each in a process of its own, so what has come back is estimated: prompts are
computed one behind the other; answers run at the pace of a step with as many requests as are under
way, and stand nearly still while prompts are computed, which takes a share of the time. Both paces
come from the replica's own cost model, so the estimate is in seconds of that machine.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, fields
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from kimik3_lab.performance.step_work import StepWork, decode_work, prefill_work
from kimik3_lab.simulation.acceptance import chance_of_mean, survival_curve

if TYPE_CHECKING:
    from kimik3_lab.simulation.executor import StepCost, StepCosts
    from kimik3_lab.simulation.spec import SimulationSpec

__all__ = ["Pace", "ReplicaLoad"]

#: Requests under way that a step is priced for; others are read off between them.
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
#: Seconds over which the share of prompts is averaged, and the most of it that is believed.
_MEMORY_S = 60.0
_DECODES_IN_MIXED = 8
_MOST = 0.9


@dataclass(frozen=True)
class Pace:
    """How fast a replica computes.

    Attributes
    ----------
    prefill_token_s
        Seconds for each prompt token in a full step that some requests decode in; data-parallel
        copies compute one each.
    token_s
        Seconds for each output token of a request, by the number of requests under way
        (:data:`batches`).
    batches
        Those numbers, rising.
    step_s
        Seconds of a step in which one request decodes; 0 if not known.
    row_s
        Seconds for a row where it is cheapest; 0 if not known.
    """

    prefill_token_s: float
    token_s: tuple[float, ...]
    batches: tuple[int, ...] = _BATCHES
    step_s: float = 0.0
    row_s: float = 0.0

    @classmethod
    def of(cls, spec: SimulationSpec, *, context: int = 8_000) -> Pace:
        """Price a full step of prompts, and steps with more and more requests that decode.

        Parameters
        ----------
        context
            Cached tokens of each of these.
        """
        costs, copies = spec.make_costs(), spec.parallel.dp
        scheduler, drafts = spec.scheduler_config, spec.num_speculative_tokens
        chunk = min(scheduler.scheduled_token_limit, scheduler.max_model_len)
        accepted = 1.0
        if drafts:
            scenario = spec.scenario
            chance = chance_of_mean(scenario.acceptance_length, scenario.acceptance_num_drafts)
            accepted += sum(survival_curve(chance, drafts))
        steps = tuple(
            _dealt(costs, n, copies, context=context, drafts=drafts).total_s for n in _BATCHES
        )
        # Every copy computes a chunk in such a step.
        prefill = costs.step_cost(prefill_work(chunk)).total_s / chunk / copies
        rows = [s / (n * (1 + drafts)) for s, n in zip(steps, _BATCHES, strict=True)]
        mixed = _mixed_work(chunk, context, drafts)
        return cls(
            costs.step_cost(mixed).total_s / mixed.num_prefill_tokens / copies,
            tuple(seconds / accepted for seconds in steps),
            step_s=steps[0],
            row_s=min(prefill, *rows),
        )

    def output_token_s(self, under_way: int) -> float:
        """Seconds for each output token of a request, with so many under way."""
        place = bisect_left(self.batches, under_way)
        if place >= len(self.batches):
            return self.token_s[-1] * under_way / self.batches[-1]
        if self.batches[place] == under_way or place == 0:
            return self.token_s[place]
        low, high = self.batches[place - 1 : place + 1]
        part = (under_way - low) / (high - low)
        return self.token_s[place - 1] + part * (self.token_s[place] - self.token_s[place - 1])


def _dealt(costs: StepCosts, num_seqs: int, copies: int, *, context: int, drafts: int) -> StepCost:
    """Price a step in which the copies of a replica have equal shares of the decodes."""
    shares = [num_seqs // copies + (copy < num_seqs % copies) for copy in range(copies)]
    works = [decode_work(n, context=context, num_speculative_tokens=drafts) for n in shares]
    return costs.step_cost(works[0]) if copies == 1 else costs.lockstep_cost(works)


def _mixed_work(num_tokens: int, context: int, drafts: int) -> StepWork:
    """Count a full step: a few requests that decode, and a chunk of a prompt in the rest."""
    seqs = max(1, min(_DECODES_IN_MIXED, num_tokens // 2 // (1 + drafts)))
    decodes = decode_work(seqs, context=context, num_speculative_tokens=drafts)
    chunk = prefill_work(max(1, num_tokens - decodes.num_tokens), num_speculative_tokens=drafts)
    return StepWork(
        **{
            item.name: getattr(decodes, item.name) + getattr(chunk, item.name)
            for item in fields(StepWork)
        }
        | {"num_speculative_tokens": drafts}
    )


class ReplicaLoad:
    """The router's book about one replica.

    Examples
    --------
    >>> load = ReplicaLoad(Pace(1e-4, (0.01, 0.02), batches=(1, 2)))
    >>> load.send(0.0, new_tokens=8000, output_tokens=100)
    1.8
    >>> load.in_flight(1.0), round(load.prefill_wait_s(0.3), 3), load.in_flight(2.0)
    (1, 0.5, 0)
    """

    def __init__(self, pace: Pace) -> None:
        self.pace = pace
        self._ends: list[float] = []
        self._prefill_free = 0.0
        self._prefill_share = 0.0
        self._latest = 0.0

    def in_flight(self, now: float) -> int:
        """Count requests that have not come back by ``now``, as far as is known."""
        while self._ends and self._ends[0] <= now:
            heappop(self._ends)
        return len(self._ends)

    def prefill_wait_s(self, now: float) -> float:
        """Seconds until the prompts sent before are computed."""
        return max(0.0, self._prefill_free - now)

    def finish_s(self, now: float, new_tokens: int, output_tokens: float) -> float:
        """Seconds until a request would have its last token, if it were sent here.

        Parameters
        ----------
        new_tokens
            Prompt tokens that are not cached.
        output_tokens
            Length of the answer, or what is expected of it.
        """
        prefill = self.prefill_wait_s(now) + new_tokens * self.pace.prefill_token_s
        token_s = self.pace.output_token_s(self.in_flight(now) + 1)
        return prefill + output_tokens * token_s / (1.0 - min(self.prefill_share(now), _MOST))

    def prefill_share(self, now: float) -> float:
        """Share of the last minute or so that prompts have taken."""
        return self._prefill_share * math.exp((self._latest - now) / _MEMORY_S)

    def send(self, now: float, new_tokens: int, output_tokens: int) -> float:
        """Book a request with ``new_tokens`` prompt tokens that are not cached.

        Returns
        -------
        float
            Seconds until it has its last token, as far as is known.
        """
        seconds = self.finish_s(now, new_tokens, output_tokens)
        prefill = new_tokens * self.pace.prefill_token_s
        self._prefill_free = max(now, self._prefill_free) + prefill
        self._prefill_share = self.prefill_share(now) + prefill / _MEMORY_S
        self._latest = now
        heappush(self._ends, now + seconds)
        return seconds

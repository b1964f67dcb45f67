"""Wrong asynchronous executors and engines: the scenarios must find out all.

Each mutant replaces one function. What it does wrong is what the host does not see: a token, a
count or a state that stays on the device between two steps.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from executor_scenarios import SCENARIOS, assert_found_out, play
from executor_world import GuessingDrafter
from wrong_methods import Mutants, wrap

from kimik3_lab.serving import EngineCoreOutput, Scheduler
from kimik3_lab.serving.async_scheduler import AsyncScheduler
from kimik3_lab.serving.engine_steps import EngineSteps
from kimik3_lab.serving.executors import async_steps, async_tables
from kimik3_lab.serving.executors.async_sampler import Sampled, SampledRows
from kimik3_lab.serving.executors.async_states import AsyncKdaStates
from kimik3_lab.serving.executors.async_tables import SeatTables
from kimik3_lab.serving.executors.kda_states import CommitTensors
from kimik3_lab.serving.executors.paged_mixer import PagedMixer
from kimik3_lab.serving.executors.pending_step import PendingStep
from kimik3_lab.serving.executors.step_parts import Decodes

pytestmark = pytest.mark.usefixtures("one_thread")

AHEAD = {"async_scheduling": True}
MUTANTS = Mutants()
mutant = MUTANTS.add


# -- tokens ------------------------------------------------------------------------------------


@mutant("caching", "a stale token is fed: the one before the last")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    def fill_in(original: Any, self: SeatTables, step: Any, token_ids: Any) -> Any:
        before, self.stale = getattr(self, "stale", self.last_token), self.last_token.clone()
        newest, self.last_token = self.last_token, before
        try:
            return original(self, step, token_ids)
        finally:
            self.last_token = newest

    wrap(monkeypatch, SeatTables, "fill_in", fill_in)


@mutant("caching", "a placeholder is fed: token 0")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    def fill_in(original: Any, self: SeatTables, step: Any, token_ids: Any) -> Any:
        self.last_token.zero_()
        return original(self, step, token_ids)

    wrap(monkeypatch, SeatTables, "fill_in", fill_in)


@mutant("seats", "the first of the new tokens is fed, not the last")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sampled, "last", property(lambda self: self.tokens[:, 0].clamp(min=0)))


@mutant("seats", "one draft too many is accepted")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    verify = async_tables.verify_rows

    def one_more(rows: SampledRows, drafts: Any, best: Any) -> Sampled:
        right = verify(rows, drafts, best)
        count = (right.num_tokens + 1).minimum(rows.num_drafts + 1).where(right.num_tokens > 0, 0)
        choice = best[rows.logit_rows()]
        places = torch.arange(choice.shape[1])
        return Sampled(choice.masked_fill(places >= count[:, None], -1), count, right.broken)

    monkeypatch.setattr(async_tables, "verify_rows", one_more)


# -- places ------------------------------------------------------------------------------------


@mutant("seats", "a step begins where the plan says, as if all drafts had been accepted")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    def settle(original: Any, self: Any, scheduled: Any, *rest: Any) -> None:
        original(self, scheduled, *rest)
        for item in scheduled:
            self.tables.num_computed[item.segment.slot] = item.chunk.stop

    wrap(monkeypatch, async_steps.AsyncSteps, "_settle", settle)


@mutant("seats", "the drafter is told the plan's context")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    def propose(original: Any, self: Any, requests: Any, anchors: Any, num_context: Any) -> Any:
        planned = torch.tensor([request.num_context for request in requests])
        return original(self, requests, anchors, planned)

    wrap(monkeypatch, GuessingDrafter, "propose_async", propose)


@mutant("seats", "a seat keeps what the wasted step of the request before left in it")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SeatTables, "begin", lambda self, seated: None)


@mutant("seats", "the rows that a plan overestimates are attended to")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    def contexts(original: Any, self: Decodes, group: int) -> Any:
        self.starts = torch.tensor(self.stops) - self.num_tokens
        return original(self, group)

    wrap(monkeypatch, Decodes, "_contexts", contexts)


# -- states ------------------------------------------------------------------------------------


@mutant("groups", "rejected drafts stay in the state")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    def advance(original: Any, self: SeatTables, rows: SampledRows, *rest: Any) -> None:
        original(self, rows, *rest)
        self.num_accepted[rows.slots] = rows.counts.where(rows.num_drafts > 0, 1)

    wrap(monkeypatch, SeatTables, "advance", advance)


@mutant("seats, records", "all drafts are committed to the state")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    def commit(original: Any, self: Any, commits: CommitTensors) -> None:
        most = self.step.records[min(self.step.records)][0].written.shape[1]
        original(self, commits._replace(num_accepted=torch.full_like(commits.num_accepted, most)))

    wrap(monkeypatch, PagedMixer, "commit_tensors", commit)


@mutant("caching, slots", "a block boundary among accepted drafts leaves no state behind")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    def settle(original: Any, self: Any, verified: Any, starts: Any, counts: Any) -> Any:
        move, self.cache.move_state_rows = self.cache.move_state_rows, lambda *moves: None
        try:
            return original(self, verified, starts, counts)
        finally:
            self.cache.move_state_rows = move

    wrap(monkeypatch, AsyncKdaStates, "settle", settle)


@mutant("caching, slots", "the state that changes its column is the plan's, not the accepted one")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    def move(original: Any, self: Any, moved: Any) -> None:
        accepted = self.tables.num_accepted
        self.tables.num_accepted = torch.full_like(accepted, 1 + self.cache.num_scratch)
        original(self, moved)
        accepted[[slot for slot, _, _ in moved]] = 1
        self.tables.num_accepted = accepted

    wrap(monkeypatch, AsyncKdaStates, "_move", move)


@mutant("caching, slots", "a state that has changed its column is looked for behind it")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    def move(original: Any, self: Any, moved: Any) -> None:
        before = self.tables.num_accepted.clone()
        original(self, moved)
        self.tables.num_accepted.copy_(before)

    wrap(monkeypatch, AsyncKdaStates, "_move", move)


# -- outputs -----------------------------------------------------------------------------------


@mutant("caching", "the output of a step is credited to the one before")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(original: Any, self: EngineSteps, step: Any = None) -> Any:
        self._in_flight.rotate()  # the newest is answered first
        return original(self, step)

    wrap(monkeypatch, EngineSteps, "_answer", answer)


@mutant("seats", "tokens of the step that ran for nothing are delivered")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    def update(original: Any, self: Scheduler, output: Any, result: Any) -> Any:
        ended = {r.request_id for r in output.scheduled if r.is_finished}
        wasted = [
            EngineCoreOutput(req_id, ids)
            for req_id, ids in zip(result.req_ids, result.sampled_token_ids, strict=True)
            if req_id in ended
        ]
        return [*original(self, output, result), *wasted]

    wrap(monkeypatch, AsyncScheduler, "update_from_output", update)


@mutant("preemption", "what a preempted request was about to say is lost")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(original: Any, self: PendingStep, new_token_ids: Any, logprobs: Any) -> None:
        original(self, new_token_ids, logprobs)
        assert self._output is not None
        for item in self.sampling:
            if item.request.slot is None and item.req_id in self._output.req_ids:
                place = self._output.req_ids.index(item.req_id)
                self._output.sampled_token_ids[place] = []

    wrap(monkeypatch, PendingStep, "resolve", resolve)


# -- the tests ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_right_executor_says_what_the_model_says_alone(name: str) -> None:
    outcome = play(SCENARIOS[name].changed(scheduler=AHEAD))
    # At the end of a wave, and where all wait for a preempted request's last token.
    assert outcome.host_waits <= (3 if name != "preemption" else outcome.steps // 4)
    assert (outcome.wasted_tokens > 0) == bool(SCENARIOS[name].scheduler)
    assert outcome.preemptions > 0 or name != "preemption"


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_executor_is_found_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scenario, patch = MUTANTS[name]
    patch(monkeypatch)
    assert_found_out(SCENARIOS[scenario].changed(scheduler=AHEAD))

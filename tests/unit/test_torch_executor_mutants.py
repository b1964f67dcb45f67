"""Wrong executors, each of a kind that real engines have had: the scenarios must find out all.

A mutant replaces one function. Without this nobody would know whether the tests of the executor can
fail: much of what it does wrong would still give fluent text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from executor_scenarios import SCENARIOS, assert_found_out, play
from wrong_methods import Mutants, wrap

from kimik3_lab.serving.executors import kda_records, paged_mixer, torch_executor
from kimik3_lab.serving.executors.drafts import Draft
from kimik3_lab.serving.executors.kda_states import KdaStates
from kimik3_lab.serving.executors.paged_cache import PagedCache
from kimik3_lab.serving.executors.paged_mixer import PagedMixer
from kimik3_lab.serving.executors.request_states import RequestStates
from kimik3_lab.serving.executors.step_metadata import StepMetadata
from kimik3_lab.serving.executors.step_parts import Decodes, Prefill, StateRows
from kimik3_lab.serving.executors.torch_executor import TorchExecutor

pytestmark = pytest.mark.usefixtures("one_thread")

MUTANTS = Mutants()
mutant = MUTANTS.add


# -- columns -----------------------------------------------------------------------------------


@mutant("caching", "the state does not move along when its column changes")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KdaStates, "_moves", lambda self, *arguments: [])


@mutant("caching", "the state moves, its convolution window does not")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    def move(self: Any, moves: Any) -> None:
        for state, _, _, target in moves:
            self.recurrent[:, target] = self.recurrent[:, state]

    monkeypatch.setattr(PagedCache, "move_states", move)


@mutant("caching", "a request that was found starts from zero")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    def begin(original: Any, self: Any, req_id: str, tables: Any, computed: int) -> None:
        original(self, req_id, tables, computed)
        if computed:
            running = self._running[req_id]
            self.cache.reset_states([table[running.column] for table in running.tables])

    wrap(monkeypatch, KdaStates, "begin", begin)


@mutant("seats", "a request that begins does not start from zero")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PagedCache, "reset_states", lambda self, rows: None)


@mutant("caching", "a hit is one column off")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    def begin(original: Any, self: Any, req_id: str, tables: Any, computed: int) -> None:
        original(self, req_id, tables, computed)
        self._running[req_id].column += computed > 0

    wrap(monkeypatch, KdaStates, "begin", begin)


@mutant("groups", "all state groups use the first one's blocks")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(original: Any, self: Any, chunk: Any) -> Any:
        found = original(self, chunk)
        return (found[0],) * len(found)

    wrap(monkeypatch, KdaStates, "_rows", rows)


@mutant("checkpoints", "shared blocks are not copied before they are written")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PagedCache, "copy_blocks", lambda self, pairs: None)


@mutant("checkpoints", "shared blocks are copied after the forward pass")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    copy = TorchExecutor._copy_blocks
    monkeypatch.setattr(TorchExecutor, "_copy_blocks", lambda self, pairs: None)

    def execute(original: Any, self: Any, plan: Any) -> Any:
        result = original(self, plan)
        copy(self, plan.kv_cache_block_copies)
        return result

    wrap(monkeypatch, TorchExecutor, "execute_model", execute)


# -- checkpoints -------------------------------------------------------------------------------


def export(monkeypatch: pytest.MonkeyPatch, **change: Callable[[Prefill], Any]) -> None:
    """Change the part of every chunk that exports a state."""

    def prefill(original: Any, self: Any, segment: Any, row: int) -> Prefill:
        part = original(self, segment, row)
        if not part.checkpoint_at:
            return part
        return dataclasses.replace(part, **{name: new(part) for name, new in change.items()})

    wrap(monkeypatch, StepMetadata, "_prefill", prefill)


@mutant("checkpoints", "a checkpoint is exported a token late")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    export(monkeypatch, checkpoint_at=lambda part: part.checkpoint_at + 1)


@mutant("checkpoints", "a checkpoint is exported into the running state's block")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    export(monkeypatch, checkpoint_rows=lambda part: part.state_rows)


@mutant("checkpoints", "a checkpoint has the state, but no convolution window")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    def conv(original: Any, self: Any, part: Prefill, *rest: Any) -> Any:
        return original(self, dataclasses.replace(part, checkpoint_at=0), *rest)

    wrap(monkeypatch, PagedMixer, "_conv_prefill", conv)


# -- roll-back ---------------------------------------------------------------------------------


@mutant("seats", "rejected drafts stay in the state")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(original: Any, self: Any, chunk: Any) -> tuple[StateRows, ...]:
        return tuple(
            dataclasses.replace(
                found, num_accepted=len(found.rows) if found.num_accepted > 1 else 1
            )
            for found in original(self, chunk)
        )

    wrap(monkeypatch, KdaStates, "_rows", rows)


@mutant("seats", "the state is one scratch row off")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    def decodes(original: Any, self: Any, part: Decodes, *rest: Any) -> Any:
        before = part.num_accepted.sub(1).clamp(min=1)
        return original(self, dataclasses.replace(part, num_accepted=before), *rest)

    wrap(monkeypatch, PagedMixer, "_kda_decodes", decodes)


@mutant("seats", "the state is rolled back, its convolution window is not")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    def conv(original: Any, self: Any, part: Decodes, *rest: Any) -> Any:
        first = torch.ones_like(part.num_accepted)
        return original(self, dataclasses.replace(part, num_accepted=first), *rest)

    wrap(monkeypatch, PagedMixer, "_conv_decodes", conv)


@mutant("groups", "a request without a draft starts from its first row (vLLM: verify path)")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(original: Any, self: Any, chunk: Any) -> tuple[StateRows, ...]:
        found = original(self, chunk)
        if chunk.stop - chunk.start > 1:
            return found
        return tuple(dataclasses.replace(rows, num_accepted=1) for rows in found)

    wrap(monkeypatch, KdaStates, "_rows", rows)


@mutant("caching, slots", "a block boundary among accepted drafts leaves no state behind")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KdaStates, "_boundary", lambda self, start, stop: 0)


@mutant("caching, records", "a commit does not write the state at a block boundary")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    def commit(original: Any, self: Any, commits: Any) -> None:
        original(self, [c._replace(boundary=0) for c in commits])

    wrap(monkeypatch, PagedMixer, "commit", commit)


@mutant("seats, records", "records are never committed")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PagedMixer, "commit", lambda self, commits: None)


@mutant("seats, records", "a commit forgets the last accepted token")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    original = kda_records.commit
    monkeypatch.setattr(kda_records, "commit", lambda s, r, count: original(s, r, count - 1))


@mutant("seats, records", "a commit does not let the state decay")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    original = kda_records.commit

    def commit(state: Any, records: Any, count: Any) -> Any:
        forgets_nothing = dataclasses.replace(records, decay=records.decay * 0)
        return original(state, forgets_nothing, count)

    monkeypatch.setattr(kda_records, "commit", commit)


@mutant("preemption", "placeholder drafts may be accepted")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Draft, "num_known", property(lambda self: len(self.token_ids)))
    verify = torch_executor.verify_batch

    def keep_all(logits: Any, drafts: Any, *rest: Any, **keywords: Any) -> Any:
        zeros = [dataclasses.replace(d, token_ids=[max(t, 0) for t in d.token_ids]) for d in drafts]
        results = verify(logits, zeros, *rest, **keywords)
        return [
            [*d.token_ids, *r[-1:]] if -1 in o.token_ids else r
            for o, d, r in zip(drafts, zeros, results, strict=True)
        ]

    monkeypatch.setattr(torch_executor, "verify_batch", keep_all)


# -- rows --------------------------------------------------------------------------------------


@mutant("seats", "a token to verify sees the drafts behind it")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(original: Any, self: Any, q: Any, rows: Any, kv_b: Any, hidden: Any) -> Any:
        sees_all = None if hidden is None else hidden & hidden.all(1, keepdim=True)
        return original(self, q, rows, kv_b, sees_all)

    wrap(monkeypatch, PagedMixer, "_mla_decodes", attend)


@mutant("caching", "padding is attended to")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(original: Any, self: Any, q: Any, rows: Any, kv_b: Any, hidden: Any) -> Any:
        return original(self, q, rows, kv_b, None)

    wrap(monkeypatch, PagedMixer, "_mla_decodes", attend)


@mutant("seats", "drafts are verified against the row before theirs")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    verify = torch_executor.verify_batch
    monkeypatch.setattr(
        torch_executor,
        "verify_batch",
        lambda logits, *rest, **keywords: verify(logits.roll(1, 0), *rest, **keywords),
    )


@mutant("caching", "rows are gathered in another order than the states they belong to")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    class Reversed:
        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        @staticmethod
        def arange(*arguments: Any, **keywords: Any) -> Any:
            return torch.arange(*arguments, **keywords).flip(0)

    monkeypatch.setattr(paged_mixer, "torch", Reversed())


@mutant("preemption", "a preempted request goes on with its old table")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    def sit_down(original: Any, self: Any, req_id: str, block_ids: Any, computed: int) -> None:
        old = self._requests[req_id].block_ids
        original(self, req_id, block_ids, computed)
        if old:
            slot = self._requests[req_id].slot
            self.cache.set_blocks(slot, 0, old[0][: len(block_ids[0])])

    wrap(monkeypatch, RequestStates, "_sit_down", sit_down)


# -- the tests ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_right_executor_says_what_the_model_says_alone(name: str) -> None:
    scenario = SCENARIOS[name]
    outcome = play(scenario)
    assert (outcome.hits > 0) == bool(scenario.cache.get("enable_prefix_caching"))
    assert outcome.preemptions > 0 or name != "preemption"


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_executor_is_found_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scenario, patch = MUTANTS[name]
    patch(monkeypatch)
    assert_found_out(SCENARIOS[scenario])

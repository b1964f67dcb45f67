"""The probe of served KDA states: silent on a right executor, and it names what is wrong."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from executor_world import GuessingDrafter, micro_model

from kimik3_lab.serving import CacheConfig, Engine, Request, SchedulerConfig, make_scheduler
from kimik3_lab.serving.executors.async_states import AsyncKdaStates
from kimik3_lab.serving.executors.async_tables import SeatTables
from kimik3_lab.serving.executors.kda_states import KdaStates
from kimik3_lab.serving.executors.paged_mixer import PagedMixer
from kimik3_lab.serving.executors.state_copies import read_state
from kimik3_lab.serving.executors.state_probe import StateProbe, WrongState
from kimik3_lab.serving.executors.torch_executor import TorchExecutor

pytestmark = pytest.mark.usefixtures("one_thread")

_DRAW = Random(1)
TRUNK = [_DRAW.randrange(3, 64) for _ in range(50)]
PROMPTS = {"a": TRUNK[:10], "b": TRUNK, "c": [*TRUNK[:16], 9, 8, 7]}
HITS = {
    "num_kda_groups": 2, "enable_prefix_caching": True, "prefix_match_unit": 4,
    "checkpoint_alignment": 4, "prefill_checkpoints": "internal",
}  # fmt: skip
TOKENS = 6
#: Reference states that all probes of this file share: they have one model.
KNOWN: dict[tuple[int, ...], Any] = {}


@pytest.fixture(scope="module")
def model() -> Any:
    return micro_model()


def watched(
    model: Any,
    cache: dict[str, Any],
    *,
    drafts: int = 0,
    seats: int = 1,
    ahead: bool = False,
    known: dict[tuple[int, ...], Any] | None = KNOWN,
) -> StateProbe:
    """Serve the prompts and return the probe."""
    config = CacheConfig(60, 16, **cache)
    drafter, speculation = None, {}
    if drafts:
        drafter = GuessingDrafter(drafts, Random(0), model.config.vocab_size)
        for name, prompt in PROMPTS.items():
            drafter.texts[name] = prompt + model.generate(prompt, TOKENS, stop_token_ids=())
        speculation = {"speculative_method": "dspark", "num_speculative_tokens": drafts}
    executor = TorchExecutor(model, config, seats, drafter=drafter)  # type: ignore[arg-type]
    probe = StateProbe(executor, known=known)
    scheduling: Any = {"async_scheduling": ahead, **speculation}
    engine = Engine(make_scheduler(SchedulerConfig(seats, 64, 96, **scheduling), config), executor)
    for name, prompt in PROMPTS.items():
        engine.add_request(Request(name, prompt, max_tokens=TOKENS))
    while engine.has_unfinished_requests() and probe.first is None:
        engine.step()
    return probe


def first(probe: StateProbe) -> WrongState:
    assert probe.first is not None
    return probe.first


@pytest.mark.parametrize("cache", [{}, HITS], ids=["seats", "hits"])
@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("ahead", [False, True])
def test_a_right_executor_has_right_states(
    model: Any, cache: dict[str, Any], drafts: int, ahead: bool
) -> None:
    if drafts and cache:
        cache = {"num_kda_groups": 2, "enable_prefix_caching": True}
    probe = watched(model, cache, drafts=drafts, seats=1 if cache else 3, ahead=ahead)
    assert probe.first is None and probe.num_steps > 3


def test_a_name_that_nobody_wrote_a_state_for(model: Any) -> None:
    found = first(watched(model, HITS | {"hash_written_states_only": False}))
    assert (found.req_id, found.start, found.layer_id, found.heads) == ("c", 16, 0, (0, 1))
    assert found.part == "state" and found.looks_like == "begun from a after 8 tokens"


def test_what_one_probe_has_read_another_need_not(model: Any) -> None:
    wrong, known = HITS | {"hash_written_states_only": False}, {}
    by_itself = watched(model, wrong, known=None)
    one, two = watched(model, wrong, known=known), watched(model, wrong, known=known)
    assert one.first == two.first == by_itself.first
    # A state for each beginning, and each read once: those of b begin as a's do, and c's.
    assert one._known is two._known is known
    texts = [tuple(ids) for ids in one._read.values()]
    assert set(known) == {text[:n] for text in texts for n in range(1, len(text) + 1)}


def test_drafts_that_stay(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    accept = KdaStates.accept

    def accept_all(self: Any, verified: Any) -> Any:
        commits = accept(self, verified)
        for chunk, _ in verified:
            self._running[chunk.req_id].num_accepted = chunk.stop - chunk.start
        return commits

    monkeypatch.setattr(KdaStates, "accept", accept_all)
    found = first(watched(model, {}, drafts=3, seats=3))
    assert found.part == "state and window" and "with all 3 drafts" in found.looks_like


@pytest.mark.parametrize("states", ["slots", "records"])
def test_drafts_that_stay_in_a_step_in_flight(
    model: Any, monkeypatch: pytest.MonkeyPatch, states: str
) -> None:
    settle, advance = AsyncKdaStates.settle, SeatTables.advance

    def accept_all(self: Any, verified: Any, starts: Any, counts: Any) -> Any:
        rows = counts.new_tensor([chunk.stop - chunk.start for chunk in verified])
        return settle(self, verified, starts, rows)

    def take_the_last(self: Any, rows: Any, *rest: Any) -> None:
        advance(self, rows, *rest)
        self.num_accepted[rows.slots] = rows.counts.where(rows.num_drafts > 0, 1)

    if states == "records":
        monkeypatch.setattr(AsyncKdaStates, "settle", accept_all)
    else:
        monkeypatch.setattr(SeatTables, "advance", take_the_last)
    cache = {"speculative_states": states}
    found = first(watched(model, cache, drafts=3, seats=3, ahead=True))
    assert found.part == "state and window" and "with all 3 drafts" in found.looks_like


def test_an_id_that_is_used_again(model: Any) -> None:
    config = CacheConfig(60, 16)
    executor = TorchExecutor(model, config, 1)
    probe = StateProbe(executor, known=KNOWN)
    scheduling = SchedulerConfig(1, 64, 96, async_scheduling=True)
    engine = Engine(make_scheduler(scheduling, config), executor)
    for prompt in (PROMPTS["a"], PROMPTS["c"][3:]):
        engine.abort("a")  # its last step is still in flight
        engine.add_request(Request("a", prompt, max_tokens=TOKENS))
        engine.step()
        engine.step()
    while engine.has_unfinished_requests():
        engine.step()
    assert probe.first is None and probe.num_steps == engine.stats().num_steps


def test_a_hit_that_starts_from_zero(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = KdaStates.begin

    def empty(self: Any, req_id: str, tables: Any, computed: int) -> None:
        begin(self, req_id, tables, computed)
        if computed:
            running = self._running[req_id]
            self.cache.reset_states([table[running.column] for table in running.tables])

    monkeypatch.setattr(KdaStates, "begin", empty)
    found = first(watched(model, HITS))
    assert found.start > 0 and found.looks_like == "begun from zero"


def test_one_head_of_one_layer(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = PagedMixer._kda_decodes

    def off(self: Any, part: Any, layer: Any, layer_id: int, inputs: Any) -> Any:
        out = decode(self, part, layer, layer_id, inputs)
        if layer_id == 1:
            layer.recurrent[part.state_rows[layer.group][:, 0], 1] *= 1 + 1e-6
        return out

    monkeypatch.setattr(PagedMixer, "_kda_decodes", off)
    found = first(watched(model, {}))
    assert (found.layer_id, found.heads, found.part) == (1, (1,), "state")
    assert found.error < 1e-5 and found.looks_like == "no state of these texts"


def test_who_does_not_run_has_no_state(model: Any) -> None:
    executor = TorchExecutor(model, CacheConfig(9), 1)
    with pytest.raises(ValueError, match="'x' is not running"):
        read_state(executor, "x")

"""The simulated executor counts each step as it was planned, and draws what is accepted."""

from __future__ import annotations

from collections.abc import Callable
from math import log
from random import Random
from statistics import stdev
from typing import Any

import pytest
from simulation_support import Prices, check_steps, drafting, plain, record

from kimik3_lab.performance.step_work import StepWork, decode_work, prefill_work
from kimik3_lab.serving import CacheConfig, Engine, Request, SamplingParams
from kimik3_lab.serving.async_scheduler import make_scheduler
from kimik3_lab.serving.outputs import ModelRunnerOutput
from kimik3_lab.serving.presets import LADDER, MAIN_2026_09_13, V0_27_1
from kimik3_lab.serving.scheduler import Scheduler
from kimik3_lab.simulation import SimulatedExecutor
from kimik3_lab.simulation.acceptance import AcceptanceModel, chance_of_mean
from kimik3_lab.simulation.arrivals import Queue
from kimik3_lab.simulation.closed_loop import Streams
from kimik3_lab.simulation.requests import SimulationRequest, make_request


def works(spec: Any, *requests: tuple[int, int]) -> list[StepWork]:
    asked = [
        SimulationRequest(f"request-{i}", 0.0, *lengths)
        for i, lengths in enumerate(requests, start=1)
    ]
    run = record(spec, Queue(asked))
    check_steps(run)
    return [step.work for step in run.steps]


def test_a_prompt_then_one_row_a_token() -> None:
    assert works(plain(), (10, 3)) == [
        prefill_work(10),
        decode_work(1, context=10),
        decode_work(1, context=11),
    ]


def test_a_chunk_inside_a_prompt_reads_what_is_before_it() -> None:
    spec = plain(scheduler={"max_num_batched_tokens": 8})
    assert works(spec, (13, 1)) == [
        prefill_work(8, last=False),
        prefill_work(5, start=8),
    ]


def test_prompt_and_decode_in_one_step() -> None:
    spec = plain(scheduler={"max_num_batched_tokens": 6})
    mixed = works(spec, (4, 3), (4, 1))[1]
    assert mixed == StepWork(
        num_tokens=3,
        num_prefill_tokens=2,
        num_prefill_seqs=1,
        num_decode_tokens=1,
        num_decode_seqs=1,
        decode_context=4,
        prefill_pairs=2 * 2 + 3,
        num_logits=2,
    )


def test_drafts_take_rows_and_logits_and_the_drafter_works_for_everybody() -> None:
    found = works(drafting(choices={"acceptance_length": 1.0}), (10, 3))
    assert found == [
        prefill_work(10, num_speculative_tokens=8),
        decode_work(1, context=10, num_speculative_tokens=8),
        decode_work(1, context=11, num_speculative_tokens=8),
    ]


def test_all_drafts_right() -> None:
    found = works(drafting(choices={"acceptance_length": 9.0}), (10, 19))
    assert [work.decode_context for work in found[1:]] == [10, 19]


def test_placeholder_drafts_are_wrong() -> None:
    """A last token is padded beside others that decode; nobody has drafted for it."""
    caching = next(rung for rung in LADDER if rung.name == "prefix caching")
    spec = drafting(
        preset=caching,
        cache={"block_size": 16},
        scheduler={"eagle_block_rule": "lookahead_hash"},
        choices={"acceptance_length": 9.0},
    )
    asked = [
        SimulationRequest("request-1", 0.0, 65, 100, (1, 2, 3, 4, 5), 16),
        SimulationRequest("request-2", 5.0, 65, 30, (1, 2, 3, 4, 6), 16),
    ]
    run = record(spec, Queue(asked))
    first = next(step for step in run.steps if "request-2" in step.scheduled)
    assert (first.scheduled["request-2"], first.drafts["request-2"]) == (9, 8)
    assert first.sampled["request-2"] == 1
    assert first.work.num_decode_seqs == 2
    assert run.log.records[1].cached_tokens == 64


@pytest.mark.parametrize("preset", LADDER, ids=lambda preset: preset.name)
@pytest.mark.parametrize("blocks", [None, 130])
def test_every_token_is_computed_once(preset: Any, blocks: int | None) -> None:
    """With few blocks, requests lose theirs and are computed anew."""
    rng = Random(7)
    if blocks is not None and preset.cache.get("dcp_world_size", 1) > 1:
        pytest.skip("blocks of eight ranks are too long to run short of them here")
    asked = [
        SimulationRequest(f"request-{i}", 3.0 * i, rng.randrange(1, 3000), rng.randrange(1, 900))
        for i in range(1, 25)
    ]
    prices = Prices(step=0.5, prefill=1e-3, decode=1e-3)
    spec = drafting(prices, preset=preset, num_blocks=blocks, max_model_len=4000)
    run = record(spec, Queue(asked))
    check_steps(run)
    assert run.log.completed == 24
    assert [r.output_tokens for r in run.log.records] == [a.output_tokens for a in asked]
    totals = run.executor.totals
    assert totals.acceptance_length == pytest.approx(3.4, rel=0.06)
    assert totals.seconds == pytest.approx(sum(s.end - s.start for s in run.steps))
    assert sum(totals.parts.values()) == pytest.approx(totals.seconds)


def test_preemption_is_seen() -> None:
    asked = [SimulationRequest(f"request-{i}", 0.0, 1000, 900) for i in range(1, 9)]
    spec = plain(num_blocks=32, max_model_len=4000)
    run = record(spec, Queue(asked))
    check_steps(run)
    assert run.executor.totals.preemptions > 0
    again = sum(step.work.num_prefill_tokens for step in run.steps)
    assert again > sum(request.prompt_tokens for request in asked)


# -- the same decisions as the scheduler alone --------------------------------------------------


@pytest.mark.parametrize("preset", [V0_27_1, MAIN_2026_09_13, LADDER[-2]], ids=lambda p: p.name)
def test_decisions_are_those_of_the_scheduler_alone(preset: Any) -> None:
    spec = drafting(Prices(1.0, 1e-3, 1e-3), preset=preset, num_blocks=260, max_model_len=9000)
    run = record(spec, Streams(6, 2000, 300), stop_s=400.0)
    scheduler = Scheduler(spec.scheduler_config, spec.cache_config)
    coming = [
        (record_.start, make_request(SimulationRequest(f"request-{i}", 0.0, 2000, 300), i - 1))
        for i, record_ in enumerate(run.log.records, start=1)
    ]
    for step in run.steps:
        while coming and coming[0][0] <= step.start:
            scheduler.add_request(coming.pop(0)[1])
        output = scheduler.schedule()
        assert output.num_scheduled_tokens == step.scheduled
        assert {i: len(d) for i, d in output.scheduled_spec_decode_tokens.items()} == step.drafts
        sampled = [[5] * step.sampled[i] for i in output.num_scheduled_tokens]
        scheduler.update_from_output(
            output, ModelRunnerOutput(list(output.num_scheduled_tokens), sampled)
        )
        scheduler.update_draft_token_ids({i: [5] * 8 for i, n in step.sampled.items() if n})
    assert len(run.steps) > 300


def test_asynchronous_scheduling_comes_to_the_same() -> None:
    runs = [
        record(drafting(scheduler={"async_scheduling": on}), Streams(3, 200, 90), stop_s=300.0)
        for on in (False, True)
    ]
    assert [s.scheduled for s in runs[0].steps] == [s.scheduled for s in runs[1].steps]
    assert [s.sampled for s in runs[0].steps] == [s.sampled for s in runs[1].steps]


# -- accepted lengths ---------------------------------------------------------------------------


@pytest.mark.parametrize(("mean", "k"), [(1.0, 8), (2.61, 7), (3.4, 8), (4.73, 7), (9.0, 8)])
def test_the_mean_is_what_was_asked_for(mean: float, k: int) -> None:
    model = AcceptanceModel.of_mean(mean, k)
    assert model.acceptance_length == pytest.approx(mean)
    draw = model.stream("x")
    lengths = [1 + draw(k) for _ in range(30_000)]
    assert sum(lengths) / len(lengths) == pytest.approx(mean, rel=0.02)
    assert min(lengths) >= 1 and max(lengths) <= 1 + k


def test_a_draft_is_as_good_with_fewer_of_them() -> None:
    eight, four = AcceptanceModel.of_mean(3.4, 8), AcceptanceModel.of_mean(3.4, 4, at=8)
    chance = chance_of_mean(3.4, 8)
    assert eight.acceptance_length == pytest.approx(3.4)
    assert four.acceptance_length == pytest.approx(sum(chance**j for j in range(5)))


@pytest.mark.parametrize("spread", [0.1, 0.25])
def test_requests_differ_and_the_mean_stays(spread: float) -> None:
    """Tokens over verifications, for many requests of one output length."""
    model = AcceptanceModel.of_mean(3.4, 8, spread=spread)
    lengths = []
    for request in range(400):
        draw, tokens, steps = model.stream(str(request)), 0, 0
        while tokens < 1000:
            tokens, steps = tokens + 1 + draw(8), steps + 1
        lengths.append(tokens / steps)
    harmonic = len(lengths) / sum(1 / length for length in lengths)
    assert harmonic == pytest.approx(3.4, rel=0.02)
    assert stdev(map(log, lengths)) == pytest.approx((spread**2 + 0.04**2) ** 0.5, rel=0.15)
    assert model.acceptance_length == pytest.approx(3.4, rel=1e-3)


def test_draws_depend_on_seed_and_request_only() -> None:
    def stream(seed: int, name: str) -> list[int]:
        draw = AcceptanceModel.of_mean(3.4, 8, seed=seed).stream(name)
        return [draw(8) for _ in range(20)]

    assert stream(1, "a") == stream(1, "a")
    assert stream(1, "a") != stream(2, "a") != stream(2, "b")


@pytest.mark.parametrize("survival", [[0.5, 0.6], [1.2], [0.5, -0.1]])
def test_no_curve(survival: list[float]) -> None:
    with pytest.raises(ValueError, match="survival must fall"):
        AcceptanceModel(survival)


def test_curves_of_different_length() -> None:
    with pytest.raises(ValueError, match=r"curves of one length, got \[1, 2\]"):
        AcceptanceModel([0.5], [0.5, 0.25])


@pytest.mark.parametrize("mean", [0.5, 9.5])
def test_no_mean(mean: float) -> None:
    with pytest.raises(ValueError, match=r"8 drafts brings 1 to 9 tokens.*got"):
        AcceptanceModel.of_mean(mean, 8)


def test_a_drafter_needs_an_acceptance_model() -> None:
    with pytest.raises(ValueError, match="needs an acceptance model for 8 drafts"):
        SimulatedExecutor(Prices(), 8)


def test_the_engine_takes_it_like_any_other() -> None:
    config = plain().scheduler_config
    engine = Engine(make_scheduler(config, CacheConfig(99)), SimulatedExecutor(Prices()))
    engine.add_request(Request("a", [5] * 30, SamplingParams(max_tokens=4)))
    news = [engine.step() for _ in range(4)]
    assert [len(item[0].new_token_ids) for item in news] == [1] * 4
    assert news[-1][0].finish_reason == "length"
    assert engine.executor.clock.now == 4.0


# -- wrong executors are found out --------------------------------------------------------------


class Mutant(SimulatedExecutor):
    def _compute(self, output: Any) -> Any:
        work, result = super()._compute(output)
        return self.spoil(work, result)

    spoil: Callable[..., Any]


def _changed(work: StepWork, **changes: int) -> StepWork:
    fields = {name: getattr(work, name) for name in StepWork.__dataclass_fields__}
    return StepWork(**{**fields, **changes})


def _too_generous(self: Any, work: StepWork, result: ModelRunnerOutput) -> Any:
    tokens = [ids * 9 if ids else ids for ids in result.sampled_token_ids]
    return work, ModelRunnerOutput(result.req_ids, tokens)


MUTANTS: dict[str, Callable[..., Any]] = {
    "pairs of a chunk without what is before it": lambda self, work, result: (
        _changed(work, prefill_pairs=sum(range(work.num_prefill_tokens + 1))), result),
    "context counted in blocks": lambda self, work, result: (
        _changed(work, decode_context=work.decode_context // 16), result),
    "one logit a request": lambda self, work, result: (
        _changed(work, num_logits=sum(map(bool, result.sampled_token_ids))), result),
    "drafts forgotten": lambda self, work, result: (
        _changed(work, num_tokens=work.num_prefill_tokens + work.num_decode_seqs,
                 num_decode_tokens=work.num_decode_seqs), result),
    "more accepted than drafted": _too_generous,
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_executor_is_found_out(name: str) -> None:
    kind = type("Wrong", (Mutant,), {"spoil": MUTANTS[name]})
    spec = drafting(Prices(1.0, 1e-3, 1e-3))
    check_steps(record(spec, Streams(3, 2000, 50), stop_s=100.0, make=type("Right", (Mutant,), {
        "spoil": lambda self, work, result: (work, result)})))  # fmt: skip
    with pytest.raises(Exception, match=r"priced as|sampled|goes on|cannot"):
        check_steps(record(spec, Streams(3, 2000, 50), stop_s=100.0, make=kind))

"""Speculation inside the executor: the drafter's context, seeds, logprobs, placeholders."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from executor_world import GuessingDrafter, micro_drafter, micro_model

from kimik3_lab.reference.drafter import DSparkDrafter
from kimik3_lab.reference.model import K3ForCausalLM
from kimik3_lab.serving import (
    CacheConfig,
    Engine,
    Request,
    SamplingParams,
    Scheduler,
    SchedulerConfig,
)
from kimik3_lab.serving.executors.torch_executor import TorchExecutor

pytestmark = pytest.mark.usefixtures("one_thread")

K = 3
DRAFTS = {"speculative_method": "dspark", "num_speculative_tokens": K}
CACHING = {"block_size": 8, "num_kda_groups": 2, "enable_prefix_caching": True}


@pytest.fixture(scope="module")
def model() -> K3ForCausalLM:
    return micro_model()


@pytest.fixture(scope="module")
def drafter(model: K3ForCausalLM) -> DSparkDrafter:
    return micro_drafter(model)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = Random(4)
    return [[rng.randrange(3, 64) for _ in range(n)] for n in (21, 6, 13, 1)]


def make_engine(
    model: K3ForCausalLM,
    drafter: Any = None,
    *,
    seqs: int = 4,
    budget: int = 64,
    num_blocks: int = 80,
    scheduler: dict[str, Any] | None = None,
    cache: dict[str, Any] | None = None,
    **executor: Any,
) -> Engine:
    cache_config = CacheConfig(num_blocks, **(CACHING if cache is None else cache))
    if scheduler is None:
        scheduler = {} if drafter is None else DRAFTS
    if isinstance(drafter, DSparkDrafter):
        executor["num_speculative_tokens"] = K
    return Engine(
        Scheduler(SchedulerConfig(seqs, budget, 96, **scheduler), cache_config),
        TorchExecutor(model, cache_config, seqs, drafter=drafter, **executor),
    )


def tokens_of(engine: Engine, prompts: Sequence[list[int]], **params: Any) -> list[list[int]]:
    sampling = SamplingParams(**{"max_tokens": 9, "ignore_eos": True, **params})
    return [r.token_ids for r in engine.generate(prompts, sampling, progress=False)]


def test_a_real_drafter_changes_no_greedy_token(
    model: K3ForCausalLM, drafter: DSparkDrafter, prompts: list[list[int]]
) -> None:
    expected = [model.generate(prompt, 9, stop_token_ids=()) for prompt in prompts]
    engine = make_engine(model, drafter)
    assert tokens_of(engine, prompts) == expected
    counters = engine.executor.counters
    assert counters.drafter_forwards == counters.forwards  # one for all requests of a step


def test_a_hit_brings_the_drafters_rows_along(
    model: K3ForCausalLM, drafter: DSparkDrafter, prompts: list[list[int]]
) -> None:
    """The drafter reads hidden states that a hit never computes: they are in the found blocks."""
    drafts = []
    engine = make_engine(model, drafter, cache=CACHING | {"prefix_match_unit": 4})
    for name in ("first", "again"):
        engine.add_request(Request(name, prompts[0], max_tokens=9))
        seen: list[list[int]] = []
        while engine.has_unfinished_requests():
            engine.step()
            seen += engine.executor.take_draft_token_ids().values()
        drafts.append(seen)
    assert engine.stats().scheduler.prefix_cache_hits == 20
    assert engine.executor.counters.block_copies > 0
    # The second request needs fewer steps for its prompt, and drafts the same from there on.
    assert drafts[0][-len(drafts[1]) :] == drafts[1]
    assert len(drafts[1][0]) == K


def test_a_seed_repeats_in_any_company_and_with_any_drafts(
    model: K3ForCausalLM, drafter: DSparkDrafter, prompts: list[list[int]]
) -> None:
    params = {"temperature": 1.0, "top_p": 0.95, "seed": 5, "max_tokens": 24}
    alone = [tokens_of(make_engine(model), [prompt], **params)[0] for prompt in prompts]
    assert tokens_of(make_engine(model), prompts, **params) == alone
    coupled = {"draft_sample_method": "probabilistic", "rejection_sample_method": "coupled"}
    assert tokens_of(make_engine(model, drafter, **coupled), prompts, **params) == alone
    small = make_engine(model, drafter, num_blocks=30, budget=20, **coupled)
    assert tokens_of(small, prompts, **params) == alone
    assert small.stats().scheduler.num_preemptions > 0
    other = tokens_of(make_engine(model), prompts, **params | {"seed": 6})
    assert other != alone


@pytest.mark.parametrize("method", ["standard", "block"])
def test_a_seed_repeats_with_drafts_that_were_drawn(
    model: K3ForCausalLM, drafter: DSparkDrafter, prompts: list[list[int]], method: str
) -> None:
    params = {"temperature": 0.8, "seed": 5}
    drawn = {"draft_sample_method": "probabilistic", "rejection_sample_method": method}
    alone = [tokens_of(make_engine(model, drafter, **drawn), [p], **params)[0] for p in prompts]
    assert tokens_of(make_engine(model, drafter, **drawn), prompts, **params) == alone


def test_logprobs_are_those_of_the_model_with_drafts_and_without(
    model: K3ForCausalLM, drafter: DSparkDrafter, prompts: list[list[int]]
) -> None:
    sampling = [SamplingParams(6, logprobs=2), SamplingParams(6), SamplingParams(6, logprobs=0)]
    plain, drafting = (
        make_engine(model, d).generate(prompts[:3], sampling, progress=False)
        for d in (None, drafter)
    )
    assert [r.logprobs is None for r in plain] == [False, True, False]
    for a, b in zip(plain, drafting, strict=True):
        assert a.token_ids == b.token_ids
        for x, y in zip(a.logprobs or [], b.logprobs or [], strict=True):
            assert (x.token_id, x.rank, len(x.top)) == (y.token_id, y.rank, len(y.top))
            assert x.logprob == pytest.approx(y.logprob, abs=1e-9)
    assert [len(x.top) for x in plain[0].logprobs or []] == [2] * 6


def test_placeholder_drafts_are_computed_and_ignored(
    model: K3ForCausalLM, prompts: list[list[int]]
) -> None:
    """A prompt of one token beside a decode is padded with -1, so that all rows are alike."""
    guesser = GuessingDrafter(K, Random(0), model.config.vocab_size)
    engine = make_engine(model, guesser)
    plans = []
    execute = engine.executor.execute_model
    engine.executor.execute_model = lambda plan: (plans.append(plan), execute(plan))[1]
    expected, got = {}, {}
    for name, prompt in (("a", prompts[0]), ("b", prompts[3])):
        expected[name] = model.generate(prompt, 9, stop_token_ids=())
        guesser.texts[name] = prompt + expected[name]
        got[name] = []
        engine.add_request(Request(name, prompt, max_tokens=9))
        for _ in range(2):
            for news in engine.step():
                got[news.request_id] += news.new_token_ids
    while engine.has_unfinished_requests():
        for news in engine.step():
            got[news.request_id] += news.new_token_ids
    assert got == expected
    padded = [p for p in plans if p.scheduled_spec_decode_tokens.get("b") == [-1] * K]
    assert len(padded) == 1
    assert padded[0].num_scheduled_tokens["b"] == 1 + K


def test_wrong_numbers_of_drafts_are_refused(model: K3ForCausalLM, drafter: DSparkDrafter) -> None:
    with pytest.raises(ValueError, match="num_speculative_tokens=3, but the executor was made for"):
        make_engine(model, scheduler=DRAFTS)
    with pytest.raises(ValueError, match="executor was made for 3"):
        make_engine(model, drafter, scheduler=DRAFTS | {"num_speculative_tokens": 2})
    with pytest.raises(ValueError, match="num_speculative_tokens=2, but the drafter drafts 0"):
        TorchExecutor(model, CacheConfig(9), 1, num_speculative_tokens=2)

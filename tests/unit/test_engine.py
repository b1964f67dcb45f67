"""The engine: steps, errors, interrupts, refusals, generate()."""

from __future__ import annotations

import logging

import pytest

from kimik3_lab.serving import (
    CacheConfig,
    Engine,
    ModelRunnerOutput,
    Request,
    SamplingParams,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
)

CACHE = CacheConfig(num_blocks=17, block_size=4)


class CountingExecutor:
    """Samples the number of tokens known so far, so every token says where it came from."""

    def __init__(self) -> None:
        self.lengths: dict[str, int] = {}
        self.raise_on: dict[int, BaseException] = {}
        self.calls: list[SchedulerOutput] = []

    def execute_model(self, output: SchedulerOutput) -> ModelRunnerOutput:
        self.calls.append(output)
        if len(self.calls) in self.raise_on:
            raise self.raise_on[len(self.calls)]
        starts = {}
        for new in output.scheduled_new_reqs:
            self.lengths[new.req_id] = len(new.prompt_token_ids)
            starts[new.req_id] = new.num_computed_tokens
        for cached in output.scheduled_cached_reqs:
            starts[cached.req_id] = cached.num_computed_tokens
        sampled = []
        for req_id, count in output.num_scheduled_tokens.items():
            done = starts[req_id] + count == self.lengths[req_id]
            sampled.append([self.lengths[req_id]] if done else [])
            self.lengths[req_id] += done
        return ModelRunnerOutput(list(output.num_scheduled_tokens), sampled)


def make(
    executor: object | None = None, seqs: int = 2, budget: int = 64
) -> tuple[Engine, CountingExecutor]:
    executor = executor or CountingExecutor()
    return Engine(Scheduler(SchedulerConfig(seqs, budget, 64), CACHE), executor), executor


def all_blocks_are_free(engine: Engine) -> bool:
    return engine.stats().scheduler.kv_cache_usage == 0.0


def test_generate_keeps_the_order_of_the_prompts() -> None:
    engine, _ = make()
    params = [SamplingParams(max_tokens=n) for n in (4, 1, 2)]
    results = engine.generate([[5] * 3, [5] * 9, [5]], params, progress=False)
    assert [r.token_ids for r in results] == [[3, 4, 5, 6], [9], [1, 2]]
    assert {r.finish_reason for r in results} == {"length"}
    assert len({r.request_id for r in results}) == 3
    assert not engine.has_unfinished_requests()
    assert engine.step() == []


def test_generate_shows_a_progress_bar(capsys: pytest.CaptureFixture[str]) -> None:
    engine, _ = make()
    engine.generate([[5], [5]], SamplingParams(max_tokens=1))
    assert "/2 [" in capsys.readouterr().err
    engine.generate([[5]], progress=False)
    assert capsys.readouterr().err == ""


def test_generate_leaves_nothing_behind_when_a_prompt_is_refused() -> None:
    engine, _ = make()
    with pytest.raises(ValueError, match="max_model_len"):
        engine.generate([[5], [5] * 64], progress=False)
    assert not engine.has_unfinished_requests()
    with pytest.raises(ValueError, match="2 prompts, but 1 sampling_params"):
        engine.generate([[5], [5]], [SamplingParams()], progress=False)
    assert engine.generate([], progress=False) == []


def test_generate_serves_other_requests_along_the_way() -> None:
    engine, executor = make()
    engine.add_request(Request("other", [5], max_tokens=50))
    engine.generate([[5]], SamplingParams(max_tokens=2), progress=False)
    assert engine.has_unfinished_requests()
    assert executor.lengths["other"] == 3


def test_eos_comes_from_the_executor() -> None:
    executor = CountingExecutor()
    executor.eos_token_id = 4
    engine, _ = make(executor)
    (result,) = engine.generate([[5, 5]], progress=False)
    assert (result.token_ids, result.finish_reason) == ([2, 3, 4], "stop")
    (result,) = engine.generate([[5, 5]], SamplingParams(5, ignore_eos=True), progress=False)
    assert (result.token_ids, result.finish_reason) == ([2, 3, 4, 5, 6], "length")


def test_stats_count_steps_and_tokens() -> None:
    engine, _ = make(budget=4)
    engine.generate([[5] * 6, [5] * 2], SamplingParams(max_tokens=2), progress=False)
    stats = engine.stats()
    assert (stats.num_steps, stats.num_forwards, stats.num_failed_steps) == (3, 3, 0)
    assert stats.num_scheduled_tokens == 6 + 2 + 2  # the last token of each is not computed
    assert stats.num_generated_tokens == 4


def test_a_failing_step_ends_its_requests_and_the_engine_lives(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine, executor = make(seqs=2)
    for name in ("a", "b", "c"):
        engine.add_request(Request(name, [5] * 3, max_tokens=4))
    engine.step()
    executor.raise_on[2] = RuntimeError("out of luck")
    with caplog.at_level(logging.ERROR, logger="kimik3_lab"):
        news = engine.step()
    assert "out of luck" in caplog.text
    assert [(n.request_id, n.new_token_ids, n.finish_reason) for n in news] == [
        ("a", [], "error"),
        ("b", [], "error"),
    ]
    assert engine.stats().scheduler.num_waiting_reqs == 1
    assert all_blocks_are_free(engine)
    tokens = []
    while engine.has_unfinished_requests():
        tokens += [t for n in engine.step() for t in n.new_token_ids]
    assert tokens == [3, 4, 5, 6]
    assert executor.calls[2].finished_req_ids == {"a", "b"}
    assert (engine.stats().num_failed_steps, engine.stats().num_forwards) == (1, 5)


def test_generate_reports_an_error_without_raising() -> None:
    engine, executor = make(seqs=1)
    executor.raise_on[2] = RuntimeError("out of luck")
    results = engine.generate([[5], [5]], SamplingParams(max_tokens=2), progress=False)
    assert [(r.token_ids, r.finish_reason) for r in results] == [([1], "error"), ([1, 2], "length")]


def test_an_interrupt_goes_through_and_leaves_nothing_behind() -> None:
    engine, executor = make(seqs=2)
    executor.raise_on[2] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        engine.generate([[5], [5], [5]], progress=False)
    assert not engine.has_unfinished_requests()
    assert all_blocks_are_free(engine)
    assert len(engine.generate([[5]], progress=False)[0].token_ids) == 16


@pytest.mark.parametrize("sampled", [[[]], [[4], [5]], None])
def test_a_wrong_result_is_an_error_not_an_endless_loop(sampled: list[list[int]] | None) -> None:
    class Wrong(CountingExecutor):
        def execute_model(self, output: SchedulerOutput) -> ModelRunnerOutput:
            if sampled is None:
                return ModelRunnerOutput([], [])
            return ModelRunnerOutput(list(output.num_scheduled_tokens), sampled)

    engine, _ = make(Wrong())
    (result,) = engine.generate([[5]], progress=False)
    assert result.finish_reason == "error"
    assert all_blocks_are_free(engine)


def test_a_token_inside_a_prompt_is_an_error() -> None:
    class Eager(CountingExecutor):
        def execute_model(self, output: SchedulerOutput) -> ModelRunnerOutput:
            ids = list(output.num_scheduled_tokens)
            return ModelRunnerOutput(ids, [[4]] * len(ids))

    engine, _ = make(Eager(), budget=2)
    assert engine.generate([[5] * 3], progress=False)[0].finish_reason == "error"


def test_abort() -> None:
    engine, executor = make()
    engine.add_request(Request("a", [5], max_tokens=50))
    engine.add_request(Request("b", [5], max_tokens=3))
    engine.step()
    engine.abort("a")
    engine.abort("a")
    engine.abort("unknown")
    assert [n.request_id for n in engine.step()] == ["b"]
    assert executor.calls[-1].finished_req_ids == {"a"}


def test_a_token_outside_the_vocabulary_is_refused() -> None:
    executor = CountingExecutor()
    executor.vocab_size = 10
    engine, _ = make(executor)
    engine.add_request(Request("good", [9]))
    with pytest.raises(ValueError, match=r"token id 10 .*vocabulary of 10"):
        engine.add_request(Request("bad", [3, 10, 4]))


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("max_num_seqs", 1, "max_num_seqs=2"),
        ("max_model_len", 63, "max_model_len=64"),
        ("cache_config", CacheConfig(num_blocks=5), "num_blocks=17"),
    ],
)
def test_an_executor_that_does_not_suit_the_scheduler_is_refused(
    attribute: str, value: object, message: str
) -> None:
    executor = CountingExecutor()
    setattr(executor, attribute, value)
    with pytest.raises(ValueError, match=message):
        make(executor)


def test_an_executor_may_refuse_what_it_cannot_compute() -> None:
    class Plain(CountingExecutor):
        def check_configs(self, scheduler_config: SchedulerConfig, cache: CacheConfig) -> None:
            if cache.enable_prefix_caching:
                raise ValueError("no prefix caching here")

    make(Plain())
    caching = CacheConfig(17, 4, enable_prefix_caching=True)
    with pytest.raises(ValueError, match="no prefix caching here"):
        Engine(Scheduler(SchedulerConfig(2, 64, 64), caching), Plain())


def test_drafts_of_the_executor_are_verified_in_the_next_step() -> None:
    class Drafting(CountingExecutor):
        def take_draft_token_ids(self) -> dict[str, list[int]]:
            return {req_id: [8, 9] for req_id in self.calls[-1].num_scheduled_tokens}

        def execute_model(self, output: SchedulerOutput) -> ModelRunnerOutput:
            self.calls.append(output)
            return ModelRunnerOutput(
                list(output.num_scheduled_tokens), [[7] for _ in output.num_scheduled_tokens]
            )

    config = SchedulerConfig(2, 64, 64, speculative_method="ngram", num_speculative_tokens=2)
    executor = Drafting()
    engine = Engine(Scheduler(config, CACHE), executor)
    (result,) = engine.generate([[5, 5]], SamplingParams(max_tokens=3), progress=False)
    assert result.token_ids == [7, 7, 7]
    counts = [output.num_scheduled_tokens["generate-0"] for output in executor.calls]
    assert counts == [2, 3, 3]  # the prompt, then a token and two drafts that are rejected

"""Steps in flight on the real executor: draws, logprobs, drafters, graphs and failures.

That no token changes in any mix of requests is in the worlds and scenarios
(tests/property/test_executor_world.py, test_async_executor_mutants.py).
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from executor_world import GuessingDrafter, micro_drafter, micro_model, quiet
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from kimik3_lab.reference.drafter import DSparkDrafter
from kimik3_lab.reference.model import K3ForCausalLM
from kimik3_lab.serving import (
    CacheConfig,
    Engine,
    Request,
    SamplingParams,
    Scheduler,
    SchedulerConfig,
    make_scheduler,
)
from kimik3_lab.serving.engine import GenerationResult
from kimik3_lab.serving.executors import async_steps
from kimik3_lab.serving.executors.cuda_graphs import Ahead, DecodeGraphs
from kimik3_lab.serving.executors.execution import ExecutionConfig
from kimik3_lab.serving.executors.torch_executor import TorchExecutor

pytestmark = pytest.mark.usefixtures("one_thread")

K = 3
TOKENS = 6
CACHING = {"block_size": 8, "num_kda_groups": 2, "enable_prefix_caching": True}
PROMPTS = [[Random(n).randrange(3, 64) for _ in range(n)] for n in (21, 6, 13, 1)]


@pytest.fixture(scope="module")
def model() -> K3ForCausalLM:
    return micro_model()


@pytest.fixture(scope="module")
def drafter(model: K3ForCausalLM) -> DSparkDrafter:
    return micro_drafter(model)


def make_engine(
    model: K3ForCausalLM, drafter: Any = None, *, ahead: bool, **executor: Any
) -> Engine:
    cache = CacheConfig(80, **CACHING)
    speculation: dict[str, Any] = {}
    if drafter is not None:
        speculation = {"speculative_method": "dspark", "num_speculative_tokens": K}
        executor["num_speculative_tokens"] = K
    config = SchedulerConfig(3, 40, 96, async_scheduling=ahead, **speculation)
    return Engine(
        make_scheduler(config, cache), TorchExecutor(model, cache, 3, drafter=drafter, **executor)
    )


def generate(engine: Engine, **params: Any) -> list[GenerationResult]:
    """Run prompts of which each has a temperature or seed of its own."""
    common = {"max_tokens": TOKENS, "ignore_eos": True, **params}
    each = [SamplingParams(**common, seed=i) for i in range(len(PROMPTS))]
    return engine.generate(PROMPTS, each, progress=False)


def same(
    model: K3ForCausalLM, drafter: Any = None, *, params: Any = None, **executor: Any
) -> Engine:
    """Compare both ways to run; return the engine that runs ahead."""
    ahead = make_engine(model, drafter, ahead=True, **executor)
    at_once = make_engine(model, drafter, ahead=False, **executor)
    params = params or {}
    assert [r.token_ids for r in generate(ahead, **params)] == [
        r.token_ids for r in generate(at_once, **params)
    ]
    return ahead


# -- tokens ------------------------------------------------------------------------------------


@pytest.mark.parametrize("metadata", ["eager", "packed"])
def test_draws_are_made_without_waiting(model: K3ForCausalLM, metadata: str) -> None:
    params = {"temperature": 1.0, "top_p": 0.9, "top_k": 20, "min_p": 0.01}
    engine = same(model, params=params, execution=ExecutionConfig(metadata=metadata))
    assert engine.executor.num_host_waits == 1  # for the very last step


def test_preemption_changes_no_draw(model: K3ForCausalLM) -> None:
    said = []
    for ahead in (False, True):
        cache = CacheConfig(10, 4)  # the longest fills seven of nine blocks
        config = SchedulerConfig(3, 40, 96, async_scheduling=ahead)
        engine = Engine(make_scheduler(config, cache), TorchExecutor(model, cache, 3))
        said.append([r.token_ids for r in generate(engine, temperature=1.0)])
        assert engine.stats().scheduler.num_preemptions > 0
    assert said[0] == said[1]


@pytest.mark.parametrize("greedily", [True, False])
def test_a_real_drafter_drafts_on_the_device(
    model: K3ForCausalLM, drafter: DSparkDrafter, greedily: bool
) -> None:
    engine = same(model, drafter, params={"temperature": 0.0 if greedily else 1.0})
    executor = engine.executor
    if greedily:
        assert executor.num_host_waits == 1
    else:  # a draw with drafts in flight has a position that the host does not know
        assert executor.num_host_waits == executor.counters.drafter_forwards


@pytest.mark.parametrize("method", ["standard", "block", "coupled"])
def test_drafts_that_were_drawn_wait_for_the_host(
    model: K3ForCausalLM, drafter: DSparkDrafter, method: Any
) -> None:
    engine = same(
        model,
        drafter,
        params={"temperature": 1.0},
        draft_sample_method="probabilistic",
        rejection_sample_method=method,
    )
    assert engine.executor.num_host_waits > engine.executor.counters.drafter_forwards


@pytest.mark.parametrize("drafts", [False, True])
def test_logprobs_are_the_same(model: K3ForCausalLM, drafter: DSparkDrafter, drafts: bool) -> None:
    results = [
        generate(make_engine(model, drafter if drafts else None, ahead=ahead), logprobs=2)
        for ahead in (True, False)
    ]
    for ahead, at_once in zip(*results, strict=True):
        assert ahead.logprobs is not None and at_once.logprobs is not None
        assert len(ahead.logprobs) == len(ahead.token_ids)
        for ours, theirs in zip(ahead.logprobs, at_once.logprobs, strict=True):
            assert (ours.token_id, ours.rank) == (theirs.token_id, theirs.rank)
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-9)
            assert [i for i, _ in ours.top] == [i for i, _ in theirs.top]


def test_some_ask_for_logprobs_and_some_draw(model: K3ForCausalLM) -> None:
    params = [
        SamplingParams(TOKENS, logprobs=0),
        SamplingParams(TOKENS, temperature=1.0, seed=3),
        SamplingParams(TOKENS, temperature=0.7, seed=4, logprobs=3),
        SamplingParams(TOKENS),
    ]
    ahead, at_once = (
        make_engine(model, ahead=a).generate(PROMPTS, params, progress=False) for a in (True, False)
    )
    assert [r.token_ids for r in ahead] == [r.token_ids for r in at_once]
    assert [r.logprobs and len(r.logprobs) for r in ahead] == [TOKENS, None, TOKENS, None]


def test_a_caller_s_verifier_is_asked(model: K3ForCausalLM, drafter: DSparkDrafter) -> None:
    engine = make_engine(model, drafter, ahead=True)
    executor, plain = engine.executor, make_engine(model, ahead=False)
    verify, seen = executor.verifier, []

    def keep_none(logits: Any, drafts: Any, *rest: Any, **keywords: Any) -> list[list[int]]:
        seen.extend(drafts)
        return [ids[:1] for ids in verify(logits, drafts, *rest, **keywords)]

    executor.verifier = keep_none
    assert [r.token_ids for r in generate(engine)] == [r.token_ids for r in generate(plain)]
    assert any(max(draft.token_ids, default=-1) >= 0 for draft in seen)


def test_a_drafter_that_answers_the_host_only(model: K3ForCausalLM) -> None:
    guesses = GuessingDrafter(K, Random(0), model.config.vocab_size)

    class OnHost:
        num_speculative_tokens = K

        def __getattr__(self, name: str) -> Any:
            if name == "propose_async":
                raise AttributeError(name)
            return getattr(guesses, name)

    engine = make_engine(model, OnHost(), ahead=True)
    for number, prompt in enumerate(PROMPTS):
        guesses.texts[f"generate-{number}"] = [
            *prompt,
            *model.generate(prompt, TOKENS, stop_token_ids=()),
        ]
    results = generate(engine)
    assert [r.token_ids for r in results] == [
        model.generate(prompt, TOKENS, stop_token_ids=()) for prompt in PROMPTS
    ]
    drafts = engine.stats().scheduler.spec_decoding_stats
    assert drafts is not None and drafts.num_accepted_tokens > 0


def test_who_stops_runs_once_more_for_nothing(model: K3ForCausalLM) -> None:
    said = model.generate(PROMPTS[0], TOKENS, stop_token_ids=())
    engine = make_engine(model, ahead=True)
    params = SamplingParams(TOKENS, stop_token_ids=(said[4],))
    (result,) = engine.generate(PROMPTS[:1], params, progress=False)
    stop = said.index(said[4]) + 1
    assert (result.token_ids, result.finish_reason) == (said[:stop], "stop")
    assert engine.stats().num_wasted_tokens == 1
    assert engine.stats().num_scheduled_tokens == len(PROMPTS[0]) + stop
    assert not engine.has_unfinished_requests()


# -- what waits --------------------------------------------------------------------------------


class NoReads(TorchFunctionMode):
    """Refuses what would make the host wait, if these tensors were on a GPU."""

    READS = ("tolist", "item", "nonzero", "__bool__", "__int__", "__float__", "cpu", "numpy")

    def __init__(self) -> None:
        self.is_on = True

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if self.is_on:
            name = getattr(function, "__name__", "")
            assert name not in self.READS, f"the host reads: {name}"
            if name in ("__getitem__", "__setitem__"):
                index = args[1] if isinstance(args[1], tuple) else (args[1],)
                assert not any(isinstance(i, list) for i in index), "a list is an index"
            if name in ("tensor", "as_tensor"):
                assert (kwargs or {}).get("device") is None, "sent from memory that may move"
        return function(*args, **kwargs or {})


class Silent:
    """Drafts nothing, on the device."""

    num_speculative_tokens = K
    num_forwards = 0
    new_taps, write, copy_blocks = dict, staticmethod(lambda *_: None), staticmethod(lambda _: None)

    def propose_async(self, requests: Any, anchors: Any, num_context: Any) -> torch.Tensor:
        return torch.full((len(requests), K), -1)


@pytest.mark.parametrize("drafts", [False, True])
def test_between_two_steps_the_host_reads_nothing(
    model: K3ForCausalLM, drafts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but the model itself: the reference chooses its experts on the host."""
    engine = make_engine(model, Silent() if drafts else None, ahead=True)
    executor, watch = engine.executor, NoReads()
    compute, execute = executor.compute, executor.execute_model_async

    def unwatched(*arguments: Any, **keywords: Any) -> Any:
        watch.is_on = False
        try:
            return compute(*arguments, **keywords)
        finally:
            watch.is_on = True

    def watched(plan: Any) -> Any:
        with watch:
            return execute(plan)

    monkeypatch.setattr(executor, "compute", unwatched)
    monkeypatch.setattr(executor, "execute_model_async", watched)
    params = {} if drafts else {"temperature": 0.8, "top_p": 0.9}
    said = [r.token_ids for r in generate(engine, logprobs=1, **params)]
    assert said == [r.token_ids for r in generate(make_engine(model, ahead=False), **params)]
    with pytest.raises(AssertionError, match="the host reads: tolist"), watch:
        torch.ones(2).tolist()


# -- recorded steps ----------------------------------------------------------------------------


def repeat(function: Callable[[], None], warm_up: Callable[[], None]) -> Callable[[], None]:
    """Record nothing: the function itself is what repeats it, on the same buffers."""
    return function


@pytest.mark.parametrize("metadata", ["eager", "packed"])
@pytest.mark.parametrize("states", ["slots", "records"])
def test_recorded_steps_are_filled_in(
    model: K3ForCausalLM, drafter: DSparkDrafter, states: Any, metadata: Any
) -> None:
    cache = CacheConfig(80, **CACHING, speculative_states=states)
    config = SchedulerConfig(
        3, 40, 96, async_scheduling=True, speculative_method="dspark", num_speculative_tokens=K
    )
    executor = TorchExecutor(
        model, cache, 3, drafter=drafter, num_speculative_tokens=K,
        execution=ExecutionConfig(metadata=metadata),
    )  # fmt: skip
    graphs = executor.compute = DecodeGraphs(executor.compute, executor.cache, recorder=repeat)
    results = generate(Engine(make_scheduler(config, cache), executor))
    assert [r.token_ids for r in results] == [
        model.generate(prompt, TOKENS, stop_token_ids=()) for prompt in PROMPTS
    ]
    assert graphs.num_replays > graphs.num_recordings > 0
    assert executor.num_host_waits == 1


def make_recorded(
    model: K3ForCausalLM, drafter: Any, *, ahead: bool, recorder: Any = repeat
) -> tuple[Engine, DecodeGraphs]:
    engine = make_engine(model, drafter, ahead=ahead)
    executor = engine.executor
    executor.compute = DecodeGraphs(executor.compute, executor.cache, recorder=recorder)
    return engine, executor.compute


@pytest.mark.parametrize("drafts", [False, True])
def test_recorded_steps_do_not_settle_draws(
    model: K3ForCausalLM, drafter: DSparkDrafter, drafts: bool
) -> None:
    """The graph knows the most probable tokens alone; greedy requests stand beside the others."""
    said = []
    for ahead in (False, True):
        engine, graphs = make_recorded(model, drafter if drafts else None, ahead=ahead)
        params = [
            SamplingParams(TOKENS, temperature=float(i % 2), seed=i, ignore_eos=True)
            for i in range(len(PROMPTS))
        ]
        results = engine.generate(PROMPTS, params, progress=False)
        said.append([r.token_ids for r in results])
        assert graphs.num_replays > 0
    assert said[0] == said[1]


@pytest.mark.parametrize("drafts", [False, True])
def test_a_graph_that_settles_draws_is_found_out(
    model: K3ForCausalLM, drafter: DSparkDrafter, drafts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_steps, "Ahead", lambda tables, settles: Ahead(tables, True))
    with quiet(), pytest.raises(AssertionError):
        test_recorded_steps_do_not_settle_draws(model, drafter, drafts)


def test_a_recorded_step_ahead_asks_hardly_more_of_the_host(model: K3ForCausalLM) -> None:
    """All that is new is in the graph. Counted are operators of PyTorch, most of them launches."""

    class Count(TorchDispatchMode):
        number, is_on = 0, True

        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.number += self.is_on
            return function(*args, **kwargs or {})

    per_step = {}
    for ahead in (False, True):
        count = Count()

        def record(
            function: Callable[[], None], warm_up: Any, count: Count = count
        ) -> Callable[[], None]:
            def replay() -> None:
                count.is_on = False
                function()
                count.is_on = True

            return replay

        engine, _ = make_recorded(model, None, ahead=ahead, recorder=record)
        engine.add_request(Request("a", PROMPTS[3], max_tokens=5))
        numbers = []
        with count:
            while engine.has_unfinished_requests():
                before = count.number
                engine.step()
                numbers.append(count.number - before)
        per_step[ahead] = sorted(numbers)[len(numbers) // 2]
    assert per_step[True] <= per_step[False] + 5


# -- failures ----------------------------------------------------------------------------------


def test_logits_without_a_largest_end_what_is_in_flight(
    model: K3ForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(model, ahead=True)
    executor = engine.executor
    forward, calls = executor.compute, iter(range(1000))

    def broken(*arguments: Any, **keywords: Any) -> torch.Tensor:
        logits = forward(*arguments, **keywords)
        return logits * torch.nan if next(calls) == 4 else logits

    monkeypatch.setattr(executor, "compute", broken)
    with quiet():
        results = generate(engine)
    reasons = [r.finish_reason for r in results]
    assert reasons == ["error"] * 3 + ["length"]  # the fourth had no seat yet
    assert engine.stats().num_failed_steps == 2
    for result, prompt in zip(results, PROMPTS, strict=True):
        alone = model.generate(prompt, TOKENS, stop_token_ids=())
        assert result.token_ids == alone[: len(result.token_ids)]
    assert [r.finish_reason for r in generate(engine)] == ["length"] * 4


def test_an_interrupted_step_is_not_kept_for_ever(
    model: K3ForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(model, ahead=True)
    executor = engine.executor

    def interrupt(*arguments: Any) -> Any:
        raise KeyboardInterrupt

    engine.add_request(Request("a", PROMPTS[0]))
    engine.step()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(executor.mixer, "mla", interrupt)
        engine.step()
    assert [r.finish_reason for r in generate(engine)] == ["length"] * 4
    assert len(executor.async_steps._pending) <= 2 < engine.stats().num_forwards


def test_a_scheduler_without_placeholders_is_refused(model: K3ForCausalLM) -> None:
    cache = CacheConfig(8)
    scheduler = Scheduler(SchedulerConfig(2, 64, 128, async_scheduling=True), cache)
    with pytest.raises(ValueError, match="make_scheduler"):
        Engine(scheduler, TorchExecutor(model, cache, 2))


def test_plans_in_another_order_are_refused(model: K3ForCausalLM) -> None:
    engine = make_engine(model, ahead=True)
    engine.add_request(Request("r", PROMPTS[0], max_tokens=5))
    plans = [engine.scheduler.schedule() for _ in range(3)]
    engine.executor.execute_model_async(plans[0])
    with pytest.raises(RuntimeError, match="in their order"):
        engine.executor.execute_model_async(plans[2])

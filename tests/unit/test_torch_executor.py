"""Engine and TorchExecutor against the reference model: the same tokens, however batched."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from kimik3_lab.config import K3Config
from kimik3_lab.reference import kda, mla
from kimik3_lab.reference.initialization import random_model
from kimik3_lab.reference.model import K3ForCausalLM, SequenceMixer
from kimik3_lab.serving import (
    CacheConfig,
    Engine,
    Request,
    SamplingParams,
    Scheduler,
    SchedulerConfig,
)
from kimik3_lab.serving.executors import step_parts
from kimik3_lab.serving.executors.paged_attention import absorbed_decode
from kimik3_lab.serving.executors.paged_cache import PagedCache
from kimik3_lab.serving.executors.step_metadata import StepMetadata
from kimik3_lab.serving.executors.step_parts import Segment, StateRows
from kimik3_lab.serving.executors.torch_executor import TorchExecutor

pytestmark = pytest.mark.usefixtures("one_thread")

MAX_TOKENS = 7
LENGTHS = (70, 3, 2, 1, 17)  # three fill a small cache, so that growing means preempting


@pytest.fixture(scope="module")
def model() -> K3ForCausalLM:
    return random_model(K3Config.micro(), seed=3, dtype=torch.float64).requires_grad_(False)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 64, (n,), generator=generator).tolist() for n in LENGTHS]


@pytest.fixture(scope="module")
def expected(model: K3ForCausalLM, prompts: list[list[int]]) -> list[list[int]]:
    return [model.generate(prompt, MAX_TOKENS) for prompt in prompts]


def make_engine(
    model: K3ForCausalLM,
    *,
    seqs: int = 4,
    budget: int = 8192,
    num_blocks: int = 64,
    block_size: int = 16,
    max_model_len: int = 256,
    **knobs: object,
) -> Engine:
    cache = CacheConfig(num_blocks, block_size)
    scheduler = Scheduler(SchedulerConfig(seqs, budget, max_model_len, **knobs), cache)
    return Engine(scheduler, TorchExecutor(model, cache, seqs))


def tokens_of(engine: Engine, prompts: list[list[int]], **params: object) -> list[list[int]]:
    params = SamplingParams(**{"max_tokens": MAX_TOKENS, **params})
    return [result.token_ids for result in engine.generate(prompts, params, progress=False)]


def test_the_expected_tokens_are_not_trivial(expected: list[list[int]]) -> None:
    assert len({tuple(tokens) for tokens in expected}) == len(expected)
    assert max(len(set(tokens)) for tokens in expected) > MAX_TOKENS // 2


@pytest.mark.parametrize("batching", ["continuous", "static"])
@pytest.mark.parametrize("budget", [7, 64, 8192])
def test_batching_and_chunking_change_no_token(
    model: K3ForCausalLM,
    prompts: list[list[int]],
    expected: list[list[int]],
    batching: str,
    budget: int,
) -> None:
    engine = make_engine(model, budget=budget, batching=batching)
    assert tokens_of(engine, prompts) == expected
    assert engine.stats().scheduler.kv_cache_usage == 0.0


def test_one_token_at_a_time(
    model: K3ForCausalLM, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    assert tokens_of(make_engine(model, budget=1), prompts[1:5]) == expected[1:5]


@pytest.mark.parametrize("block_size", [1, 3, 128])
def test_the_block_size_changes_no_token(
    model: K3ForCausalLM, prompts: list[list[int]], expected: list[list[int]], block_size: int
) -> None:
    engine = make_engine(model, budget=30, num_blocks=2 + 600 // block_size, block_size=block_size)
    assert tokens_of(engine, prompts) == expected


def test_preemption_changes_no_token(
    model: K3ForCausalLM, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    # 19 blocks of 4 hold the longest request (70 + 6 tokens) and nothing else.
    engine = make_engine(model, budget=30, num_blocks=20, block_size=4)
    assert tokens_of(engine, prompts) == expected
    assert engine.stats().scheduler.num_preemptions > 0


def test_preemption_changes_no_seeded_draw(model: K3ForCausalLM, prompts: list[list[int]]) -> None:
    params = {"temperature": 1.0, "top_p": 0.95, "seed": 11}
    alone = [tokens_of(make_engine(model, seqs=1), [prompt], **params)[0] for prompt in prompts]
    engine = make_engine(model, budget=30, num_blocks=20, block_size=4)
    assert tokens_of(engine, prompts, **params) == alone
    assert engine.stats().scheduler.num_preemptions > 0
    assert alone != [model.generate(prompt, MAX_TOKENS) for prompt in prompts]


def test_requests_that_come_and_go_do_not_disturb_each_other(
    model: K3ForCausalLM, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    engine = make_engine(model, seqs=3, budget=40)
    tokens: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
    for number in range(60):
        if number % 2 == 0 and number // 2 < len(prompts):
            i = number // 2
            request = Request(str(i), prompts[i], max_tokens=MAX_TOKENS, eos_token_id=1)
            engine.add_request(request)
            engine.add_request(Request(f"aborted-{i}", prompts[-i], max_tokens=MAX_TOKENS))
        if number % 3 == 0:
            engine.abort(f"aborted-{number // 3}")
        for news in engine.step():
            if news.request_id in tokens:
                tokens[news.request_id] += news.new_token_ids
    assert not engine.has_unfinished_requests()
    assert list(tokens.values()) == expected


def test_many_decodes_are_split_to_bound_memory(
    model: K3ForCausalLM,
    prompts: list[list[int]],
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(step_parts, "MAX_GATHERED_ROWS", 50)
    assert tokens_of(make_engine(model, seqs=6), prompts) == expected


def test_nothing_unwritten_is_read(
    model: K3ForCausalLM, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    engine = make_engine(model, budget=30)
    cache = engine.executor.cache
    cache.latent[:, 1:] = torch.nan  # all but the null block
    cache.recurrent.fill_(torch.nan)
    cache.conv.fill_(torch.nan)
    assert tokens_of(engine, prompts) == expected
    assert cache.latent[:, 0].count_nonzero() == 0


def test_eos_ends_a_request(model: K3ForCausalLM, prompts: list[list[int]]) -> None:
    engine = make_engine(model)
    tokens = tokens_of(engine, prompts[:1])[0]
    (stopped,) = engine.generate(
        prompts[:1], SamplingParams(MAX_TOKENS, stop_token_ids=(tokens[3],)), progress=False
    )
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == tokens[: tokens.index(tokens[3]) + 1]
    assert engine.executor.eos_token_id == model.config.eos_token_id == 1


def test_a_step_that_fails_inside_the_model_leaves_a_working_engine(
    model: K3ForCausalLM,
    prompts: list[list[int]],
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = make_engine(model, seqs=2, budget=40)
    executor = engine.executor
    original, calls = executor.mixer.mla, iter(range(1000))

    def mla_that_fails(*args: object) -> torch.Tensor:
        if next(calls) == 7:  # in the second of the two MLA layers of the fourth step
            raise RuntimeError("no memory")
        return original(*args)

    monkeypatch.setattr(executor.mixer, "mla", mla_that_fails)
    with caplog.at_level(logging.CRITICAL, logger="kimik3_lab"):
        params = SamplingParams(MAX_TOKENS)
        results = engine.generate(prompts, params, progress=False)
    failed = [r.finish_reason == "error" for r in results]
    assert 1 <= sum(failed) <= 2
    for result, tokens in zip(results, expected, strict=True):
        good = result.finish_reason != "error"
        assert result.token_ids == (tokens if good else tokens[: len(result.token_ids)])
    # A finished request keeps its slot until the next step tells the executor; no more than that.
    assert len(executor.requests) + executor.requests.num_free_slots == 2
    assert tokens_of(engine, prompts) == expected


def test_a_step_that_fails_before_the_executor_heard_of_it_leaks_no_slot(
    model: K3ForCausalLM,
    prompts: list[list[int]],
    expected: list[list[int]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = make_engine(model, seqs=2, budget=30, num_blocks=20, block_size=4)
    original, calls = engine.executor.execute_model, iter(range(1000))

    def deaf(output: object) -> object:
        if next(calls) % 4 == 3:
            raise RuntimeError("not listening")
        return original(output)

    engine.executor.execute_model = deaf
    with caplog.at_level(logging.CRITICAL, logger="kimik3_lab"):
        for _ in range(2):
            results = engine.generate(prompts, SamplingParams(MAX_TOKENS), progress=False)
            assert any(r.finish_reason == "error" for r in results)
    engine.executor.execute_model = original
    assert tokens_of(engine, prompts) == expected
    assert engine.stats().scheduler.num_preemptions > 0


def test_one_forward_pass_for_each_step(
    model: K3ForCausalLM, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(model, seqs=6, budget=64)
    rows: list[int] = []
    forward = model.forward

    def counted(token_ids: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        rows.append(len(token_ids))
        return forward(token_ids, *args, **kwargs)

    monkeypatch.setattr(model, "forward", counted)
    tokens_of(engine, prompts, ignore_eos=True)
    stats = engine.stats()
    assert len(rows) == stats.num_forwards
    assert sum(rows) == stats.num_scheduled_tokens == sum(LENGTHS) + len(LENGTHS) * (MAX_TOKENS - 1)


def test_bfloat16_runs_and_keeps_wide_states(prompts: list[list[int]]) -> None:
    model = random_model(K3Config.micro(), dtype=torch.bfloat16)
    engine = make_engine(model, budget=20)
    assert all(len(tokens) == MAX_TOKENS for tokens in tokens_of(engine, prompts, ignore_eos=True))
    assert engine.executor.cache.latent.dtype == torch.bfloat16
    assert engine.executor.cache.recurrent.dtype == torch.float32


# -- refusals ----------------------------------------------------------------------------------


def test_bad_arguments_are_refused(model: K3ForCausalLM) -> None:
    with pytest.raises(ValueError, match="backend"):
        TorchExecutor(model, CacheConfig(4), 1, backend="cuda")
    with pytest.raises(ValueError, match="max_num_seqs"):
        TorchExecutor(model, CacheConfig(4), 0)
    engine = make_engine(model)
    with pytest.raises(ValueError, match="vocabulary of 64"):
        engine.add_request(Request("r", [64]))


def test_an_executor_that_cannot_follow_the_scheduler_is_refused(model: K3ForCausalLM) -> None:
    scheduler = Scheduler(SchedulerConfig(4, 64, 128), CacheConfig(8))
    with pytest.raises(ValueError, match="max_num_seqs=4"):
        Engine(scheduler, TorchExecutor(model, CacheConfig(8), 2))
    with pytest.raises(ValueError, match="max_model_len=257"):
        make_engine(model, max_model_len=257)
    with pytest.raises(ValueError, match="num_blocks=8"):
        Engine(scheduler, TorchExecutor(model, CacheConfig(9), 4))


@pytest.mark.parametrize(
    ("knob", "config", "cache"),
    [
        ("num_kda_groups", {}, {"enable_prefix_caching": True}),
        ("speculative_method", {"speculative_method": "ngram", "num_speculative_tokens": 2}, {}),
        ("async_scheduling", {"async_scheduling": True}, {}),
    ],
)
def test_plans_that_it_cannot_compute_are_refused(
    model: K3ForCausalLM, knob: str, config: dict[str, Any], cache: dict[str, Any]
) -> None:
    cache_config = CacheConfig(8, **cache)
    scheduler = Scheduler(SchedulerConfig(2, 64, 128, **config), cache_config)
    with pytest.raises(ValueError, match=knob):
        Engine(scheduler, TorchExecutor(model, cache_config, 2))


# -- parts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("lengths", [(3,), (5, 5, 5), (3, 4, 31)])
def test_absorbed_decode_equals_each_sequence_alone(lengths: tuple[int, ...], count: int) -> None:
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    longest, heads, nope, rope, rank, value = max(lengths), 3, 4, 2, 6, 5
    q, kv_b = randn(len(lengths), count, heads, nope + rope), randn(heads * (nope + value), rank)
    rows = randn(len(lengths), longest, rank + rope)
    last = torch.tensor(lengths)[:, None] - count + torch.arange(count)
    hidden = torch.arange(longest) > last[..., None]
    alone = [mla.expanded(q[i], rows[i, :n], kv_b) for i, n in enumerate(lengths)]
    torch.testing.assert_close(absorbed_decode(q, rows, kv_b, hidden), torch.stack(alone))


def test_metadata_finds_the_cells_of_a_mixed_step() -> None:
    cache = PagedCache(K3Config.micro(), CacheConfig(num_blocks=10, block_size=4), num_slots=4)
    cache.set_blocks(0, 0, [7])
    cache.set_blocks(2, 0, [5])
    cache.set_blocks(2, 1, [2])
    cache.set_blocks(1, 0, [9, 1])
    cache.set_blocks(3, 0, [3])
    states = [[StateRows([slot])] for slot in range(4)]
    step = StepMetadata(
        cache,
        [
            Segment(3, 0, 3, 2, states[3]),
            Segment(0, 2, 1, 0, states[0]),
            Segment(2, 5, 1, 0, states[2]),
            Segment(1, 3, 3, 0, states[1]),
        ],
    )
    verify, decode, prefill = step.parts
    assert [part.kind for part in step.parts] == ["verify", "decode", "prefill"]
    assert step.is_mixed
    assert [part.rows for part in step.parts] == [slice(0, 3), slice(3, 5), slice(5, 8)]
    assert decode.state_rows[0].tolist() == [[0], [2]]
    assert step.positions.tolist() == [0, 1, 2, 2, 5, 3, 4, 5]
    assert step.cell_mapping.tolist() == [[12, 13, 14, 30, 9, 39, 4, 5]]
    ((context,),) = verify.contexts
    assert context.hidden.tolist() == [[[False, i < 1, i < 2] for i in range(3)]]
    ((context,),) = decode.contexts
    assert context.cells.tolist() == [[28, 29, 30, 0, 0, 0], [20, 21, 22, 23, 8, 9]]
    assert context.hidden.tolist() == [[[False] * 3 + [True] * 3], [[False] * 6]]
    ((context,),) = prefill.contexts
    assert (context.rows, context.cells.tolist()) == (slice(5, 8), [36, 37, 38, 39, 4, 5])


@pytest.mark.parametrize(
    "segments",
    [
        [Segment(0, 0, 2), Segment(1, 0, 1)],
        [Segment(0, 3, 1), Segment(1, 1, 1)],
        [Segment(0, 3, 1), Segment(1, 3, 2, 1)],
    ],
)
def test_metadata_refuses_another_order(segments: list[Segment]) -> None:
    cache = PagedCache(K3Config.micro(), CacheConfig(num_blocks=4), num_slots=2)
    with pytest.raises(ValueError, match="drafts first"):
        StepMetadata(cache, segments)


def test_states_lie_v_major(model: K3ForCausalLM, prompts: list[list[int]]) -> None:
    engine = make_engine(model, seqs=1)
    engine.add_request(Request("r", prompts[4], max_tokens=5))
    engine.step()
    mixer_state = model.new_state()
    with torch.inference_mode():
        model(torch.tensor(prompts[4]), SequenceMixer(mixer_state))
    slot = engine.executor.requests["r"].slot
    for index, layer_id in enumerate(model.config.kda_layer_ids):
        torch.testing.assert_close(
            kda.from_cache_layout(engine.executor.cache.recurrent[index, slot]),
            mixer_state.recurrent[layer_id],
        )
        torch.testing.assert_close(
            engine.executor.cache.conv[index, slot], mixer_state.conv[layer_id]
        )

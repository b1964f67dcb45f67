"""Sampling through the whole engine: seeds, logprobs and speculation on a real model."""

from __future__ import annotations

import pytest
import torch
from drafter_support import random_drafter

from kimik3_lab.config import K3Config
from kimik3_lab.drafter_config import DSparkConfig
from kimik3_lab.paths import default_model_dir
from kimik3_lab.reference import checkpoint, drafter_checkpoint
from kimik3_lab.reference.evaluation import generate_with_drafts
from kimik3_lab.reference.initialization import random_model
from kimik3_lab.reference.model import K3ForCausalLM
from kimik3_lab.reference.state import SequenceMixer
from kimik3_lab.serving import CacheConfig, Engine, SamplingParams, Scheduler, SchedulerConfig
from kimik3_lab.serving.executors.torch_executor import TorchExecutor

PROMPT = [0, 5, 9, 9, 31]
OTHERS = [[0, 7], [0, *range(10, 50)], [0, 60, 61, 62], [0] * 20]
SAMPLED = SamplingParams(
    max_tokens=24, temperature=1.2, top_p=0.95, seed=11, ignore_eos=True, logprobs=2
)


@pytest.fixture(scope="module")
def model() -> K3ForCausalLM:
    return random_model(K3Config.micro(), seed=0, dtype=torch.float64).requires_grad_(False)


def engine(
    model: K3ForCausalLM, *, drafts: int = 0, num_blocks: int = 65, budget: int = 128, **sampling
) -> Engine:
    config, kwargs = {}, {}
    if drafts:
        config = {"speculative_method": "dspark", "num_speculative_tokens": drafts}
        drafter = random_drafter(DSparkConfig.for_target(model.config), seed=1)
        kwargs = {"drafter": drafter, "num_speculative_tokens": drafts, **sampling}
    cache = CacheConfig(num_blocks=num_blocks, block_size=4)
    executor = TorchExecutor(model, cache, 5, **kwargs)
    return Engine(Scheduler(SchedulerConfig(5, budget, 128, **config), cache), executor)


def sampled(run: Engine, *, company: bool) -> list[int]:
    """Tokens of the request with the seed; its company draws too, and one of them is greedy."""
    prompts, params = [PROMPT], [SAMPLED]
    if company:
        prompts = [*OTHERS[:2], PROMPT, *OTHERS[2:]]
        others = [
            SamplingParams(max_tokens=30, temperature=t, ignore_eos=True) for t in (0, 1, 2, 1)
        ]
        params = [*others[:2], SAMPLED, *others[2:]]
    results = run.generate(prompts, params, progress=False)
    return results[prompts.index(PROMPT)].token_ids


@pytest.fixture(scope="module")
def alone(model: K3ForCausalLM) -> list[int]:
    tokens = sampled(engine(model), company=False)
    assert len(set(tokens)) > 8  # or there is little to tell apart
    return tokens


def test_a_seed_repeats_whatever_the_batch(model: K3ForCausalLM, alone: list[int]) -> None:
    assert sampled(engine(model), company=False) == alone
    assert sampled(engine(model), company=True) == alone
    # Chunks of a prompt, and steps that not everybody is in.
    assert sampled(engine(model, budget=7), company=True) == alone


def test_a_seed_survives_preemption(model: K3ForCausalLM, alone: list[int]) -> None:
    run = engine(model, num_blocks=26)
    assert sampled(run, company=True) == alone
    assert run.stats().scheduler.num_preemptions > 0


@pytest.mark.parametrize(
    "sampling",
    [
        {},  # drafts that are not drawn go by the same rule whatever the method is called
        {"rejection_sample_method": "block"},
        {"rejection_sample_method": "coupled", "draft_sample_method": "probabilistic"},
    ],
    ids=str,
)
def test_a_seed_gives_the_same_tokens_with_drafts_and_without(
    model: K3ForCausalLM, alone: list[int], sampling: dict
) -> None:
    for options in ({}, {"budget": 24}, {"num_blocks": 34}):
        run = engine(model, drafts=3, **options, **sampling)
        assert sampled(run, company=True) == alone
        stats = run.stats().scheduler.spec_decoding_stats
        assert stats is not None
        assert stats.num_accepted_tokens > 0


@pytest.mark.parametrize("method", ["standard", "block"])
def test_drawn_drafts_repeat_with_the_same_steps(model: K3ForCausalLM, method: str) -> None:
    """These rules keep the distribution; the tokens are the same if the drafts are."""
    options = {"rejection_sample_method": method, "draft_sample_method": "probabilistic"}
    once = sampled(engine(model, drafts=3, **options), company=False)
    assert sampled(engine(model, drafts=3, **options), company=False) == once
    assert len(once) == SAMPLED.max_tokens


@pytest.mark.parametrize("drafts", [0, 3])
def test_logprobs_are_what_the_model_says_of_its_tokens(model: K3ForCausalLM, drafts: int) -> None:
    run = engine(model, drafts=drafts)
    prompts = [PROMPT, OTHERS[1]]
    greedy = SamplingParams(max_tokens=10, ignore_eos=True)
    result, silent = run.generate(prompts, [SAMPLED, greedy], progress=False)
    assert silent.logprobs is None
    assert result.logprobs is not None
    assert [entry.token_id for entry in result.logprobs] == result.token_ids
    text = torch.tensor([*PROMPT, *result.token_ids[:-1]])
    rows = model(text, SequenceMixer(model.new_state())).log_softmax(-1)[len(PROMPT) - 1 :]
    for entry, row in zip(result.logprobs, rows, strict=True):
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-8)
        assert entry.rank == int((row >= row[entry.token_id] - 1e-12).sum())
        assert [token for token, _ in entry.top] == row.topk(2).indices.tolist()


@pytest.mark.slow
def test_the_trained_pair_accepts_in_a_batch_what_it_accepts_alone() -> None:
    """Greedy tokens and accepted drafts of the trained tiny K3 are those of the reference loop."""
    target = checkpoint.load(default_model_dir(), dtype=torch.float32)
    drafter = drafter_checkpoint.load(default_model_dir() / "drafter")
    prompts = [[0, 100, 200, 300, 400], [0, *range(500, 540)], [0, 1500, 7]]
    length = 16
    alone = [
        generate_with_drafts(target, drafter, prompt, length, stop_token_ids=())
        for prompt in prompts
    ]
    cache = CacheConfig(num_blocks=65)
    config = SchedulerConfig(3, 128, 256, speculative_method="dspark", num_speculative_tokens=7)
    executor = TorchExecutor(target, cache, 3, drafter=drafter, num_speculative_tokens=7)
    run = Engine(Scheduler(config, cache), executor)
    params = SamplingParams(max_tokens=length, ignore_eos=True)
    results = run.generate(prompts, params, progress=False)
    assert [r.token_ids for r in results] == [made.token_ids for made in alone]
    stats = run.stats().scheduler.spec_decoding_stats
    assert stats is not None
    # Near the end there is room for fewer drafts than were kept alone.
    kept = sum(sum(made.yielded) - len(made.yielded) for made in alone)
    assert kept <= stats.num_accepted_tokens <= sum(sum(made.accepted) for made in alone)
    assert executor.counters.drafter_forwards < sum(len(made.accepted) for made in alone) + 3

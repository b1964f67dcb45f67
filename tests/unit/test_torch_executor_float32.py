"""The trained tiny K3 in float32, with its own drafter, against the model alone.

Rounding may decide a near tie differently from then on, so tokens are compared up to the first step
that was close, and probabilities throughout (:mod:`kimik3_lab.serving.executors.agreement`).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from kimik3_lab.paths import data_dir, default_model_dir
from kimik3_lab.reference import checkpoint, drafter_checkpoint
from kimik3_lab.reference.drafter import DSparkDrafter
from kimik3_lab.reference.model import K3ForCausalLM
from kimik3_lab.serving import CacheConfig, Engine, SamplingParams, Scheduler, SchedulerConfig
from kimik3_lab.serving.executors.agreement import Agreement, compare
from kimik3_lab.serving.executors.execution import ExecutionConfig
from kimik3_lab.serving.executors.torch_executor import TorchExecutor

pytestmark = pytest.mark.usefixtures("one_thread")

K = 4
MAX_TOKENS = 12
HYBRID = {"num_kda_groups": 3, "enable_prefix_caching": True}


@pytest.fixture(scope="module")
def model() -> K3ForCausalLM:
    return checkpoint.load(default_model_dir(), dtype=torch.float32)


@pytest.fixture(scope="module")
def drafter() -> DSparkDrafter:
    return drafter_checkpoint.load(default_model_dir() / "drafter", dtype=torch.float32)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Two that share 48 tokens, a short one, and the first again."""
    text = (data_dir() / "held_out" / "sched.py").read_text(encoding="utf-8")
    tokenizer = Tokenizer.from_file(str(default_model_dir() / "tokenizer.json"))
    ids = tokenizer.encode(text).ids
    return [ids[:60], ids[300:310], ids[:48] + ids[200:215], ids[:60]]


@pytest.mark.parametrize(
    ("cache", "drafts", "mixed_batch"),
    [
        ({}, 0, "gather"),
        (HYBRID, K, "gather"),
        (
            HYBRID | {"prefill_checkpoints": "internal", "speculative_states": "records"},
            K,
            "zero_copy",
        ),
    ],
    ids=["seats", "slots", "records"],
)
def test_it_agrees_with_the_model_alone(
    model: K3ForCausalLM,
    drafter: DSparkDrafter,
    prompts: list[list[int]],
    cache: dict[str, Any],
    drafts: int,
    mixed_batch: Any,
) -> None:
    config = CacheConfig(200, 16, **cache)
    method = {"speculative_method": "dspark", "num_speculative_tokens": K} if drafts else {}
    executor = TorchExecutor(
        model,
        config,
        3,
        execution=ExecutionConfig(mixed_batch=mixed_batch),
        drafter=drafter if drafts else None,
        num_speculative_tokens=drafts or None,
    )
    engine = Engine(Scheduler(SchedulerConfig(3, 96, 256, **method), config), executor)
    params = SamplingParams(MAX_TOKENS, logprobs=0, ignore_eos=True)
    results = [
        result
        for wave in (prompts[:2], prompts[2:])
        for result in engine.generate(wave, params, progress=False)
    ]
    found = [
        compare(model, prompt, result.token_ids, [t.logprob for t in result.logprobs or []])
        for prompt, result in zip(prompts, results, strict=True)
    ]
    assert [a for a in found if not a.holds()] == []
    # That it holds would mean little if every step were close.
    steps, close = sum(a.num_steps for a in found), sum(a.num_close_steps for a in found)
    assert steps == len(prompts) * MAX_TOKENS
    assert close < steps / 4
    if cache:
        assert engine.stats().scheduler.prefix_cache_hits >= 96
        assert engine.executor.counters.forwards < steps  # drafts were accepted


def test_a_wrong_token_and_a_wrong_probability_are_seen() -> None:
    assert Agreement(8, 1, 5, 5, 1e-4).holds()
    assert not Agreement(8, 1, 5, 4, 1e-4).holds()
    assert not Agreement(8, 0, 8, 8, 2e-3).holds()


def test_a_text_that_the_model_would_not_say_is_told_from_its_own(model: K3ForCausalLM) -> None:
    prompt = [0, 5, 9, 100]
    own = model.generate(prompt, 3)
    other = [own[0], (own[1] + 1) % 2048, own[2]]
    assert compare(model, prompt, own, [0.0] * 3).first_difference == 3
    assert compare(model, prompt, other, [0.0] * 3).first_difference == 1
    with pytest.raises(ValueError, match="expected a logprob for each"):
        compare(model, prompt, own, [0.0])

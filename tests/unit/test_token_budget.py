"""How the tokens of a step are handed out under each rule, against the published tables."""

from __future__ import annotations

import pytest

from kimik3_lab.serving import Request, SamplingParams, Scheduler
from kimik3_lab.serving.budget import TokenBudget
from kimik3_lab.serving.config import CacheConfig, SchedulerConfig
from kimik3_lab.serving.outputs import ModelRunnerOutput


def dspark(rule: str, *, k: int = 8, seqs: int = 1024, rows: int = 8192) -> SchedulerConfig:
    return SchedulerConfig(
        seqs,
        rows,
        32768,
        speculative_method="dspark",
        num_speculative_tokens=k,
        token_budget=rule,
    )


@pytest.mark.parametrize(
    ("k", "running", "before", "now"),
    # The published table (K = 8) and that of the pull request (K = 7), B = 8192, S = 1024.
    [
        (8, 1, 1024, 8185),
        (8, 32, 1024, 7968),
        (8, 128, 1024, 7296),
        (8, 1024, 1024, 1024),
        (7, 1, 2048, 8186),
        (7, 32, 2048, 8000),
        (7, 128, 2048, 7424),
        (7, 1024, 2048, 2048),
    ],
)
def test_most_tokens_that_a_number_of_requests_share(
    k: int, running: int, before: int, now: int
) -> None:
    def shared(rule: str) -> int:
        budget, taken = TokenBudget(dspark(rule, k=k)), 0
        for i in range(running):
            # All but the last take one token, the last one takes what is left.
            tokens = 1 if i < running - 1 else budget.remaining
            budget.spend(tokens)
            taken += tokens
        return taken

    assert shared("static") == before
    assert shared("adaptive") == now
    assert shared("lookahead_cap") == 8192


def test_what_is_given_back_can_be_handed_out_again() -> None:
    for rule in ("static", "adaptive", "lookahead_cap"):
        budget = TokenBudget(dspark(rule))
        full = budget.remaining
        budget.spend(9)
        left = budget.remaining
        budget.spend(5)
        budget.give_back(5)
        assert budget.remaining == left
        budget.give_back(9)
        assert budget.remaining == full


def test_the_lookahead_cap_limits_requests_and_not_tokens() -> None:
    # #52922: B = 16, K = 4. Two prompts of 8 fit; one budget for target and draft gave 8 + 2.
    def scheduled(rule: str, *lengths: int) -> list[int]:
        config = dspark(rule, k=4, seqs=16 if rule != "static" else 2, rows=16)
        scheduler = Scheduler(config, CacheConfig(100))
        for i, length in enumerate(lengths):
            scheduler.add_request(Request(str(i), [5] * length))
        return list(scheduler.schedule().num_scheduled_tokens.values())

    assert scheduled("adaptive", 8, 8) == [8, 2]
    assert scheduled("lookahead_cap", 8, 8) == [8, 8]
    assert scheduled("lookahead_cap", 1, 1, 1, 1, 1) == [1, 1, 1, 1]  # 16 // 4 requests


def test_a_prompt_of_8000_tokens_alone_and_beside_fifteen_that_decode() -> None:
    def prefill_steps(config: SchedulerConfig, decoding: int) -> list[int]:
        scheduler = Scheduler(config, CacheConfig(4000))
        params = SamplingParams(max_tokens=1000, ignore_eos=True)
        for i in range(decoding):
            scheduler.add_request(Request(f"d{i}", [5], params))
        prompt = Request("prompt", [6] * 8000, params)
        chunks: list[int] = []
        for step in range(30):
            if step == 3:
                scheduler.add_request(prompt)
            output = scheduler.schedule()
            if "prompt" in output.num_scheduled_tokens:
                chunks.append(output.num_scheduled_tokens["prompt"])
            tokens = [[] if r.is_prefill_chunk else [7] for r in output.scheduled]
            ids = list(output.num_scheduled_tokens)
            scheduler.update_from_output(output, ModelRunnerOutput(ids, tokens))
            if prompt.num_output_tokens:
                return chunks
            drafts = {i: [7] * 8 for i in ids if i != "prompt"}
            scheduler.update_draft_token_ids(drafts)
        raise AssertionError("the prompt was not computed")

    assert prefill_steps(dspark("static"), 0) == [1024] * 7 + [832]
    assert prefill_steps(dspark("adaptive"), 0) == [8000]
    assert prefill_steps(dspark("static"), 15)[0] == 889
    assert prefill_steps(dspark("adaptive"), 15) == [7945, 55]
    assert prefill_steps(dspark("adaptive", rows=16384), 15) == [8000]


def test_sixteen_prompts_share_a_step() -> None:
    scheduler = Scheduler(dspark("adaptive", rows=16384), CacheConfig(20_000))
    for i in range(16):
        scheduler.add_request(Request(str(i), [5] * 8000))
    assert list(scheduler.schedule().num_scheduled_tokens.values()) == [8000, 8000, 363]


@pytest.mark.parametrize(
    ("method", "rule", "rows", "slots"),
    [
        ("ngram", "static", 0, 0),
        ("eagle3", "adaptive", 0, 8),
        ("eagle3-parallel", "lookahead_cap", 7, 8),
        ("draft_model", "static", 1, 8),
        ("pard", "adaptive", 8, 8),
        ("dspark", "static", 7, 8),
        ("dspark", "lookahead_cap", 0, 8),
        ("dflash", "static", 7, 9),
        ("dflash", "adaptive", 8, 9),
        ("dflash", "lookahead_cap", 0, 9),
    ],
)
def test_what_drafters_ask_for(method: str, rule: str, rows: int, slots: int) -> None:
    config = SchedulerConfig(
        4, 512, 1024, speculative_method=method, num_speculative_tokens=8, token_budget=rule
    )
    assert (config.num_draft_slots, config.num_lookahead_tokens) == (rows, slots)

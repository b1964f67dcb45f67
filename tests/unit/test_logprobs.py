"""Logprobs: what they say of a token, and their way from the executor to the client."""

from __future__ import annotations

import math

import pytest
import torch

from kimik3_lab.serving import CacheConfig, Engine, Request, SamplingParams, SchedulerConfig
from kimik3_lab.serving.async_scheduler import make_scheduler
from kimik3_lab.serving.executors.logprobs import token_logprobs
from kimik3_lab.serving.outputs import ModelRunnerOutput, SchedulerOutput, TokenLogprobs


def test_an_entry_tells_logarithm_rank_and_alternatives() -> None:
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3], [0.25, 0.25, 0.25, 0.25]]).log() + 5
    first, second = token_logprobs(logits, [2, 1], [2, 3])
    assert first.token_id == 2
    assert first.logprob == pytest.approx(math.log(0.2))
    assert first.rank == 3
    assert [token for token, _ in first.top] == [1, 3]
    assert first.top[0][1] == pytest.approx(math.log(0.4))
    # Equals: all of them are "at least as likely", and are listed in the order of their ids.
    assert second.rank == 4
    assert [token for token, _ in second.top] == [0, 1, 2]


def test_more_alternatives_than_the_vocabulary_has_are_all_of_it() -> None:
    (entry,) = token_logprobs(torch.zeros(1, 3), [0], [20])
    assert len(entry.top) == 3
    (entry,) = token_logprobs(torch.zeros(1, 3), [0], [0])
    assert entry.top == ()
    assert token_logprobs(torch.zeros(0, 3), [], []) == []


def test_tokens_that_cannot_be_are_minus_infinity() -> None:
    (entry,) = token_logprobs(torch.tensor([[0.0, -torch.inf]]), [0], [2])
    assert entry.logprob == 0.0
    assert entry.top[1] == (1, -math.inf)


def test_the_model_s_own_distribution_is_described() -> None:
    """Temperature and cuts change what is drawn, not what is reported (raw_logprobs)."""
    from kimik3_lab.serving.executors.drafts import Draft
    from kimik3_lab.serving.executors.random_stream import RandomStream
    from kimik3_lab.serving.executors.rejection_sampler import batch_logprobs, verify_batch

    logits = torch.tensor([[2.0, 1.0, 0.0]])
    params = SamplingParams(temperature=0.1, top_k=1, seed=0, logprobs=1)
    drafts = [Draft([])]
    new = verify_batch(logits, drafts, [params], [RandomStream(0)], [4])
    entries = batch_logprobs(logits, drafts, new, [params])
    assert new == [[0]] and entries is not None
    assert entries[0][0].logprob == pytest.approx(float(logits.log_softmax(-1)[0, 0]))


# -- from the executor to the client -----------------------------------------------------------


class Talker:
    """Says 10, 11, 12, ..., and keeps the first ``keep`` of the drafts that are scheduled."""

    def __init__(self, keep: int = 0) -> None:
        self.keep, self.said = keep, {}

    def execute_model(self, output: SchedulerOutput) -> ModelRunnerOutput:
        for new in output.scheduled_new_reqs:
            self.said[new.req_id] = (0, new.sampling_params.logprobs, len(new.prompt_token_ids))
        computed = {
            r.req_id: r.num_computed_tokens
            for r in [*output.scheduled_new_reqs, *output.scheduled_cached_reqs]
        }
        tokens, logprobs = [], []
        for req_id, count in output.num_scheduled_tokens.items():
            said, asked, prompt = self.said[req_id]
            drafts = output.scheduled_spec_decode_tokens.get(req_id, [])
            caught_up = computed[req_id] + count - len(drafts) >= prompt + said
            number = min(self.keep, len(drafts)) + 1 if caught_up else 0
            new = [10 + said + i for i in range(number)]
            self.said[req_id] = (said + number, asked, prompt)
            tokens.append(new)
            entries = [TokenLogprobs(token, -token / 10, 1) for token in new]
            logprobs.append([] if asked is None else entries)
        nobody = all(asked is None for _, asked, _ in self.said.values())
        ids = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(ids, tokens, None if nobody else logprobs)

    def take_draft_token_ids(self) -> dict[str, list[int]]:
        return {req_id: [1, 2, 3] for req_id in self.said} if self.keep else {}


def engine(keep: int = 0, **config) -> Engine:
    scheduler = make_scheduler(
        SchedulerConfig(4, 64, 64, **config), CacheConfig(num_blocks=33, block_size=4)
    )
    return Engine(scheduler, Talker(keep))


SPECULATIVE = {"speculative_method": "dspark", "num_speculative_tokens": 3}


@pytest.mark.parametrize(("keep", "config"), [(0, {}), (2, SPECULATIVE)])
def test_every_new_token_has_its_entry(keep: int, config: dict) -> None:
    run = engine(keep, **config)
    run.add_request(Request("asks", [5] * 6, SamplingParams(max_tokens=8, logprobs=0)))
    run.add_request(Request("silent", [5] * 3, SamplingParams(max_tokens=8)))
    tokens, entries, sizes = [], [], set()
    while run.has_unfinished_requests():
        for news in run.step():
            if news.request_id == "silent":
                assert news.new_logprobs is None
                continue
            assert news.new_logprobs is not None
            assert len(news.new_logprobs) == len(news.new_token_ids)
            sizes.add(len(news.new_token_ids))
            tokens += news.new_token_ids
            entries += news.new_logprobs
    assert tokens == list(range(10, 18))
    assert [entry.token_id for entry in entries] == tokens
    # With two kept of three: 1, then three at a time, the last step cut by max_tokens.
    assert sizes == ({1} if not keep else {1, 3})


def test_tokens_behind_the_end_bring_no_entries() -> None:
    run = engine(2, **SPECULATIVE)
    params = SamplingParams(max_tokens=8, stop_token_ids=(12,), logprobs=0)
    (result,) = run.generate([[5] * 6], params, progress=False)
    assert result.token_ids == [10, 11, 12]  # 13 was sampled, in the same step as 11 and 12
    assert result.logprobs is not None
    assert [entry.token_id for entry in result.logprobs] == [10, 11, 12]


def test_nobody_asked() -> None:
    run = engine()
    (result,) = run.generate([[5] * 6], SamplingParams(max_tokens=3), progress=False)
    assert result.logprobs is None


# -- counters of speculation -------------------------------------------------------------------


def test_drafts_are_counted_by_position() -> None:
    run = engine(2, **SPECULATIVE)
    run.generate([[5] * 6, [7] * 3], SamplingParams(max_tokens=8), progress=False)
    stats = run.stats().scheduler.spec_decoding_stats
    assert stats is not None
    # Each request: one token from its prompt, then seven by 3 + 3 + 1 (cut by max_tokens).
    assert stats.num_spec_tokens == 3
    assert stats.num_accepted_tokens_per_pos[2] == 0
    assert stats.num_accepted_tokens_per_pos[0] >= stats.num_accepted_tokens_per_pos[1]
    assert sum(stats.num_accepted_tokens_per_pos) == stats.num_accepted_tokens
    assert stats.num_drafts == 6
    assert stats.num_draft_tokens == 18
    assert stats.num_accepted_tokens == 12
    assert stats.mean_acceptance_length == 3.0
    assert stats.acceptance_rate_per_pos == (1.0, 1.0, 0.0)
    assert stats.draft_acceptance_rate == pytest.approx(2 / 3)


def test_without_speculation_there_are_no_counters() -> None:
    assert engine().stats().scheduler.spec_decoding_stats is None


def test_before_the_first_draft_rates_are_not_numbers() -> None:
    stats = engine(2, **SPECULATIVE).stats().scheduler.spec_decoding_stats
    assert stats is not None
    assert math.isnan(stats.draft_acceptance_rate)
    assert math.isnan(stats.mean_acceptance_length)


def test_placeholders_are_no_drafts_unless_scheduling_is_asynchronous() -> None:
    from kimik3_lab.serving.spec_decode import SpecDecodingCounter

    counter = SpecDecodingCounter(3)
    counter.observe_draft([-1, -1], 0)
    counter.observe_draft([4, -1], 1)
    assert counter.stats().num_drafts == 1
    assert counter.stats().num_draft_tokens == 1
    counter.observe_draft([-1, -1], 2, placeholders=True)
    assert counter.stats().num_draft_tokens == 3
    assert counter.stats().num_accepted_tokens_per_pos == (2, 1, 0)
    with pytest.raises(ValueError, match="3 of 2 draft tokens cannot"):
        counter.observe_draft([4, -1], 3)

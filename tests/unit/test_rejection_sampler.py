"""Verification of many drafts at once: distributions by chi-square, seeds, and placeholders."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch
from scipy.stats import chi2

from kimik3_lab.serving.executors.drafts import Draft
from kimik3_lab.serving.executors.random_stream import RandomStream, exponentials
from kimik3_lab.serving.executors.rejection_sampler import batch_logprobs, verify_batch
from kimik3_lab.serving.executors.sampler import distribution, sample
from kimik3_lab.serving.request import SamplingParams

VOCAB, COUNT, FIRST = 4, 2, 10
METHODS = ("standard", "block", "coupled")

Model = Callable[[Sequence[int]], torch.Tensor]


def table_model(seed: int, sharpness: float = 1.5) -> Model:
    """Logits that depend on the whole text after the prompt."""
    generator = torch.Generator().manual_seed(seed)
    table = {
        prefix: torch.randn(VOCAB, generator=generator, dtype=torch.float64) * sharpness
        for length in range(COUNT + 2)
        for prefix in itertools.product(range(VOCAB), repeat=length)
    }
    return lambda text: table[tuple(text)]


TARGET, DRAFTER = table_model(1), table_model(2)


@functools.cache
def probabilities(model: Model, text: tuple[int, ...], params: SamplingParams) -> torch.Tensor:
    return distribution(model(text)[None], [params])[0]


def make_draft(
    stream: RandomStream, text: Sequence[int], params: SamplingParams, *, shared: bool
) -> Draft:
    """Draw a draft of COUNT tokens behind ``text``, as the proposer does."""
    first = FIRST + len(text)
    own = stream.generator(first, "draft")
    tokens, probs = [], []
    for i in range(COUNT - len(text)):
        q = probabilities(DRAFTER, (*text, *tokens), params)
        noise = stream.exponentials(first + i, VOCAB) if shared else exponentials(own, VOCAB)
        tokens.append(int((q / noise).argmax()))
        probs.append(q)
    return Draft(tokens, torch.stack(probs) if probs else None)


def speculate(
    seeds: Sequence[int], params: SamplingParams, method: str, make=make_draft, *, shared=False
) -> tuple[list[tuple[int, ...]], float]:
    """COUNT + 1 tokens for each seed, step by step; and the mean of kept tokens in the first."""
    streams = {seed: RandomStream(seed) for seed in seeds}
    texts: dict[int, list[int]] = {seed: [] for seed in seeds}
    kept = None
    while active := [seed for seed in seeds if len(texts[seed]) <= COUNT]:
        drafts = [make(streams[s], texts[s], params, shared=shared) for s in active]
        rows = [
            TARGET([*texts[s], *d.token_ids[:i]])
            for s, d in zip(active, drafts, strict=True)
            for i in range(len(d.token_ids) + 1)
        ]
        new = verify_batch(
            torch.stack(rows),
            drafts,
            [params] * len(active),
            [streams[s] for s in active],
            [FIRST + len(texts[s]) for s in active],
            method=method,
        )
        kept = sum(len(n) - 1 for n in new) / len(new) if kept is None else kept
        for seed, tokens in zip(active, new, strict=True):
            texts[seed] += tokens
    assert kept is not None
    return [tuple(texts[seed]) for seed in seeds], kept


@functools.cache
def drawn(kind: str, method: str) -> tuple[list[tuple[int, ...]], float]:
    """Speculate for 2000 seeds with honest drafts: more than one test looks at the outcome."""
    return speculate(range(2000), PARAMS[kind], method)


def surprise(texts: Sequence[tuple[int, ...]], params: SamplingParams) -> float:
    """p-value of a chi-square test that ``texts`` were drawn from the target, token by token."""
    counts, expected = Counter(texts), {}
    for text in itertools.product(range(VOCAB), repeat=COUNT + 1):
        chance = 1.0
        for i, token in enumerate(text):
            chance *= float(probabilities(TARGET, text[:i], params)[token])
        expected[text] = chance * len(texts)
    assert all(expected[text] for text in counts), "a text that the target cannot say"
    # Rare texts are counted together: the approximation wants about five of each.
    common = [text for text, number in expected.items() if number >= 5]
    cells = [(counts[text], expected[text]) for text in common]
    rest = len(texts) - sum(e for _, e in cells)
    if rest > 1e-9:
        cells.append((len(texts) - sum(c for c, _ in cells), rest))
    statistic = sum((got - want) ** 2 / want for got, want in cells)
    return float(chi2.sf(statistic, len(cells) - 1))


PARAMS = {
    "plain": SamplingParams(temperature=1.0),
    "hot": SamplingParams(temperature=1.7),
    "nucleus": SamplingParams(temperature=1.0, top_p=0.8),
    "top_k": SamplingParams(temperature=0.8, top_k=3),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", PARAMS)
def test_texts_are_distributed_as_the_target_s(method: str, kind: str) -> None:
    params = PARAMS[kind]
    texts, kept = drawn(kind, method)
    assert surprise(texts, params) > 1e-4
    assert 0 < kept < COUNT


def test_shared_noise_keeps_the_distribution_when_coupled_and_keeps_more() -> None:
    params = PARAMS["plain"]
    texts, kept = speculate(range(2000), params, "coupled", shared=True)
    _, independent = drawn("plain", "coupled")
    assert surprise(texts, params) > 1e-4
    assert kept > independent + 0.1


def test_shared_noise_under_the_standard_rule_would_be_caught() -> None:
    """The draws of a draft must not tell how it is verified; reusing the seed is a known trap."""

    class Leaky(RandomStream):
        def generator(self, position, purpose):  # the same numbers for every purpose
            return super().generator(position, "token")

    params = PARAMS["plain"]

    def leaky(stream, text, params, *, shared):
        return make_draft(Leaky(stream.seed), text, params, shared=shared)

    def verify_leaky(seeds):
        streams = [Leaky(seed) for seed in seeds]
        drafts = [leaky(s, [], params, shared=False) for s in streams]
        rows = [TARGET(d.token_ids[:i]) for d in drafts for i in range(COUNT + 1)]
        return verify_batch(
            torch.stack(rows), drafts, [params] * len(seeds), streams, [FIRST] * len(seeds)
        )

    first = torch.tensor([new[0] for new in verify_leaky(range(2000))]).bincount(minlength=VOCAB)
    expected = probabilities(TARGET, (), params) * 2000
    statistic = float(((first - expected) ** 2 / expected).sum())
    assert chi2.sf(statistic, VOCAB - 1) < 1e-6


def test_a_wrong_draft_distribution_is_caught_by_the_test() -> None:
    def lying(stream, text, params, *, shared):
        draft = make_draft(stream, text, params, shared=shared)
        flat = None if draft.probs is None else torch.full_like(draft.probs, 1 / VOCAB)
        return Draft(draft.token_ids, flat)

    texts, _ = speculate(range(2000), PARAMS["plain"], "standard", lying)
    assert surprise(texts, PARAMS["plain"]) < 1e-6


@pytest.mark.parametrize("method", METHODS)
def test_chosen_drafts_keep_the_distribution_and_the_tokens(method: str) -> None:
    """Without probabilities a draft changes how many steps it takes, and nothing else."""
    params = PARAMS["nucleus"]

    def best(stream, text, params, *, shared):
        tokens: list[int] = []
        for _ in range(COUNT - len(text)):
            tokens.append(int(DRAFTER([*text, *tokens]).argmax()))
        return Draft(tokens)

    texts, kept = speculate(range(2000), params, method, best)
    assert surprise(texts, params) > 1e-4
    assert kept > 0
    plain, none = speculate(range(2000), params, method, lambda *_, **__: Draft([]))
    assert plain == texts
    assert none == 0


@pytest.mark.parametrize("shared", [False, True])
def test_coupled_gives_the_same_tokens_with_any_draft(shared: bool) -> None:
    params = PARAMS["hot"]
    plain, _ = speculate(range(200), params, "coupled", lambda *_, **__: Draft([]))
    drafted, kept = speculate(range(200), params, "coupled", shared=shared)
    assert drafted == plain
    assert kept > 0
    others, _ = speculate(range(200), params, "standard")
    assert others != plain


def test_block_keeps_more_than_standard() -> None:
    standard, block = (drawn("plain", method)[1] for method in METHODS[:2])
    assert block > standard


@pytest.mark.parametrize("method", METHODS)
def test_a_request_does_not_notice_its_company(method: str) -> None:
    kinds = [SamplingParams(), *PARAMS.values(), SamplingParams(temperature=1.0, min_p=0.2)]
    streams = [RandomStream(i) for i in range(len(kinds))]
    drafts = [
        Draft([2, 3]) if p.greedy else make_draft(s, [], p, shared=False)
        for s, p in zip(streams, kinds, strict=True)
    ]
    drafts[2] = Draft([])
    rows = [torch.stack([TARGET(d.token_ids[:i]) for i in range(len(d.token_ids) + 1)])
            for d in drafts]  # fmt: skip

    def verify(order: Sequence[int]) -> dict[int, list[int]]:
        new = verify_batch(
            torch.cat([rows[i] for i in order]),
            [drafts[i] for i in order],
            [kinds[i] for i in order],
            [streams[i] for i in order],
            [FIRST] * len(order),
            method=method,
        )
        return dict(zip(order, new, strict=True))

    together = verify(range(len(kinds)))
    assert verify([5, 3, 1, 0, 2, 4]) == together
    for i in range(len(kinds)):
        assert verify([i])[i] == together[i]


def test_without_a_draft_it_samples() -> None:
    logits = torch.randn(30, 16, generator=torch.Generator().manual_seed(0))
    params = [SamplingParams(), SamplingParams(temperature=1.0, top_p=0.9)] * 15
    streams = [RandomStream(i) for i in range(30)]
    positions = range(50, 80)
    sampled = sample(logits, params, streams, positions)
    assert verify_batch(logits, [Draft([])] * 30, params, streams, positions) == [
        [token] for token in sampled
    ]
    assert verify_batch(logits[:0], [], [], [], []) == []


def test_greedy_keeps_what_the_target_would_have_said() -> None:
    logits = torch.eye(8)[[3, 1, 4, 1, 5, 0, 2, 6]]
    drafts = [Draft([3, 1]), Draft([1, 7, 0]), Draft([])]
    new = verify_batch(logits, drafts, [SamplingParams()] * 3, [None] * 3, [5] * 3)
    assert new == [[3, 1, 4], [1, 5], [6]]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=1.0, seed=4)])
def test_nothing_is_kept_from_a_placeholder_on(method: str, params: SamplingParams) -> None:
    stream = RandomStream.for_request(params)
    # Rows behind a placeholder were computed from no token, and may hold anything.
    rows = torch.cat((torch.eye(4)[[1, 2]] * 40, torch.full((2, 4), torch.nan)))
    assert verify_batch(rows, [Draft([1, -1, 3])], [params], [stream], [9], method=method) == [
        [1, 2]
    ]
    rows = torch.cat((torch.eye(4)[[1]] * 40, torch.full((2, 4), torch.nan)))
    assert verify_batch(rows, [Draft([-1, -1])], [params], [stream], [9], method=method) == [[1]]


def test_a_part_of_a_draft_is_verified_as_a_draft() -> None:
    stream, params = RandomStream(0), PARAMS["plain"]
    whole = make_draft(stream, [], params, shared=False)
    part = whole.matching(whole.token_ids[:1])
    assert part.token_ids == whole.token_ids[:1]
    assert torch.equal(part.probs, whole.probs[:1])
    assert whole.matching([]).token_ids == []
    stranger = whole.matching([(whole.token_ids[0] + 1) % VOCAB, 0])
    assert stranger.probs is None and len(stranger.token_ids) == 2


def test_what_does_not_fit_is_refused() -> None:
    arguments = ([Draft([1])], [SamplingParams()], [None], [3])
    with pytest.raises(ValueError, match=r"need logits \[2, vocab\], got \[3, 4\]"):
        verify_batch(torch.zeros(3, 4), *arguments)
    with pytest.raises(ValueError, match="method must be one of"):
        verify_batch(torch.zeros(2, 4), *arguments, method="typical")
    logits = torch.zeros(2, 4)
    logits[1, 0] = torch.nan
    with pytest.raises(ValueError, match=r"rows \[1\]"):
        verify_batch(logits, *arguments)


def test_logprobs_are_those_of_the_rows_that_chose_the_tokens() -> None:
    logits = torch.randn(7, 16, generator=torch.Generator().manual_seed(3))
    drafts = [Draft([1, 2]), Draft([]), Draft([5, 6])]
    asks = [SamplingParams(logprobs=2), SamplingParams(), SamplingParams(logprobs=0)]
    sampled = [[1, 9], [4], [5, 6, 7]]
    entries = batch_logprobs(logits, drafts, sampled, asks)
    assert entries is not None
    logprobs = logits.double().log_softmax(-1)
    assert [[e.token_id for e in row] for row in entries] == [[1, 9], [], [5, 6, 7]]
    for row, e in zip([0, 1, 4, 5, 6], itertools.chain(*entries), strict=True):
        assert e.logprob == pytest.approx(float(logprobs[row, e.token_id]), abs=1e-12)
    assert [len(e.top) for e in itertools.chain(*entries)] == [2, 2, 0, 0, 0]
    assert batch_logprobs(logits, drafts, sampled, [SamplingParams()] * 3) is None

"""The sampler: greedy, temperature, top-p, and draws that do not depend on the batch."""

from __future__ import annotations

import pytest
import torch

from kimik3_lab.serving.executors.sampler import make_generator, sample
from kimik3_lab.serving.request import SamplingParams


def draws(logits: torch.Tensor, params: SamplingParams, count: int) -> list[int]:
    generator = make_generator(params)
    return [sample(logits[None], [params], [generator])[0] for _ in range(count)]


def test_greedy_takes_the_most_probable_and_draws_nothing() -> None:
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(0))
    params = SamplingParams(seed=1)
    assert make_generator(params) is None
    assert sample(logits, [params] * 5, [None] * 5) == logits.argmax(-1).tolist()
    assert sample(logits[:0], [], []) == []


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_softmax(temperature: float) -> None:
    torch.manual_seed(0)
    logits = torch.tensor([0.0, 1.0, -1.0, 0.5])
    count = 4000
    params = SamplingParams(temperature=temperature, seed=7)
    # One generator, many rows: the same stream as row after row.
    generator = make_generator(params)
    tokens = sample(logits.expand(count, -1), [params] * count, [generator] * count)
    frequency = torch.tensor(tokens).bincount(minlength=4) / count
    expected = (logits / temperature).softmax(-1)
    # Five standard deviations of a frequency of 4000 draws.
    assert ((frequency - expected).abs() < 5 * (expected * (1 - expected) / count).sqrt()).all()


@pytest.mark.parametrize(
    ("top_p", "allowed"),
    [
        (0.01, {2}),
        (0.49, {2}),
        (0.51, {2, 0}),
        (0.74, {2, 0}),
        (0.76, {2, 0, 3}),
        (1.0, {2, 0, 3, 1}),
    ],
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, allowed: set[int]) -> None:
    logits = torch.tensor([0.25, 0.12, 0.5, 0.13]).log()
    params = SamplingParams(temperature=1.0, top_p=top_p, seed=3)
    assert set(draws(logits, params, 200)) == allowed


def test_ties_in_top_p_go_to_the_lower_id() -> None:
    params = SamplingParams(temperature=1.0, top_p=0.25, seed=3)
    assert set(draws(torch.zeros(8), params, 100)) == {0, 1}


def test_a_seed_repeats_and_does_not_depend_on_the_batch() -> None:
    logits = torch.randn(20, 64, generator=torch.Generator().manual_seed(1))
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=5)
    generator = make_generator(params)
    alone = [sample(row[None], [params], [generator])[0] for row in logits]

    generator = make_generator(params)
    others = [SamplingParams(), SamplingParams(temperature=3.0, seed=9), SamplingParams(seed=2)]
    together = []
    for i, row in enumerate(logits):
        company = others[: i % 4]
        batch = torch.stack([*logits[: len(company)], row])
        generators = [*(make_generator(p) for p in company), generator]
        together.append(sample(batch, [*company, params], generators)[-1])
    assert together == alone
    assert draws(logits[0], SamplingParams(temperature=1.0, seed=6), 20) != draws(
        logits[0], SamplingParams(temperature=1.0, seed=5), 20
    )


def test_without_a_seed_two_requests_differ() -> None:
    params = SamplingParams(temperature=1.0)
    logits = torch.zeros(1000)
    assert draws(logits, params, 10) != draws(logits, params, 10)


def test_a_tiny_temperature_is_greedy_and_not_nan() -> None:
    logits = torch.tensor([1.0, 500.0, 499.0])
    assert set(draws(logits, SamplingParams(temperature=1e-300, seed=0), 20)) == {1}


def test_excluded_tokens_are_never_drawn() -> None:
    logits = torch.tensor([-torch.inf, 0.0, -torch.inf, 0.0])
    assert set(draws(logits, SamplingParams(temperature=5.0, seed=0), 100)) == {1, 3}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_without_probabilities_are_refused_by_row(bad: float) -> None:
    logits = torch.zeros(3, 4)
    logits[1, 2] = bad
    with pytest.raises(ValueError, match=r"rows \[1\]"):
        sample(logits, [SamplingParams()] * 3, [None] * 3)
    with pytest.raises(ValueError, match=r"rows \[0\]"):
        sample(torch.full((1, 4), -torch.inf), [SamplingParams()], [None])

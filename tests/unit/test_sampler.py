"""The sampler: greedy, temperature, the three cuts, and draws that belong to seed and position."""

from __future__ import annotations

import pytest
import torch

from kimik3_lab.serving.executors.random_stream import RandomStream
from kimik3_lab.serving.executors.sampler import distribution, sample
from kimik3_lab.serving.request import SamplingParams


def draws(logits: torch.Tensor, params: SamplingParams, count: int) -> list[int]:
    """Tokens of one request at positions 0 to ``count - 1``, all with the same logits."""
    stream = RandomStream.for_request(params)
    rows = logits.expand(count, -1)
    return sample(rows, [params] * count, [stream] * count, range(count))


def test_greedy_takes_the_most_probable_and_draws_nothing() -> None:
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(0))
    params = SamplingParams(seed=1)
    assert RandomStream.for_request(params) is None
    assert sample(logits, [params] * 5, [None] * 5, range(5)) == logits.argmax(-1).tolist()
    assert sample(logits[:0], [], [], []) == []


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_softmax(temperature: float) -> None:
    logits = torch.tensor([0.0, 1.0, -1.0, 0.5])
    expected = (logits / temperature).softmax(-1)
    count = 4000
    bound = 5 * (expected * (1 - expected) / count).sqrt()  # five standard deviations
    params = SamplingParams(temperature=temperature, seed=7)
    # The positions of one stream, and one position of many streams.
    along = draws(logits, params, count)
    streams = [RandomStream(seed) for seed in range(count)]
    across = sample(logits.expand(count, -1), [params] * count, streams, [3] * count)
    for tokens in (along, across):
        frequency = torch.tensor(tokens).bincount(minlength=4) / count
        assert ((frequency - expected).abs() < bound).all()


def test_seeds_that_differ_above_32_bits_differ() -> None:
    logits = torch.zeros(1000)
    low, high = (SamplingParams(temperature=1.0, seed=seed) for seed in (5, 5 + 2**32))
    assert draws(logits, low, 10) != draws(logits, high, 10)


def test_purposes_have_unrelated_numbers() -> None:
    stream = RandomStream(3)
    numbers = [
        torch.rand(4, generator=stream.generator(8, purpose)).tolist()
        for purpose in ("token", "draft", "verify")
    ]
    assert len({tuple(n) for n in numbers}) == 3


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


def test_ties_go_to_the_lower_id() -> None:
    nucleus = SamplingParams(temperature=1.0, top_p=0.25, seed=3)
    assert set(draws(torch.zeros(8), nucleus, 100)) == {0, 1}
    assert set(draws(torch.zeros(8), SamplingParams(temperature=1.0, top_k=3, seed=3), 100)) == {
        0, 1, 2,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("cut", "expected"),
    [
        ({"top_k": 1}, [1.0, 0.0, 0.0, 0.0]),
        ({"top_k": 2}, [0.625, 0.375, 0.0, 0.0]),
        ({"top_k": 9}, [0.5, 0.3, 0.15, 0.05]),
        # 0.15 is 0.3 of the largest: just in, and just out.
        ({"min_p": 0.29}, [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0.0]),
        ({"min_p": 0.31}, [0.625, 0.375, 0.0, 0.0]),
        ({"min_p": 1.0}, [1.0, 0.0, 0.0, 0.0]),
        # The nucleus is taken from what the others have left: 0.625 of it is the first token.
        ({"top_k": 2, "top_p": 0.6}, [1.0, 0.0, 0.0, 0.0]),
        ({"min_p": 0.5, "top_p": 0.6}, [1.0, 0.0, 0.0, 0.0]),
        ({"top_p": 0.6}, [0.625, 0.375, 0.0, 0.0]),
    ],
)
def test_cuts_and_their_order(cut: dict[str, float], expected: list[float]) -> None:
    # Out of order, so that putting the probabilities back in place matters.
    shuffle = [2, 0, 3, 1]
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]], dtype=torch.float64).log()[:, shuffle]
    # Another row in the batch, with other parameters, must not matter.
    batch = torch.cat((logits, logits.flip(-1)))
    params = [SamplingParams(temperature=1.0, **cut), SamplingParams(temperature=2.0)]
    got = distribution(batch, params)
    wanted = torch.tensor(expected, dtype=torch.float64)[shuffle]
    assert torch.allclose(got[0], wanted, atol=1e-12)
    assert torch.allclose(got[1], (logits.flip(-1) / 2).softmax(-1)[0], atol=1e-12)


def test_min_p_looks_at_the_distribution_after_temperature() -> None:
    logits = torch.tensor([[0.8, 0.2]]).log()
    hot, cold = (SamplingParams(temperature=t, min_p=0.4) for t in (2.0, 1.0))
    assert distribution(logits, [hot])[0, 1] > 0  # a half of the largest at temperature 2
    assert distribution(logits, [cold])[0, 1] == 0  # a quarter


def test_a_seed_repeats_whatever_the_batch_and_the_order() -> None:
    logits = torch.randn(20, 64, generator=torch.Generator().manual_seed(1))
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=5)
    alone = [sample(logits[i : i + 1], [params], [RandomStream(5)], [i])[0] for i in range(20)]

    others = [SamplingParams(), SamplingParams(temperature=3.0, seed=9), SamplingParams(seed=2)]
    together = {}
    # Backwards, and every position twice: what was drawn before leaves no trace.
    for i in [*reversed(range(20)), *range(20)]:
        company = others[: i % 4]
        batch = torch.stack([*logits[: len(company)], logits[i]])
        streams = [*map(RandomStream.for_request, company), RandomStream.for_request(params)]
        positions = [*range(100, 100 + len(company)), i]
        together[i] = sample(batch, [*company, params], streams, positions)[-1]
    assert [together[i] for i in range(20)] == alone
    assert draws(logits[0], SamplingParams(temperature=1.0, seed=6), 20) != draws(
        logits[0], SamplingParams(temperature=1.0, seed=5), 20
    )


def test_without_a_seed_two_requests_differ_and_each_agrees_with_itself() -> None:
    params = SamplingParams(temperature=1.0)
    logits = torch.zeros(1000)
    assert draws(logits, params, 10) != draws(logits, params, 10)
    stream = RandomStream.for_request(params)
    row = logits[None]
    assert sample(row, [params], [stream], [4]) == sample(row, [params], [stream], [4])


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
        sample(logits, [SamplingParams()] * 3, [None] * 3, [0] * 3)
    with pytest.raises(ValueError, match=r"rows \[0\]"):
        sample(torch.full((1, 4), -torch.inf), [SamplingParams()], [None], [0])


def test_a_draw_without_a_stream_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a random stream"):
        sample(torch.zeros(1, 4), [SamplingParams(temperature=1.0)], [None], [0])


@pytest.mark.parametrize(
    "bad",
    [
        {"top_k": -1}, {"top_k": 1.5}, {"min_p": -0.1}, {"min_p": 1.1}, {"min_p": float("nan")},
        {"logprobs": -1}, {"logprobs": True}, {"logprobs": 2.0},
    ],
)  # fmt: skip
def test_parameters_out_of_range_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        SamplingParams(**bad)

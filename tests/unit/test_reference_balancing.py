"""Quantile balancing against its definition, counted expert by expert."""

from __future__ import annotations

import math

import pytest
import torch

from kimik3_lab.reference.balancing import (
    BINS,
    BiasHistogram,
    expert_load,
    load_statistics,
    quantile_bias,
    required_bias,
)
from kimik3_lab.reference.moe import route

torch.set_num_threads(1)
TOKENS, EXPERTS, TOP_K = 4096, 16, 3


def skewed_scores(seed: int = 0, tokens: int = TOKENS) -> torch.Tensor:
    """Scores as a router gives them: some experts are liked by nearly everyone."""
    generator = torch.Generator().manual_seed(seed)
    taste = torch.linspace(-2.0, 2.0, EXPERTS)
    return torch.sigmoid(taste + torch.randn(tokens, EXPERTS, generator=generator))


def chosen(scores: torch.Tensor, bias: torch.Tensor, top_k: int = TOP_K) -> torch.Tensor:
    return (scores + bias).argsort(dim=-1, descending=True, stable=True)[:, :top_k]


def test_required_bias_is_where_the_choice_of_an_expert_flips() -> None:
    scores = skewed_scores(tokens=40).double()
    bias = torch.linspace(0.2, -0.2, EXPERTS, dtype=torch.float64)
    required = required_bias(scores, bias, TOP_K)
    picks = chosen(scores, bias)
    for token in range(40):
        for expert in range(EXPERTS):
            if expert not in picks[token]:
                # Reaches the cutoff only with more, as the cutoff is the best of these.
                assert required[token, expert] >= bias[expert] - 1e-12
                continue
            # Chosen with the bias it has, and still chosen down to the cutoff.
            assert required[token, expert] < bias[expert]
            for step, want in ((-1e-6, False), (1e-6, True)):
                changed = bias.clone()
                changed[expert] = required[token, expert] + step
                assert (expert in chosen(scores[token : token + 1], changed)[0]) is want


def test_the_quantile_counts_tokens_above_the_cutoff() -> None:
    scores, bias = skewed_scores(), torch.zeros(EXPERTS)
    solved = quantile_bias(scores, bias, TOP_K)
    cutoff = (scores + bias).sort(dim=-1, descending=True).values[:, TOP_K : TOP_K + 1]
    # Before the mean came off, to which a choice is indifferent. Tokens for which the expert is
    # itself the cutoff all need the same bias, so a quantile may fall among equals.
    full = required_bias(scores, bias, TOP_K).quantile(TOP_K / EXPERTS, dim=0)
    margin = scores + full - cutoff
    share = TOKENS * TOP_K / EXPERTS
    assert ((margin > 1e-6).sum(0) <= share + 1).all()
    assert ((margin > -1e-6).sum(0) >= share - 1).all()
    torch.testing.assert_close(solved, full - full.mean())
    assert solved.mean().abs() < 1e-6
    assert (solved.diff() <= 0).all() and solved[0] > 0.3 and solved[-1] < -0.2, (
        "the more an expert is liked, the lower its bias"
    )


def test_a_few_batches_even_out_a_skewed_router() -> None:
    bias = torch.zeros(EXPERTS)
    history = []
    for batch in range(8):
        scores = skewed_scores(seed=batch)
        history.append(load_statistics(expert_load(chosen(scores, bias), EXPERTS)))
        bias = quantile_bias(scores, bias, TOP_K)
    assert history[0].max_over_mean > 2.5 and history[0].entropy < 0.9
    assert history[-1].max_over_mean < 1.1 and history[-1].entropy > 0.999
    assert history[1].max_over_mean < history[0].max_over_mean


def test_the_histogram_reads_the_same_bias_off_its_counts() -> None:
    scores = skewed_scores()
    bias = torch.linspace(0.3, -0.3, EXPERTS)
    histogram = BiasHistogram(bias)
    for part in scores.split(1000):
        histogram.add(part, TOP_K)
    assert histogram.counts.shape == (EXPERTS, BINS)
    assert (histogram.counts.sum(-1) == TOKENS).all()
    exact = quantile_bias(scores, bias, TOP_K)
    bin_width = (2 + 0.6) / BINS
    assert (histogram.solve(TOP_K) - exact).abs().max() < 1.5 * bin_width


def test_histograms_of_machines_add_up() -> None:
    scores, bias = skewed_scores(), torch.zeros(EXPERTS)
    whole, first, second = (BiasHistogram(bias) for _ in range(3))
    whole.add(scores, TOP_K)
    first.add(scores[:1500], TOP_K)
    second.add(scores[1500:], TOP_K)
    first.counts += second.counts
    assert torch.equal(first.counts, whole.counts)
    assert torch.equal(first.solve(TOP_K), whole.solve(TOP_K))


def test_no_required_bias_falls_outside_the_bins() -> None:
    bias = torch.tensor([0.4, -0.6, 0.0, 0.2])
    scores = torch.tensor([[1.0, 0.0, 1.0, 1.0], [0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]])
    required = required_bias(scores, bias, 1)
    histogram = BiasHistogram(bias)
    top = histogram.low + BINS * histogram.width
    assert histogram.low == pytest.approx(-1.6) and float(top) == pytest.approx(1.4)
    assert histogram.low <= required.min() and required.max() <= top


def test_a_histogram_without_tokens_leaves_the_bias() -> None:
    bias = torch.tensor([0.5, -0.25, 0.0])
    assert torch.equal(BiasHistogram(bias).solve(1), bias)


def test_bias_changes_the_choice_and_not_the_weights() -> None:
    hidden, weight = torch.randn(64, 8), torch.randn(EXPERTS, 8)
    scores = torch.sigmoid(hidden @ weight.mT)
    bias = quantile_bias(scores, torch.zeros(EXPERTS), TOP_K)
    routing = route(hidden, weight, bias, TOP_K)
    assert not torch.equal(routing.expert_ids, route(hidden, weight, 0 * bias, TOP_K).expert_ids)
    own = scores.gather(-1, routing.expert_ids)
    torch.testing.assert_close(routing.weights, own / own.sum(-1, keepdim=True))


def test_top_k_of_all_experts_has_no_bias() -> None:
    with pytest.raises(ValueError, match="top_k must be from 1 to 3 of 4 experts, got 4"):
        required_bias(torch.rand(2, 4), torch.zeros(4), 4)


def test_statistics_of_loads_that_are_known() -> None:
    even = load_statistics(torch.full((8,), 5))
    assert even == (1.0, 0.0, 1.0, 0)
    one = load_statistics(torch.tensor([0, 12, 0, 0]))
    assert one == (4.0, pytest.approx(math.sqrt(3), abs=1e-4), 0.0, 3)
    half = load_statistics(torch.tensor([6, 6, 0, 0]))
    assert half == (2.0, 1.0, 0.5, 2)
    with pytest.raises(ValueError, match="one token"):
        load_statistics(torch.zeros(4, dtype=torch.int64))


def test_load_counts_every_choice() -> None:
    ids = torch.tensor([[0, 3], [3, 1], [3, 0]])
    assert expert_load(ids, 5).tolist() == [2, 1, 0, 3, 0]

"""Quantile balancing: the selection bias that sends every expert its share of the tokens.

Needs torch. Lesson 02 builds it up and watches it work; ``tools/train_tiny_k3`` trains with it.

A router scores experts by what they are good for, and nothing makes popular ones less popular. K3
adds a bias to the scores before the choice, and nowhere else: no loss pulls at the router. The bias
is not nudged up or down by a fixed amount either, but solved for once per global batch:

1. For token i, ``cutoff_i`` is the (k+1)-th best of ``score + bias``: what an expert has to beat.
2. ``cutoff_i - score_ij`` is the bias with which expert j just reaches that for token i.
3. The ``k / E`` quantile of that over tokens is the bias with which k / E of them choose expert j.

Then the mean over experts is taken off, which changes no choice. The release holds the last bias of
training as ``e_score_correction_bias``. With tokens on many machines nobody can gather all scores,
so :class:`BiasHistogram` counts them in 1000 bins per expert, which add up over machines, and reads
the quantile off the counts.

Source: Kimi K3 technical report, section 2.3.3 and appendices C and D, as implemented in
https://github.com/pytorch/torchtitan/pull/4577, https://github.com/NVIDIA/Megatron-LM/pull/6637 and
https://github.com/NVIDIA/TransformerEngine/pull/3395; the method comes from
https://kexue.fm/archives/11619. The report itself was not read here.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "BINS",
    "BiasHistogram",
    "LoadStatistics",
    "expert_load",
    "load_statistics",
    "quantile_bias",
    "required_bias",
]

#: Bins per expert in the report's appendix D.
BINS = 1000


def required_bias(scores: Tensor, bias: Tensor, top_k: int) -> Tensor:
    """Bias at which each expert just reaches the cutoff of each token, others staying as they are.

    The cutoff is the best preference that was *not* chosen. So a chosen expert needs less than its
    bias, and is dropped below this; for the others it is their bias or more.

    Parameters
    ----------
    scores
        ``[N, E]``: the router's scores, without bias.
    bias
        ``[E]``: the bias that the tokens were routed with.
    top_k
        Experts for a token, fewer than E.

    Returns
    -------
    Tensor
        ``[N, E]`` in the type of ``scores``.

    Raises
    ------
    ValueError
        If every expert is chosen anyway: then no bias changes anything.

    Examples
    --------
    The second-best score is the cutoff, and the third expert would need 0.25 to reach it:

    >>> required_bias(torch.tensor([[0.75, 0.5, 0.25]]), torch.zeros(3), top_k=1)
    tensor([[-0.2500,  0.0000,  0.2500]])
    """
    experts = scores.shape[-1]
    if not 0 < top_k < experts:
        raise ValueError(f"top_k must be from 1 to {experts - 1} of {experts} experts, got {top_k}")
    preference = scores + bias.to(scores.dtype)
    cutoff = preference.topk(top_k + 1, dim=-1).values[..., -1:]
    return cutoff - scores


def quantile_bias(scores: Tensor, bias: Tensor, top_k: int) -> Tensor:
    """Bias for the next batch: the exact quantile, for a batch whose scores are all at hand.

    Parameters
    ----------
    scores, bias, top_k
        As for :func:`required_bias`.

    Returns
    -------
    Tensor
        ``[E]`` with mean 0.

    Examples
    --------
    Two experts, and every token prefers the first; half of them hardly do:

    >>> scores = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.5, 0.4], [0.5, 0.4]])
    >>> bias = quantile_bias(scores, torch.zeros(2), top_k=1)
    >>> bool(bias[0] < bias[1]), expert_load((scores + bias).argmax(-1, keepdim=True), 2).tolist()
    (True, [2, 2])
    """
    required = required_bias(scores, bias, top_k).flatten(0, -2)
    share = top_k / scores.shape[-1]
    solved = torch.quantile(required, share, dim=0)
    return solved - solved.mean()


class BiasHistogram:
    """:func:`quantile_bias` from counts: adds up over micro-batches and machines.

    Parameters
    ----------
    bias
        ``[E]``, float32: the bias that tokens are routed with until the next :meth:`solve`. The
        bins span ``[min(bias) - 1, max(bias) + 1]``, which no required bias can leave as long as
        scores lie in (0, 1).
    bins
        Bins per expert.

    Examples
    --------
    >>> generator = torch.Generator().manual_seed(0)
    >>> scores = torch.rand(4000, 8, generator=generator) ** torch.arange(1, 9)
    >>> histogram = BiasHistogram(torch.zeros(8))
    >>> for part in scores.split(1000):
    ...     histogram.add(part, top_k=2)
    >>> exact = quantile_bias(scores, torch.zeros(8), top_k=2)
    >>> bool((histogram.solve(top_k=2) - exact).abs().max() < 2 / BINS)
    True
    """

    def __init__(self, bias: Tensor, bins: int = BINS) -> None:
        self.bias = bias
        self.bins = bins
        self.low = bias.min() - 1
        self.width = (bias.max() + 1 - self.low) / bins
        self.counts = torch.zeros(len(bias), bins, dtype=torch.int64, device=bias.device)

    def add(self, scores: Tensor, top_k: int) -> None:
        """Count the tokens of ``scores [N, E]``."""
        required = required_bias(scores, self.bias, top_k).flatten(0, -2)
        index = ((required - self.low) / self.width).long().clamp(0, self.bins - 1)
        experts = torch.arange(len(self.bias), device=index.device)
        flat = (experts * self.bins + index).flatten()
        self.counts.view(-1).scatter_add_(0, flat, torch.ones_like(flat))

    def solve(self, top_k: int) -> Tensor:
        """Bias ``[E]`` for the next batch, mean 0; the quantile is interpolated within its bin.

        Before any token was counted this is the bias unchanged.
        """
        total = self.counts.sum(-1, keepdim=True)
        wanted = total * (top_k / len(self.bias))
        upto = self.counts.cumsum(-1)
        index = (upto < wanted).sum(-1, keepdim=True).clamp(max=self.bins - 1)
        inside = self.counts.gather(-1, index)
        below = upto.gather(-1, index) - inside
        fraction = ((wanted - below) / inside.clamp(min=1)).clamp(0, 1)
        solved = (self.low + (index + fraction) * self.width).squeeze(-1).to(self.bias.dtype)
        return torch.where(total.squeeze(-1) > 0, solved - solved.mean(), self.bias)


# -- load ------------------------------------------------------------------------------------------


class LoadStatistics(NamedTuple):
    """How evenly experts are loaded.

    Attributes
    ----------
    max_over_mean
        Load of the busiest expert in units of the fair share; 1 is perfect. With one expert per
        machine a step waits this much longer than it would have to.
    coefficient_of_variation
        Standard deviation over mean; 0 is perfect.
    entropy
        Of the shares, over that of equal shares; 1 is perfect, 0 is one expert for everything.
    idle
        Experts that got no token.
    """

    max_over_mean: float
    coefficient_of_variation: float
    entropy: float
    idle: int


def expert_load(expert_ids: Tensor, num_experts: int) -> Tensor:
    """Tokens that chose each expert, int64 ``[num_experts]``.

    Examples
    --------
    >>> expert_load(torch.tensor([[0, 2], [2, 3]]), 4).tolist()
    [1, 0, 2, 1]
    """
    flat = expert_ids.flatten()
    counts = torch.zeros(num_experts, dtype=torch.int64, device=flat.device)
    return counts.scatter_add_(0, flat, torch.ones_like(flat))


def load_statistics(load: Tensor) -> LoadStatistics:
    """Describe a load ``[E]``, E at least 2.

    Raises
    ------
    ValueError
        If there is no token at all, or only one expert.

    Examples
    --------
    >>> load_statistics(torch.tensor([30, 10, 0, 0]))
    LoadStatistics(max_over_mean=3.0, coefficient_of_variation=1.2247, entropy=0.4056, idle=2)
    """
    if len(load) < 2 or not int(load.sum()):
        raise ValueError(f"a load needs at least two experts and one token, got {load.tolist()}")
    load = load.double()
    share = load / load.sum()
    entropy = torch.special.entr(share).sum() / torch.tensor(float(len(load))).log()
    return LoadStatistics(
        round(float(load.max() / load.mean()), 4),
        round(float(load.std(correction=0) / load.mean()), 4),
        round(float(entropy), 4),
        int((load == 0).sum()),
    )

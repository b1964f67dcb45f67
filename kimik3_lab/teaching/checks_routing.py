"""Answer checks of lesson 02. Needs torch.

Each takes the reader's function, tries it on small inputs, and judges it by what the answer has to
do (shares of tokens, loads of ranks), not by comparing with the lab's own code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = ["check_1", "check_2"]


def check_1(solve: Callable[[Tensor, Tensor, int], Tensor]) -> None:
    """Check exercise 1: one step of quantile balancing.

    Each expert's bias, tried alone against the cutoffs of the old routing, must be reached by
    ``k / E`` of the tokens; and the biases must have mean zero.

    Raises
    ------
    AssertionError
        Naming the case, the expert, the share that came out and the one wanted.
    """
    cases = _router_cases()
    for name, (scores, bias, top_k) in cases.items():
        kept = scores.clone(), bias.clone()
        solved = solve(scores, bias, top_k)
        assert torch.equal(scores, kept[0]) and torch.equal(bias, kept[1]), (
            f"{name}: the scores or the old bias were changed in place"
        )
        assert isinstance(solved, Tensor) and solved.shape == bias.shape, (
            f"{name}: expected a tensor of shape {tuple(bias.shape)}, "
            f"got {tuple(getattr(solved, 'shape', ())) or type(solved).__name__}"
        )
        mean = solved.mean().item()
        assert abs(mean) < 1e-4, f"{name}: the biases should have mean 0, got {mean:.4f}"
        _check_shares(name, scores, bias, top_k, solved)
    print(f"exercise 1: right on {len(cases)} routers")


def _router_cases() -> dict[str, tuple[Tensor, Tensor, int]]:
    generator = torch.Generator().manual_seed(2)

    def scores(tokens: int, experts: int, lean: float) -> Tensor:
        favour = lean * torch.randn(experts, generator=generator)
        return torch.sigmoid(torch.randn(tokens, experts, generator=generator) + favour)

    return {
        "800 tokens, 2 of 8 experts": (scores(800, 8, 1.0), torch.zeros(8), 2),
        "an old bias that is not zero": (
            scores(900, 6, 0.5), 0.2 * torch.randn(6, generator=generator), 1,
        ),
        "strong favourites, 4 of 16": (scores(1200, 16, 3.0), torch.zeros(16), 4),
        "5 of 7, most are chosen": (scores(700, 7, 1.0), torch.zeros(7), 5),
    }  # fmt: skip


def _check_shares(name: str, scores: Tensor, bias: Tensor, top_k: int, solved: Tensor) -> None:
    """Undo the shift to mean zero with the first expert, then look at every expert's share."""
    tokens, experts = scores.shape
    ranked = (scores + bias).sort(dim=1, descending=True).values
    cutoff = ranked[:, top_k]
    wanted = top_k / experts
    reach = (cutoff[:, None] - scores).sort(dim=0).values
    # The shift that was taken off is the same for all experts; the first one's quantile gives it.
    position = wanted * (tokens - 1)
    low = reach[int(position), 0].item()
    high = reach[min(int(position) + 1, tokens - 1), 0].item()
    shift = (low + high) / 2 - solved[0].item()
    slack = (high - low) / 2 + 1e-5
    for expert in range(experts):
        bound = solved[expert].item() + shift
        least = (reach[:, expert] <= bound - slack).double().mean().item()
        most = (reach[:, expert] <= bound + slack).double().mean().item()
        assert least - 2 / tokens <= wanted <= most + 2 / tokens, (
            f"{name}: expert {expert} should be chosen by {wanted:.1%} of the tokens that keep "
            f"their cutoff, got {(least + most) / 2:.1%}"
        )


def check_2(place: Callable[[Sequence[int], int], Sequence[int]]) -> None:
    """Check exercise 2: experts to ranks, equally many on each, by load.

    Raises
    ------
    AssertionError
        Naming the case, and the rank that has too many experts or too much load.
    """
    generator = torch.Generator().manual_seed(5)
    zipf = [10_000 // (i + 1) for i in range(32)]
    mixed = [zipf[i] for i in torch.randperm(32, generator=generator).tolist()]
    cases = {
        "sorted, steep": ([90, 80, 70, 60, 50, 40, 30, 20], 4),
        "all equal": ([7] * 12, 4),
        "Zipf's law, shuffled": (mixed, 4),
        "Zipf's law, 8 ranks": (mixed, 8),
        "idle experts": ([0, 0, 0, 0, 5, 5, 0, 0], 2),
        "random": (torch.randint(50, 150, (64,), generator=generator).tolist(), 8),
    }
    for name, (load, ranks) in cases.items():
        placed = place(list(load), ranks)
        assert placed is not None, f"{name}: expected a rank for each expert, got None"
        answer = [int(rank) for rank in placed]
        assert len(answer) == len(load), (
            f"{name}: expected a rank for each of {len(load)} experts, got {len(answer)}"
        )
        room = len(load) // ranks
        for rank in range(ranks):
            held = answer.count(rank)
            assert held == room, f"{name}: rank {rank} should hold {room} experts, got {held}"
        total = [0] * ranks
        for value, rank in zip(load, answer, strict=True):
            total[rank] += value
        worst = max(range(ranks), key=total.__getitem__)
        ratio = total[worst] * ranks / sum(load)
        bound = _least_possible(load, ranks)
        assert ratio <= bound + 0.02, (
            f"{name}: rank {worst} carries {ratio:.2f} times the mean; {bound:.2f} is possible"
        )
    print(f"exercise 2: right on {len(cases)} loads")


def _least_possible(load: Sequence[int], ranks: int) -> float:
    """No rank can be under the mean, and the busiest expert's rank holds others beside it."""
    ordered = sorted(load)
    beside = sum(ordered[: len(load) // ranks - 1])
    return max(1.0, (ordered[-1] + beside) * ranks / sum(load))

"""The checks of lesson 02 accept right answers, written in more than one way, and no wrong one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from kimik3_lab.reference.balancing import quantile_bias
from kimik3_lab.teaching import checks_routing

torch.set_num_threads(1)


def by_sorting(scores: Tensor, bias: Tensor, top_k: int, **wrong: object) -> Tensor:
    """One step of quantile balancing without torch.quantile, with switches for mistakes."""
    preference = scores if "old_bias" in wrong else scores + bias
    rank = top_k - 1 if "cutoff" in wrong else top_k
    cutoff = preference.sort(dim=1, descending=True).values[:, rank]
    reach = cutoff[:, None] - (preference if "bias_twice" in wrong else scores)
    share = top_k / scores.shape[1]
    if "uniform_share" in wrong:
        share = 1 / scores.shape[1]
    if "upside_down" in wrong:
        share = 1 - share
    solved = reach.sort(dim=0).values[round(share * (len(scores) - 1))]
    if "sign" in wrong:
        solved = -solved
    return solved if "mean" in wrong else solved - solved.mean()


@pytest.mark.parametrize("solve", [quantile_bias, by_sorting])
def test_check_1_accepts(solve: Callable[..., Tensor], capsys: pytest.CaptureFixture[str]) -> None:
    checks_routing.check_1(solve)
    assert "right on 4 routers" in capsys.readouterr().out


@pytest.mark.parametrize(
    "mistake",
    ["old_bias", "cutoff", "bias_twice", "uniform_share", "upside_down", "sign", "mean"],
)
def test_check_1_refuses(mistake: str) -> None:
    with pytest.raises(AssertionError, match=r"tokens|bias"):
        checks_routing.check_1(lambda s, b, k: by_sorting(s, b, k, **{mistake: True}))


def in_place(scores: Tensor, bias: Tensor, top_k: int) -> Tensor:
    bias += quantile_bias(scores, bias, top_k) - bias
    return bias


def test_check_1_refuses_a_change_in_place_and_another_shape() -> None:
    with pytest.raises(AssertionError, match="changed in place"):
        checks_routing.check_1(in_place)
    with pytest.raises(AssertionError, match="expected a tensor of shape"):
        checks_routing.check_1(lambda s, b, k: quantile_bias(s, b, k)[:-1])


def greedy(load: Sequence[int], ranks: int, *, ascending: bool = False) -> list[int]:
    """Heaviest expert first, to the lightest rank with room."""
    room = len(load) // ranks
    total, held, answer = [0] * ranks, [0] * ranks, [0] * len(load)
    for expert in sorted(range(len(load)), key=lambda e: load[e] if ascending else -load[e]):
        rank = min((r for r in range(ranks) if held[r] < room), key=total.__getitem__)
        answer[expert] = rank
        total[rank] += load[expert]
        held[rank] += 1
    return answer


def test_check_2_accepts_the_greedy_answer_as_list_and_as_tensor() -> None:
    checks_routing.check_2(greedy)
    checks_routing.check_2(lambda load, ranks: torch.tensor(greedy(load, ranks)))


def test_check_2_says_when_nothing_comes_back() -> None:
    with pytest.raises(AssertionError, match="expected a rank for each expert, got None"):
        checks_routing.check_2(lambda load, ranks: None)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (lambda load, ranks: [e * ranks // len(load) for e in range(len(load))], "1.55 times"),
        (lambda load, ranks: [e % ranks for e in range(len(load))], "1.27 times"),
        (lambda load, ranks: greedy(load, ranks, ascending=True), "times the mean"),
        (lambda load, ranks: [0] * len(load), "rank 0 should hold 2 experts, got 8"),
        (lambda load, ranks: greedy(load, ranks)[:-1], "a rank for each of 8 experts"),
    ],
)
def test_check_2_refuses(place: Callable[[Sequence[int], int], list[int]], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        checks_routing.check_2(place)

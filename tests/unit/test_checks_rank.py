"""The checks of lesson 10's second half take right answers of any style and no wrong one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kimik3_lab.teaching import checks_rank as checks

Parts = list[tuple[float, float]]
Times = tuple[float, float]


def least(parts: Parts, bandwidth: float, rate: float) -> float:
    return 1e3 * sum(max(moved / bandwidth, work / rate) for moved, work in parts)


def another_least(parts: Parts, bandwidth: float, rate: float) -> float:
    total = 0.0
    for moved, work in parts:
        times = moved / bandwidth * 1e3, work / rate * 1e3
        total += times[0] if times[0] > times[1] else times[1]
    return total


def numpy_least(parts: Parts, bandwidth: float, rate: float) -> Any:
    return 1e3 * (np.array(parts).reshape(-1, 2) / [bandwidth, rate]).max(1, initial=0).sum()


def torch_least(parts: Parts, bandwidth: float, rate: float) -> Any:
    moved, work = torch.tensor(parts, dtype=torch.float64).reshape(-1, 2).T
    return 1e3 * torch.maximum(moved / bandwidth, work / rate).sum()


@pytest.mark.parametrize("answer", [least, another_least, numpy_least, torch_least])
def test_right_floors_pass(answer: Callable[..., Any]) -> None:
    checks.check_3(answer)


def max_of_sums(parts: Parts, bandwidth: float, rate: float) -> float:
    moved, work = (sum(p[i] for p in parts) for i in (0, 1))
    return 1e3 * max(moved / bandwidth, work / rate)


def both_added(parts: Parts, bandwidth: float, rate: float) -> float:
    return 1e3 * sum(moved / bandwidth + work / rate for moved, work in parts)


def bytes_alone(parts: Parts, bandwidth: float, rate: float) -> float:
    return 1e3 * sum(moved / bandwidth for moved, _ in parts)


def work_alone(parts: Parts, bandwidth: float, rate: float) -> float:
    return 1e3 * sum(work / rate for _, work in parts)


def in_seconds(parts: Parts, bandwidth: float, rate: float) -> float:
    return least(parts, bandwidth, rate) / 1e3


def longest_part(parts: Parts, bandwidth: float, rate: float) -> float:
    return max((least([p], bandwidth, rate) for p in parts), default=0.0)


def swapped(parts: Parts, bandwidth: float, rate: float) -> float:
    return least([(work, moved) for moved, work in parts], bandwidth, rate)


def smaller_of_both(parts: Parts, bandwidth: float, rate: float) -> float:
    return 1e3 * sum(min(moved / bandwidth, work / rate) for moved, work in parts)


def takes_the_list(parts: Parts, bandwidth: float, rate: float) -> float:
    total = 0.0
    while parts:
        total += least([parts.pop()], bandwidth, rate)
    return total


def by_roofline_of_the_first(parts: Parts, bandwidth: float, rate: float) -> float:
    if not parts or parts[0][0] / bandwidth >= parts[0][1] / rate:
        return bytes_alone(parts, bandwidth, rate)
    return work_alone(parts, bandwidth, rate)


@pytest.mark.parametrize(
    "answer",
    [
        max_of_sums, both_added, bytes_alone, work_alone, in_seconds, longest_part, swapped,
        smaller_of_both, takes_the_list, by_roofline_of_the_first, lambda *_: None,
    ],
)  # fmt: skip
def test_wrong_floors_are_refused(answer: Callable[..., Any]) -> None:
    with pytest.raises(AssertionError, match=r"expected|was changed"):
        checks.check_3(answer)


def gains(before: Times, after: Times, tokens: int, **wrong: Any) -> tuple[float, ...]:
    """Ratios of latencies, with switches that each make one mistake."""
    rest = tokens - wrong.get("less", 1)

    def latency(ttft: float, tpot: float) -> float:
        return ttft + rest * tpot * wrong.get("unit", 1.0)

    old, new = latency(*before), latency(*after)
    first, others = latency(after[0], before[1]), latency(before[0], after[1])
    if "backwards" in wrong:  # each taken away from the end instead of added at the start
        return first / new, others / new, old / new
    ratios = old / first, old / others, old / new
    if "inverted" in wrong:
        return tuple(1 / r for r in ratios)
    if "product" in wrong:
        return ratios[0], ratios[1], ratios[0] * ratios[1]
    if "exchanged" in wrong:
        return ratios[1], ratios[0], ratios[2]
    if "times_alone" in wrong:
        return before[0] / after[0], before[1] / after[1], old / new
    return ratios


def another_gains(before: Times, after: Times, tokens: int) -> list[float]:
    pairs = [(after[0], before[1]), (before[0], after[1]), after]
    whole = before[0] + (tokens - 1) * before[1]
    return [whole / (ttft + (tokens - 1) * tpot) for ttft, tpot in pairs]


def numpy_gains(before: Times, after: Times, tokens: int) -> Any:
    return np.array(another_gains(before, after, tokens))


def torch_gains(before: Times, after: Times, tokens: int) -> Any:
    return torch.tensor(another_gains(before, after, tokens), dtype=torch.float64)


def one_by_one(before: Times, after: Times, tokens: int) -> Any:
    yield from another_gains(before, after, tokens)


@pytest.mark.parametrize("answer", [gains, another_gains, numpy_gains, torch_gains, one_by_one])
def test_right_gains_pass(answer: Callable[..., Any]) -> None:
    checks.check_4(answer)


@pytest.mark.parametrize(
    "wrong",
    [
        {"less": 0}, {"less": 2}, {"unit": 1e3}, {"backwards": True}, {"inverted": True},
        {"product": True}, {"exchanged": True}, {"times_alone": True},
    ],
    ids=str,
)  # fmt: skip
def test_wrong_gains_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(AssertionError, match="expected"):
        checks.check_4(lambda before, after, tokens: gains(before, after, tokens, **wrong))


@pytest.mark.parametrize(
    "answer",
    [
        lambda *_: None, lambda *_: (1.0, 1.0), lambda *_: 1.0, lambda *_: np.float64(1.0),
        lambda *_: np.array(1.0), lambda *_: "abc", lambda *_: {1.0, 2.0, 3.0},
        lambda *_: dict.fromkeys((1.0, 2.0, 3.0)),
    ],
)  # fmt: skip
def test_no_answer_is_refused(answer: Callable[..., Any]) -> None:
    with pytest.raises(AssertionError, match="expected a list of three"):
        checks.check_4(answer)

"""Lesson 10's checks take right answers of any style, and refuse plausible wrong ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from kimik3_lab.teaching import checks_engine

DRAFTS = "vllm:spec_decode_num_drafts_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
Metrics = Mapping[str, float]


def right_move(computed: int, scheduled: int, size: int) -> tuple[int, int] | None:
    if computed == 0:
        return None
    before, after = (computed - 1) // size, (computed + scheduled - 1) // size
    return None if before == after else (before, after)


def another_right_move(computed: int, scheduled: int, size: int) -> list[int] | None:
    ends = [-(-tokens // size) - 1 for tokens in (computed, computed + scheduled)]
    return ends if computed and ends[0] != ends[1] else None


def right_mean(before: Metrics, after: Metrics) -> float | None:
    drafts = after.get(DRAFTS, 0) - before.get(DRAFTS, 0)
    return 1 + (after[ACCEPTED] - before[ACCEPTED]) / drafts if drafts else None


@pytest.mark.parametrize("move", [right_move, another_right_move])
def test_right_moves_pass(move: Callable[..., Any]) -> None:
    checks_engine.check_1(move)


def test_a_right_mean_passes() -> None:
    checks_engine.check_2(right_mean)


def floor_of_count(computed: int, scheduled: int, size: int) -> Any:
    before, after = computed // size, (computed + scheduled) // size
    return None if not computed or before == after else (before, after)


def copies_from_nothing(computed: int, scheduled: int, size: int) -> Any:
    before, after = max(computed - 1, 0) // size, (computed + scheduled - 1) // size
    return None if before == after else (before, after)


def copies_always(computed: int, scheduled: int, size: int) -> Any:
    if computed:
        return (computed - 1) // size, (computed + scheduled - 1) // size
    return None


def only_the_next(computed: int, scheduled: int, size: int) -> Any:
    move = right_move(computed, scheduled, size)
    return move and (move[0], move[0] + 1)


@pytest.mark.parametrize(
    "move",
    [floor_of_count, copies_from_nothing, copies_always, only_the_next, lambda *_: None],
)
def test_wrong_moves_are_refused(move: Callable[..., Any]) -> None:
    with pytest.raises(AssertionError, match="expected"):
        checks_engine.check_1(move)


def totals(before: Metrics, after: Metrics) -> float | None:
    return 1 + after[ACCEPTED] / after[DRAFTS] if after.get(DRAFTS) else None


def without_bonus(before: Metrics, after: Metrics) -> float | None:
    mean = right_mean(before, after)
    return None if mean is None else mean - 1


def divides_by_nothing(before: Metrics, after: Metrics) -> float | None:
    return 1 + (after[ACCEPTED] - before[ACCEPTED]) / (after[DRAFTS] - before[DRAFTS])


def says_one(before: Metrics, after: Metrics) -> float:
    mean = right_mean(before, after)
    return 1.0 if mean is None else mean


def needs_a_drafter(before: Metrics, after: Metrics) -> float | None:
    drafts = after[DRAFTS] - before[DRAFTS]
    return 1 + (after[ACCEPTED] - before[ACCEPTED]) / drafts if drafts else None


@pytest.mark.parametrize(
    "mean",
    [totals, without_bonus, divides_by_nothing, says_one, needs_a_drafter, lambda *_: None],
)
def test_wrong_means_are_refused(mean: Callable[..., Any]) -> None:
    with pytest.raises(AssertionError, match="expected"):
        checks_engine.check_2(mean)

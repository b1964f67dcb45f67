"""Lesson 10's comparison: a switch that changes what is said is told, however it does."""

from __future__ import annotations

import pytest

from kimik3_lab.teaching.engine_switches import Served, compare

BEFORE = Served(((1, 2), (3, 4)), {"forwards": 4, "copies": 1})


@pytest.mark.parametrize(
    ("token_ids", "words"),
    [
        (((1, 2), (3, 5)), "request 1: token 1 was 4 and is 5"),
        (((1, 2), (3,)), "request 1: there were 2 tokens and are 1"),
        (((1, 2, 9), (3, 4)), "request 0: there were 2 tokens and are 3"),
        (((1, 2),), "there were 2 requests and are 1"),
    ],
)
def test_a_switch_that_changes_what_is_said(
    token_ids: tuple[tuple[int, ...], ...], words: str
) -> None:
    with pytest.raises(AssertionError, match=words):
        compare(BEFORE, Served(token_ids, BEFORE.counts))


def test_only_the_counts_that_change_are_told() -> None:
    after = Served(BEFORE.token_ids, {"forwards": 2, "copies": 1})
    assert compare(BEFORE, after) == {"forwards": (4, 2)}

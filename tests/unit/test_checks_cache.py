"""The checks of lesson 07 accept right answers and no wrong one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kimik3_lab.teaching import checks_cache


def page(state: int, row: int, alignment: int, **wrong: object) -> tuple[int, int]:
    """Exercise 1, found by counting up in bytes, with switches for mistakes."""
    if "align_128" in wrong:
        alignment = 128
    unit = row * alignment
    blocks = state // unit + 1 if "always_one_more" in wrong else -(-state // unit)
    if "round_down" in wrong:
        blocks = max(state // unit, 1)
    if "float" in wrong:
        blocks = int(-(-(float(state) / unit) // 1))
    size = -(-state // row) if "unaligned" in wrong else blocks * alignment
    padding = size * row - state
    if "padding_in_rows" in wrong:
        padding //= row
    if "padding_of_page" in wrong:
        padding = size * row
    return size, padding


def test_check_1_accepts_the_rule(capsys: pytest.CaptureFixture[str]) -> None:
    checks_cache.check_1(page)
    assert "right in 10 cases" in capsys.readouterr().out


@pytest.mark.parametrize(
    "mistake",
    ["align_128", "always_one_more", "round_down", "float", "unaligned", "padding_in_rows",
     "padding_of_page"],
)  # fmt: skip
def test_check_1_refuses(mistake: str) -> None:
    with pytest.raises(AssertionError, match=r"multiple|too few|would do|padding"):
        checks_cache.check_1(lambda s, r, a: page(s, r, a, **{mistake: True}))


@pytest.mark.parametrize("answer", [768, (768,), (768.0, 70_656)])
def test_check_1_wants_two_whole_numbers(answer: object) -> None:
    with pytest.raises(AssertionError, match="expected"):
        checks_cache.check_1(lambda *_: answer)  # type: ignore[arg-type, return-value]


def longest_hit(
    hashes: Sequence[bytes],
    pages: set[bytes],
    states: Sequence[set[bytes]],
    num_tokens: int,
    **wrong: object,
) -> int:
    """Exercise 2, from the right, with switches for mistakes."""
    limit = num_tokens if "whole_prompt" in wrong else num_tokens - 1
    for column in reversed(range(len(hashes))):
        if (column + 1) * 16 > limit:
            continue
        before = hashes[column : column + 1] if "gaps" in wrong else hashes[: column + 1]
        if not pages.issuperset(before) and "no_pages" not in wrong:
            continue
        asked = states[:1] if "first_group" in wrong else states
        kept = [hashes[column] in group for group in asked]
        if "any_group" in wrong:
            kept = [any(kept)]
        if "no_states" in wrong:
            kept = []
        if "dense_states" in wrong:
            kept = [group.issuperset(before) for group in asked]
        if all(kept):
            return column if "columns" in wrong else (column + 1) * 16
    return 0


def test_check_2_accepts_the_search_from_the_right(capsys: pytest.CaptureFixture[str]) -> None:
    checks_cache.check_2(longest_hit)
    assert "200 pools" in capsys.readouterr().out


@pytest.mark.parametrize(
    "mistake",
    ["whole_prompt", "gaps", "no_pages", "first_group", "any_group", "no_states", "dense_states",
     "columns"],
)  # fmt: skip
def test_check_2_refuses(mistake: str) -> None:
    with pytest.raises(AssertionError, match="expected a hit of"):
        checks_cache.check_2(lambda h, p, s, n: longest_hit(h, p, s, n, **{mistake: True}))


def test_check_2_keeps_its_own_pools() -> None:
    """An answer that empties what it was given does not empty what it is judged by."""

    def greedy(
        hashes: Sequence[bytes], pages: set[bytes], states: Sequence[set[bytes]], num_tokens: int
    ) -> int:
        answer = longest_hit(hashes, pages, states, num_tokens)
        pages.clear()
        return answer

    checks_cache.check_2(greedy)

"""The checks of lesson 11 accept right answers and no wrong one."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from kimik3_lab.teaching import checks_b300

TRUNK, EXPERTS, STATE, ROW = 23_955_971_824, 180_807_008_256, 56_171_520, 27_648


def floor_ms(requests: int, context: int, drafts: int, mistake: str = "") -> float:
    """Exercise 1, with switches for mistakes."""
    rows = requests * (1 + drafts)
    tokens = requests if mistake == "drafts read no experts" else rows
    share = 1 - (1 - 16 / 896) ** tokens
    if mistake == "no expert twice":
        share = min(1.0, 16 * tokens / 896)
    if mistake == "all experts":
        share = 1.0
    states = requests + rows
    if mistake == "state once":
        states = requests
    if mistake == "one state a request":
        states = 2 * requests
    cached = (1 if mistake == "one context" else requests) * context
    if mistake == "rows split":
        cached /= 8
    trunk = 0 if mistake == "no trunk" else TRUNK
    return 1e3 * (trunk + EXPERTS * share + states * STATE + cached * ROW) / 8e12


def test_check_1_accepts_the_bytes() -> None:
    checks_b300.check_1(floor_ms)


@pytest.mark.parametrize(
    "mistake",
    [
        "drafts read no experts", "no expert twice", "all experts", "state once",
        "one state a request", "one context", "rows split", "no trunk",
    ],
)  # fmt: skip
def test_check_1_refuses(mistake: str) -> None:
    with pytest.raises(AssertionError, match=r"expected .* ms, got"):
        checks_b300.check_1(lambda n, c, k: floor_ms(n, c, k, mistake))


def test_check_1_wants_milliseconds() -> None:
    with pytest.raises(AssertionError, match="expected"):
        checks_b300.check_1(lambda n, c, k: floor_ms(n, c, k) / 1e3)
    with pytest.raises(AssertionError, match="expected a number, got None"):
        checks_b300.check_1(lambda n, c, k: None)  # type: ignore[arg-type,return-value]


def first_token(
    prompt: int,
    limit: int,
    decoding: int,
    drafts: int,
    step_seconds: Callable[[int], float],
    mistake: str = "",
) -> tuple[list[int], float]:
    """Exercise 2 by division instead of a loop, with switches for mistakes."""
    decodes = decoding * (drafts if mistake == "no last token" else 1 + drafts)
    room = limit if mistake == "decodes are free" else limit - decodes
    whole, rest = divmod(prompt, room)
    chunks = [room] * whole + ([rest] if rest or mistake == "an empty chunk" else [])
    if mistake == "even chunks":
        count = math.ceil(prompt / room)
        chunks = [prompt // count + (i < prompt % count) for i in range(count)]
    if mistake == "rest first":
        chunks = chunks[::-1]
    if mistake == "rest lost" and whole:
        chunks = chunks[:whole]
    priced = [c if mistake == "price of the chunk alone" else c + decodes for c in chunks]
    if mistake == "one price for all":
        priced = [room + decodes] * len(chunks)
    seconds = sum(map(step_seconds, priced))
    return chunks, 1e3 * seconds if mistake == "milliseconds" else seconds


def test_check_2_accepts_a_division() -> None:
    checks_b300.check_2(first_token)


@pytest.mark.parametrize(
    "mistake",
    [
        "no last token", "decodes are free", "an empty chunk", "even chunks", "rest first",
        "rest lost", "price of the chunk alone", "one price for all", "milliseconds",
    ],
)  # fmt: skip
def test_check_2_refuses(mistake: str) -> None:
    with pytest.raises(AssertionError, match="prompt of"):
        checks_b300.check_2(lambda p, m, d, k, s: first_token(p, m, d, k, s, mistake))


def test_check_2_says_when_nothing_comes_back() -> None:
    with pytest.raises(AssertionError, match="expected the chunks and their seconds, got None"):
        checks_b300.check_2(lambda p, m, d, k, s: None)  # type: ignore[arg-type,return-value]


def best_k(chance: float, step_seconds: Callable[[int], float], mistake: str = "") -> int:
    """Exercise 3, with switches for mistakes."""

    def speed(k: int) -> float:
        tokens = 1 + sum(chance**place for place in range(1, k + 1))
        if mistake == "own token forgotten":
            tokens = tokens - 1 or 1e-9
        if mistake == "each draft alone":
            tokens = 1 + k * chance
        if mistake == "all or nothing":
            tokens = 1 + k * chance**k
        return tokens / (1.0 if mistake == "steps cost the same" else step_seconds(k))

    ks = range(1, 9) if mistake == "never none" else range(9)
    if mistake == "first rise":
        k = 0
        while k < 8 and speed(k + 1) > speed(k):
            k += 1
        return k
    if mistake == "up to 7":
        ks = range(8)
    return max(ks, key=speed)


def test_check_3_accepts_a_sum_of_powers() -> None:
    checks_b300.check_3(best_k)


@pytest.mark.parametrize(
    "mistake",
    [
        "own token forgotten", "each draft alone", "all or nothing", "steps cost the same",
        "never none", "first rise", "up to 7",
    ],
)  # fmt: skip
def test_check_3_refuses(mistake: str) -> None:
    with pytest.raises(AssertionError, match="ms a token"):
        checks_b300.check_3(lambda p, s: best_k(p, s, mistake))


def test_check_3_names_the_case_that_divides_by_zero() -> None:
    with pytest.raises(AssertionError, match="right with 0%: ZeroDivisionError"):
        checks_b300.check_3(lambda p, s: int(1 / p))


@pytest.mark.parametrize("answer", [None, 2.0, 9, -1, True])
def test_check_3_wants_a_number_of_drafts(answer: object) -> None:
    with pytest.raises(AssertionError, match="expected a whole number from 0 to 8"):
        checks_b300.check_3(lambda p, s: answer)  # type: ignore[arg-type,return-value]

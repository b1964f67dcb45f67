"""Answer checks of lesson 10's second half. Needs the standard library only."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from numbers import Real
from typing import Any

__all__ = ["check_3", "check_4"]

_Parts = Sequence[tuple[float, float]]


def check_3(least_ms: Callable[[_Parts, float, float], float]) -> None:
    """Check exercise 3: the least time of parts that run one after another.

    Judged on parts whose least time is known, and by what must hold for any: another order changes
    nothing, and two steps one after another take as long as both.

    Raises
    ------
    AssertionError
        Naming the parts, what came back and what was expected.
    """
    known: list[tuple[str, _Parts, float]] = [
        ("a part that only moves bytes", [(4e9, 0.0)], 1.0),
        ("a part that only computes", [(0.0, 6e11)], 2.0),
        ("more bytes than arithmetic", [(8e9, 3e11)], 2.0),
        ("more arithmetic than bytes", [(4e9, 6e11)], 2.0),
        # Bytes of one and arithmetic of the other do not overlap: they are not there together.
        ("one of each, one after the other", [(4e9, 0.0), (0.0, 3e11)], 2.0),
        ("three parts", [(8e9, 3e11), (4e9, 9e11), (4e9, 0.0)], 6.0),
        ("no part at all", [], 0.0),
    ]
    bandwidth, rate = 4e12, 3e14
    for name, parts, want in known:
        _holds(name, least_ms(list(parts), bandwidth, rate), want)
    draw = random.Random(10)
    for number in range(20):
        step = [(draw.uniform(0, 9e9), draw.uniform(0, 9e11)) for _ in range(5)]
        other = [(draw.uniform(0, 9e9), draw.uniform(0, 9e11)) for _ in range(3)]
        given = list(step)
        whole = _plain(least_ms(given, bandwidth, rate))
        assert given == step, f"random step {number}: the list of parts was changed"
        assert isinstance(whole, Real), f"random step {number}: expected a number, got {whole!r}"
        turned = least_ms(step[::-1], bandwidth, rate)
        _holds(f"random step {number}, parts in another order", turned, whole)
        alone = [_plain(least_ms(parts, bandwidth, rate)) for parts in (step, other)]
        both = least_ms(step + other, bandwidth, rate)
        _holds(f"random step {number} and one more behind it", both, sum(alone))
        halved = least_ms(step, 2 * bandwidth, 2 * rate)
        _holds(f"random step {number} on a machine twice as fast", halved, whole / 2)
    print(f"exercise 3: right for {len(known) + 20} steps")


def check_4(
    gains: Callable[[tuple[float, float], tuple[float, float], int], Iterable[float]],
) -> None:
    """Check exercise 4: the gain in latency from the first token, from the others, and from both.

    Raises
    ------
    AssertionError
        Naming the request, what came back and what was expected.
    """
    draw = random.Random(4)
    cases: list[tuple[str, tuple[float, float], tuple[float, float], int]] = [
        ("only the first token came sooner", (400.0, 2.0), (100.0, 2.0), 101),
        ("only the others came sooner", (400.0, 6.0), (400.0, 2.0), 101),
        ("nothing changed", (300.0, 5.0), (300.0, 5.0), 1000),
        ("the first token came later", (100.0, 4.0), (200.0, 2.0), 51),
        ("one token", (400.0, 5.0), (100.0, 1.0), 1),
        ("two tokens", (100.0, 100.0), (50.0, 50.0), 2),
    ]
    for number in range(10):
        times = [draw.uniform(1, 900) for _ in range(4)]
        shown = (times[0], times[1] / 100), (times[2], times[3] / 100)
        cases.append((f"random request {number}", *shown, draw.randrange(2, 2000)))
    for name, before, after, tokens in cases:
        name = f"{name}: {before} to {after}, {tokens} tokens"
        got = _plain(gains(before, after, tokens))
        answer = list(got) if isinstance(got, Iterable) else []
        shown = f"{name}: expected a list of three, got {got!r}"
        assert len(answer) == 3 and not isinstance(got, str | Set | Mapping), shown
        # A clock that is stopped at every token.
        old = before[0] + sum(before[1] for _ in range(tokens - 1))
        for what, ttft, tpot, value in zip(
            ("only the first token", "only the others", "both"),
            (after[0], before[0], after[0]),
            (before[1], after[1], after[1]),
            answer,
            strict=True,
        ):
            new = ttft + sum(tpot for _ in range(tokens - 1))
            _holds(f"{name}, {what}", value, old / new)
    print(f"exercise 4: right for {len(cases)} requests")


def _plain(got: Any) -> Any:
    """Take the number out of an array without axes, as NumPy and torch return one."""
    return got.item() if getattr(got, "ndim", None) == 0 else got


def _holds(name: str, got: object, want: float) -> None:
    got = _plain(got)
    shown = f"{name}: expected {want:.6g}, got {got!r}"
    assert isinstance(got, Real), shown
    assert math.isclose(float(got), want, rel_tol=1e-9, abs_tol=1e-12), shown

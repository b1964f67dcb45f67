"""Answer checks of lesson 10. Needs the standard library only."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from numbers import Real

__all__ = ["check_1", "check_2"]

_DRAFTS = "vllm:spec_decode_num_drafts_total"
_ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"


def check_1(state_move: Callable[[int, int, int], tuple[int, int] | None]) -> None:
    """Check exercise 1: when a KDA state must be copied, and from which column to which.

    Judged by playing the columns token by token: the state after token n belongs to the column
    that holds token n.

    Raises
    ------
    AssertionError
        Naming the step, what came back and what the columns say.
    """
    cases = [
        (computed, scheduled, size)
        for size in (1, 4, 16)
        for computed in (0, 1, size - 1, size, size + 1, 3 * size)
        for scheduled in (1, size, 2 * size + 1)
        if computed >= 0
    ]
    for computed, scheduled, size in cases:
        name = f"computed {computed}, scheduled {scheduled}, block_size {size}"
        columns = [token // size for token in range(computed + scheduled)]
        before, after = columns[computed - 1] if computed else None, columns[-1]
        want = None if before is None or before == after else (before, after)
        got = state_move(computed, scheduled, size)
        if want is None:
            why = "a first step starts from zero" if before is None else "the column stays"
            assert got is None, f"{name}: expected None, {why}; got {got!r}"
        else:
            assert got is not None, f"{name}: expected a copy {want}, got None"
            assert tuple(got) == want, f"{name}: expected a copy {want}, got {got!r}"
    print(f"exercise 1: right in {len(cases)} steps")


def check_2(
    tokens_per_verification: Callable[[Mapping[str, float], Mapping[str, float]], float | None],
) -> None:
    """Check exercise 2: tokens per verification between two readings of the metrics.

    Raises
    ------
    AssertionError
        Naming the two readings, what came back and what was expected.
    """
    cases: list[tuple[str, tuple[float, float], tuple[float, float], float | None]] = [
        ("ten verifications from the start", (0, 0), (10, 24), 3.4),
        ("ten more on a server that has run before", (100, 50), (110, 74), 3.4),
        ("nothing accepted", (5, 3), (9, 3), 1.0),
        ("everything accepted, K = 7", (40, 90), (42, 104), 8.0),
        ("no verification in between", (7, 11), (7, 11), None),
    ]
    for name, first, second, want in cases:
        before, after = ({_DRAFTS: d, _ACCEPTED: a} for d, a in (first, second))
        try:
            got = tokens_per_verification(before, after)
        except ZeroDivisionError:
            raise AssertionError(f"{name}: divided by zero; expected {want}") from None
        shown = f"{name}: expected {want}, got {got!r}"
        if want is None:
            assert got is None, f"{shown}; nothing was verified, so there is no mean"
        else:
            assert isinstance(got, Real), shown
            assert math.isclose(float(got), want, rel_tol=1e-9), shown
    try:
        got = tokens_per_verification({}, {})
    except KeyError:
        raise AssertionError(
            "a server without a drafter has neither metric: expected None, got a KeyError"
        ) from None
    assert got is None, f"a server without a drafter: expected None, got {got!r}"
    print(f"exercise 2: right in {len(cases) + 1} readings")

"""Answer check of lesson 12. Needs scipy."""

from __future__ import annotations

from collections.abc import Callable

from kimik3_lab.performance.published import count_ratio_interval

__all__ = ["check_1"]


def check_1(requests_needed: Callable[[float, float], int]) -> None:
    """Check exercise 1: the answer must satisfy the demand, and one request less must not.

    Raises
    ------
    AssertionError
        Naming the case and which of the two fails.
    """
    cases = ((2.0, 1.5), (2.0, 1.6), (3.0, 1.0))
    for ratio, at_least in cases:
        got = requests_needed(ratio, at_least)
        case = f"ratio {ratio:g}, lower end {at_least:g}: got {got}"
        low, _ = count_ratio_interval(got, round(ratio * got))
        assert low > at_least, f"{case}, but its interval begins at {low:.3f}"
        if got > 1:
            low, _ = count_ratio_interval(got - 1, round(ratio * (got - 1)))
            assert low <= at_least, f"{case}, but {got - 1} is already enough"
    print(f"exercise 1: right on {len(cases)} cases")

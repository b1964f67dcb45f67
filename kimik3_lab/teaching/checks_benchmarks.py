"""Answer checks of lesson 12. Needs scipy for the first."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

from kimik3_lab.performance.published import count_ratio_interval

__all__ = ["check_1", "check_2", "check_3"]

#: A request: when it was sent, and when its last token came; seconds.
Request = tuple[float, float]


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


def check_2(window_figures: Callable[[list[Request], float, float], tuple[float, float]]) -> None:
    """Check exercise 2: mean latency and rate of a window, by guidellm's rule.

    The cases hold requests that begin before the window, end after it, span it, miss it on either
    side, and touch its edges exactly.

    Raises
    ------
    AssertionError
        Naming the case, what was expected and what came.
    """
    cases: list[tuple[str, list[Request], float, float]] = [
        ("all inside", [(11.0, 13.0), (13.0, 17.0)], 10.0, 20.0),
        ("one began before the window", [(6.0, 12.0), (12.0, 14.0)], 10.0, 20.0),
        ("one ended after the window", [(11.0, 13.0), (13.0, 25.0)], 10.0, 20.0),
        ("one spans the window", [(2.0, 40.0), (12.0, 13.0)], 10.0, 20.0),
        ("some miss the window", [(1.0, 9.0), (11.0, 12.0), (21.0, 22.0)], 10.0, 20.0),
        ("edges belong to the window", [(4.0, 10.0), (15.0, 20.0), (20.0, 27.0)], 10.0, 20.0),
        ("nothing ended inside", [(5.0, 25.0), (8.0, 30.0)], 10.0, 20.0),
    ]
    rng = random.Random(0)
    for number in range(5):
        made = [(s, s + rng.uniform(0.5, 9)) for s in (rng.uniform(0, 30) for _ in range(40))]
        cases.append((f"random case {number}", made, rng.uniform(4, 9), rng.uniform(18, 26)))
    for name, requests, opens, closes in cases:
        touching = [end - start for start, end in requests if end >= opens and start <= closes]
        ended = sum(opens <= end <= closes for _, end in requests)
        wanted = (math.fsum(touching) / len(touching), ended / (closes - opens))
        got = window_figures(list(requests), opens, closes)
        assert isinstance(got, tuple | list) and len(got) == 2, (
            f"{name}: expected mean latency and requests a second, got {got!r}"
        )
        for what, right, value in zip(("mean latency", "requests a second"), wanted, got,
                                      strict=True):  # fmt: skip
            assert math.isclose(value, right, rel_tol=1e-9, abs_tol=1e-12), (
                f"{name}: {what} should be {right:.4g}, got {value!r}; requests {requests[:3]}, "
                f"window {opens:g} to {closes:g}"
            )
    print(f"exercise 2: right on {len(cases)} windows")


def check_3(
    from_schedule: Callable[[list[float], list[float]], Sequence[float]],
) -> None:
    """Check exercise 3: latencies of one server, counted from when each request was due.

    Raises
    ------
    AssertionError
        Naming the case, the request, what was expected and what came.
    """
    cases: list[tuple[str, list[float], list[float]]] = [
        ("nobody waits", [0.0, 10.0, 20.0], [3.0, 3.0, 3.0]),
        ("one stall, and the queue behind it", [0.0, 1.0, 2.0, 3.0], [4.0, 0.5, 0.5, 0.5]),
        ("the server idles, then works", [5.0, 30.0, 31.0], [2.0, 4.0, 1.0]),
        ("all at once", [2.0, 2.0, 2.0], [1.0, 2.0, 3.0]),
        ("more than it can serve", [float(i) for i in range(12)], [1.5] * 12),
    ]
    rng = random.Random(0)
    for number in range(4):
        due, moments = 0.0, []
        for _ in range(30):
            due += rng.expovariate(1.0)
            moments.append(due)
        cases.append((f"random case {number}", moments, [rng.uniform(0, 1.8) for _ in moments]))
    for name, scheduled, service in cases:
        got = list(from_schedule(list(scheduled), list(service)))
        assert len(got) == len(scheduled), (
            f"{name}: {len(scheduled)} requests, {len(got)} latencies"
        )
        free = 0.0
        for index, (due, seconds, value) in enumerate(zip(scheduled, service, got, strict=True)):
            free = max(free, due) + seconds
            assert math.isclose(value, free - due, rel_tol=1e-9, abs_tol=1e-12), (
                f"{name}: request {index}, due at {due:.3g} and served until {free:.3g}, has "
                f"latency {free - due:.4g}, got {value!r}"
            )
    print(f"exercise 3: right on {len(cases)} schedules")

"""Answer check of lesson 11's exercise on exchanges: a latency and a bandwidth from times.

Needs the standard library only. The answer is judged by lines that it must find again, by what
must not change it, and by how far it is from the times; the lesson's own solution is not asked.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

__all__ = ["check_4"]

_SIZES = [1 << n for n in range(12, 29)]


def check_4(
    alpha_beta: Callable[[Sequence[float], Sequence[float]], tuple[float, float]],
) -> None:
    """Check exercise 4.

    Raises
    ------
    AssertionError
        Naming the times, and what is wrong with the line.
    """
    rng = random.Random(4)
    cases = 0
    for latency, bandwidth in ((13e-6, 3e11), (40e-6, 1e11), (2e-6, 4.5e11), (300e-6, 1e10)):
        for sizes in (_SIZES, _SIZES[::2], rng.sample(_SIZES, 6)):
            seconds = [latency + size / bandwidth for size in sizes]
            found = _pair(alpha_beta(list(sizes), list(seconds)))
            for name, got, expected, unit in (
                ("latency", found[0], latency, "s"),
                ("bandwidth", found[1], bandwidth, "B/s"),
            ):
                assert math.isclose(got, expected, rel_tol=1e-4), (
                    f"times that lie on a line of {latency:g} s and {bandwidth:g} B/s: the {name} "
                    f"should be {expected:g} {unit}, got {got:g}"
                )
            cases += 1
    for _ in range(10):
        latency, bandwidth = 10 ** rng.uniform(-6, -4), 10 ** rng.uniform(10, 12)
        seconds = [(latency + size / bandwidth) * rng.uniform(0.85, 1.15) for size in _SIZES]
        found = _pair(alpha_beta(list(_SIZES), seconds))
        best = _loss(found, seconds)
        for factor in (0.98, 1.02):
            for moved in ((found[0] * factor, found[1]), (found[0], found[1] * factor)):
                assert _loss(moved, seconds) >= best, (
                    "times that scatter by 15 %: a line of "
                    f"{moved[0]:g} s and {moved[1]:g} B/s has smaller relative errors than yours "
                    f"of {found[0]:g} s and {found[1]:g} B/s. Does every size count alike, a "
                    "message of 4 KiB as much as one of 256 MiB?"
                )
        cases += 1
    print(f"exercise 4: right in {cases} cases")


def _loss(line: tuple[float, float], seconds: Sequence[float]) -> float:
    latency, bandwidth = line
    return sum(
        ((latency + size / bandwidth) / y - 1) ** 2 for size, y in zip(_SIZES, seconds, strict=True)
    )


def _pair(answer: object) -> tuple[float, float]:
    try:
        latency, bandwidth = (float(value) for value in answer)  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        raise AssertionError(
            f"expected two numbers, seconds and bytes a second, got {answer!r}"
        ) from None
    assert bandwidth > 0, f"expected a bandwidth above 0, got {bandwidth!r}"
    return latency, bandwidth

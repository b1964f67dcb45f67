"""What the parts of :mod:`benchmarks.kda_ladder` share: the layer's size, timing, the comparison.

Needs a CUDA device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.floors import HEAD_DIM
from benchmarks.timing import time_side_by_side

__all__ = ["HEADS", "STATE_BYTES", "Row", "check", "time_calls"]

HEADS = 12
#: Of one request's states.
STATE_BYTES = HEADS * HEAD_DIM * HEAD_DIM * 4

Row = dict[str, Any]


def time_calls(calls: dict[str, Callable[[int], object]], sets: int) -> dict[str, Row]:
    """Time calls in turns; each takes the number of an input set."""
    timings = time_side_by_side(calls, sets, seconds=0.05)
    return {
        name: {"us": t.median_us, "p10_us": t.p10_us, "p90_us": t.p90_us, "graph": t.graph}
        for name, t in timings.items()
    }


def check(name: str, problem: Any, call: Callable[[int], object]) -> float:
    """Return the relative error of a call against float64; refuse one that is too large."""
    error = float(problem.error(call))
    if not error <= problem.tolerance:
        raise AssertionError(
            f"{name}: relative error {error:.3g} against float64, expected at most "
            f"{problem.tolerance:g}"
        )
    return error

"""One row of the result: the arithmetic between times, floor and goal.

Needs the standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

from benchmarks.cases import CASES, Case, expected_floor_us
from benchmarks.registry import OURS, PEERS

__all__ = ["NOT_MEASURED", "complete", "goal_met", "make_row"]

#: The reason in a row of a case that no run has come to.
NOT_MEASURED = "not measured"


class _Timed(Protocol):
    median_us: float
    p10_us: float
    p90_us: float
    graph: bool


def make_row(
    case: Case,
    *,
    floor_us: float | None = None,
    timings: Mapping[str, _Timed] | None = None,
    errors: Mapping[str, float] | None = None,
    reasons: Mapping[str, str] | None = None,
    facts: Mapping[str, Any] | None = None,
    tolerance: float | None = None,
) -> dict[str, Any]:
    """Make a row; ``timings`` holds ours and the peers', ``reasons`` why one was not timed.

    ``ratio`` is the time of ``best_peer`` over ours. Where the goal names peers, the best of those
    counts; ``ratios`` has all. Without a time of ours, ``reason`` says why.
    """
    timings, errors, reasons = timings or {}, errors or {}, reasons or {}
    ours = timings.get(OURS)
    peers = {name: timings[name].median_us for name in PEERS[case.operator] if name in timings}
    against = case.goal.against if case.goal else ()
    rivals = {name: us for name, us in peers.items() if not against or name in against}
    best = min(rivals, key=rivals.__getitem__) if rivals else None
    ours_us = ours.median_us if ours else None
    finite = {name: error if math.isfinite(error) else None for name, error in errors.items()}
    row: dict[str, Any] = {
        "operator": case.operator,
        "case": case.name,
        "ours_us": ours_us,
        "peers": peers,
        "best_peer": best,
        "ratio": rivals[best] / ours_us if best and ours_us else None,
        "goal": case.goal.value if case.goal else None,
        "floor_us": floor_us,
        "fraction_of_floor": floor_us / ours_us if floor_us and ours_us else None,
        "max_rel_err": finite.get(OURS),
        "goal_kind": case.goal.kind if case.goal else None,
        "goal_against": list(against),
        "goal_or_below_us": case.goal.or_below_us if case.goal else None,
        "ratios": {name: us / ours_us for name, us in peers.items()} if ours_us else {},
        "spread_us": {name: [t.p10_us, t.p90_us] for name, t in timings.items()},
        "rel_err": finite,
        "tolerance": tolerance,
        "not_timed": {name: why for name, why in reasons.items() if name != OURS},
        "not_in_a_graph": [name for name, t in timings.items() if not t.graph],
        "inputs": dict(facts or {}),
    }
    if ours_us is None:
        row["reason"] = reasons.get(OURS, NOT_MEASURED)
    row["goal_met"] = goal_met(row)
    return row


def goal_met(row: Mapping[str, Any]) -> bool | None:
    """Say whether a row reaches its goal; None where it has no goal or was not measured."""
    if row["goal"] is None or row["ours_us"] is None:
        return None
    if row["goal_kind"] == "ratio":
        return None if row["ratio"] is None else row["ratio"] >= row["goal"]
    below = row["goal_or_below_us"]
    quick = below is not None and row["ours_us"] < below
    return quick or row["fraction_of_floor"] >= row["goal"]


def complete(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for every case in their order: those given, and for the rest why they lack."""
    given = {(row["operator"], row["case"]): row for row in rows}
    return [
        given.get((c.operator, c.name)) or make_row(c, floor_us=expected_floor_us(c)) for c in CASES
    ]

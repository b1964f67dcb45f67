"""The result file and the table: read, merge, write, print.

Needs the standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.provenance import same_session
from benchmarks.rows import complete

__all__ = ["RECORDED", "SCHEMA_VERSION", "header", "line", "merge", "recorded", "save", "summary"]

SCHEMA_VERSION = 2
RECORDED = Path(__file__).resolve().parents[2] / "data" / "results"

_WIDTHS = {"case": 15, "ours us": 9, "best peer us": 27, "ratio": 6, "goal": 6, "floor us": 9,
           "of floor": 8, "rel err": 8}  # fmt: skip


def merge(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Add a run's rows to an earlier run's; a case measured twice takes the new row.

    Raises
    ------
    ValueError
        If the two come from different machines, software or sources: their times must not stand
        side by side.
    """
    different = same_session(old["provenance"], new["provenance"])
    if old.get("schema_version") != SCHEMA_VERSION or different:
        what = ", ".join(different) or "schema_version"
        raise ValueError(
            f"the earlier rows are of another session ({what} differ): write to another file, or "
            "remove that one"
        )
    rows = {(row["operator"], row["case"]): row for row in (*old["rows"], *new["rows"])}
    made = dict(new["provenance"])
    made["peers"] = {**old["provenance"]["peers"], **made["peers"]}
    earlier = old["provenance"].get("commands", [old["provenance"]["command"]])
    made["commands"] = [*(earlier if old["rows"] else ()), made["command"]]
    return {**new, "provenance": made, "rows": list(rows.values())}


def save(path: Path, result: dict[str, Any]) -> None:
    """Write a result with a row for every case; the old file stays until the new one is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".part")
    whole = {**result, "rows": complete(result["rows"])}
    unfinished.write_text(json.dumps(whole, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    unfinished.replace(path)


def recorded(folder: Path = RECORDED) -> Iterator[dict[str, Any]]:
    """Yield every recorded result of this schema."""
    for path in sorted(folder.glob("*/kernels.json")):
        result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if result.get("schema_version") == SCHEMA_VERSION:
            yield result


def header() -> str:
    """Return the table's head."""
    return " ".join(title.rjust(width) for title, width in _WIDTHS.items())


def line(row: dict[str, Any]) -> str:
    """Return a row of the table; behind it the peers that were quicker than the best that counts.

    A goal over named peers can be met while another peer is quicker still, than ours even.
    """
    best = row["best_peer"]
    peer = f"{best} {row['peers'][best]:.1f}" if best else "-"
    goal = "-" if row["goal"] is None else f"{row['goal']:.2f}"
    mark = {True: "  met", False: "  not met", None: ""}[row["goal_met"]]
    cells = (
        row["case"], _number(row["ours_us"], ".2f"), peer, _number(row["ratio"], ".2f"), goal,
        _number(row["floor_us"], ".2f"), _number(row["fraction_of_floor"], ".0%"),
        _number(row["max_rel_err"], ".1e"),
    )  # fmt: skip
    text = " ".join(cell.rjust(width) for cell, width in zip(cells, _WIDTHS.values(), strict=True))
    counted = row["peers"][best] if best else row["ours_us"] or 0.0
    quicker = [
        f"{name} {_number(row['ratios'].get(name), '.2f')}"
        for name, us in row["peers"].items()
        if us < counted and row["goal_against"] and name not in row["goal_against"]
    ]
    note = f"  quicker: {', '.join(quicker)}" if quicker else ""
    return text + mark + note + (f"  ({row['reason']})" if row.get("reason") else "")


def summary(rows: Iterable[dict[str, Any]]) -> str:
    """Count the goals that are met, and all rows without a time of ours."""
    rows = list(rows)
    goals = [row for row in rows if row["goal"] is not None]
    verdicts = [row["goal_met"] for row in goals]
    lonely = sum(row["goal_met"] is None and row["ours_us"] is not None for row in goals)
    text = (
        f"{verdicts.count(True)} of {len(goals)} goals met, {verdicts.count(False)} missed; "
        f"{sum(row['ours_us'] is None for row in rows)} of {len(rows)} cases not measured"
    )
    return text + (f", {lonely} without the peer of the goal" if lonely else "")


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)

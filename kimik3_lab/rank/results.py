"""The file of the rank ladder: what is in it, and how it is written.

Needs the standard library only. Lesson 10 and its figures read the file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["ROW_KEYS", "check_rows", "gains", "operators", "save"]

#: Keys that every row has.
ROW_KEYS = (
    "concurrency",
    "rung",
    "beyond_published",
    "latency_s",
    "ttft_ms",
    "tpot_ms",
    "output_tokens_per_s",
    "forwards",
    "launches",
    "bytes",
    "fraction_of_floor",
)
#: Operators of a rank's step in the kernel benchmark, with the cases next to a step's sizes.
_OPERATORS = {
    "moe_mxfp4_tp8": ("T=1", "T=4", "T=16", "T=64", "T=256", "T=1024", "T=8192"),
    "kda_decode": ("H=12,B=1", "H=12,B=16", "H=12,B=64"),
    "kda_prefill": ("H=12,1x2048", "H=12,1x8192"),
    "attnres8": ("T=1", "T=16", "T=256", "T=1024", "T=8192"),
    "router": ("T=1", "T=16", "T=256", "T=8192"),
}


def check_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    """Refuse rows that are not whole.

    Raises
    ------
    ValueError
        Naming the row and what is missing.
    """
    for row in rows:
        missing = [key for key in ROW_KEYS if row.get(key) is None]
        if missing:
            raise ValueError(
                f"row {row.get('rung')!r} at concurrency {row.get('concurrency')} lacks {missing}"
            )


def gains(rows: Sequence[Mapping[str, Any]], last: str) -> dict[str, float]:
    """Output tokens a second of rung ``last`` over those of the first rung, by concurrency.

    Examples
    --------
    >>> rows = [{"concurrency": 1, "rung": name, "output_tokens_per_s": value}
    ...         for name, value in (("old", 2.0), ("new", 5.0))]
    >>> gains(rows, "new")
    {'1': 2.5}
    """
    first = rows[0]["rung"] if rows else None
    rate = {(r["rung"], r["concurrency"]): r["output_tokens_per_s"] for r in rows}
    return {
        str(c): round(rate[last, c] / rate[first, c], 4)
        for name, c in rate
        if name == first and (last, c) in rate
    }


def operators(kernels: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each operator of the first rung beside its best peer, from the kernel benchmark's file.

    Returns
    -------
    list of dict
        Times in microseconds; ``ours_over_peer`` above 1.1 means that the rung is slower than the
        software it stands for could have been.
    """
    found = []
    for row in kernels["rows"]:
        wanted = _OPERATORS.get(row["operator"], ())
        if row["case"] not in wanted or not row.get("ours_us") or not row.get("ratio"):
            continue
        found.append(
            {
                "operator": row["operator"],
                "case": row["case"],
                "ours_us": round(row["ours_us"], 3),
                "best_peer": row["best_peer"],
                "best_peer_us": round(row["ours_us"] * row["ratio"], 3),
                "ours_over_peer": round(1 / row["ratio"], 3),
                "slower_than_1.1x": row["ratio"] < 1 / 1.1,
            }
        )
    return found


def save(body: Mapping[str, Any], path: Path) -> None:
    """Write the file under a temporary name, then rename it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(f"{path}.tmp")
    temporary.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)

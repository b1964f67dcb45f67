"""The columns that a foreign result is read into, and how its fields are looked up.

Needs the standard library only. :mod:`kimik3_lab.benchmark.foreign` and its two readers use it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

__all__ = ["LATENCIES", "STATISTICS", "ForeignFormatError", "blank_row", "number", "part"]

LATENCIES = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_s")
STATISTICS = ("mean", "median", "p90", "p99")
_COLUMNS = (
    "concurrency", "request_rate", "attempted", "completed", "failed", "completed_in_window",
    "window_s", "requests_per_s", "output_tokens_per_s", "observed_tokens_per_s",
)  # fmt: skip


class ForeignFormatError(ValueError):
    """A result that lacks something; the message says what, and how to get it."""


def blank_row() -> dict[str, Any]:
    """Return the columns of :func:`kimik3_lab.benchmark.report.rows`, all None.

    >>> list(blank_row())[:3], blank_row()["ttft_ms_median"]
    (['concurrency', 'request_rate', 'attempted'], None)
    """
    names = [f"{name}_{statistic}" for name in LATENCIES for statistic in STATISTICS]
    return dict.fromkeys((*_COLUMNS, *names, "prompt_tokens", "output_tokens"))


def part(body: Mapping[str, Any], path: str, *, where: str) -> Any:
    """Follow a dotted path.

    Raises
    ------
    ForeignFormatError
        If it does not lead anywhere.

    Examples
    --------
    >>> part({"a": {"b": 3}}, "a.b", where="benchmark 0")
    3
    """
    found: Any = body
    for name in path.split("."):
        if not isinstance(found, Mapping) or name not in found:
            raise ForeignFormatError(f"{where} has no {path} (nothing at {name!r})")
        found = found[name]
    return found


def number(body: Mapping[str, Any], path: str, *, where: str) -> float:
    """Follow a dotted path to a finite number.

    Raises
    ------
    ForeignFormatError
        If there is none, or it is not finite.
    """
    found = part(body, path, where=where)
    usable = isinstance(found, int | float) and not isinstance(found, bool)
    if not usable or not math.isfinite(found):
        raise ForeignFormatError(f"{where}: {path} must be a number, got {found!r}")
    return float(found)

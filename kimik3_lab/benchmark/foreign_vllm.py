"""What ``vllm bench serve --save-result`` writes, read into our rows.

Needs numpy. The fields are those of 0.27.1 to 0.33.0. A file holds one load level.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kimik3_lab.benchmark.foreign_rows import (
    LATENCIES,
    STATISTICS,
    ForeignFormatError,
    blank_row,
    number,
)

__all__ = ["vllm_rows"]

_NAMES = {"ttft_ms": "ttft_ms", "tpot_ms": "tpot_ms", "itl_ms": "itl_ms", "e2e_s": "e2el_ms"}
_QUANTILES = {"median": 0.5, "p90": 0.9, "p99": 0.99}


def vllm_rows(bodies: Sequence[Any]) -> tuple[str, list[dict[str, Any]], list[str]]:
    """Return the tool's name, a row for each run, and notes.

    Raises
    ------
    ForeignFormatError
        If a run has no completed request, or lacks a figure.
    """
    table, notes = [], []
    for index, body in enumerate(bodies):
        where = f"run {index}" if len(bodies) > 1 else "the run"
        if not isinstance(body, Mapping):
            raise ForeignFormatError(f"{where} is a {type(body).__name__}, not an object")
        row = _row(body, where)
        table.append(row)
        notes += _notes(row)
    notes.append(
        "vllm bench serve counts the whole run, from the first request to the last answer, with "
        "no warm-up or cool-down cut off; prompt tokens are without the chat template"
    )
    return "vllm bench serve", table, notes


def _row(body: Mapping[str, Any], where: str) -> dict[str, Any]:
    row = blank_row()
    row["completed"] = row["completed_in_window"] = round(number(body, "completed", where=where))
    row["attempted"] = round(number(body, "num_prompts", where=where))
    # Older versions do not write how many failed.
    failed = body.get("failed", row["attempted"] - row["completed"])
    row["failed"] = round(number({"failed": failed}, "failed", where=where))
    if not row["completed"]:
        raise ForeignFormatError(
            f"{where} completed none of {row['attempted']} requests, so it has no figures"
        )
    rate = body.get("request_rate")
    if body.get("max_concurrency") is not None:
        row["concurrency"] = round(number(body, "max_concurrency", where=where))
    if rate not in (None, "inf"):
        row["request_rate"] = number(body, "request_rate", where=where)
    elif row["concurrency"] is None:
        row["request_rate"] = math.inf  # all requests at once
    row["window_s"] = number(body, "duration", where=where)
    row["requests_per_s"] = number(body, "request_throughput", where=where)
    row["output_tokens_per_s"] = number(body, "output_throughput", where=where)
    for column, total in (
        ("prompt_tokens", "total_input_tokens"),
        ("output_tokens", "total_output_tokens"),
    ):
        row[column] = number(body, total, where=where) / row["completed"]
    for latency in LATENCIES:
        _statistics(row, body, latency, where)
    for needed in ("ttft_ms_mean", "tpot_ms_mean"):
        if row[needed] is None:
            raise ForeignFormatError(
                f"{where} has no mean_{needed.removesuffix('_mean')}: run with --percentile-metrics"
                " ttft,tpot,itl,e2el --metric-percentiles 50,90,99"
            )
    return row


def _statistics(row: dict[str, Any], body: Mapping[str, Any], latency: str, where: str) -> None:
    """Fill in a latency; what the run did not print is computed from its list, if it has one."""
    theirs = _NAMES[latency]
    factor = 1e-3 if latency == "e2e_s" else 1.0
    for statistic in STATISTICS:
        name = f"{statistic}_{theirs}"
        if name in body:
            row[f"{latency}_{statistic}"] = factor * number(body, name, where=where)
    samples = body.get("latencies")
    # Failed requests have an entry in the list too, so it only serves when there were none.
    if latency != "e2e_s" or not isinstance(samples, list) or row["failed"] or not samples:
        return
    data = np.asarray(samples, dtype=float)
    found = {"mean": float(data.mean())}
    found |= {name: float(np.quantile(data, q)) for name, q in _QUANTILES.items()}
    for statistic in STATISTICS:
        if row[f"{latency}_{statistic}"] is None:
            row[f"{latency}_{statistic}"] = found[statistic]


def _notes(row: Mapping[str, Any]) -> list[str]:
    load = f"c={row['concurrency']}" if row["concurrency"] else f"{row['request_rate']:g} req/s"
    notes = []
    if row["failed"]:
        notes.append(f"{load}: {row['failed']} of {row['attempted']} requests failed")
    if row["e2e_s_mean"] is None:
        notes.append(
            f"{load}: no end-to-end latency in the file; ask for it with --percentile-metrics "
            "ttft,tpot,itl,e2el"
        )
    if row["concurrency"] and row["request_rate"]:
        notes.append(f"{load}: requests came at {row['request_rate']:g} a second, so many at most")
    return notes

"""guidellm's JSON report, read into our rows.

Needs the standard library only. Its classes name what is read here: ``GenerativeBenchmarksReport``
with schema version 1 (guidellm 0.6) and 2 (0.7 and 0.8). What changed between them lies outside of
the part that is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kimik3_lab.benchmark.foreign_rows import (
    STATISTICS,
    ForeignFormatError,
    blank_row,
    number,
    part,
)

__all__ = ["guidellm_rows"]

_SCHEMAS = (1, 2)
#: Our column, guidellm's metric, and what turns its unit into ours. Its ``inter_token_latency_ms``
#: is (last - first) / (n - 1) of each request, weighted by tokens: what we call TPOT. Its own
#: ``time_per_output_token_ms`` divides the whole latency, first token included, by all tokens.
_METRICS = (
    ("e2e_s", "request_latency"),
    ("ttft_ms", "time_to_first_token_ms"),
    ("tpot_ms", "inter_token_latency_ms"),
)
_NAMES = {"mean": "mean", "median": "median", "p90": "percentiles.p90", "p99": "percentiles.p99"}


def guidellm_rows(body: Mapping[str, Any]) -> tuple[str, list[dict[str, Any]], list[str]]:
    """Return the tool's name, a row for each benchmark of the report, and notes.

    Raises
    ------
    ForeignFormatError
        If the schema is another one, no benchmark is in it, or one lacks a figure.
    """
    metadata = body.get("metadata")
    schema = metadata.get("version") if isinstance(metadata, Mapping) else None
    if schema not in _SCHEMAS:
        raise ForeignFormatError(
            f"metadata.version is {schema!r}, this lab reads guidellm's schemas 1 (0.6) and 2 "
            "(0.7 and 0.8): measure again with one of these"
        )
    version = metadata.get("guidellm_version", "") if isinstance(metadata, Mapping) else ""
    benchmarks = body["benchmarks"]
    if not isinstance(benchmarks, list) or not benchmarks:
        raise ForeignFormatError(
            "the report has no benchmarks: every load level failed or was cut short; look at "
            "guidellm's own output"
        )
    table, notes = [], []
    for index, benchmark in enumerate(benchmarks):
        where = f"benchmark {index}"
        if not isinstance(benchmark, Mapping):
            raise ForeignFormatError(f"{where} is a {type(benchmark).__name__}, not an object")
        row = _row(benchmark, where)
        table.append(row)
        notes += _notes(row)
    notes.append(
        "output_tokens_per_s is requests that ended in the window times their length, which is how "
        "the published figures came about; observed_tokens_per_s is guidellm's own, of tokens that "
        "arrived in it"
    )
    notes.append(
        "tpot_ms is guidellm's inter_token_latency_ms, weighted by tokens; its "
        "time_per_output_token_ms has the time to the first token in it"
    )
    return f"guidellm {version}".strip(), table, notes


def _row(benchmark: Mapping[str, Any], where: str) -> dict[str, Any]:
    row = blank_row()
    strategy = part(benchmark, "config.strategy", where=where)
    _load(row, strategy, where)
    made = "scheduler_metrics.requests_made"
    for column, status in (("completed", "successful"), ("failed", "errored")):
        row[column] = round(number(benchmark, f"{made}.{status}", where=where))
    row["attempted"] = round(number(benchmark, f"{made}.total", where=where))
    if not row["completed"]:
        raise ForeignFormatError(
            f"{where}: none of {row['attempted']} requests succeeded ({row['failed']} failed), so "
            "it has no figures"
        )
    row["window_s"] = number(benchmark, "duration", where=where)
    row["requests_per_s"] = number(
        benchmark, "metrics.requests_per_second.successful.mean", where=where
    )
    row["completed_in_window"] = round(row["requests_per_s"] * row["window_s"])
    # Its own figure counts the tokens that arrived inside the window, of finished requests.
    row["observed_tokens_per_s"] = number(
        benchmark, "metrics.output_tokens_per_second.successful.mean", where=where
    )
    for column, metric in (
        ("prompt_tokens", "prompt_token_count"),
        ("output_tokens", "output_token_count"),
    ):
        row[column] = number(benchmark, f"metrics.{metric}.successful.mean", where=where)
    row["output_tokens_per_s"] = row["requests_per_s"] * row["output_tokens"]
    for column, metric in _METRICS:
        for statistic in STATISTICS:
            path = f"metrics.{metric}.successful.{_NAMES[statistic]}"
            row[f"{column}_{statistic}"] = number(benchmark, path, where=where)
    return row


def _load(row: dict[str, Any], strategy: Any, where: str) -> None:
    """Read how requests arrived."""
    kind = part(strategy, "type_", where=f"{where}, config.strategy")
    if kind == "synchronous":
        row["concurrency"] = 1
    elif kind == "concurrent":
        row["concurrency"] = round(number(strategy, "streams", where=f"{where}, config.strategy"))
    elif kind in ("constant", "poisson"):
        row["request_rate"] = number(strategy, "rate", where=f"{where}, config.strategy")
    elif kind == "throughput":
        row["request_rate"] = float("inf")
    else:
        raise ForeignFormatError(
            f"{where} ran the strategy {kind!r}; known: synchronous, concurrent, constant, "
            "poisson, throughput"
        )


def _notes(row: Mapping[str, Any]) -> list[str]:
    load = f"c={row['concurrency']}" if row["concurrency"] else f"{row['request_rate']:g} req/s"
    notes = []
    if row["failed"]:
        notes.append(f"{load}: {row['failed']} of {row['attempted']} requests failed")
    if row["completed_in_window"] < 30:
        notes.append(
            f"{load}: {row['completed_in_window']} requests ended in the window; guidellm prints "
            "percentiles for any number of them"
        )
    return notes

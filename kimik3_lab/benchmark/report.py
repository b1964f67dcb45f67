"""Save, load and print benchmark results.

Needs rich for the table. Used by lessons 00, 10 and 12 and by ``k3lab bench``.

A result file is JSON with ``schema`` and ``schema_version``, the provenance, the configuration and
one entry a cell: its summary, and each request with its token times, so that any other statistic
can be computed from the file.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kimik3_lab.benchmark.client import BenchmarkResult, CellResult
from kimik3_lab.benchmark.config import Load
from kimik3_lab.benchmark.intervals import Interval
from kimik3_lab.benchmark.load import ClientHealth
from kimik3_lab.benchmark.records import RequestRecord
from kimik3_lab.benchmark.summary import LatencyStats, Summary, Throughput
from kimik3_lab.benchmark.window import Window

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "SCHEMA",
    "SCHEMA_VERSION",
    "ResultError",
    "check_writable",
    "load_result",
    "print_table",
    "rows",
    "save_result",
]

SCHEMA = "kimik3-lab/benchmark"
SCHEMA_VERSION = 1


class ResultError(ValueError):
    """A result file that cannot be read or written; the message names it and says why."""


def save_result(result: BenchmarkResult, path: str | Path, *, overwrite: bool = False) -> Path:
    """Write a result file; it appears whole or not at all.

    Raises
    ------
    ResultError
        If the file exists and ``overwrite`` is false, or its folder is missing.
    """
    path = Path(path)
    check_writable(path, overwrite=overwrite)
    data = {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "provenance": result.provenance,
        "configuration": result.configuration,
        "url": result.url,
        "model": result.model,
        "cells": [_cell_dict(cell) for cell in result.cells],
    }
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(_dump(data))
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return path


def check_writable(path: Path, *, overwrite: bool) -> None:
    """Raise ResultError unless ``path`` may be written; worth asking before a long run."""
    if path.is_dir():
        raise ResultError(f"{path} is a folder; name a file, such as {path / 'result.json'}")
    if path.exists() and not overwrite:
        raise ResultError(f"{path} exists; choose another name, or overwrite it with --force")
    if not path.parent.is_dir():
        raise ResultError(f"no folder {path.parent} to write {path.name} into; make it first")


def load_result(path: str | Path) -> BenchmarkResult:
    """Read a result file.

    Raises
    ------
    ResultError
        If there is no such file, it is not JSON, or not a benchmark result of this version.
    """
    path = Path(path)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ResultError(f"no result file at {path}") from error
    except (OSError, ValueError) as error:
        raise ResultError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise ResultError(f'{path} is not a benchmark result: it lacks "schema": "{SCHEMA}"')
    if data.get("schema_version") != SCHEMA_VERSION:
        raise ResultError(
            f"{path} has schema_version {data.get('schema_version')!r}, this lab reads "
            f"{SCHEMA_VERSION}: read it with the lab version that wrote it, or measure again"
        )
    try:
        return BenchmarkResult(
            configuration=data["configuration"],
            url=data["url"],
            model=data["model"],
            cells=[_cell_from(cell) for cell in data["cells"]],
            provenance=data["provenance"],
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ResultError(
            f"{path} is damaged ({type(error).__name__}: {error}); measure again"
        ) from error


def rows(result: BenchmarkResult) -> list[dict[str, Any]]:
    """One flat dictionary a cell, ready for ``pandas.DataFrame(rows(result))``.

    None stands for a value that the samples cannot support.
    """
    table = []
    for cell in result.cells:
        summary, rate = cell.summary, cell.summary.throughput
        row: dict[str, Any] = {
            "concurrency": cell.load.concurrency,
            "request_rate": cell.load.request_rate,
            "attempted": summary.attempted,
            "completed": summary.completed,
            "failed": summary.failed,
            "completed_in_window": rate.completed,
            "window_s": summary.window.duration,
            "requests_per_s": rate.requests_per_s,
            "output_tokens_per_s": rate.output_tokens_per_s,
            "observed_tokens_per_s": rate.observed_tokens_per_s,
        }
        for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_s"):
            stats = getattr(summary, name)
            for statistic in ("mean", "median", "p90", "p99"):
                row[f"{name}_{statistic}"] = getattr(stats, statistic)
        table.append(row)
    return table


def print_table(result: BenchmarkResult, console: Console | None = None) -> None:
    """Print one line a cell, then what a reader must know before quoting a number.

    Parameters
    ----------
    result
        From a run or from :func:`load_result`.
    console
        A rich console; by default a new one on standard output.
    """
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = console or Console()
    # Tight, so that the counts still show on a terminal of 80 columns.
    table = Table(
        title=f"{escape(result.model)} at {escape(result.url)}",
        title_justify="left",
        box=SIMPLE,
        collapse_padding=True,
        pad_edge=False,
    )
    table.add_column("load", no_wrap=True)
    table.add_column("ended in\nwindow", justify="right", no_wrap=True)
    table.add_column("tokens/s\n(95 %)", justify="right", no_wrap=True)
    table.add_column("observed\ntokens/s", justify="right", no_wrap=True)
    for name in ("TTFT ms", "TPOT ms", "latency s"):
        table.add_column(f"{name}\np50 / p90", justify="right", no_wrap=True)
    for cell in result.cells:
        summary, rate = cell.summary, cell.summary.throughput
        interval = rate.output_tokens_per_s_ci
        table.add_row(
            cell.load.label,
            f"{rate.completed}\n({_number(summary.window.duration)} s)",
            _number(rate.output_tokens_per_s)
            + (f"\n({_number(interval.low)}-{_number(interval.high)})" if interval else ""),
            _number(rate.observed_tokens_per_s),
            _pair(summary.ttft_ms),
            _pair(summary.tpot_ms),
            _pair(summary.e2e_s),
        )
    console.print(table)
    for line in _remarks(result):
        console.print(line, soft_wrap=True, highlight=False, markup=False)


def _remarks(result: BenchmarkResult) -> list[str]:
    lines = []
    for cell in result.cells:
        label, summary = cell.load.label, cell.summary
        shown = (summary.ttft_ms, summary.tpot_ms, summary.e2e_s)
        notes = (note for stats in shown for note in stats.notes if not note.startswith("p99"))
        if missing := list(dict.fromkeys(notes)):
            lines.append(f"{label}: - stands for too few samples: {'; '.join(missing)}")
        if summary.failed:
            lines.append(f"{label}: {summary.failed} of {summary.attempted} requests failed")
        lines += [f"{label}: {warning}" for warning in cell.warnings]
    lines += [f"{count} x {error}" for error, count in result.errors.items()]
    return lines


def _pair(stats: LatencyStats) -> str:
    return f"{_number(stats.median)} / {_number(stats.p90)}"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:#.3g}".rstrip(".")


def _cell_dict(cell: CellResult) -> dict[str, Any]:
    return {
        "load": dataclasses.asdict(cell.load),
        "stream": cell.stream,
        "elapsed": round(cell.elapsed, 6),
        "stop_reason": cell.stop_reason,
        "client_health": dataclasses.asdict(cell.health),
        "warnings": cell.warnings,
        "summary": dataclasses.asdict(cell.summary),
        "records": [record.as_dict() for record in cell.records],
    }


def _cell_from(data: dict[str, Any]) -> CellResult:
    summary = dict(data["summary"])
    for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_s"):
        summary[name] = LatencyStats(**_tuples(summary[name]))
    summary["throughput"] = Throughput(**_tuples(summary["throughput"]))
    summary["window"] = Window(**summary["window"])
    summary["notes"] = tuple(summary["notes"])
    return CellResult(
        load=Load(**data["load"]),
        stream=data["stream"],
        elapsed=data["elapsed"],
        stop_reason=data["stop_reason"],
        health=ClientHealth(**data["client_health"]),
        records=[RequestRecord.from_dict(row) for row in data["records"]],
        summary=Summary(**summary),
    )


def _tuples(fields: dict[str, Any]) -> dict[str, Any]:
    """JSON has no tuples: turn lists back into intervals and notes."""
    back = dict(fields)
    for name, value in fields.items():
        if name.endswith("_ci") and value is not None:
            back[name] = Interval(*value)
        elif name == "notes":
            back[name] = tuple(value)
    return back


def _dump(data: dict[str, Any]) -> str:
    """JSON with one request a line: a file that people can open and compare."""
    cells = data["cells"]
    lists = [cell.pop("records") for cell in cells]
    for number, cell in enumerate(cells):
        cell["records"] = f"@records-{number}@"
    text = json.dumps(data, indent=1, allow_nan=False)
    for number, records in enumerate(lists):
        lines = ",\n".join("   " + json.dumps(r, separators=(",", ":")) for r in records)
        text = text.replace(f'"@records-{number}@"', f"[\n{lines}\n  ]" if records else "[]")
    return text + "\n"

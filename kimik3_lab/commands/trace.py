"""``k3lab trace``: what a trace asks of a server, beside what is published of public traces."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kimik3_lab.commands._errors import CommandError

if TYPE_CHECKING:
    from kimik3_lab.benchmark.published_traces import Comparison, PublishedTrace
    from kimik3_lab.benchmark.traces import TraceFile, TraceRequest

__all__ = ["trace"]

_Format = StrEnum("_Format", ["mooncake", "burstgpt", "azure", "sharegpt"])


def trace(
    file: Annotated[
        Path | None,
        typer.Argument(
            help="Trace: Mooncake JSONL, BurstGPT CSV, Azure CSV or ShareGPT JSON; .gz is fine."
        ),
    ] = None,
    workload: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="A made-up trace instead of a file; '?' lists them."),
    ] = None,
    duration: Annotated[
        float | None, typer.Option(help="Seconds of it.", show_default="3600, or the whole file")
    ] = None,
    start: Annotated[float, typer.Option(help="Seconds of a file to pass over first.")] = 0.0,
    rate_scale: Annotated[
        float, typer.Option(help="Let requests arrive that many times as often.")
    ] = 1.0,
    session_rate: Annotated[
        float | None,
        typer.Option(help="For files without times (ShareGPT): sessions that begin in a second."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the made-up trace, or of these times.")] = 0,
    trace_format: Annotated[
        _Format | None,
        typer.Option("--format", metavar="KIND", help="Format, if it is not recognised."),
    ] = None,
    block_tokens: Annotated[
        int, typer.Option(help="Tokens that one of the hash_ids stands for.")
    ] = 512,
    tokenizer: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder with tokenizer.json, to count ShareGPT's tokens."),
    ] = None,
    skip_bad_rows: Annotated[
        bool, typer.Option("--skip-bad-rows", help="Pass over bad rows and count them.")
    ] = False,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Public trace to compare with.", show_default="the workload's own"
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Write it as Mooncake JSONL as well."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print statistics of a trace: lengths, bursts, and what its prompts share."""
    from kimik3_lab.benchmark.published_traces import PUBLISHED_TRACES, compare
    from kimik3_lab.benchmark.synthetic_traces import SYNTHETIC_TRACES, synthetic_trace
    from kimik3_lab.benchmark.trace_statistics import trace_statistics
    from kimik3_lab.benchmark.traces import (
        TraceError,
        cut_window,
        poisson_arrivals,
        read_trace,
        scale_rate,
        write_trace,
    )

    if workload == "?":
        typer.echo("\n".join(SYNTHETIC_TRACES))
        return
    if (file is None) == (workload is None):
        raise CommandError("name a trace file, or a made-up one with --workload; not both")
    published = _published(against or workload, PUBLISHED_TRACES, asked=against is not None)
    read: TraceFile | None = None
    try:
        if file is None:
            name = str(workload)
            requests: Iterable[TraceRequest] = synthetic_trace(
                name, duration or 3_600.0, rate_scale=rate_scale, seed=seed
            )
        else:
            name = str(file)
            read = read_trace(
                file,
                None if trace_format is None else trace_format.value,  # type: ignore[arg-type]
                block_tokens=block_tokens,
                tokenizer=tokenizer,
                skip_bad_rows=skip_bad_rows,
            )
            stop = float("inf") if duration is None else start + duration
            timed: Iterable[TraceRequest] = _shown(read)
            if session_rate is not None:
                timed = poisson_arrivals(timed, session_rate, seed=seed)
            requests = scale_rate(cut_window(timed, start, stop), rate_scale)
        if output is not None:
            write_trace(requests, output)
            requests = read_trace(output, "mooncake", block_tokens=block_tokens)
        found = trace_statistics(requests, block_tokens=block_tokens)
    except TraceError as error:
        raise CommandError(str(error)) from error
    rows = compare(found, published)
    bad_rows = read.bad_rows if read is not None else 0
    if as_json:
        body = {
            "trace": name,
            "requests": found.requests,
            "duration_s": found.duration_s,
            "bad_rows": bad_rows,
            "first_bad_rows": read.first_bad_rows if read is not None else [],
            "published": published.source if published else None,
            "statistics": [row._asdict() | {"deviation": row.deviation} for row in rows],
        }
        typer.echo(json.dumps(body, indent=1))
        return
    _print_table(f"{name}: {found.requests:,} requests in {found.duration_s:,.0f} s", rows,
                 published)  # fmt: skip
    if bad_rows:
        typer.echo(f"{bad_rows:,} bad rows passed over, the first: {read.first_bad_rows[0]}")  # type: ignore[union-attr]
    if output is not None:
        typer.echo(f"wrote {output}")


def _published(
    name: str | None, known: dict[str, PublishedTrace], *, asked: bool
) -> PublishedTrace | None:
    if asked and name not in known:
        raise CommandError(f"nothing is published here of {name!r}, only of {', '.join(known)}")
    return None if name is None else known.get(name)


def _shown(requests: Iterable[TraceRequest]) -> Iterator[TraceRequest]:
    """Count on standard error what is being read, if somebody watches and it takes long."""
    from tqdm import tqdm

    return iter(tqdm(requests, desc="reading", unit=" requests", delay=1.0, leave=False,
                     disable=None))  # fmt: skip


def _print_table(title: str, rows: list[Comparison], published: PublishedTrace | None) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(title), title_justify="left", box=SIMPLE, pad_edge=False)
    table.add_column("statistic")
    table.add_column("this trace", justify="right")
    if published is not None:
        table.add_column("published", justify="right")
        table.add_column("deviation", justify="right")
    for row in rows:
        cells: list[Any] = [row.name, _number(row.found)]
        if published is not None:
            bound = "≥ " if row.name in published.at_least else ""
            off = "" if row.deviation is None else f"{row.deviation:+.1%}"
            cells += [bound + _number(row.published) if row.published is not None else "", off]
        table.add_row(*cells)
    console = Console()
    console.print(table)
    if published is not None:
        told = f"Published: computed from {published.source}; licence {published.licence}."
        console.print(told, soft_wrap=True, highlight=False, markup=False)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"

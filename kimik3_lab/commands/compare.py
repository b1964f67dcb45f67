"""``k3lab compare``: results of several tools side by side, with the published and simulated."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer

from kimik3_lab.commands._errors import CommandError

__all__ = ["compare"]

_LENGTHS = ("prompt_tokens", "output_tokens")


def compare(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[FILE]...",
            help="JSON of k3lab bench, guidellm or vllm bench serve --save-result.",
            show_default=False,
        ),
    ] = None,
    published: Annotated[
        bool, typer.Option(help="Show the published points of Kimi K3 on 8 B300 too.")
    ] = True,
    simulated: Annotated[bool, typer.Option(help="Simulate the published points too.")] = True,
    seed: Annotated[int, typer.Option(help="Of the simulation's accepted drafts.")] = 0,
    json_output: Annotated[
        bool, typer.Option("--json", help="Print JSON instead of a table.")
    ] = False,
) -> None:
    """Lay benchmark results side by side, whichever tool measured them.

    Published and simulated rows appear at the concurrencies of your files, or
    at 1, 4 and 16 if none of them is there. They are of 8,000 tokens in and
    1,000 out on 8 B300; a remark says so where your lengths differ.

    Try it:  k3lab compare guidellm.json vllm.json --no-simulated
    """
    from kimik3_lab.benchmark.foreign import load_any
    from kimik3_lab.benchmark.report import ResultError

    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    for file in files or ():
        try:
            loaded = load_any(file)
        except ResultError as error:
            raise CommandError(str(error)) from error
        rows += [{"source": loaded.tool, "file": file.name, **row} for row in loaded.rows]
        notes += [f"{file.name}: {note}" for note in loaded.notes]
    if not rows and not (published or simulated):
        raise CommandError("nothing to show: name a file, or leave --published on")
    own = len(rows)
    levels = _levels(rows)
    if published or simulated:
        from kimik3_lab.simulation.side_by_side import published_rows, simulated_rows

        if published:
            rows += [{"source": "published", "file": "", **row} for row in published_rows(levels)]
        if simulated:
            made = simulated_rows(levels, seed=seed)
            rows += [{"source": "simulated", "file": "", **row} for row in made]
        notes += _differing_lengths(rows[:own], rows[own:])
        if published:
            notes.append(
                "published: vLLM blog, 2026-09-13; it does not say whether its TTFT is a mean or a "
                "median, shown as mean"
            )
    rows.sort(key=_order)
    if json_output:
        typer.echo(json.dumps({"rows": [_finite(row) for row in rows], "notes": notes}, indent=1))
        return
    _print(rows, list(dict.fromkeys(notes)))


def _levels(rows: list[dict[str, Any]]) -> list[int]:
    """Find the published concurrencies that occur in the files; all of them if none does."""
    from kimik3_lab.performance.published import load_points

    known = sorted({point.concurrency for point in load_points()})
    mine = {row["concurrency"] for row in rows}
    return [c for c in known if c in mine] or known


def _differing_lengths(mine: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> list[str]:
    """Say of each file whose requests are no 8000/1000 ones that the rows cannot be compared."""
    if not theirs:
        return []
    found = {}
    for row in mine:
        if any(abs(row[name] - theirs[0][name]) > 0.05 * theirs[0][name]
               for name in _LENGTHS if row[name] is not None):  # fmt: skip
            found[row["file"]] = row
    return [
        f"{name}: {_number(row['prompt_tokens'])} tokens in and {_number(row['output_tokens'])} "
        f"out, not {theirs[0]['prompt_tokens']:,.0f} and {theirs[0]['output_tokens']:,.0f}: its "
        "figures stand beside the published and simulated ones, but do not compare with them"
        for name, row in found.items()
    ]


def _order(row: dict[str, Any]) -> tuple[float, float]:
    """Sort closed loops by concurrency, then open loops by rate; a level stays as it was given."""
    if row["concurrency"] is not None:
        return (0, row["concurrency"])
    return (1, row["request_rate"])


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity: a rate without a limit becomes a word, as in vLLM's own files."""
    return {k: "inf" if isinstance(v, float) and math.isinf(v) else v for k, v in row.items()}


def _print(rows: list[dict[str, Any]], notes: list[str]) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    table = Table(box=SIMPLE, pad_edge=False, collapse_padding=True)
    table.add_column("load", no_wrap=True)
    table.add_column("source", overflow="fold")
    headings = (
        "ended in\nwindow", "tokens/s", "TTFT ms\nmean", "TTFT ms\np50", "TPOT ms\nmean",
        "latency s\nmean", "latency s\np50", "failed",
    )  # fmt: skip
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    columns = (
        "output_tokens_per_s", "ttft_ms_mean", "ttft_ms_median", "tpot_ms_mean", "e2e_s_mean",
        "e2e_s_median", "failed",
    )  # fmt: skip
    last = None
    for row in rows:
        load = f"c={row['concurrency']}" if row["concurrency"] else f"{row['request_rate']:g}/s"
        if last is not None and load != last:
            table.add_section()
        name = " ".join(filter(None, (row["source"], row["file"], row.get("version"))))
        table.add_row(
            load if load != last else "",
            escape(name),
            f"{row['completed_in_window']} in {_number(row['window_s'])} s",
            *(_number(row[column]) for column in columns),
        )
        last = load
    console.print(table)
    for note in notes:
        console.print(note, soft_wrap=True, highlight=False, markup=False)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, int):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:#.3g}".rstrip(".")

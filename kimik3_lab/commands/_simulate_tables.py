"""What ``k3lab simulate`` prints: a line for each run, and where the time of a step goes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from kimik3_lab.performance.step_cost import PARTS
from kimik3_lab.simulation.totals import StepTotals

__all__ = ["explanation", "print_explanation", "print_rows"]

#: Columns of a table that goes to a file or a pipe.
_FULL_WIDTH = 110


def explanation(totals: Iterable[StepTotals]) -> dict[str, Any]:
    """Count steps of each kind, and milliseconds of such a step by part, the largest first.

    Parameters
    ----------
    totals
        Of each replica.
    """
    whole = StepTotals()
    for part in totals:
        whole.add(part)
    return {
        "acceptance_length": whole.acceptance_length,
        "kinds": {
            name: {
                "steps": kind.steps,
                "share": kind.seconds / whole.seconds,
                "tokens_per_step": kind.tokens / kind.steps,
                "ms_per_step": 1e3 * kind.seconds / kind.steps,
                "parts_ms": {k: 1e3 * v / kind.steps for k, v in kind.parts.most_common() if v},
            }
            for name, kind in whole.kinds.items()
            if kind.steps
        },
    }


def print_rows(rows: list[dict[str, Any]], statistic: str) -> None:
    """Print one line a run; ``statistic`` is that of the time to first token."""
    console = _console()
    table = Table(box=SIMPLE, pad_edge=False, collapse_padding=True)
    table.add_column("preset", no_wrap=True)
    table.add_column("load", no_wrap=True)
    for heading in ("requests", "tokens/s", f"TTFT ms\n{statistic}", "TPOT ms", "latency s"):
        table.add_column(heading, justify="right", no_wrap=True)
    names = ("completed_requests", "output_tokens_per_s", "ttft_ms", "tpot_ms", "latency_s")
    for row in rows:
        table.add_row(row["preset"], _load(row), *(_cell(row, name) for name in names))
    console.print(table)
    for row in rows:
        if row["concurrency"] is None:
            _print_open_loop(console, row)
    if any(row["interval"] for row in rows):
        console.print(
            "Simulated. Requests are those that ended in the window. Below a figure: what it spans "
            f"over the choices that public figures leave open, {rows[0]['interval_method']}.",
            style="dim",
        )


def _print_open_loop(console: Console, row: dict[str, Any]) -> None:
    percentiles = "/".join(_number(row[f"ttft_ms_{name}"]) for name in ("median", "p90", "p99"))
    replicas = f"{row['replicas']} replicas" if row["replicas"] > 1 else "the machine"
    console.print(
        f"{row['preset']}: {row['attempted']:,} requests in {row['simulated_s']:,.0f} s, "
        f"{row['refused']} refused, {row['cancelled']} cut off; {replicas} busy "
        f"{row['utilization']:.0%} of the time; {row['cached_tokens']:,} prompt tokens cached; "
        f"{row['preemptions']} preemptions; TTFT p50/p90/p99 {percentiles} ms",
        highlight=False,
    )


def print_explanation(row: dict[str, Any]) -> None:
    """Print the parts of a step of each kind, the costliest over the whole run first."""
    kinds, length = row["explain"]["kinds"], row["explain"]["acceptance_length"]
    console = _console()
    drafts = f"; a verification brings {length:.2f} tokens" if length else ""
    console.print(f"{row['preset']}, {_load(row)}: milliseconds of a step{drafts}", highlight=False)
    table = Table(box=SIMPLE, pad_edge=False)
    table.add_column("part")
    for name, kind in kinds.items():
        share, rows = f"{kind['share']:.0%} of the time", f"{kind['tokens_per_step']:,.0f} rows"
        table.add_column(f"{name}\n{kind['steps']:,} steps\n{share}\n{rows}", justify="right")
    seconds = {
        part: sum(kind["steps"] * kind["parts_ms"].get(part, 0.0) for kind in kinds.values())
        for part in dict.fromkeys(name for kind in kinds.values() for name in kind["parts_ms"])
    }
    for part in sorted(seconds, key=lambda name: -seconds[name]):
        values = (kind["parts_ms"].get(part) for kind in kinds.values())
        label = PARTS.get(part, part.replace("_", " "))
        table.add_row(label, *("" if value is None else f"{value:.2f}" for value in values))
    table.add_section()
    table.add_row("all", *(f"{kind['ms_per_step']:.2f}" for kind in kinds.values()))
    console.print(table)


def _console() -> Console:
    console = Console()
    # A pipe or a file has no width to fit.
    return console if console.is_terminal else Console(width=_FULL_WIDTH)


def _load(row: dict[str, Any]) -> str:
    return "open loop" if row["concurrency"] is None else f"c={row['concurrency']}"


def _cell(row: dict[str, Any], name: str) -> str:
    text = _number(row[name])
    span = (row["interval"] or {}).get(name)
    return text if span is None else f"{text}\n{_number(span[0])}-{_number(span[1])}"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:#.3g}".rstrip(".")

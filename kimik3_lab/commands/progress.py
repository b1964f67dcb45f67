"""``k3lab progress``: what you predicted in each lesson, what it was, and how close you were."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kimik3_lab.commands._errors import CommandError

if TYPE_CHECKING:
    from kimik3_lab.teaching.predictions import Prediction

__all__ = ["progress"]


def progress(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    reset: Annotated[
        bool, typer.Option("--reset", help="Start afresh; the old file is kept under another name.")
    ] = False,
) -> None:
    """Print your predictions, the actual values and your scores, by lesson."""
    from kimik3_lab.teaching.predictions import PredictionStore

    store = PredictionStore()
    if reset:
        try:
            place = store.reset()
        except OSError as error:
            raise CommandError(f"cannot move {store.path} aside: {error}") from error
        told = (
            f"started afresh; your predictions are kept in {place}" if place else "nothing to reset"
        )
        typer.echo(told)
        return
    found = store.all()
    if as_json:
        import json

        rows = [_row(prediction) for prediction in found]
        typer.echo(json.dumps({"file": str(store.path), "predictions": rows}, indent=2))
    elif found:
        _print_table(found)
        typer.echo(f"Kept in {store.path}")
    else:
        typer.echo(
            f"no predictions yet in {store.path}: start JupyterLab with 'k3lab lab' and run the "
            f"Predict cells of a lesson"
        )


def _row(prediction: Prediction) -> dict[str, Any]:
    from dataclasses import asdict

    row = asdict(prediction) | {"points": None, "ratio": None, "verdict": None}
    if result := prediction.score:
        # JSON has no infinity: a ratio that does not exist is null, its points are 0.
        ratio = result.ratio if math.isfinite(result.ratio) else None
        row |= {"points": result.points, "ratio": ratio, "verdict": result.verdict}
    return row


def _print_table(found: list[Prediction]) -> None:
    from rich.console import Console
    from rich.table import Table

    from kimik3_lab.teaching.scoring import format_number

    table = Table(title="Your predictions")
    for heading in ("lesson", "prediction"):
        table.add_column(heading)
    for heading in ("predicted", "actual", "points"):
        table.add_column(heading, justify="right")
    table.add_column("verdict")
    last, points = "", []
    for entry in found:
        if last and entry.lesson != last:
            table.add_section()
        result = entry.score
        if result is not None:
            points.append(result.points)
        again = f" (attempt {entry.attempt})" if entry.attempt > 1 else ""
        table.add_row(
            "" if entry.lesson == last else entry.lesson,
            entry.name,
            f"{format_number(entry.value)} {entry.unit}".rstrip(),
            "" if entry.actual is None else f"{format_number(entry.actual)} {entry.unit}".rstrip(),
            "" if result is None else str(result.points),
            ("not revealed yet" if result is None else result.verdict) + again,
        )
        last = entry.lesson
    Console().print(table)
    if points:
        average = sum(points) / len(points)
        typer.echo(f"{len(points)} of {len(found)} revealed, {average:.0f} points on average")

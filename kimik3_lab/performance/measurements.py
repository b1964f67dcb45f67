"""Published measurements of Kimi K3, and what each of them was used for.

Needs numpy. Lesson 11 draws its line between held-in and held-out from here;
``python -m kimik3_lab.performance.measurements --output data/results/simulated/held_in.json``
writes it down, together with every constant and every choice that was made after seeing a figure.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from kimik3_lab.paths import data_dir
from kimik3_lab.performance.calibration import FITTED
from kimik3_lab.performance.constants import CONSTANTS
from kimik3_lab.performance.published import load_points
from kimik3_lab.provenance import provenance

__all__ = ["CHOICES", "Measurement", "RowRole", "load_measurements", "row_roles"]

#: Choices of form, not of a number, and the figures that had been seen when they were made.
CHOICES: tuple[tuple[str, str], ...] = (
    (
        "the published TTFT is the median",
        "all six: with means, 0.27.1 at 4 and 16 requests is off by 35 and 56 %",
    ),
    (
        "mixed steps take longer by an amount for each prompt token, on the later version only and "
        "for at most 8,192 tokens",
        "TTFT at 4 requests; that 0.27.1 shows none of it; that with it #51725 alone would have "
        "gained less than it claims; that a node would not carry long prompts",
    ),
    (
        "small all-reduces are low-latency ones, on 0.27.1 vLLM's own",
        "single decode steps of SGLang and GB300; the latency of 0.27.1 at one request",
    ),
    (
        "a draft is sampled in a quarter of a millisecond",
        "latencies at 1, 4 and 16 requests: step times grow less than kernels alone would",
    ),
    (
        "a factor of 0.87 to 1.06 on the experts by the number of tokens",
        "residuals of five tables that agree; and latency at 16 requests",
    ),
    (
        "a cold first step of three seconds, and requests that differ in acceptance",
        "published counts of 10, 22 and 50 requests",
    ),
    (
        "experts of 0.27.1 by TensorRT-LLM, not Marlin",
        "the claim of #51725 for TTFT; Marlin would fit the latency at 4 requests better",
    ),
    (
        "two nodes of H200 are slow for messages of 192 to 256 KiB",
        "16 requests in both layouts",
    ),
    (
        "errors beyond two and a half units count no more in the fit",
        "TTFT of the later version at 16 requests, which no choice brings near",
    ),
)


@dataclass(frozen=True, slots=True)
class Measurement:
    """One row of the file of measurements. Empty cells are None or empty text."""

    id: str
    hardware: str
    parallelism: str
    speculation: str
    concurrency: str
    rows: str
    metric: str
    value: float | None
    value_high: float | None
    unit: str
    source_url: str
    notes: str


@dataclass(frozen=True, slots=True)
class RowRole:
    """What a published figure was used for.

    Attributes
    ----------
    role
        ``"set"`` if a constant was set on it; ``"held out"`` if the model is only checked on it, or
        not used at all.
    constants
        Which ones.
    """

    id: str
    role: Literal["set", "held out"]
    constants: tuple[str, ...]


def load_measurements(path: str | Path | None = None) -> tuple[Measurement, ...]:
    """Read the published measurements that ship with the lab.

    Raises
    ------
    ValueError
        If a column is missing or a row appears twice.

    Examples
    --------
    >>> {row.id: row.value for row in load_measurements()}["b300-sglang-tpot-c1"]
    8.51
    """
    path = data_dir() / "published" / "kimi_k3_measurements.csv" if path is None else Path(path)
    names = Measurement.__slots__
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        if missing := set(names) - set(reader.fieldnames or ()):
            raise ValueError(f"{path}: no column {', '.join(sorted(missing))}")
        rows = []
        for line in reader:
            cells: dict[str, Any] = {name: line[name] for name in names}
            for name in ("value", "value_high"):
                cells[name] = float(cells[name]) if cells[name] else None
            rows.append(Measurement(**cells))
    ids = [row.id for row in rows]
    if twice := sorted({name for name in ids if ids.count(name) > 1}):
        raise ValueError(f"{path}: row {twice[0]} appears twice")
    return tuple(rows)


def row_roles() -> tuple[RowRole, ...]:
    """Say for every published figure which constants were set on it.

    Examples
    --------
    >>> roles = {role.id: role for role in row_roles()}
    >>> roles["b300-sglang-tpot-c1"].role, roles["blog-0.27.1-c1"].role
    ('held out', 'set')
    """
    ids = [row.id for row in load_measurements()]
    ids += [f"blog-{p.version}-c{p.concurrency}" for p in load_points()]
    found = []
    for name in ids:
        used = tuple(
            constant.name
            for constant in CONSTANTS.values()
            if any(fnmatchcase(name, pattern) for pattern in constant.set_on)
        )
        found.append(RowRole(name, "set" if used else "held out", used))
    return tuple(found)


def _held_in() -> dict[str, Any]:
    """Put everything that was set, on what, and what was not, into one table."""
    return {
        "constants": [dataclasses.asdict(constant) for constant in CONSTANTS.values()],
        "fitted_on_the_six_points": [dataclasses.asdict(fitted) for fitted in FITTED],
        "choices": [{"choice": choice, "seen": seen} for choice, seen in CHOICES],
        "rows": [dataclasses.asdict(role) for role in row_roles()],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Count rows that were set on and rows that were not, or write all of it down."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    chosen = parser.parse_args(arguments)
    table = _held_in()
    for role in ("set", "held out"):
        print(f"{sum(row['role'] == role for row in table['rows'])} figures {role}")
    if chosen.output is not None:
        body = {"provenance": provenance(device="simulated"), **table}
        chosen.output.parent.mkdir(parents=True, exist_ok=True)
        partial = chosen.output.with_name(f".{chosen.output.name}.partial")
        partial.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
        os.replace(partial, chosen.output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

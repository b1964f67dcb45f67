"""NVIDIA's aiconfigurator on the six published points, as recorded: the best that it can do.

Needs the standard library. Lesson 11 and :mod:`~kimik3_lab.simulation.score` set it beside the
simulator. The record is made by ``tools/compare_aiconfigurator.py``, which says how to install it.

Which setting is its best was decided by the published figures: its accepted drafts, the engine
whose tables it reads and the prompt tokens of a step were scanned. So the comparison favours it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from kimik3_lab.paths import data_dir

__all__ = ["KINDS", "BestSetting", "best_settings", "default_path", "recorded_version"]

#: What a setting can be the best in: the mean of the three errors, from measured kernels alone or
#: in any mode; or one error alone. Its mode SOL is the speed of light, a floor, which few accepted
#: drafts can bring near a measurement: two errors that cancel.
KINDS = ("tables", "together", "latency", "ttft", "throughput")


@dataclass(frozen=True, slots=True)
class BestSetting:
    """The best of all settings for one published version.

    Attributes
    ----------
    version, kind
        Published version, and one of :data:`KINDS`.
    setting
        Engine, version of its tables, how gaps are filled, prompt tokens of a step, drafts, and
        accepted drafts.
    latency, ttft, throughput
        Mean absolute errors at 1, 4 and 16 requests, percent.
    command
        Repeats its estimate at 16 requests.
    """

    version: str
    kind: str
    setting: str
    latency: float
    ttft: float
    throughput: float
    command: str


def default_path() -> Path:
    """Path of the record that ships with the lab."""
    return data_dir() / "results" / "simulated" / "aiconfigurator.json"


def recorded_version(path: str | Path | None = None) -> str:
    """Version of aiconfigurator that was asked."""
    return str(json.loads(_read(path))["version"])


def best_settings(path: str | Path | None = None) -> dict[tuple[str, str], BestSetting]:
    """Return the best settings by published version and kind.

    Examples
    --------
    >>> best = best_settings()
    >>> best["0.27.1", "together"].latency > best["0.27.1", "latency"].latency > 5
    True
    """
    record = json.loads(_read(path))
    found = {}
    for version, kinds in record["best"].items():
        named = [row for row in record["named"] if row["version"] == version]
        kinds["tables"] = min(named, key=lambda row: fmean(row["errors"].values()))
        for kind in KINDS:
            row = kinds[kind]
            words = " ".join(str(value) for value in row["setting"].values())
            found[version, kind] = BestSetting(
                version, kind, words, **row["errors"], command=row["command"]
            )
    return found


def _read(path: str | Path | None) -> str:
    return (default_path() if path is None else Path(path)).read_text(encoding="utf-8")

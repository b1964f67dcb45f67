"""What the rank ladder's file says: its rungs in order, what is missing, what a change was worth.

Needs the standard library; tables need pandas. Lesson 10 and the picture in the README read
``data/results/h200/ladder.json`` through it.

A file may be partial: the machine's time ended before the last rung. What is missing is shown as
*not measured*, never left out and never filled in.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kimik3_lab.paths import data_dir
from kimik3_lab.serving.presets import LADDER, MAIN_2026_09_13, V0_27_1, Preset

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["FIRST", "NOT_MEASURED", "SEPTEMBER", "RankRecord", "default_path"]

#: The two ends of the published comparison, as the file names them.
FIRST, SEPTEMBER = V0_27_1.name, MAIN_2026_09_13.name
NOT_MEASURED = "not measured"
#: Switches that change how a step is computed in which nothing but drafts is verified.
_DECODE_SWITCHES = {"skinny_gemm", "deferred_finalize", "other_step_changes"}
_Row = Mapping[str, Any]


def default_path() -> Path:
    """Path of the recorded file."""
    return data_dir() / "results" / "h200" / "ladder.json"


class RankRecord:
    """One file of the rank ladder.

    Parameters
    ----------
    body : mapping
        Content of the file.

    Attributes
    ----------
    rungs : tuple of Preset
        Those that were measured or should have been, from the ground up.
    concurrencies : tuple of int
        Requests at a time for which there are rows.

    Examples
    --------
    >>> record = RankRecord.read()
    >>> [rung.name for rung in record.rungs][:3]
    ['v0.27.1', 'batch of 16,384', 'adaptive budget']
    >>> record.need(FIRST, 1)["forwards"]
    301
    """

    def __init__(self, body: Mapping[str, Any]) -> None:
        self.body = body
        self._rows = {(row["rung"], row["concurrency"]): row for row in body["rows"]}
        named = {rung for rung, _ in self._rows} | set(body.get("not_measured", {}))
        self.rungs: tuple[Preset, ...] = tuple(p for p in LADDER if p.name in named)
        self.concurrencies = tuple(sorted({c for _, c in self._rows}))

    @classmethod
    def read(cls, path: Path | None = None) -> RankRecord:
        """Read a file, by default the recorded one."""
        path = default_path() if path is None else path
        return cls(json.loads(path.read_text(encoding="utf-8")))

    # -- rows --------------------------------------------------------------------------------

    def row(self, rung: str, concurrency: int) -> _Row | None:
        """Return the row of a cell, or None if it was not measured."""
        return self._rows.get((rung, concurrency))

    def need(self, rung: str, concurrency: int) -> _Row:
        """Return the row of a cell that must be there.

        Raises
        ------
        KeyError
            If it was not measured.
        """
        row = self.row(rung, concurrency)
        if row is None:
            raise KeyError(
                f"rung {rung!r} at concurrency {concurrency} was not measured; there are "
                f"{sorted(self._rows)}: run python -m kimik3_lab.rank on a GPU"
            )
        return row

    @property
    def missing(self) -> dict[str, list[int]]:
        """Concurrencies that each rung lacks, for those that lack any."""
        lacks = {
            rung.name: [c for c in self.concurrencies if self.row(rung.name, c) is None]
            for rung in self.rungs
        }
        return {name: found for name, found in lacks.items() if found}

    def describe(self) -> str:
        """Say in a few lines on what, when and with which command it was measured."""
        made = self.body["provenance"]
        packages = made.get("packages", {})
        versions = [f"{name} {packages[name]}" for name in ("torch", "triton") if name in packages]
        dates = [row.get("date_utc") or made["date_utc"] for row in self.body["rows"]]
        days = sorted({date[:10] for date in dates}) or [made["date_utc"][:10]]
        cells = len(self.rungs) * len(self.concurrencies)
        there = cells - sum(map(len, self.missing.values()))
        lines = [
            f"{', '.join(self.body['label'])}: {made['device']}, {' to '.join(days)}",
            f"{', '.join(versions)}: {made['command']}",
            f"{self.body['what']}: {self.body['workload']['layers']} of 93 layers",
            f"{there} of {cells} cells measured",
        ]
        if note := self.body.get("note"):
            lines += textwrap.wrap(f"note: {note}", 96)
        return "\n".join(lines)

    # -- comparisons -------------------------------------------------------------------------

    def gain(self, concurrency: int, key: str = "output_tokens_per_s") -> float:
        """September's rung over the first: above 1 is better, for rates and for times alike."""
        first, last = (self.need(rung, concurrency)[key] for rung in (FIRST, SEPTEMBER))
        return float(last / first if key.endswith("_per_s") else first / last)

    def saved_before_first_token(self, concurrency: int) -> float:
        """Part of a request's saved time that lies before its first token, 0 to 1."""
        first, last = (self.need(rung, concurrency) for rung in (FIRST, SEPTEMBER))
        saved = first["latency_s"] - last["latency_s"]
        return float((first["ttft_ms"] - last["ttft_ms"]) / 1e3 / saved)

    def floor_rate(self, concurrency: int, rung: str = SEPTEMBER) -> float:
        """Output tokens a second if every step of the cell took no longer than its floor."""
        row = self.need(rung, concurrency)
        return float(row["output_tokens"] / row["floor_s"])

    def own_ms(self, rung: str, concurrency: int) -> float:
        """Milliseconds a token would take if its request never waited for another's prompt.

        A step in which all requests verify, divided by the tokens that a verification brings.
        """
        row = self.need(rung, concurrency)
        return float(row["decode_step_ms"] / row["tokens_per_verify"])

    def least_ttft_ms(self, concurrency: int) -> float:
        """Shortest time to the first token of the measured rungs up to September's."""
        names = [rung.name for rung in self.rungs if not rung.beyond_published]
        there = [row for name in names if (row := self.row(name, concurrency)) is not None]
        return float(min(row["ttft_ms"] for row in there))

    def alike(self, concurrency: int) -> dict[str, float]:
        """Milliseconds of a verification step on the rungs that compute it in the same way.

        Up to "KDA prefill" the rungs differ in their budgets and in what they do with prompts, so
        how far these times lie apart is what the machine does by itself.
        """
        found = {}
        for rung in self.rungs:
            row = self.row(rung.name, concurrency)
            if rung.beyond_published or rung.execution & _DECODE_SWITCHES or row is None:
                continue
            if row.get("decode_step_ms"):
                found[rung.name] = float(row["decode_step_ms"])
        return found

    def noise(self, concurrency: int) -> float:
        """Divide the longest of :meth:`alike` by the shortest, less 1."""
        times = self.alike(concurrency).values()
        return max(times) / min(times) - 1

    def falls(self, concurrency: int) -> dict[tuple[str, str], float]:
        """Pairs of neighbouring measured rungs of which the upper one is slower.

        Returns
        -------
        dict
            By names of the lower and the upper rung: lost part of the throughput, 0 to 1.
        """
        there = [row for r in self.rungs if (row := self.row(r.name, concurrency)) is not None]
        return {
            (below["rung"], above["rung"]): 1 - ratio
            for below, above in pairwise(there)
            if (ratio := above["output_tokens_per_s"] / below["output_tokens_per_s"]) < 1
        }

    def step_parts(self, concurrency: int) -> dict[str, float]:
        """Milliseconds of a verification step, split into the floor and what comes on top.

        The device's times are those of the cost curves, at the prompt's length; what is left of the
        step in the ladder is the host's, and whatever differs between the two rungs.
        """
        context = self.body["workload"]["prompt_tokens"]
        curve = next(
            row
            for row in self.body["curves"]["decode"]
            if (row["requests"], row["context"]) == (concurrency, context)
        )
        same = self.row(self.body["curves"]["rung"], concurrency)
        row = self.need(SEPTEMBER, concurrency) if same is None else same
        device = curve["target_ms"] + curve["drafter_ms"]
        return {
            "model, floor": curve["target_floor_ms"],
            "model, above its floor": curve["target_ms"] - curve["target_floor_ms"],
            "drafter, floor": curve["drafter_floor_ms"],
            "drafter, above its floor": curve["drafter_ms"] - curve["drafter_floor_ms"],
            "host and the rest": max(0.0, row["decode_step_ms"] - device),
        }

    def launches_of_a_chunk(self, rung: str) -> float:
        """Operators that the host starts for one chunk of a lone request's prompt.

        A step that only verifies is replayed and counts one.
        """
        row = self.need(rung, 1)
        verified = row["drafter_forwards"] - 1  # it drafts once after the prompt, too
        return float((row["launches"] - verified) / (row["forwards"] - verified))

    # -- tables ------------------------------------------------------------------------------

    def table(self, columns: Mapping[str, Callable[[_Row], Any]], concurrency: int) -> pd.DataFrame:
        """Make a table with a line for every rung, measured or not.

        Parameters
        ----------
        columns
            By heading: what to write for a row.
        concurrency
            Requests at a time.
        """
        import pandas as pd

        lines = {}
        for rung in self.rungs:
            row = self.row(rung.name, concurrency)
            blank = [NOT_MEASURED, *[""] * (len(columns) - 1)]
            lines[rung.name] = blank if row is None else [show(row) for show in columns.values()]
        return pd.DataFrame(lines, list(columns)).T.rename_axis("rung")

    def worth(self) -> pd.DataFrame:
        """Tabulate what each rung added to the throughput of the nearest measured one below it.

        Where rungs between the two were not measured, their number stands beside the figure.
        """
        import pandas as pd

        lines: dict[str, list[str]] = {}
        below: dict[int, tuple[int, float]] = {}
        for place, rung in enumerate(self.rungs):
            found = [rung.change]
            for c in self.concurrencies:
                row = self.row(rung.name, c)
                if row is None:
                    found.append(NOT_MEASURED)
                    continue
                rate = row["output_tokens_per_s"]
                if c in below:
                    steps, before = place - below[c][0], below[c][1]
                    several = "" if steps == 1 else f", {steps} rungs"
                    found.append(f"{100 * (rate / before - 1):+.0f} %{several}")
                else:
                    found.append(f"{rate:,.0f} tok/s")
                below[c] = place, rate
            lines[rung.name] = found
        heads = ["what it changes", *(f"{c} concurrent" for c in self.concurrencies)]
        return pd.DataFrame(lines, heads).T.rename_axis("rung")

"""What the rank ladder's file says: its rungs in order, what is missing, what a change was worth.

Needs the standard library; tables need pandas. Lesson 10 and the picture in the README read
``data/results/h200/ladder.json`` through it.

A file may be partial: the machine's time ended before the last rung. What is missing is shown as
*not measured*, never left out and never filled in.
"""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Callable, Mapping
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
    again : RankRecord or None
        The second run of the same ladder, if the file holds one.

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
        again = body.get("again")
        self.again = None if again is None else RankRecord({"workload": body["workload"], **again})

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
        for name, note in (
            ("note", self.body.get("note")),
            ("again", self.again and self.again.body["what"]),
        ):
            if note:
                lines += textwrap.wrap(f"{name}: {note}", 96)
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

    def apart(self, concurrency: int, key: str = "output_tokens_per_s") -> dict[str, float]:
        """By rung: the second run's figure over this one's, less 1; cells that both have.

        Counts are the same in both, so this is what machines and their neighbours do.
        """
        found = {}
        for rung in self.rungs if self.again is not None else ():
            one, other = (r and r.row(rung.name, concurrency) for r in (self, self.again))
            if one and other:
                found[rung.name] = float(other[key] / one[key] - 1)
        return found

    def stalls(self) -> dict[tuple[str, int], tuple[float, float]]:
        """Cells in which one run has a step at least three times as long as the other's longest.

        Returns
        -------
        dict
            By rung and concurrency: milliseconds of the longest step in this run and the other.
        """
        found = {}
        for c in self.concurrencies:
            for name, share in self.apart(c, "longest_step_ms").items():
                if not 1 / 3 < 1 + share < 3:
                    longest = float(self.need(name, c)["longest_step_ms"])
                    found[name, c] = (longest, longest * (1 + share))
        return found

    def prompt_seconds(self, rung: str, concurrency: int) -> float:
        """Seconds that steps with a prompt take at least: as few as the budget allows.

        Their number is the prompts' tokens over the tokens of a step, rounded up; their length is
        the median of those that were measured.
        """
        preset = next(p for p in self.rungs if p.name == rung)
        row, work = self.need(rung, concurrency), self.body["workload"]
        length = work["prompt_tokens"] + work["output_tokens"]
        limit = preset.scheduler_config(length).scheduled_token_limit
        steps = math.ceil(row["requests"] * work["prompt_tokens"] / limit)
        return float(steps * row["prompt_step_ms"] / 1e3)

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

        Where rungs between the two were not measured, their number stands beside the figure. If
        there is a second run, its figure follows after a bar.
        """
        import pandas as pd

        runs = [self] if self.again is None else [self, self.again]
        worth = [run._worth() for run in runs]
        lines = {}
        for rung in self.rungs:
            cells = [(rung.name, c) for c in self.concurrencies]
            told = [" | ".join(found.get(cell, NOT_MEASURED) for found in worth) for cell in cells]
            lines[rung.name] = [rung.change, *told]
        heads = ["what it changes", *(f"{c} concurrent" for c in self.concurrencies)]
        return pd.DataFrame(lines, heads).T.rename_axis("rung")

    def _worth(self) -> dict[tuple[str, int], str]:
        """By rung and concurrency: what this run says of the rung's worth."""
        found: dict[tuple[str, int], str] = {}
        for c in self.concurrencies:
            below: tuple[int, float] | None = None
            for place, rung in enumerate(self.rungs):
                row = self.row(rung.name, c)
                if row is None:
                    found[rung.name, c] = NOT_MEASURED
                    continue
                rate = float(row["output_tokens_per_s"])
                if below is None:
                    found[rung.name, c] = f"{rate:,.0f} tok/s"
                else:
                    several = "" if place - below[0] == 1 else f", {place - below[0]} rungs"
                    found[rung.name, c] = f"{100 * (rate / below[1] - 1):+.0f} %{several}"
                below = place, rate
        return found

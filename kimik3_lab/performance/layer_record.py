"""The layers that two H200s ran, with what had been predicted for them.

Needs numpy. Lessons 11 and 13 read the record through this. Two predictions stand beside each time.
*Before* prices the routed experts by the experts that are read and the pairs that are computed.
*With tiles* prices them by the tiles that the kernel computes
(:mod:`kimik3_lab.performance.expert_tiles`): a form that was chosen after an earlier run of most of
these cases had shown where the first one misses. Numbers of both were set on one GPU alone, and all
of it before the run that is recorded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kimik3_lab.paths import data_dir
from kimik3_lab.performance.expert_tiles import TileCount
from kimik3_lab.performance.measured_collectives import MeasuredCollectives

__all__ = ["LayerRow", "TwoGpus"]

Routing = Literal["uniform", "skewed", "placed"]


@dataclass(frozen=True, slots=True)
class LayerRow:
    """One case.

    Attributes
    ----------
    layer, parallel, routing, tokens
        ``"moe"`` or ``"whole"``; ``"tp"`` or ``"ep"``; load; T.
    us, us_compute, us_overlap
        Microseconds of the layer; with all exchanges left out; with the shared experts beside the
        exchange of the latent sum, None for a whole layer.
    earlier_us
        What the earlier run had measured, None where it was cut short.
    before_us, before_parts_us
        As predicted with experts and pairs.
    tiles_us
        As predicted with tiles.
    tiles
        Of the busiest rank.
    imbalance
        Pairs of the busiest rank over the mean.
    parts_us
        Parts of the layer, each timed alone; only of whole layers with an even load.
    """

    layer: str
    parallel: str
    routing: Routing
    tokens: int
    us: float
    us_compute: float
    us_overlap: float | None
    earlier_us: float | None
    before_us: float
    before_parts_us: Mapping[str, float]
    tiles_us: float
    tiles: TileCount
    imbalance: float
    parts_us: Mapping[str, float]

    @property
    def before_error(self) -> float:
        """Of the prediction before, relative to what was measured."""
        return self.before_us / self.us - 1

    @property
    def tiles_error(self) -> float:
        """Of the prediction with tiles."""
        return self.tiles_us / self.us - 1

    @property
    def exchanged(self) -> float:
        """Share of the layer that its exchanges add."""
        return 1 - self.us_compute / self.us

    @property
    def summed_us(self) -> float:
        """Sum of the parts as they were timed alone: exchanges too, and small kernels as priced.

        Examples
        --------
        >>> row = TwoGpus.load().rows(layer="whole", tokens=4096, routing="uniform")[0]
        >>> abs(row.summed_us / row.us - 1) < 0.01  # the parts make the layer
        True
        """
        return sum(self.parts_us.get(name, us) for name, us in self.before_parts_us.items())


class TwoGpus:
    """The record ``data/results/h200x2/collectives.json``, or what the command writes elsewhere.

    Parameters
    ----------
    body
        The file's content.

    Attributes
    ----------
    device, ranks
        Which GPUs, and how many took part.
    layers
        All cases.
    foretold
        Cases that the earlier run had not timed, with what was then predicted for them; none in a
        file as the command writes it, which is of one run.

    Examples
    --------
    >>> record = TwoGpus.load()
    >>> record.device, min(record.sizes("all_reduce")), max(record.sizes("all_reduce")) >> 20
    ('2 x NVIDIA H200', 4096, 256)
    """

    def __init__(self, body: Mapping[str, Any]) -> None:
        self.body = body
        self.device: str = body["provenance"]["device"]
        self.ranks: int = body["ranks"]
        foretold = body.get("predicted_before_measured", {}).get("layers", [])
        earlier = body.get("earlier_run", {}).get("layers", [])
        seen = {_case(row): row["us"] for row in earlier}
        rows = {_case(row): {**row, "earlier_us": seen.get(_case(row))} for row in body["layers"]}
        self.layers = tuple(_row(row) for row in rows.values())
        self.foretold = tuple(_row({**rows[_case(row)], **row}) for row in foretold)

    @classmethod
    def load(cls, path: str | Path | None = None) -> TwoGpus:
        """Read the record that ships with the lab, or another."""
        default = data_dir() / "results" / "h200x2" / "collectives.json"
        return cls(json.loads(Path(path or default).read_text(encoding="utf-8")))

    @property
    def earlier_run(self) -> MeasuredCollectives:
        """Exchanges of the earlier run.

        Raises
        ------
        ValueError
            If the file is of one run.
        """
        if "earlier_run" not in self.body:
            raise ValueError(
                "this file is of one run, with no earlier one to compare it with: read the record "
                "that ships with the lab (data/results/h200x2/collectives.json, restored if it was "
                "replaced), or leave the comparison out"
            )
        rows = self.body["earlier_run"]["collectives"]
        return MeasuredCollectives.from_rows(rows, self.ranks)

    def table(self, mode: str = "graph") -> MeasuredCollectives:
        """Return times of the exchanges, in a graph or launched by the host (``"eager"``)."""
        return MeasuredCollectives.from_rows(self.body["collectives"], self.ranks, mode=mode)

    def sizes(self, collective: str, mode: str = "graph") -> dict[int, float]:
        """Bytes of the message to microseconds.

        Raises
        ------
        ValueError
            If that collective was not timed in that mode.
        """
        rows = self.body["collectives"]
        found = {
            row["bytes"]: row["us"]
            for row in rows
            if (row["collective"], row["mode"]) == (collective, mode)
        }
        if not found:
            known = sorted({f"{row['collective']} ({row['mode']})" for row in rows})
            raise ValueError(
                f"{collective} ({mode}) was not timed; recorded: {', '.join(known) or 'none'}"
            )
        return found

    def rows(self, **wanted: object) -> list[LayerRow]:
        """Cases with these attributes.

        Raises
        ------
        ValueError
            If an attribute is unknown, or no case has that value of it: a slip, where an empty
            list would go unseen. A combination that was not timed is an empty list.

        Examples
        --------
        >>> sorted(row.tokens for row in TwoGpus.load().rows(layer="moe", routing="placed"))
        [1, 16, 64, 256, 4096]
        """
        for name, value in wanted.items():
            if name not in LayerRow.__slots__:
                known = ", ".join(LayerRow.__slots__)
                raise ValueError(f"a case has no {name!r}; it has {known}")
            values = {getattr(row, name) for row in self.layers}
            if value not in values:
                known = ", ".join(map(repr, sorted(values))) or "none"
                raise ValueError(f"no case has {name} {value!r}; recorded: {known}")
        return [
            row
            for row in self.layers
            if all(getattr(row, name) == value for name, value in wanted.items())
        ]


def _case(row: Mapping[str, Any]) -> tuple[str, str, str, int]:
    return row["layer"], row["parallel"], row["routing"], row["T"]


def _row(row: Mapping[str, Any]) -> LayerRow:
    return LayerRow(
        row["layer"], row["parallel"].rstrip("0123456789"), row["routing"], row["T"],
        row["us"], row["us_compute"], row.get("us_overlap"), row["earlier_us"],
        row["predicted_us"], row["predicted_parts_us"], row["predicted_tiles_us"],
        TileCount(*row["tiles_busiest_rank"]), row["imbalance"], row.get("parts_us", {}),
    )  # fmt: skip

"""The layers that two H200s ran, with what was predicted for them before and what is now.

Needs numpy. Lessons 02, 11 and 13 read the record through this. Three columns stay apart:

*measured*; *predicted before*, written by the run itself after it had timed exchanges and before it
timed a layer; and *predicted with tiles*, where one part, the routed experts, is priced by the
tiles that the kernel computes (:mod:`kimik3_lab.performance.expert_tiles`). That form was chosen
after the misses had been seen; its numbers were set on one GPU alone. Layers of a case that has not
been measured yet have both predictions and no time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kimik3_lab.config import K3Config
from kimik3_lab.paths import data_dir
from kimik3_lab.performance.expert_tiles import TILED, TileCount, TileShape, draw_counts
from kimik3_lab.performance.layer_cost import LayerCost
from kimik3_lab.performance.measured_collectives import MeasuredCollectives

__all__ = ["LayerRow", "TwoGpus", "busiest_rank", "missing_cases"]

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
        exchange of the latent sum. None where that was not measured.
    before_us, before_parts_us
        As predicted before any layer had run.
    tiles_us
        As predicted with tiles.
    imbalance
        Pairs of the busiest rank over the mean.
    parts_us
        Parts of the layer, each timed alone.
    """

    layer: str
    parallel: str
    routing: Routing
    tokens: int
    us: float | None
    us_compute: float | None
    us_overlap: float | None
    before_us: float
    before_parts_us: Mapping[str, float]
    tiles_us: float
    imbalance: float
    parts_us: Mapping[str, float]

    @property
    def before_error(self) -> float:
        """Of the prediction before, relative to what was measured."""
        return self.before_us / self._measured - 1

    @property
    def tiles_error(self) -> float:
        """Of the prediction with tiles."""
        return self.tiles_us / self._measured - 1

    @property
    def exchanged(self) -> float:
        """Share of the layer that its exchanges add."""
        assert self.us_compute is not None
        return 1 - self.us_compute / self._measured

    @property
    def _measured(self) -> float:
        if self.us is None:
            raise ValueError(
                f"{self.layer} {self.parallel}2 {self.routing} T={self.tokens} was not measured"
            )
        return self.us


@cache
def _draws(
    experts: int, top_k: int, tokens: int, skewed: bool
) -> tuple[npt.NDArray[np.int64], ...]:
    generator = np.random.default_rng(tokens)
    load: Literal["uniform", "skewed"] = "skewed" if skewed else "uniform"
    times = 4 if tokens < 1024 else 1  # many tokens are their own mean
    return tuple(draw_counts(experts, top_k, tokens, load, generator) for _ in range(times))


def busiest_rank(
    config: K3Config, parallel: str, tokens: int, routing: Routing, ranks: int = 2
) -> TileCount:
    """Count what the kernel computes on the busiest rank: means over draws of a load.

    Tiles are those of the rule; ``placed`` deals the popular experts out over the ranks.

    Examples
    --------
    >>> count = busiest_rank(K3Config.released(), "tp", 256, "skewed")
    >>> 830 < count.experts < 860, 980 < count.tiles < 1020  # 150 experts are read again
    (True, True)
    """
    experts, top_k = config.num_experts, config.num_experts_per_token
    whole = parallel == "ep"
    here = experts // ranks if whole else experts
    width = config.moe_intermediate_size // (1 if whole else ranks)
    tile = TileShape.by_rule(tokens * top_k, here)

    def time(count: TileCount) -> float:
        return TILED.us(count, latent=config.routed_expert_hidden_size, width=width)

    found = []
    for counts in _draws(experts, top_k, tokens, routing != "uniform"):
        if routing == "placed":
            counts = np.concatenate([counts[rank::ranks] for rank in range(ranks)])
        parts = counts.reshape(ranks if whole else 1, here)
        found.append(max((tile.count(part) for part in parts), key=time))
    return TileCount(*np.mean(found, axis=0).tolist())


class TwoGpus:
    """The record ``data/results/h200x2/collectives.json``.

    Parameters
    ----------
    body
        The file's content.

    Examples
    --------
    >>> record = TwoGpus.load()
    >>> record.device, min(record.sizes("all_reduce")), max(record.sizes("all_reduce")) >> 20
    ('2 x NVIDIA H200', 4096, 256)
    """

    def __init__(self, body: Mapping[str, Any]) -> None:
        self.body = body
        self.device: str = body["provenance"]["device"]
        #: The run that timed the layers timed exchanges first and predicted from these.
        self.first_run = MeasuredCollectives.from_rows(
            body.get("collectives_first_run", body["collectives"]), 2
        )
        self.config = K3Config.released()
        self.cost = LayerCost(self.config, "H200", self.first_run)
        self.layers: tuple[LayerRow, ...] = tuple(self._row(row) for row in body["layers"])
        self.not_measured: tuple[LayerRow, ...] = tuple(
            self._row(row) for row in body.get("predicted_not_measured", ())
        )

    @classmethod
    def load(cls, path: str | Path | None = None) -> TwoGpus:
        """Read the record that ships with the lab, or another."""
        default = data_dir() / "results" / "h200x2" / "collectives.json"
        return cls(json.loads(Path(path or default).read_text(encoding="utf-8")))

    def table(self, mode: str = "graph") -> MeasuredCollectives:
        """Return times of the exchanges, in a graph or launched by the host (``"eager"``)."""
        return MeasuredCollectives.from_rows(self.body["collectives"], 2, mode=mode)

    def sizes(self, collective: str, mode: str = "graph") -> dict[int, float]:
        """Bytes of the message to microseconds."""
        return {
            row["bytes"]: row["us"]
            for row in self.body["collectives"]
            if (row["collective"], row["mode"]) == (collective, mode)
        }

    def rows(self, **wanted: object) -> list[LayerRow]:
        """Cases with these attributes.

        Examples
        --------
        >>> [row.tokens for row in TwoGpus.load().rows(layer="moe", routing="placed")]
        [1, 16, 64, 256]
        """
        return [
            row
            for row in self.layers
            if all(getattr(row, name) == value for name, value in wanted.items())
        ]

    def _row(self, row: Mapping[str, Any]) -> LayerRow:
        parallel = row["parallel"].removesuffix("2")
        width = self.config.moe_intermediate_size // (1 if parallel == "ep" else 2)
        experts_us = TILED.us(
            self._count(row, parallel), latent=self.config.routed_expert_hidden_size, width=width
        )
        tiles = self.cost.layer_us(
            row["layer"], row["T"], ranks=2, whole_experts=parallel == "ep",
            distinct=row["distinct_experts_busiest_rank"], pairs=row["pairs_busiest_rank"],
            experts_us=experts_us,
        )  # fmt: skip
        return LayerRow(
            row["layer"], parallel, row["routing"], row["T"],
            row.get("us"), row.get("us_compute"), row.get("us_overlap"),
            row["predicted_us"], row["predicted_parts_us"], tiles.total,
            row["imbalance"], row.get("parts_us", {}),
        )  # fmt: skip

    def _count(self, row: Mapping[str, Any], parallel: str) -> TileCount:
        """Tiles of a case: counted by the run, or drawn anew for the experts that it counted."""
        if "tiles_busiest_rank" in row:
            return TileCount(*row["tiles_busiest_rank"])
        drawn = busiest_rank(self.config, parallel, row["T"], row["routing"])
        experts = row["distinct_experts_busiest_rank"]
        more = experts / drawn.experts
        return TileCount(experts, row["pairs_busiest_rank"], drawn.tiles * more, drawn.rows * more)


def missing_cases(record: TwoGpus, cases: Sequence[tuple[str, int, str]]) -> Iterator[Any]:
    """Predict layers that nobody has timed: rows for ``predicted_not_measured`` of the record.

    Parameters
    ----------
    cases
        Kind of parallelism, tokens and routing.
    """
    for parallel, tokens, routing in cases:
        count = busiest_rank(record.config, parallel, tokens, routing)  # type: ignore[arg-type]
        mean = tokens * record.config.num_experts_per_token / (2 if parallel == "ep" else 1)
        for layer in ("moe", "whole") if routing != "placed" else ("moe",):
            predicted = record.cost.layer_us(
                layer, tokens, ranks=2, whole_experts=parallel == "ep",
                distinct=count.experts, pairs=count.pairs,
            )  # fmt: skip
            yield {
                "layer": layer, "parallel": f"{parallel}2", "routing": routing, "T": tokens,
                "distinct_experts_busiest_rank": count.experts,
                "pairs_busiest_rank": count.pairs, "imbalance": round(count.pairs / mean, 4),
                "predicted_us": round(predicted.total, 2),
                "predicted_parts_us": {n: round(us, 2) for n, us in predicted.parts.items()},
            }  # fmt: skip

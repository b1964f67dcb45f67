"""Exchanges between GPUs that were timed at many sizes: read between them, or lay a line.

Needs numpy. Lesson 11 fits a latency and a bandwidth to them;
:mod:`kimik3_lab.performance.layer_cost` and :mod:`~kimik3_lab.performance.collective_scaling` build
on it. The times come from ``python -m kimik3_lab.parallel.measure``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Line", "MeasuredCollectives"]


@dataclass(frozen=True, slots=True)
class Line:
    """A collective's time as ``latency + bytes / bandwidth``.

    Attributes
    ----------
    latency_s, bandwidth
        Seconds, and bytes of the message a second.
    worst_error
        Largest relative distance of a measured size from the line.
    least_bytes, most_bytes
        Sizes that it was laid through.
    """

    latency_s: float
    bandwidth: float
    worst_error: float
    least_bytes: int
    most_bytes: int

    def seconds(self, size: float) -> float:
        """Time of a message of ``size`` bytes."""
        return self.latency_s + size / self.bandwidth


class MeasuredCollectives:
    """Collectives among GPUs that were timed at many sizes.

    Parameters
    ----------
    times
        Name to sizes in bytes, ascending, and seconds.
    ranks
        GPUs that took part.

    Examples
    --------
    >>> table = MeasuredCollectives({"all_reduce": ([1024, 4096], [1e-5, 2e-5])}, ranks=2)
    >>> [round(1e6 * table.seconds("all_reduce", size)) for size in (512, 4096)]
    [10, 20]
    """

    def __init__(
        self, times: Mapping[str, tuple[Sequence[int], Sequence[float]]], ranks: int
    ) -> None:
        self.ranks = ranks
        self._times = {
            name: (np.asarray(sizes, float), np.asarray(seconds, float))
            for name, (sizes, seconds) in times.items()
        }

    @classmethod
    def from_rows(
        cls, rows: Sequence[Mapping[str, Any]], ranks: int, *, mode: str = "graph"
    ) -> MeasuredCollectives:
        """Read the rows ``collectives`` of ``data/results/h200x2/collectives.json``.

        Raises
        ------
        ValueError
            If there is no row of that mode.
        """
        times: dict[str, tuple[list[int], list[float]]] = {}
        for row in sorted(rows, key=lambda row: row["bytes"]):
            if row["mode"] == mode:
                sizes, seconds = times.setdefault(row["collective"], ([], []))
                sizes.append(row["bytes"])
                seconds.append(row["us"] / 1e6)
        if not times:
            known = ", ".join(sorted({repr(row["mode"]) for row in rows})) or "none"
            raise ValueError(f"no collective was timed in mode {mode!r}; recorded modes: {known}")
        return cls(times, ranks)

    @property
    def names(self) -> tuple[str, ...]:
        """Collectives that were timed."""
        return tuple(self._times)

    def seconds(self, name: str, size: float) -> float:
        """Time of a message of ``size`` bytes, between the sizes that were timed.

        Below the smallest it is that one's time; beyond the largest its bandwidth.

        Raises
        ------
        ValueError
            If that collective was not timed.
        """
        if size <= 0 or self.ranks == 1:
            return 0.0
        sizes, seconds = self._of(name)
        if size > sizes[-1]:
            return float(seconds[-1] * size / sizes[-1])
        return float(np.exp(np.interp(math.log(size), np.log(sizes), np.log(seconds))))

    def _of(self, name: str) -> tuple[Any, Any]:
        if name not in self._times:
            known = ", ".join(self._times) or "none"
            raise ValueError(f"no collective {name!r} was timed; recorded: {known}")
        return self._times[name]

    def line(self, name: str, least_bytes: int = 0, most_bytes: int = 1 << 62) -> Line:
        """Lay a line through the sizes of a range, every size counting alike (relative errors)."""
        sizes, seconds = self._of(name)
        chosen = (sizes >= least_bytes) & (sizes <= most_bytes)
        x, y = sizes[chosen], seconds[chosen]
        if len(x) < 2:
            raise ValueError(f"{name}: a line needs two sizes in the range, got {len(x)}")
        matrix = np.stack([1 / y, x / y], 1)
        (latency, slope), *_ = np.linalg.lstsq(matrix, np.ones(len(x)), rcond=None)
        worst = float(np.abs(matrix @ (latency, slope) - 1).max())
        return Line(float(latency), float(1 / slope), worst, int(x[0]), int(x[-1]))

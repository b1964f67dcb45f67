"""Mean and percentiles of any number of latencies in a fixed amount of memory.

Needs the standard library only. Runs of hours are kept in it; lesson 12 compares it with exact
percentiles.

Up to :data:`EXACT` values are kept as they are, and quantiles are those of numpy. Beyond that they
are counted in buckets whose upper end is 1 % above the lower one, so a quantile is off by half a
percent at most. Count, mean, minimum and maximum are always exact.
"""

from __future__ import annotations

import math
from collections import Counter

__all__ = ["EXACT", "LatencySketch"]

#: Values that are kept as they are.
EXACT = 4096

_RATIO = math.log(1.01)
#: What is less than this lies in the lowest bucket: a nanosecond, whatever the unit.
_LEAST = 1e-9


class LatencySketch:
    """Collects latencies, all in one unit.

    Examples
    --------
    >>> sketch = LatencySketch()
    >>> for value in (1.0, 2.0, 4.0):
    ...     sketch.add(value)
    >>> sketch.count, round(sketch.mean, 3), sketch.quantile(0.5)
    (3, 2.333, 2.0)
    """

    __slots__ = ("_buckets", "_values", "count", "maximum", "minimum", "total")

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self.minimum = math.inf
        self.maximum = -math.inf
        self._values: list[float] | None = []
        self._buckets: Counter[int] = Counter()

    def add(self, value: float, times: int = 1) -> None:
        """Count one latency, or the same one several times."""
        self.count += times
        self.total += value * times
        if value < self.minimum:
            self.minimum = value
        if value > self.maximum:
            self.maximum = value
        if self._values is None:
            self._buckets[_bucket(value)] += times
        else:
            self._values += [value] * times
            if len(self._values) > EXACT:
                self._spill()

    def merge(self, other: LatencySketch) -> None:
        """Count the latencies of ``other`` too."""
        if other._values is not None:
            for value in other._values:
                self.add(value)
            return
        self._spill()
        self._buckets.update(other._buckets)
        self.count += other.count
        self.total += other.total
        self.minimum = min(self.minimum, other.minimum)
        self.maximum = max(self.maximum, other.maximum)

    def _spill(self) -> None:
        """Go over to buckets."""
        if self._values is not None:
            self._buckets.update(map(_bucket, self._values))
            self._values = None

    @property
    def mean(self) -> float | None:
        """Arithmetic mean; None without a value."""
        return self.total / self.count if self.count else None

    @property
    def is_exact(self) -> bool:
        """Whether quantiles are exact."""
        return self._values is not None

    def quantile(self, q: float) -> float | None:
        """Value below which a share ``q`` of all lies; None without a value.

        Raises
        ------
        ValueError
            If ``q`` lies outside [0, 1].
        """
        if not 0.0 <= q <= 1.0:
            raise ValueError(f"a quantile is a share in [0, 1], got {q}")
        if not self.count:
            return None
        rank = q * (self.count - 1)
        if self._values is not None:
            values, low = sorted(self._values), int(rank)
            high = min(low + 1, self.count - 1)
            return values[low] + (rank - low) * (values[high] - values[low])
        seen = 0
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            if seen > rank:
                middle = _LEAST * math.exp((bucket + 0.5) * _RATIO)
                return min(max(middle, self.minimum), self.maximum)
        return self.maximum

    def share_within(self, limit: float) -> float | None:
        """Share of the values that are at most ``limit``; None without a value."""
        if not self.count:
            return None
        if self._values is not None:
            return sum(value <= limit for value in self._values) / self.count
        last = _bucket(limit)
        return sum(n for bucket, n in self._buckets.items() if bucket <= last) / self.count


def _bucket(value: float) -> int:
    return int(math.log(value / _LEAST) / _RATIO) if value > _LEAST else 0

"""Which part of a cell counts: guidellm's rule for leaving out its start and its end.

Needs the standard library only. Used by lessons 10 and 12.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kimik3_lab.benchmark.records import RequestRecord

__all__ = ["Window"]


@dataclass(frozen=True, slots=True)
class Window:
    """The part of a cell that counts, in seconds since the cell began; the rule is guidellm's.

    Latencies come from requests that end after ``open`` and start before ``close`` (so a long
    request is not lost to both edges); rates count the ends inside.

    Examples
    --------
    >>> Window.of_duration(150, warmup=0.1, cooldown=0.1)
    Window(open=15.0, close=135.0)
    """

    open: float
    close: float

    @property
    def duration(self) -> float:
        """Length in seconds; 0 for a window that never opened."""
        return max(0.0, self.close - self.open)

    def touches(self, record: RequestRecord) -> bool:
        """Whether a request's latencies count: it ends after ``open``, starts before ``close``."""
        return record.end >= self.open and record.start <= self.close

    def contains(self, moment: float) -> bool:
        """Whether a moment, such as the end of a request, lies inside."""
        return self.open <= moment <= self.close

    @classmethod
    def of_duration(cls, duration: float, warmup: float = 0.1, cooldown: float = 0.1) -> Window:
        """Return the window of a cell that ran for a set time."""
        return cls(duration * warmup, duration * (1 - cooldown))

    @classmethod
    def of_requests(
        cls, records: Sequence[RequestRecord], warmup: float = 0.1, cooldown: float = 0.1
    ) -> Window:
        """Return the window of a cell that ran for a set number of requests.

        It opens when the first request after the warm-up ones (in order of ending) was sent, and
        closes when the last one before the cool-down ones ended.

        With a burst start, several of the first requests end together, so few warm-up requests at
        high concurrency leave the burst inside: a set time measures throughput better.
        """
        ended = sorted((r for r in records if r.status in ("completed", "failed")), key=_end)
        if not ended:
            return cls(0.0, 0.0)
        skipped = int(warmup * len(ended))
        last = len(ended) - int(cooldown * len(ended)) - 1
        opens = ended[skipped].start if skipped else 0.0
        return cls(opens, ended[last].end)


def _end(record: RequestRecord) -> float:
    return record.end

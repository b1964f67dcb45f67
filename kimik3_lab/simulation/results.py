"""What a simulated run came to, under the names that the benchmark client uses.

Needs the standard library; numpy and scipy for intervals (:attr:`SimulationResult.summary`).
Lessons 11 and 12 set it beside measured results.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from kimik3_lab.benchmark.records import RequestRecord
from kimik3_lab.benchmark.summary import Summary
from kimik3_lab.benchmark.window import Window
from kimik3_lab.simulation.latency_sketch import LatencySketch
from kimik3_lab.simulation.run_log import LATENCIES, RunLog
from kimik3_lab.simulation.totals import StepTotals

__all__ = ["SimulationResult"]


@dataclass
class SimulationResult:
    """Outcome of one run.

    Attributes
    ----------
    preset, load
        What was run, and the load: ``c=4`` or ``open loop``.
    seed
        Of the accepted lengths.
    duration_s
        When the run ended, seconds.
    window
        The part that counts.
    latencies
        ``ttft_ms``, ``tpot_ms``, ``itl_ms`` and ``e2e_s`` of the requests in it; means are exact.
    attempted, completed, cancelled, refused
        Requests sent; ended; in flight when the run ended; refused by the engine.
    in_window
        Completed requests whose latencies count.
    completed_in_window, output_tokens_in_window
        Requests that ended inside the window, and their output tokens.
    totals
        Steps, seconds by part, drafts.
    records
        Every request in full, or None for runs that keep none.
    """

    preset: str
    load: str
    seed: int
    duration_s: float
    window: Window
    latencies: dict[str, LatencySketch]
    attempted: int
    completed: int
    cancelled: int
    refused: int
    in_window: int
    completed_in_window: int
    output_tokens_in_window: int
    totals: StepTotals = field(repr=False)
    records: list[RequestRecord] | None = field(default=None, repr=False)

    @classmethod
    def from_log(
        cls,
        log: RunLog,
        totals: StepTotals,
        *,
        preset: str,
        load: str,
        seed: int,
        duration_s: float,
    ) -> SimulationResult:
        """Close a log."""
        return cls(
            preset=preset,
            load=load,
            seed=seed,
            duration_s=duration_s,
            window=log.window,
            latencies=log.latencies,
            attempted=log.attempted,
            completed=log.completed,
            cancelled=log.cancelled,
            refused=log.refused,
            in_window=log.in_window,
            completed_in_window=log.completed_in_window,
            output_tokens_in_window=log.output_tokens_in_window,
            totals=totals,
            records=log.records if log.keep_records else None,
        )

    @property
    def output_tokens_per_s(self) -> float | None:
        """Output tokens of the requests that ended in the window, over its length: a count."""
        length = self.window.duration
        return self.output_tokens_in_window / length if length else None

    @property
    def utilization(self) -> float:
        """Share of the run in which a step was being computed."""
        return min(self.totals.seconds / self.duration_s, 1.0) if self.duration_s else 0.0

    def latency(self, name: str, statistic: str = "mean") -> float | None:
        """One latency: ``mean``, ``median``, ``p90`` or ``p99`` of ``ttft_ms`` and so on.

        Raises
        ------
        ValueError
            For a name or a statistic that there is not.
        """
        if name not in self.latencies:
            raise ValueError(f"latency must be one of {', '.join(LATENCIES)}, got {name!r}")
        sketch = self.latencies[name]
        if statistic == "mean":
            return sketch.mean
        if statistic == "median":
            return sketch.quantile(0.5)
        if statistic[:1] == "p" and statistic[1:].isdigit():
            return sketch.quantile(int(statistic[1:]) / 100)
        raise ValueError(f"statistic must be mean, median or p<percent>, got {statistic!r}")

    @cached_property
    def summary(self) -> Summary:
        """What the benchmark client makes of the same records, with intervals.

        Raises
        ------
        ValueError
            If the run kept no records.
        """
        from kimik3_lab.benchmark.metrics import summarise  # scipy takes a second to import

        if self.records is None:
            raise ValueError("this run kept no records: run it again with keep_records=True")
        return summarise(self.records, self.window)

    def row(self, ttft_statistic: str = "mean") -> dict[str, Any]:
        """Make one flat row of the published figures; all but TTFT are means or counts."""
        return {
            "latency_s": self.latency("e2e_s"),
            "ttft_ms": self.latency("ttft_ms", ttft_statistic),
            "tpot_ms": self.latency("tpot_ms"),
            "output_tokens_per_s": self.output_tokens_per_s,
            "completed_requests": self.completed_in_window,
        }

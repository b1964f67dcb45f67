"""What a service promises of its latencies, and whether a simulated run kept it.

Needs the standard library. Used by :mod:`kimik3_lab.simulation.planner`; lesson 12 draws goodput
with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

from kimik3_lab.benchmark.records import RequestRecord
from kimik3_lab.simulation.latency_sketch import LatencySketch

__all__ = ["Slo", "Verdict"]

#: Limit, unit, and the latency that it holds against.
_LIMITS = {"ttft_ms": "ms", "tpot_ms": "ms", "e2e_s": "s"}


class Outcome(Protocol):
    """What is judged: a :class:`SimulationResult` or a list of them in a fleet."""

    latencies: dict[str, LatencySketch]

    @property
    def attempted(self) -> int: ...
    @property
    def completed(self) -> int: ...
    @property
    def refused(self) -> int: ...


@dataclass(frozen=True)
class Verdict:
    """Whether a run kept a promise.

    Attributes
    ----------
    kept
        Whether it did.
    measured
        What was promised, as it came out.
    excess
        The worst of them over its limit: at most 1 if kept, 1.5 if a limit was passed by half,
        infinity if requests never ended.
    reason
        What was not kept, with numbers; empty if all was.
    """

    kept: bool
    measured: dict[str, float | None]
    excess: float
    reason: str


@dataclass(frozen=True)
class Slo:
    """Service level objective.

    Attributes
    ----------
    ttft_ms, tpot_ms, e2e_s
        Most that time to first token, time per output token and latency may be; None promises
        nothing.
    percentile
        Of the requests, which each of these holds for on its own.
    goodput
        Share of the requests that must keep all limits at once; None asks for none.

    Raises
    ------
    ValueError
        If nothing is promised, or a number makes no sense.

    Examples
    --------
    >>> Slo(ttft_ms=2000, tpot_ms=50).text
    'p95 TTFT <= 2,000 ms, p95 TPOT <= 50 ms'
    """

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_s: float | None = None
    percentile: int = 95
    goodput: float | None = None

    def __post_init__(self) -> None:
        if not self.limits:
            raise ValueError("an SLO needs a limit: ttft_ms, tpot_ms or e2e_s")
        for name, limit in self.limits.items():
            if not 0 < limit < math.inf:
                raise ValueError(f"{name} must be a number above 0, got {limit!r}")
        if not 1 <= self.percentile <= 99:
            raise ValueError(f"percentile must be in 1 ... 99, got {self.percentile!r}")
        if self.goodput is not None and not 0 < self.goodput <= 1:
            raise ValueError(f"goodput is a share above 0, up to 1, got {self.goodput!r}")

    @property
    def limits(self) -> dict[str, float]:
        """Limits by name of the latency."""
        values = {name: getattr(self, name) for name in _LIMITS}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def text(self) -> str:
        """As a table heads it."""
        parts = [
            f"p{self.percentile} {_short(name)} <= {limit:,g} {_LIMITS[name]}"
            for name, limit in self.limits.items()
        ]
        if self.goodput is not None:
            parts.append(f"{self.goodput:.0%} of the requests within all limits")
        return ", ".join(parts)

    def is_good(self, record: RequestRecord) -> bool:
        """Whether one request kept all limits."""
        values = {
            "ttft_ms": None if record.ttft is None else record.ttft * 1e3,
            "tpot_ms": None if record.tpot is None else record.tpot * 1e3,
            "e2e_s": record.e2e,
        }
        if record.status != "completed":
            return False
        # An answer of one token has no time per output token to be late with.
        return all((values[name] or 0.0) <= limit for name, limit in self.limits.items())

    def judge(self, outcome: Outcome, records: list[RequestRecord] | None = None) -> Verdict:
        """Judge a run.

        Parameters
        ----------
        outcome
            Its result. Requests that were refused or did not end break the promise.
        records
            Its requests; needed with :attr:`goodput`.

        Raises
        ------
        ValueError
            If records are needed and missing.
        """
        measured: dict[str, float | None] = {}
        excesses: list[tuple[float, str]] = []
        unfinished = outcome.attempted - outcome.completed
        if unfinished or not outcome.attempted:
            excesses.append((math.inf, _unfinished(outcome)))
        for name, limit in self.limits.items():
            found = outcome.latencies[name].quantile(self.percentile / 100)
            measured[name] = found
            if found is not None:
                told = (
                    f"p{self.percentile} {_short(name)} {_figure(found)} {_LIMITS[name]} > "
                    f"{limit:,g} {_LIMITS[name]}"
                )
                excesses.append((found / limit, told))
        if self.goodput is not None:
            if records is None:
                raise ValueError("goodput needs the records of the run: keep_records=True")
            share = sum(map(self.is_good, records)) / len(records) if records else 0.0
            measured["goodput"] = share
            told = f"goodput {share:.1%} < {self.goodput:.1%}"
            excesses.append((self.goodput / share if share else math.inf, told))
        excess = max(value for value, _ in excesses)
        reasons = [told for value, told in excesses if value > 1]
        return Verdict(not reasons, measured, excess, "; ".join(reasons))

    def to_dict(self) -> dict[str, Any]:
        """Plain content for JSON."""
        return {**self.limits, "percentile": self.percentile, "goodput": self.goodput}


def _unfinished(outcome: Outcome) -> str:
    if not outcome.attempted:
        return "no request was sent: take a longer load"
    if outcome.refused:
        return (
            f"{outcome.refused} of {outcome.attempted} requests are longer than the context or "
            "the cache allows"
        )
    return f"{outcome.attempted - outcome.completed} of {outcome.attempted} requests did not end"


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _short(name: str) -> str:
    return {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "e2e_s": "latency"}[name]

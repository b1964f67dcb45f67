"""Goodput: requests a second that keep all limits at once, over the load.

Needs the standard library. Lesson 12 draws the curve: throughput goes on rising when nobody is
served in time any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kimik3_lab.benchmark.trace_request import TraceRequest
from kimik3_lab.simulation.arrivals import simulate_arrivals
from kimik3_lab.simulation.slo import Slo
from kimik3_lab.simulation.spec import SimulationSpec
from kimik3_lab.simulation.trace_requests import to_simulation_requests

__all__ = ["GoodputPoint", "goodput_curve"]


@dataclass(frozen=True)
class GoodputPoint:
    """One load.

    Attributes
    ----------
    scale
        Of the load, as it was asked for.
    requests_per_s
        Offered.
    good_share
        Share of the requests that kept all limits.
    goodput_per_s
        Requests a second that did.
    output_tokens_per_s
        Throughput until the last request ended.
    """

    scale: float
    requests_per_s: float
    good_share: float
    goodput_per_s: float
    output_tokens_per_s: float


def goodput_curve(
    spec: SimulationSpec,
    load: Callable[[float], Iterable[TraceRequest]],
    slo: Slo,
    scales: Sequence[float],
    duration_s: float,
    *,
    seed: int = 0,
) -> list[GoodputPoint]:
    """Simulate one replica under more and more load.

    Parameters
    ----------
    spec
        The replica.
    load
        Makes the requests for a scale, all of which arrive within ``duration_s``.
    slo
        Its limits; percentile and goodput do not matter here.
    scales
        Loads to try.
    duration_s
        Seconds over which requests arrive.
    seed
        Of accepted lengths.

    Examples
    --------
    >>> from kimik3_lab.serving.presets import MAIN_2026_09_13
    >>> from kimik3_lab.simulation.trace_requests import fixed_lengths
    >>> curve = goodput_curve(
    ...     SimulationSpec(MAIN_2026_09_13),
    ...     lambda scale: fixed_lengths(scale, 4000, 20, 20.0),
    ...     Slo(ttft_ms=2000),
    ...     (0.5, 8.0),
    ...     20.0,
    ... )
    >>> curve[0].good_share, curve[1].good_share < 0.9
    (1.0, True)
    """
    points = []
    for scale in scales:
        requests = list(to_simulation_requests(load(scale)))
        if not requests:
            raise ValueError(f"no request at scale {scale}: take a longer load, or a larger scale")
        result = simulate_arrivals(spec, requests, seed=seed, keep_records=True)
        good = sum(map(slo.is_good, result.records or ()))
        points.append(
            GoodputPoint(
                scale,
                len(requests) / duration_s,
                good / len(requests),
                good / duration_s,
                result.output_tokens_per_s or 0.0,
            )
        )
    return points

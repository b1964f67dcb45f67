"""Fit the cost model to some of the published points, and ask it for the others.

Needs numpy, the scheduler and the cost model. Lesson 11 leaves out one concurrency at a time: a
model that only remembers its points is wrong about the one that it has not seen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from kimik3_lab.performance.calibration import Fit, calibrate
from kimik3_lab.performance.published import PublishedPoint, load_points
from kimik3_lab.performance.scenarios import Scenario
from kimik3_lab.simulation.closed_loop import simulate_closed_loop
from kimik3_lab.simulation.point_scores import PRESETS, PointScore, score_points
from kimik3_lab.simulation.spec import SimulationSpec

__all__ = ["LeftOut", "leave_one_out", "predict_points"]


def predict_points(
    constants: Mapping[str, float],
    scenario: Scenario,
    points: Sequence[PublishedPoint],
    seeds: Sequence[int] = (0, 1),
) -> list[tuple[float, float]]:
    """Mean latency in seconds and TTFT in milliseconds of published points, simulated.

    Parameters
    ----------
    constants, scenario
        Of the cost model. The scenario says which statistic TTFT is.
    seeds
        Runs to average over.

    Examples
    --------
    >>> ((latency, ttft),) = predict_points({}, Scenario.default(), load_points()[:1], seeds=(0,))
    >>> latency > ttft / 1000 > 0
    True
    """
    found = []
    for point in points:
        spec = SimulationSpec(PRESETS[point.version], scenario=scenario, constants=constants)
        runs = [
            simulate_closed_loop(
                spec,
                point.concurrency,
                seed=seed,
                cold=point.concurrency == 1,
                keep_records=False,
            )
            for seed in seeds
        ]
        # A machine so slow that nothing ends is given the length of the run.
        latency = fmean(run.latency("e2e_s") or run.duration_s for run in runs)
        statistic = scenario.ttft_statistic
        ttft = fmean(run.latency("ttft_ms", statistic) or 1e3 * run.duration_s for run in runs)
        found.append((latency, ttft))
    return found


@dataclass(frozen=True, slots=True)
class LeftOut:
    """One concurrency that the fit has not seen, and how far off it was there."""

    concurrency: int
    fit: Fit
    scores: list[PointScore]

    @property
    def latency_error(self) -> float:
        """Mean absolute error of the latency at this concurrency, percent."""
        return fmean(abs(score.latency_error) for score in self.scores)


def leave_one_out(
    points: Sequence[PublishedPoint] | None = None,
    *,
    start: Mapping[str, float] | None = None,
    strides: Sequence[float] = (0.5, 0.25),
    seeds: Sequence[int] = (0,),
) -> list[LeftOut]:
    """Fit to all but one concurrency, for each of them. Takes minutes.

    Parameters
    ----------
    points
        The six published ones if left out.
    start, strides
        See :func:`kimik3_lab.performance.calibration.calibrate`.
    seeds
        Runs of each point to average over.
    """
    points = load_points() if points is None else tuple(points)

    def predict(
        constants: Mapping[str, float], scenario: Scenario, asked: Sequence[PublishedPoint]
    ) -> list[tuple[float, float]]:
        return predict_points(constants, scenario, asked, seeds)

    left_out = []
    for concurrency in sorted({point.concurrency for point in points}):
        kept = [point for point in points if point.concurrency != concurrency]
        unseen = [point for point in points if point.concurrency == concurrency]
        fit = calibrate(predict, kept, start=start, strides=strides)
        scores = score_points(
            unseen,
            lambda preset, fit=fit: SimulationSpec(  # type: ignore[misc]
                preset, scenario=fit.scenario, constants=fit.constants
            ),
        )
        left_out.append(LeftOut(concurrency, fit, scores))
    return left_out

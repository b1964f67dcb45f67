"""Published points beside what the simulator makes of them, and the errors.

Needs the standard library, the scheduler and the cost model. Lesson 11 plots them.

A run of 150 seconds completes a whole number of requests, and accepted lengths are drawn, so one
run differs from the next. Errors are those of one run, the first seed, as the published figures are
those of one run; the spread over more seeds is shown beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from kimik3_lab.performance.published import BASELINE, IMPROVED, PublishedPoint, load_points
from kimik3_lab.serving.presets import MAIN_2026_09_13, V0_27_1, Preset
from kimik3_lab.simulation.closed_loop import simulate_closed_loop
from kimik3_lab.simulation.spec import SimulationSpec

__all__ = ["PRESETS", "MakeSpec", "PointScore", "mean_errors", "over_seeds", "score_points"]

#: What each published version is simulated with.
PRESETS: dict[str, Preset] = {BASELINE: V0_27_1, IMPROVED: MAIN_2026_09_13}

#: Makes a specification from a preset.
MakeSpec = Callable[[Preset], SimulationSpec]


@dataclass(frozen=True, slots=True)
class PointScore:
    """One published point and what the simulator makes of it. Errors are signed, in percent.

    Attributes
    ----------
    latency_s, ttft_mean_ms, ttft_median_ms, completed_requests
        Simulated, of the first seed.
    latency_range, completed_range
        Smallest and largest over all seeds.
    """

    version: str
    concurrency: int
    published_latency_s: float
    published_ttft_ms: float
    published_completed: int
    latency_s: float
    ttft_mean_ms: float
    ttft_median_ms: float
    completed_requests: int
    latency_range: tuple[float, float]
    completed_range: tuple[int, int]

    @property
    def latency_error(self) -> float:
        """Of the mean latency."""
        return _error(self.latency_s, self.published_latency_s)

    @property
    def throughput_error(self) -> float:
        """Of the count of requests that ended in the window."""
        return _error(self.completed_requests, self.published_completed)

    def ttft_error(self, statistic: str) -> float:
        """Of the time to first token: its ``"mean"`` or its ``"median"``."""
        simulated = {"mean": self.ttft_mean_ms, "median": self.ttft_median_ms}[statistic]
        return _error(simulated, self.published_ttft_ms)


def _error(simulated: float, published: float) -> float:
    return 100.0 * (simulated / published - 1.0)


def score_points(
    points: Iterable[PublishedPoint] | None = None,
    make_spec: MakeSpec = SimulationSpec,
    seeds: Sequence[int] = (0,),
) -> list[PointScore]:
    """Simulate published points.

    Parameters
    ----------
    points
        By default all six.
    make_spec
        Makes a specification from a preset: here a scenario or other constants come in.
    seeds
        The first one gives the figures, all together the ranges.
    """
    scores = []
    for point in load_points() if points is None else points:
        spec = make_spec(PRESETS[point.version])
        # The post measured concurrency 1 first, on a server that had just been started.
        cold = point.concurrency == 1
        runs = [
            simulate_closed_loop(spec, point.concurrency, seed=seed, cold=cold) for seed in seeds
        ]
        latencies = [run.latency("e2e_s") or 0.0 for run in runs]
        counts = [run.completed_in_window for run in runs]
        first = runs[0]
        scores.append(
            PointScore(
                version=point.version,
                concurrency=point.concurrency,
                published_latency_s=point.latency_s,
                published_ttft_ms=point.ttft_ms,
                published_completed=point.completed_requests,
                latency_s=latencies[0],
                ttft_mean_ms=first.latency("ttft_ms") or 0.0,
                ttft_median_ms=first.latency("ttft_ms", "median") or 0.0,
                completed_requests=counts[0],
                latency_range=(min(latencies), max(latencies)),
                completed_range=(min(counts), max(counts)),
            )
        )
    return scores


def over_seeds(by_seed: Sequence[Sequence[PointScore]]) -> list[PointScore]:
    """Join scores of the same points with other seeds: figures of the first, ranges of all.

    Examples
    --------
    >>> point = load_points()[3]
    >>> one, two = (score_points([point], seeds=(seed,)) for seed in (0, 1))
    >>> over_seeds([one, two]) == score_points([point], seeds=(0, 1))
    True
    """
    joined = []
    for scores in zip(*by_seed, strict=True):
        latencies = [end for score in scores for end in score.latency_range]
        counts = [end for score in scores for end in score.completed_range]
        joined.append(
            replace(
                scores[0],
                latency_range=(min(latencies), max(latencies)),
                completed_range=(min(counts), max(counts)),
            )
        )
    return joined


def mean_errors(scores: Sequence[PointScore]) -> dict[str, float]:
    """Mean absolute errors in percent: latency, TTFT by both statistics, count throughput."""
    return {
        "latency": fmean(abs(score.latency_error) for score in scores),
        "ttft_mean": fmean(abs(score.ttft_error("mean")) for score in scores),
        "ttft_median": fmean(abs(score.ttft_error("median")) for score in scores),
        "throughput": fmean(abs(score.throughput_error) for score in scores),
    }

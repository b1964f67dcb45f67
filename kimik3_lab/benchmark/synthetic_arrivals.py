"""Arrival times that are less even than a Poisson process: slow waves, bursts, coarse stamps.

Needs numpy. Used by the generators of :mod:`kimik3_lab.benchmark.synthetic_traces`.

Traces are uneven in three ways. The rate drifts over minutes: then the index of dispersion grows
with the length of the bin, ``1 + rate * variance * bin``. Requests come in bursts with silence
between: then the gaps vary far more than their mean. And a recorder may round its stamps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

__all__ = ["BurstyArrivals", "RateWaves", "round_down"]

#: Periods of the waves in seconds: far apart, and an hour holds several of each.
_PERIODS = (1_500.0, 830.0, 470.0)


@dataclass(frozen=True)
class RateWaves:
    """A rate that rises and falls slowly: three waves with random phases.

    Attributes
    ----------
    spread
        Standard deviation of the rate over its mean, at most 0.4; 0 keeps it even.

    Examples
    --------
    >>> RateWaves(0.0).warp(np.array([5.0, 7.0]), 10.0, np.random.default_rng(0)).tolist()
    [5.0, 7.0]
    """

    spread: float

    def __post_init__(self) -> None:
        if not 0 <= self.spread <= 0.4:  # three amplitudes of 0.41 would take the rate below 0
            raise ValueError(f"spread must be in [0, 0.4], got {self.spread!r}")

    def warp(self, times: np.ndarray, duration_s: float, rng: np.random.Generator) -> np.ndarray:
        """Move times so that an even rate becomes this one; 0 and ``duration_s`` stay in place.

        Times before 0 are moved by the same waves. The order stays.
        """
        if not self.spread:
            return times
        phases = rng.uniform(0, 2 * math.pi, len(_PERIODS))
        amplitude = self.spread * math.sqrt(2 / len(_PERIODS))

        def passed(moments: np.ndarray) -> np.ndarray:
            """Integral of the rate from 0 on, where a mean rate of 1 gives the time itself."""
            total = moments.astype(float)
            for period, phase in zip(_PERIODS, phases, strict=True):
                turn = 2 * math.pi / period
                total += amplitude / turn * (np.sin(turn * moments + phase) - math.sin(phase))
            return total

        # A table of the integral, read backwards: it rises, since the rate stays above 0.
        grid = np.arange(min(times.min(initial=0.0), 0.0) - 1e3, duration_s + 1e3, 1.0)
        warped = np.interp(times * (passed(np.array([duration_s]))[0] / duration_s),
                           passed(grid), grid)  # fmt: skip
        return np.asarray(warped)


@dataclass(frozen=True)
class BurstyArrivals:
    """Bursts of requests, and silence between them.

    Attributes
    ----------
    burst_size
        Mean requests of a burst (geometric), at least 1.
    gap_in_burst_s
        Mean seconds between two of them (exponential).
    silence_s
        Mean seconds from the last request of a burst to the next burst (exponential).
    """

    burst_size: float
    gap_in_burst_s: float
    silence_s: float

    @property
    def rate(self) -> float:
        """Requests a second in the long run."""
        return self.burst_size / ((self.burst_size - 1) * self.gap_in_burst_s + self.silence_s)

    def times(self, duration_s: float, rate_scale: float, rng: np.random.Generator) -> np.ndarray:
        """Arrivals in ``0 <= t < duration_s``; bursts come ``rate_scale`` times as often.

        Sizes and silences are evenly spread quantiles in random order, so that an hour, which holds
        less than a hundred of them, looks the same with every seed.
        """
        silence = max(
            1e-3, (self.burst_size / (self.rate * rate_scale))
            - (self.burst_size - 1) * self.gap_in_burst_s,
        )  # fmt: skip
        cycle = self.burst_size / (self.rate * rate_scale)
        bursts = max(1, round(duration_s / cycle))
        shares = (np.arange(bursts) + 0.5) / bursts
        sizes = rng.permutation(np.ceil(np.log1p(-shares) / math.log1p(-1 / self.burst_size)))
        silences = rng.permutation(-np.log1p(-shares) * silence)
        starts, moment = [], 0.0
        for size, pause in zip(sizes.astype(int), silences, strict=True):
            inside = rng.exponential(self.gap_in_burst_s, size - 1)
            starts.append(moment + np.concatenate(([0.0], np.cumsum(inside))))
            moment = starts[-1][-1] + pause
        times = np.concatenate(starts)
        # The drawn cycles do not add up to the duration to the second.
        return times[times < duration_s]


def round_down(times: np.ndarray, step_s: float) -> np.ndarray:
    """Stamp times with multiples of ``step_s``; 0 leaves them as they are."""
    return np.floor(times / step_s) * step_s if step_s else times

"""How sure a measured number is: intervals for counts and latencies, and how many samples it takes.

Needs numpy; scipy when an interval is computed. Used by :mod:`kimik3_lab.benchmark.metrics`;
lesson 12 applies it to the published counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

__all__ = ["Interval", "bootstrap_interval", "poisson_interval", "samples_needed"]

_RESAMPLES = 2000


class Interval(NamedTuple):
    """A confidence interval, both ends included, in the unit of its number."""

    low: float
    high: float


def poisson_interval(count: int, confidence: float = 0.95) -> Interval:
    """Exact (Garwood) interval for the mean of a Poisson count.

    A closed loop completes requests more evenly than a Poisson process, so for its counts this
    interval is on the wide side: it is an upper bound on the doubt that counting alone leaves.

    Parameters
    ----------
    count
        Requests that ended inside the window.
    confidence
        Coverage, 0 to 1.

    Examples
    --------
    The published run at concurrency 1 completed about 10 requests with vLLM 0.27.1:

    >>> low, high = poisson_interval(10)
    >>> round(low, 1), round(high, 1)
    (4.8, 18.4)
    """
    from scipy.stats import chi2

    if count < 0:
        raise ValueError(f"count must be at least 0, got {count}")
    tail = (1 - confidence) / 2
    low = chi2.ppf(tail, 2 * count) / 2 if count else 0.0
    return Interval(float(low), float(chi2.ppf(1 - tail, 2 * (count + 1)) / 2))


def samples_needed(quantile: float, confidence: float = 0.95) -> int:
    """Return the fewest samples whose smallest and largest bracket a quantile.

    With ``n`` independent samples the ``quantile`` lies between the smallest and the largest with
    probability ``1 - quantile**n - (1 - quantile)**n``, whatever the distribution. Below this
    count no distribution-free interval for it exists, so the sample says next to nothing about it.

    Examples
    --------
    >>> [samples_needed(q) for q in (0.5, 0.9, 0.99)]
    [6, 29, 299]
    """
    if not (0 < quantile < 1 and 0 < confidence < 1):
        raise ValueError(f"need 0 < quantile, confidence < 1, got {quantile} and {confidence}")
    far = max(quantile, 1 - quantile)
    n = max(1, math.floor(math.log(1 - confidence) / math.log(far)))
    while 1 - far**n - (1 - far) ** n < confidence:
        n += 1
    return n


def bootstrap_interval(
    samples: Sequence[np.ndarray],
    statistic: Callable[..., np.ndarray],
    confidence: float = 0.95,
    seed: int = 0,
) -> Interval | None:
    """Percentile bootstrap interval of a statistic.

    Parameters
    ----------
    samples
        One array, or several of equal length whose rows belong together.
    statistic
        Called with the resampled arrays and ``axis``.
    confidence
        Coverage, 0 to 1.
    seed
        The interval of the same samples is always the same.

    Returns
    -------
    Interval or None
        None with fewer than two samples.

    Examples
    --------
    >>> bootstrap_interval([np.array([2.0, 2.0, 2.0])], np.mean)
    Interval(low=2.0, high=2.0)
    """
    from scipy.stats import bootstrap

    if len(samples[0]) < 2:
        return None
    if all(np.ptp(array) == 0 for array in samples):
        value = float(statistic(*samples, axis=-1))
        return Interval(value, value)
    # A batch of some 2**20 drawn values keeps memory small for long inputs.
    result = bootstrap(
        tuple(samples),
        statistic,
        paired=len(samples) > 1,
        vectorized=True,
        n_resamples=_RESAMPLES,
        batch=max(1, min(_RESAMPLES, 2**20 // len(samples[0]))),
        confidence_level=confidence,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return Interval(float(result.low), float(result.high))

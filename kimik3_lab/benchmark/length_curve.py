"""Lengths drawn so that given quantiles come out: a lognormal whose spread may change on its way.

Needs numpy. Used by the generators of :mod:`kimik3_lab.benchmark.synthetic_traces`.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

__all__ = ["LengthCurve"]


@dataclass(frozen=True)
class LengthCurve:
    """A distribution of token counts, given by some of its quantiles.

    Between two quantiles the logarithm of the length is a straight line over the normal score, so
    two quantiles make a lognormal, and more of them one with another spread in each part. Behind
    the outer quantiles the lines go on, as far as ``least`` and ``most``.

    Parameters
    ----------
    quantiles
        Share of the lengths that lie below, and the length; two or more, both rising.
    least, most
        Shortest and longest length; what lies outside is set to them.

    Raises
    ------
    ValueError
        If the quantiles do not rise.

    Examples
    --------
    >>> chat = LengthCurve(((0.5, 129), (0.9, 424)), most=1500)
    >>> chat.tokens(np.array([-9.0, 0.0, 1.2815515655446004, 9.0])).tolist()
    [1, 129, 424, 1500]
    """

    quantiles: tuple[tuple[float, float], ...]
    least: int = 1
    most: int = 1 << 20

    def __post_init__(self) -> None:
        shares, lengths = zip(*self.quantiles, strict=True) if self.quantiles else ((), ())
        rising = all(np.all(np.diff(values) > 0) for values in (shares, lengths))
        if len(shares) < 2 or not rising or not 0 < shares[0] < shares[-1] < 1:
            raise ValueError(
                f"two quantiles or more are needed, rising and inside (0, 1), got {self.quantiles}"
            )
        if not 1 <= self.least < self.most:
            raise ValueError(f"need 1 <= least < most, got {self.least} and {self.most}")

    def tokens(self, scores: np.ndarray) -> np.ndarray:
        """Lengths at normal scores ``scores``: standard normal ones give this distribution."""
        normal = NormalDist()
        at = np.array([normal.inv_cdf(share) for share, _ in self.quantiles])
        logs = np.log([length for _, length in self.quantiles])
        slopes = np.diff(logs) / np.diff(at)
        lines = np.interp(scores, at, logs)
        lines += np.minimum(scores - at[0], 0) * slopes[0]
        lines += np.maximum(scores - at[-1], 0) * slopes[-1]
        # Clipped first: a score far out could overflow.
        lines = np.clip(lines, np.log(self.least), np.log(self.most))
        tokens: np.ndarray = np.rint(np.exp(lines)).astype(int)
        return tokens

    @property
    def mean(self) -> float:
        """Mean length, from 20,001 evenly spread quantiles."""
        steps = 20_001
        normal = NormalDist()
        scores = np.array([normal.inv_cdf((i + 0.5) / steps) for i in range(steps)])
        return float(self.tokens(scores).mean())

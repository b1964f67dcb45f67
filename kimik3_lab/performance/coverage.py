"""How many experts a step reads: even or skewed load, and tokens that share experts.

Needs numpy. Lesson 02 measures load on a small model; lesson 11 asks what it does to a step.

Two things make a step read fewer experts than independent even picks would. Some experts are asked
for more often than others. And a token tends to pick experts that the token before it picked:
29.5 % of them on the released model (https://github.com/sqliteai/waste, docs/K3.md), where even
picks would give 1.8 %. Drafts of one request are neighbours, so they count as fewer tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

__all__ = ["ExpertCoverage", "effective_tokens", "skewed_load"]

#: Up to here the number of distinct experts is tabulated; beyond, practically all are read.
_TABLE = 8192


def effective_tokens(rows: int, seqs: int, reuse: float) -> float:
    """Count the independent tokens that pick as many experts as ``rows`` neighbours do.

    The rows belong to ``seqs`` runs. The first of a run counts in full, every further one for the
    share of its picks that are new.

    Examples
    --------
    >>> effective_tokens(9, 1, reuse=0.25), effective_tokens(9, 9, reuse=0.25)
    (7.0, 9.0)
    """
    return seqs + (rows - seqs) * (1.0 - reuse)


def skewed_load(num_experts: int, top_k: int, exponent: float) -> npt.NDArray[np.float64]:
    """Probability that a token picks each expert, falling with its rank as ``rank ** -exponent``.

    No expert can be picked by more than every token; what is cut off there goes to the others.

    Examples
    --------
    >>> load = skewed_load(896, 16, 1.0)
    >>> round(float(load.sum()), 6), float(load.max())
    (16.0, 1.0)
    """
    weights = np.arange(1, num_experts + 1, dtype=np.float64) ** -exponent
    load = np.zeros(num_experts)
    full = 0
    while True:
        rest = weights[full:]
        load[full:] = (top_k - full) * rest / rest.sum()
        over = int((load[full:] > 1.0).sum())
        if not over:
            return load
        load[full : full + over] = 1.0
        full += over


class ExpertCoverage:
    """Distinct experts that a step reads in one layer, for a given load.

    Parameters
    ----------
    load
        Probability that a token picks each expert; sums to the picks of a token.

    Raises
    ------
    ValueError
        If an entry is no probability.

    Examples
    --------
    >>> even = ExpertCoverage([16 / 896] * 896)
    >>> round(even.distinct(16), 1), round(even.distinct(144), 1)
    (224.4, 829.1)
    """

    def __init__(self, load: Sequence[float] | npt.NDArray[np.float64]) -> None:
        picked = np.asarray(load, dtype=np.float64)
        if picked.ndim != 1 or not picked.size or not ((picked >= 0) & (picked <= 1)).all():
            raise ValueError(
                "a load is a list with one probability (0 to 1) for each expert, got "
                f"shape {picked.shape} from {picked.min(initial=0)} to {picked.max(initial=0)}"
            )
        self.num_experts = picked.size
        self.top_k = float(picked.sum())
        counts = np.unique(np.concatenate([np.arange(257), np.geomspace(257, _TABLE, 256)]))
        # One column for each different load; an even load has one.
        values, times = np.unique(picked, return_counts=True)
        missed = np.power(1.0 - values[None, :], counts[:, None]) @ times
        self._counts, self._distinct = counts, self.num_experts - missed

    def distinct(self, tokens: float) -> float:
        """Expect so many distinct experts among those that ``tokens`` independent tokens pick."""
        return float(np.interp(tokens, self._counts, self._distinct))


@lru_cache(maxsize=64)
def coverage(num_experts: int, top_k: int, exponent: float) -> ExpertCoverage:
    """Coverage of :func:`skewed_load`, kept because cost models share it."""
    return ExpertCoverage(skewed_load(num_experts, top_k, exponent))

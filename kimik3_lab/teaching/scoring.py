"""Score a predicted number by how many times too large or too small it was.

Needs the standard library only. Used by :mod:`kimik3_lab.teaching.predictions` in every lesson.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["Score", "format_number", "score"]

#: Largest symmetric ratio of each verdict, and the words for it.
_VERDICTS = (
    (1.1, "spot on"),
    (1.5, "close"),
    (3.0, "right size, wrong detail"),
    (10.0, "wrong by a factor"),
    (math.inf, "wrong by more than a factor of ten"),
)


@dataclass(frozen=True)
class Score:
    """How far a prediction was from the truth.

    Attributes
    ----------
    ratio
        Symmetric ratio: the larger of predicted/actual and actual/predicted, so at least 1. Twice
        too much and half of it are equally wrong.
    points
        100 for exact, 70 for a factor of two, 0 from a factor of ten on.
    verdict
        The same in plain words.
    """

    ratio: float
    points: int
    verdict: str


def score(predicted: float, actual: float) -> Score:
    """Score a prediction by its symmetric ratio to the actual value.

    A prediction of the wrong sign, or of zero for something that is not, has an infinite ratio.

    Examples
    --------
    >>> score(50, 100) == score(200, 100)
    True
    >>> score(50, 100)
    Score(ratio=2.0, points=70, verdict='right size, wrong detail')
    """
    if predicted == actual:
        return Score(1.0, 100, _VERDICTS[0][1])
    if not predicted or not actual:
        return Score(math.inf, 0, _VERDICTS[-1][1])
    if (predicted < 0) != (actual < 0):
        return Score(math.inf, 0, "wrong sign")
    ratio = max(predicted / actual, actual / predicted)
    # The tolerance keeps 110 against 100 in its class: 110 / 100 is not exactly 1.1 in binary.
    verdict = next(words for limit, words in _VERDICTS if ratio <= limit * (1 + 1e-9))
    return Score(ratio, round(100 * (1 - math.log10(min(ratio, 10.0)))), verdict)


def format_number(value: float) -> str:
    """Print a number as a reader would write it: four digits, thousands separated.

    Examples
    --------
    >>> format_number(27648.0), format_number(0.123456), format_number(3)
    ('27,648', '0.1235', '3')
    """
    if abs(value) >= 1000:
        return f"{value:,.0f}" if abs(value) < 1e15 else f"{value:.4g}"
    return f"{value:.4g}"

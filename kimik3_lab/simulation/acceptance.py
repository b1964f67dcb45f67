"""How many drafts of a request are right, drawn so that a simulated run repeats.

Needs the standard library only. Lesson 11 turns the acceptance length; lesson 12 shows why text of
another kind has another one.

A step of a request brings one token and those of its drafts that are right up to the first wrong
one. Their number is drawn from a *survival* curve: the chance that at least 1, 2, ... K drafts are
right. Where only the mean is known, each draft is taken to be right with the same chance p if those
before it were, so the curve is p, p^2, ..., p^K, and p is solved from the mean. Requests may differ
in p: code is easier to draft than prose.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise, repeat
from math import exp
from operator import mul
from random import Random
from statistics import NormalDist, fmean

__all__ = ["AcceptanceModel", "chance_of_mean", "survival_curve"]

#: Kinds of requests that stand for a spread among them.
_KINDS = 33


def survival_curve(chance: float, num_drafts: int) -> tuple[float, ...]:
    """Chances that at least 1, 2, ... ``num_drafts`` drafts are right, each with ``chance``.

    >>> survival_curve(0.5, 3)
    (0.5, 0.25, 0.125)
    """
    return tuple(accumulate(repeat(chance, num_drafts), mul))


def chance_of_mean(acceptance_length: float, num_drafts: int) -> float:
    """Chance for one draft at which a step brings ``acceptance_length`` tokens on average.

    Parameters
    ----------
    acceptance_length
        Tokens of a step, the one that needs no draft included: 1 to ``1 + num_drafts``.
    num_drafts
        K.

    Raises
    ------
    ValueError
        If that many drafts cannot bring that many tokens.

    Examples
    --------
    >>> round(chance_of_mean(3.0, 2), 6), round(chance_of_mean(1.75, 2), 6)
    (1.0, 0.5)
    """
    if not 1.0 <= acceptance_length <= 1 + num_drafts:
        raise ValueError(
            f"a step with {num_drafts} drafts brings 1 to {1 + num_drafts} tokens on average, got "
            f"acceptance_length={acceptance_length}"
        )
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if 1.0 + sum(survival_curve(middle, num_drafts)) < acceptance_length:
            low = middle
        else:
            high = middle
    return (low + high) / 2


class AcceptanceModel:
    """Draws how many drafts in a row are right.

    Parameters
    ----------
    survivals
        Curves, one for each kind of request; all kinds are equally frequent. Each curve holds the
        chances that at least 1, 2, ... drafts are right: falling, within [0, 1]. Their length is
        the most drafts that a step can verify.
    seed
        With the id of a request, decides all its draws: they do not depend on the other requests.

    Raises
    ------
    ValueError
        If a curve rises or leaves [0, 1], or they differ in length.

    Examples
    --------
    >>> draw = AcceptanceModel.of_mean(3.5, 8).stream("a")
    >>> lengths = [1 + draw(8) for _ in range(20_000)]
    >>> round(sum(lengths) / len(lengths), 1), max(lengths)
    (3.5, 9)
    """

    def __init__(self, *survivals: Sequence[float], seed: int = 0) -> None:
        for survival in survivals:
            curve = [1.0, *survival, 0.0]
            if any(later > earlier for earlier, later in pairwise(curve)):
                raise ValueError(
                    "survival must fall and lie in [0, 1]: with j drafts right there were j - 1 "
                    f"right, got {list(survival)}"
                )
        if len({len(survival) for survival in survivals}) != 1:
            raise ValueError(
                f"all kinds of requests need curves of one length, got {list(map(len, survivals))}"
            )
        self.seed = seed
        self.num_drafts = len(survivals[0])
        self.acceptance_lengths = tuple(1.0 + sum(survival) for survival in survivals)
        self._thresholds = [[1.0 - chance for chance in survival] for survival in survivals]

    @classmethod
    def of_mean(
        cls,
        acceptance_length: float,
        num_drafts: int,
        *,
        at: int | None = None,
        spread: float = 0.0,
        seed: int = 0,
    ) -> AcceptanceModel:
        """Make a model from the mean tokens of a step.

        Parameters
        ----------
        acceptance_length
            Mean over all steps of all requests, which have outputs of one length.
        num_drafts
            K.
        at
            The number of drafts for which that mean was found, if it is another than K: the chance
            of a draft is taken to be the same.
        spread
            How much requests differ. The steps that a request takes for a token are lognormal with
            this standard deviation of the logarithm; code is easier to draft than prose. 0: all are
            alike.

        Examples
        --------
        >>> AcceptanceModel.of_mean(1.75, 1, at=2).acceptance_length
        1.5
        """
        if not 0.0 <= spread < 1.0:
            raise ValueError(f"spread must lie in [0, 1), got {spread}")
        most = num_drafts if at is None else at
        chances = [chance_of_mean(acceptance_length, most)]
        if spread:
            # What would leave the range is brought to its ends, hardly ever.
            lengths = (acceptance_length / factor for factor in _lognormal(spread))
            chances = [chance_of_mean(min(max(n, 1.0), 1.0 + most), most) for n in lengths]
        curves = (survival_curve(round(chance, 12), num_drafts) for chance in chances)
        return cls(*curves, seed=seed)

    @property
    def acceptance_length(self) -> float:
        """Tokens of a step on average over requests of one length, when all drafts are verified."""
        return 1.0 / fmean(1.0 / length for length in self.acceptance_lengths)

    def stream(self, request_id: str) -> Callable[[int], int]:
        """Make the draws of one request: from the drafts of a step, how many of them are right."""
        random = Random(f"{self.seed}/{request_id}").random
        kinds = self._thresholds
        thresholds = kinds[int(random() * len(kinds))] if len(kinds) > 1 else kinds[0]

        def accepted(num_drafts: int) -> int:
            right = bisect_right(thresholds, random())
            return right if right < num_drafts else num_drafts

        return accepted


def _lognormal(sigma: float) -> list[float]:
    """Factors with mean 1, each as likely as the others."""
    normal = NormalDist(sigma=sigma)
    factors = [exp(normal.inv_cdf((i + 0.5) / _KINDS)) for i in range(_KINDS)]
    mean = fmean(factors)
    return [factor / mean for factor in factors]

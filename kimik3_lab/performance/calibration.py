"""Setting what only the published points can set.

Needs numpy. Lesson 11 refits with a concurrency left out. Most constants come from tables of single
kernels (:mod:`kimik3_lab.performance.constants`). Seven numbers are left, and the six published
points with their 18 figures are asked for those, starting from what else is known about them: least
squares of relative errors, to which every number adds its distance from its own prior.

The simulator is passed in, because it is built on this package.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kimik3_lab.performance.published import BASELINE, IMPROVED, PublishedPoint, load_points
from kimik3_lab.performance.scenarios import Scenario

__all__ = ["FITTED", "Fit", "Fitted", "Predict", "calibrate"]

#: Latency in seconds and time to first token in milliseconds for each point, in order.
Predict = Callable[
    [Mapping[str, float], Scenario, Sequence[PublishedPoint]], Sequence[tuple[float, float]]
]


@dataclass(frozen=True, slots=True)
class Fitted:
    """One number of the fit, and what is known of it without the six points.

    Attributes
    ----------
    prior, spread
        Expected value, and the factor by which it may well be off; 1.1 is ten per cent.
    versions
        Whose points depend on it.
    why
        Where the prior comes from.
    """

    name: str
    prior: float
    spread: float
    versions: tuple[str, ...]
    why: str


#: The numbers that the six points set. The first two are fields of a scenario.
FITTED: tuple[Fitted, ...] = (
    Fitted(
        "acceptance_length",
        3.4,
        1.13,
        (BASELINE, IMPROVED),
        "3.88 on code with K = 8; 3.3 over 1,604 mixed prompts with K = 5",
    ),
    Fitted(
        "routing_skew",
        0.55,
        1.5,
        (BASELINE, IMPROVED),
        "0.55 fits NVIDIA's table of that load; flashinfer times 0 and 1.02",
    ),
    Fitted(
        "markov_draft",
        0.15e-3,
        2.0,
        (BASELINE, IMPROVED),
        "20 us of kernels, or eight times as much if every draft sorts the vocabulary for top-p",
    ),
    Fitted(
        "bulk_all_reduce",
        300e9,
        1.4,
        (IMPROVED,),
        "190 GB/s in the table of vLLM's own kernel; twice that where the switch adds up",
    ),
    Fitted(
        "mixed_batch_token",
        20e-6,
        2.0,
        (IMPROVED,),
        "of the order of what zero-copy batches saved",
    ),
    Fitted(
        "eager_layer_0_27_1",
        2.5e-3,
        1.5,
        (BASELINE,),
        "a few times SGLang's 0.74 ms for a KDA module alone",
    ),
    Fitted(
        "decode_step_residual",
        10e-3,
        2.0,
        (BASELINE,),
        "one launch of some 100 us in each layer that is not in a graph",
    ),
)
#: Relative error that counts as one: of a latency, and of a time to first token.
LATENCY_UNIT, TTFT_UNIT = 0.02, 0.08
#: No error counts for more than so many units. No single statistic of TTFT fits all six points, and
#: the one that is far off must not bend everything else.
MOST = 2.5


@dataclass(frozen=True, slots=True)
class Fit:
    """Result of :func:`calibrate`.

    Attributes
    ----------
    constants, scenario
        To build a cost model with.
    values
        The fitted numbers by name.
    loss
        Sum of squares at the end.
    """

    constants: Mapping[str, float]
    scenario: Scenario
    values: Mapping[str, float]
    loss: float


def calibrate(
    predict: Predict,
    points: Sequence[PublishedPoint] | None = None,
    *,
    scenario: Scenario | None = None,
    start: Mapping[str, float] | None = None,
    strides: Sequence[float] = (1.0, 0.5, 0.5, 0.25, 0.25),
) -> Fit:
    """Fit the numbers of :data:`FITTED` to published points.

    Parameters
    ----------
    predict
        Simulates points under given constants and scenario.
    points
        What to fit; the six published ones if left out.
    scenario
        All that is not fitted.
    start
        Where to begin; the priors if left out.
    strides
        One round each: every number in turn is moved up, else down, by so much of its spread, and
        stays where that made things better. Simulated runs are whole requests, so the errors jump
        a little, and their slopes are of no use.

    Raises
    ------
    ValueError
        If there are no points.
    """
    points = load_points() if points is None else tuple(points)
    if not points:
        raise ValueError("calibrate needs at least one published point")
    scenario = scenario or Scenario.default()
    asked = [f for f in FITTED if any(p.version in f.versions for p in points)]
    first = {f.name: f.prior for f in FITTED} | dict(start or {})
    at = np.log([first[f.name] for f in asked])
    fixed = {name: value for name, value in first.items() if name not in {f.name for f in asked}}

    def unpack(logs: Any) -> tuple[dict[str, float], Scenario]:
        values = fixed | {f.name: math.exp(x) for f, x in zip(asked, logs, strict=True)}
        length, skew = values.pop("acceptance_length"), values.pop("routing_skew")
        return values, replace(scenario, acceptance_length=length, routing_skew=skew)

    def errors(logs: Any, which: Sequence[int]) -> Any:
        constants, chosen = unpack(logs)
        found = predict(constants, chosen, [points[i] for i in which])
        rows = []
        for i, (latency, ttft) in zip(which, found, strict=True):
            rows.append(math.log(latency / points[i].latency_s) / LATENCY_UNIT)
            rows.append(math.log(ttft / points[i].ttft_ms) / TTFT_UNIT)
        return _bounded(np.array(rows))

    def prior(logs: Any) -> Any:
        return np.array(
            [(x - math.log(f.prior)) / math.log(f.spread) for f, x in zip(asked, logs, strict=True)]
        )

    every = list(range(len(points)))
    data = errors(at, every)
    loss = float(data @ data + prior(at) @ prior(at))
    for stride in strides:
        for column, f in enumerate(asked):
            which = [i for i in every if points[i].version in f.versions]
            rows = [2 * i + j for i in which for j in (0, 1)]
            for direction in (1.0, -1.0):
                tried, now = at.copy(), data.copy()
                tried[column] += direction * stride * math.log(f.spread)
                now[rows] = errors(tried, which)
                new = float(now @ now + prior(tried) @ prior(tried))
                if new < loss:
                    at, data, loss = tried, now, new
                    break
    constants, chosen = unpack(at)
    values = {f.name: math.exp(x) for f, x in zip(asked, at, strict=True)}
    return Fit(constants, chosen, values, loss)


def _bounded(units: Any) -> Any:
    """Leave small errors as they are, and let large ones approach :data:`MOST`."""
    return units / np.sqrt(1.0 + (units / MOST) ** 2)

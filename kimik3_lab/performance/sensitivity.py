"""How far a price could be off, from what each constant and each choice leaves open.

Needs numpy. Lesson 11 draws which unknown matters where; predictions take their intervals from it.

Each constant is moved to either end of its range while the others stay, and so is each choice of
the scenario. The moves are independent as far as anybody knows, so their squares are added up. Such
an interval is a judgement, not a confidence interval.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kimik3_lab.config import K3Config
from kimik3_lab.performance.constants import CONSTANTS
from kimik3_lab.performance.hardware import Accelerator
from kimik3_lab.performance.parallelism import Parallelism
from kimik3_lab.performance.scenarios import Scenario
from kimik3_lab.performance.step_cost import CostModel
from kimik3_lab.performance.step_work import StepWork

__all__ = ["Spread", "spread"]


@dataclass(frozen=True, slots=True)
class Spread:
    """Interval of a sum of steps.

    Attributes
    ----------
    low_s, value_s, high_s
        Seconds.
    swings
        For each constant and choice the least and most seconds that it alone leads to, the widest
        first; those that change nothing are left out.
    """

    low_s: float
    value_s: float
    high_s: float
    swings: Mapping[str, tuple[float, float]]

    @property
    def low_ratio(self) -> float:
        """Lower end over the value."""
        return self.low_s / self.value_s

    @property
    def high_ratio(self) -> float:
        """Upper end over the value."""
        return self.high_s / self.value_s


def spread(
    steps: Sequence[tuple[float, StepWork]],
    hardware: Accelerator | str,
    parallel: Parallelism,
    *,
    execution: frozenset[str],
    scenario: Scenario,
    corners: Sequence[Scenario] = (),
    constants: Mapping[str, float] | None = None,
    config: K3Config | None = None,
) -> Spread:
    """Find the interval of a weighted sum of steps.

    Parameters
    ----------
    steps
        How often each step is taken, and the step.
    corners
        Scenarios that are taken one at a time, each instead of ``scenario``.

    Examples
    --------
    >>> from kimik3_lab.performance.step_work import decode_work
    >>> found = spread(
    ...     [(1.0, decode_work(1, context=8500))],
    ...     "B300",
    ...     Parallelism(8),
    ...     execution=frozenset(),
    ...     scenario=Scenario.default(),
    ... )
    >>> found.low_s < found.value_s < found.high_s
    True
    """
    config = config or K3Config.released()
    base = dict(constants or {})

    def seconds(chosen: Scenario, values: Mapping[str, float]) -> float:
        model = CostModel(
            config, hardware, parallel, execution=execution, scenario=chosen, constants=values
        )
        return sum(times * model.step_cost(work).total_s for times, work in steps)

    value = seconds(scenario, base)
    swings: dict[str, tuple[float, float]] = {}
    for name, constant in CONSTANTS.items():
        ends = [seconds(scenario, {**base, name: end}) for end in (constant.low, constant.high)]
        swings[name] = (min(value, *ends), max(value, *ends))
    for corner in corners:
        other = seconds(corner, base)
        swings[f"scenario: {corner.name}"] = (min(value, other), max(value, other))
    down = math.sqrt(sum((value - low) ** 2 for low, _ in swings.values()))
    up = math.sqrt(sum((high - value) ** 2 for _, high in swings.values()))
    moved = {name: ends for name, ends in swings.items() if ends[1] - ends[0] > 1e-9 * value}
    ordered = dict(sorted(moved.items(), key=lambda item: item[1][0] - item[1][1]))
    return Spread(max(0.0, value - down), value, value + up, ordered)

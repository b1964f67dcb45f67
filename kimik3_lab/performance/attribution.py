"""Where a step's time goes, and what each way to compute it faster is worth.

Needs numpy. Lesson 11 and ``k3lab simulate --explain`` print it. What a switch saves depends on
which others are thrown, so both ends are given: thrown first, on the old version, and thrown last,
on top of all others. What a whole run gains is the subject of the simulator.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kimik3_lab.config import K3Config
from kimik3_lab.performance.hardware import Accelerator
from kimik3_lab.performance.parallelism import Parallelism
from kimik3_lab.performance.scenarios import Scenario
from kimik3_lab.performance.step_cost import EXECUTION_SWITCHES, PARTS, CostModel, StepCost
from kimik3_lab.performance.step_work import StepWork

__all__ = ["PartShare", "SwitchWorth", "explain", "switch_worth"]


@dataclass(frozen=True, slots=True)
class PartShare:
    """One part of a step: its key and wording in :data:`PARTS`, seconds, and share of the step."""

    part: str
    label: str
    seconds: float
    share: float


@dataclass(frozen=True, slots=True)
class SwitchWorth:
    """Seconds that a switch takes off a step if it is thrown first, and if it is thrown last."""

    switch: str
    first_s: float
    last_s: float


def explain(cost: StepCost | Mapping[str, float]) -> list[PartShare]:
    """Sort the parts of a step, or of many steps added up, the longest first.

    Raises
    ------
    KeyError
        If a part has no entry in :data:`PARTS`.

    Examples
    --------
    >>> [(row.label, row.share) for row in explain({"host": 1.0, "router": 3.0, "mla": 0.0})]
    [('router', 0.75), ('host between steps', 0.25)]
    """
    parts = cost.parts if isinstance(cost, StepCost) else cost
    total = sum(parts.values())
    rows = [
        PartShare(name, PARTS[name], seconds, seconds / total)
        for name, seconds in parts.items()
        if seconds > 0
    ]
    return sorted(rows, key=lambda row: -row.seconds)


def switch_worth(
    work: StepWork,
    hardware: Accelerator | str,
    parallel: Parallelism,
    *,
    scenario: Scenario | None = None,
    constants: Mapping[str, float] | None = None,
) -> list[SwitchWorth]:
    """Price a step with each switch thrown first and last.

    Examples
    --------
    >>> from kimik3_lab.performance.step_work import prefill_work
    >>> rows = {row.switch: row for row in switch_worth(prefill_work(8000), "B300", Parallelism(8))}
    >>> rows["kda_prefill_in_place"].last_s > 100 * rows["skinny_gemm"].last_s > 0
    True
    """

    def seconds(execution: frozenset[str]) -> float:
        model = CostModel(
            K3Config.released(),
            hardware,
            parallel,
            execution=execution,
            scenario=scenario,
            constants=constants,
        )
        return model.step_cost(work).total_s

    none, every = seconds(frozenset()), seconds(EXECUTION_SWITCHES)
    return [
        SwitchWorth(
            switch,
            none - seconds(frozenset({switch})),
            seconds(EXECUTION_SWITCHES - {switch}) - every,
        )
        for switch in sorted(EXECUTION_SWITCHES)
    ]

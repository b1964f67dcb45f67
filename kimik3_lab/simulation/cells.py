"""Many runs: each on its own, over several processes if that pays, with intervals over scenarios.

Needs the standard library and the scheduler. Lessons 11 and 12 and ``k3lab simulate`` use it.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, fields, replace
from typing import Any

from kimik3_lab.performance.scenarios import Scenario
from kimik3_lab.performance.step_work import StepWork, decode_work, prefill_work
from kimik3_lab.simulation.closed_loop import simulate_closed_loop
from kimik3_lab.simulation.results import SimulationResult
from kimik3_lab.simulation.spec import SimulationSpec

__all__ = ["Cell", "at_corners", "interval", "simulate_cells"]

#: Runs below which a second process does not pay for its start.
_FEW = 4


@dataclass(frozen=True)
class Cell:
    """One closed loop to be run; ``options`` are those of :func:`simulate_closed_loop`."""

    spec: SimulationSpec
    concurrency: int
    options: Mapping[str, Any] = field(default_factory=dict)

    def run(self) -> SimulationResult:
        """Run it."""
        return simulate_closed_loop(self.spec, self.concurrency, **self.options)


def _run(cell: Cell) -> SimulationResult:
    return cell.run()


def simulate_cells(
    cells: Iterable[Cell],
    *,
    processes: int = 1,
    on_end: Callable[[SimulationResult], object] = lambda result: None,
) -> list[SimulationResult]:
    """Run cells and return their results in order.

    Cells whose scenarios differ only in what their runs do not notice are run once.

    Parameters
    ----------
    processes
        How many run at a time. The results do not depend on it. With more than one, a script must
        guard its own code with ``if __name__ == "__main__"``: other processes import it.
    on_end
        Called with each result, in order, as it comes.
    """
    cells = list(cells)
    keys = [_key(cell) for cell in cells]
    distinct = dict(zip(keys, cells, strict=True))
    results: dict[Hashable, SimulationResult] = {}
    if processes <= 1 or len(distinct) <= _FEW:
        for key, cell in distinct.items():
            results[key] = cell.run()
            on_end(results[key])
    else:
        # Started afresh: a fork would copy the threads of a progress bar half-way.
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(min(processes, len(distinct)), mp_context=context) as pool:
            for key, result in zip(distinct, pool.map(_run, distinct.values()), strict=True):
                results[key] = result
                on_end(result)
    return [results[key] for key in keys]


def at_corners(cell: Cell) -> list[Cell]:
    """Make the same cell for every scenario that an interval spans, the cell's own first.

    Choices that the cell's scenario makes differently from the default stay as they are.
    """
    default, own = Scenario.default(), cell.spec.scenario
    kept = {
        item.name: getattr(own, item.name)
        for item in fields(Scenario)
        if item.name != "name" and getattr(own, item.name) != getattr(default, item.name)
    }
    scenarios = [own, *(replace(corner, **kept) for corner in Scenario.corners())]
    return [replace(cell, spec=replace(cell.spec, scenario=scenario)) for scenario in scenarios]


def _key(cell: Cell) -> Hashable:
    """All that a run notices: what steps cost, what is decided, what is drawn."""
    spec, scenario = cell.spec, cell.spec.scenario
    k, costs = spec.num_speculative_tokens, spec.make_costs()
    works = [
        prefill_work(1024, num_speculative_tokens=k),
        prefill_work(8000, num_speculative_tokens=k),
        decode_work(1, context=8000, num_speculative_tokens=k),
        decode_work(16, context=8000, num_speculative_tokens=k),
        _mixed(k),
    ]
    return (
        spec.preset.name,
        spec.scheduler_config,
        spec.cache_config,
        tuple(costs.step_cost(work).total_s for work in works),
        (scenario.acceptance_length, scenario.acceptance_num_drafts, scenario.acceptance_spread),
        scenario.turnaround_s,
        scenario.cold_start_s if cell.options.get("cold") else 0.0,
        cell.concurrency,
        tuple(sorted(cell.options.items())),
    )


def _mixed(k: int) -> StepWork:
    prompt = prefill_work(1000, num_speculative_tokens=k)
    decode = decode_work(4, context=8000, num_speculative_tokens=k)
    names = [item.name for item in fields(StepWork) if item.name != "num_speculative_tokens"]
    sums = {name: getattr(prompt, name) + getattr(decode, name) for name in names}
    return StepWork(**sums, num_speculative_tokens=k)


def interval(rows: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, float] | None]:
    """Smallest and largest value of each figure over the rows of all scenarios.

    Examples
    --------
    >>> interval([{"latency_s": 5.0, "ttft_ms": None}, {"latency_s": 4.5, "ttft_ms": 300.0}])
    {'latency_s': (4.5, 5.0), 'ttft_ms': (300.0, 300.0)}
    """
    spans: dict[str, tuple[float, float] | None] = {}
    for name in rows[0]:
        values = [row[name] for row in rows if row[name] is not None]
        spans[name] = (min(values), max(values)) if values else None
    return spans

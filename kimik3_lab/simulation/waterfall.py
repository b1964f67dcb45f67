"""What each change between two versions is worth, in both orders, with intervals.

Needs numpy, the scheduler and the cost model. Lesson 11 draws it. Run it with
``python -m kimik3_lab.simulation.waterfall``; ``--output`` writes it with its provenance, which is
how ``data/results/simulated/waterfall.json`` was made.

Changes interact: a larger budget is worth more where steps are short. So the gains of one order,
each change on top of those before it, are no property of the changes alone. The ladder's order and
its reverse bracket them: a change comes early in one and late in the other. An interval spans the
scenarios that public figures cannot tell apart.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from kimik3_lab.json_file import write_json
from kimik3_lab.performance.scenarios import Scenario
from kimik3_lab.provenance import provenance
from kimik3_lab.serving.presets import LADDER, MAIN_2026_09_13, Preset
from kimik3_lab.simulation.cells import Cell, simulate_cells
from kimik3_lab.simulation.results import SimulationResult
from kimik3_lab.simulation.spec import SimulationSpec

__all__ = ["Order", "RungGain", "compose", "waterfall"]

Order = Literal["ladder", "reversed"]


@dataclass(frozen=True, slots=True)
class RungGain:
    """One change at one concurrency, on top of those before it.

    Attributes
    ----------
    order
        Whether changes come as on the ladder or in reverse.
    position
        Its place in that order, from 1.
    latency_s, ttft_ms
        With it, under the default scenario: mean latency, and TTFT by the scenario's statistic.
    saved_s, saved_ttft_ms
        What it takes off both.
    saved_s_range, saved_ttft_ms_range
        Smallest and largest saving over all scenarios.
    share, share_range
        ``saved_s`` as a share of what all changes together save.
    """

    order: Order
    concurrency: int
    position: int
    name: str
    prs: tuple[int, ...]
    latency_s: float
    ttft_ms: float
    saved_s: float
    saved_s_range: tuple[float, float]
    saved_ttft_ms: float
    saved_ttft_ms_range: tuple[float, float]
    share: float
    share_range: tuple[float, float]


def compose(rungs: Sequence[int], ladder: Sequence[Preset] = LADDER) -> Preset:
    """Make a preset out of the lowest rung and some changes of other rungs.

    Parameters
    ----------
    rungs
        Numbers of rungs; what each changes from the one below it is applied, in this order.

    Examples
    --------
    >>> compose(range(1, 4)).execution == LADDER[3].execution
    True
    >>> compose([2]).scheduler["max_num_batched_tokens"]  # the budget without the larger batch
    8192
    """
    preset = ladder[0]
    for number in rungs:
        rung, below = ladder[number], ladder[number - 1]
        preset = replace(
            preset,
            name=rung.name if len(list(rungs)) == 1 else f"{preset.name} + {rung.name}",
            change=rung.change,
            prs=rung.prs,
            scheduler={**preset.scheduler, **_changed(rung.scheduler, below.scheduler)},
            cache={**preset.cache, **_changed(rung.cache, below.cache)},
            execution=preset.execution | (rung.execution - below.execution),
        )
    return preset


def _changed(after: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    return {name: v for name, v in after.items() if name not in before or before[name] != v}


def waterfall(
    concurrencies: Sequence[int] = (1, 4, 16),
    *,
    scenarios: Sequence[Scenario] | None = None,
    seeds: Sequence[int] = (0,),
    last: Preset = MAIN_2026_09_13,
    options: Mapping[str, Any] | None = None,
    processes: int = 1,
) -> list[RungGain]:
    """Simulate all changes up to a rung, one after the other, in both orders.

    Parameters
    ----------
    concurrencies
        Closed loops to run.
    scenarios
        The first gives the figures, all together the ranges; left out, the default and its corners.
        About 14 runs for each scenario, concurrency and seed.
    seeds
        Runs to average over.
    last
        Rung to stop at.
    options
        Of :func:`kimik3_lab.simulation.simulate_closed_loop`, for example lengths.
    processes
        Runs at a time, see :func:`kimik3_lab.simulation.cells.simulate_cells`.
    """
    scenarios = Scenario.corners() if scenarios is None else tuple(scenarios)
    top = LADDER.index(last)
    forward = list(range(1, top + 1))
    orders: dict[Order, list[int]] = {"ladder": forward, "reversed": forward[::-1]}
    wanted = {
        frozenset(order[:length]): order[:length]
        for order in orders.values()
        for length in range(top + 1)
    }
    keys = [
        (changes, number, scenario, seed)
        for changes in wanted
        for number in concurrencies
        for scenario in scenarios
        for seed in seeds
    ]
    cells = [
        Cell(
            SimulationSpec(compose(wanted[changes]), scenario=scenario),
            number,
            {"keep_records": False, **(options or {}), "seed": seed},
        )
        for changes, number, scenario, seed in keys
    ]
    results = dict(zip(keys, simulate_cells(cells, processes=processes), strict=True))

    def figures(changes: Sequence[int], number: int, scenario: Scenario) -> tuple[float, float]:
        runs = [results[frozenset(changes), number, scenario, seed] for seed in seeds]
        return _figures(runs, scenario.ttft_statistic)

    gains = []
    for order, changes in orders.items():
        for number in concurrencies:
            ladders = [
                [figures(changes[:length], number, scenario) for length in range(top + 1)]
                for scenario in scenarios
            ]
            for position, rung in enumerate(changes, start=1):
                gains.append(_gain(order, number, position, LADDER[rung], ladders))
    return gains


def _figures(runs: Sequence[SimulationResult], statistic: str) -> tuple[float, float]:
    """Mean latency and TTFT over seeds; a run in which nothing ended counts with its length."""
    latency = fmean(run.latency("e2e_s") or run.duration_s for run in runs)
    ttft = fmean(run.latency("ttft_ms", statistic) or 1e3 * run.duration_s for run in runs)
    return latency, ttft


def _gain(
    order: Order,
    concurrency: int,
    position: int,
    rung: Preset,
    ladders: Sequence[Sequence[tuple[float, float]]],
) -> RungGain:
    """Compare a rung with the one before it, in every scenario."""
    saved, ttft, shares = [], [], []
    for steps in ladders:
        before, after = steps[position - 1], steps[position]
        saved.append(before[0] - after[0])
        ttft.append(before[1] - after[1])
        shares.append(saved[-1] / (steps[0][0] - steps[-1][0]))
    return RungGain(
        order=order,
        concurrency=concurrency,
        position=position,
        name=rung.name,
        prs=rung.prs,
        latency_s=ladders[0][position][0],
        ttft_ms=ladders[0][position][1],
        saved_s=saved[0],
        saved_s_range=(min(saved), max(saved)),
        saved_ttft_ms=ttft[0],
        saved_ttft_ms_range=(min(ttft), max(ttft)),
        share=shares[0],
        share_range=(min(shares), max(shares)),
    )


def main() -> None:
    """Print what each change between the two published versions is worth."""
    import argparse

    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--concurrency", default="1,4,16")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--output", type=Path, help="write it as JSON")
    arguments = parser.parse_args()
    concurrencies = [int(part) for part in arguments.concurrency.split(",")]
    gains = waterfall(concurrencies, seeds=range(arguments.seeds), processes=os.cpu_count() or 1)
    for gain in gains:
        if gain.position == 1:
            print(f"\nconcurrency {gain.concurrency}, order: {gain.order}")
        low, high = gain.share_range
        print(
            f"  {gain.name:20} saves {gain.saved_s:6.2f} s "
            f"({gain.saved_s_range[0]:.2f} to {gain.saved_s_range[1]:.2f}), "
            f"{gain.share:4.0%} ({low:.0%} to {high:.0%}) -> {gain.latency_s:6.2f} s; "
            f"TTFT {gain.saved_ttft_ms:6.0f} ms -> {gain.ttft_ms:6.0f} ms"
        )
    if arguments.output is not None:
        body = {
            "provenance": provenance(device="simulated"),
            "scenarios": [asdict(scenario) for scenario in Scenario.corners()],
            "seeds": arguments.seeds,
            "gains": [asdict(gain) for gain in gains],
        }
        write_json(arguments.output, body)


if __name__ == "__main__":
    main()

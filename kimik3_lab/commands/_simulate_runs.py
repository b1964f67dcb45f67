"""The runs of ``k3lab simulate``: closed loops with intervals, or requests of a trace."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

from tqdm.auto import tqdm

from kimik3_lab.benchmark.traces import TraceRequest
from kimik3_lab.commands._simulate_tables import explanation
from kimik3_lab.simulation import SimulationSpec, cells, simulate_arrivals
from kimik3_lab.simulation.estimate import estimate_row
from kimik3_lab.simulation.fleet import simulate_fleet
from kimik3_lab.simulation.router import RouterName
from kimik3_lab.simulation.switches import preset_id
from kimik3_lab.simulation.trace_requests import to_simulation_requests

__all__ = ["closed_loops", "open_loops"]


def closed_loops(
    specs: list[SimulationSpec],
    concurrencies: list[int],
    options: dict[str, Any],
    *,
    cold: int,
    interval: str,
    quiet: bool,
) -> list[dict[str, Any]]:
    """Run each specification at each concurrency, and under each scenario of an interval.

    Parameters
    ----------
    options
        Of ``simulate_closed_loop``.
    cold
        The concurrency whose cell finds a server that has just been started.
    interval
        ``"estimated"`` from the steps of the run, ``"simulated"`` or ``"none"``.
    """
    own = [
        cells.Cell(spec, number, {**options, "cold": number == cold, "keep_records": False})
        for spec in specs
        for number in concurrencies
    ]
    groups = [cells.at_corners(cell) if interval == "simulated" else [cell] for cell in own]
    every = [cell for group in groups for cell in group]
    with tqdm(unit=" runs", leave=False, disable=True if quiet else None) as bar:
        found_all = cells.simulate_cells(
            every, processes=os.cpu_count() or 1, on_end=lambda result: bar.update()
        )
    results = iter(found_all)
    rows = []
    for cell, group in zip(own, groups, strict=True):
        statistic = cell.spec.scenario.ttft_statistic
        found = [next(results) for _ in group]
        # A scenario may say that the table shows another statistic.
        figures = [
            result.row(member.spec.scenario.ttft_statistic)
            for member, result in zip(group, found, strict=True)
        ]
        if interval == "estimated":
            figures += [
                estimate_row(found[0], cell.spec, corner.spec.scenario, cold=cell.options["cold"])
                for corner in cells.at_corners(cell)
            ]
        rows.append(
            {
                "preset": preset_id(cell.spec.preset),
                "concurrency": cell.concurrency,
                **figures[0],
                "interval": None if interval == "none" else cells.interval(figures),
                "interval_method": interval,
                "ttft_statistic": statistic,
                "explain": explanation([found[0].totals]),
            }
        )
    return rows


def open_loops(
    specs: list[SimulationSpec],
    load: Callable[[], Iterable[TraceRequest]],
    *,
    replicas: int,
    router: RouterName,
    duration: float | None,
    seed: int,
    quiet: bool,
) -> list[dict[str, Any]]:
    """Send the same requests to each specification, at their times.

    Parameters
    ----------
    load
        Makes the requests anew for each run.
    replicas, router
        Machines behind a router, see :func:`kimik3_lab.simulation.fleet.simulate_fleet`.
    """
    rows = []
    for spec in specs:
        requests = to_simulation_requests(load())
        options: dict[str, Any] = {"duration_s": duration, "seed": seed, "progress": not quiet}
        if replicas == 1:
            result: Any = simulate_arrivals(spec, requests, **options)
            parts = [result]
        else:
            result = simulate_fleet(spec, requests, replicas=replicas, router=router, **options)
            parts = result.replicas
        percentiles = {
            f"{name}_{statistic}": result.latency(name, statistic)
            for name in ("ttft_ms", "tpot_ms", "e2e_s")
            for statistic in ("mean", "median", "p90", "p99")
        }
        rows.append(
            {
                "preset": preset_id(spec.preset),
                "concurrency": None,
                **result.row(spec.scenario.ttft_statistic),
                **percentiles,
                "replicas": replicas,
                "attempted": result.attempted,
                "cancelled": result.cancelled,
                "refused": result.refused,
                "simulated_s": result.duration_s,
                "utilization": result.utilization,
                "cached_tokens": sum(part.totals.cached_tokens for part in parts),
                "preemptions": sum(part.totals.preemptions for part in parts),
                "interval": None,
                "ttft_statistic": spec.scenario.ttft_statistic,
                "explain": explanation(part.totals for part in parts),
            }
        )
    return rows

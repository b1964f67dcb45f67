"""Published and simulated figures as rows of a benchmark result, to stand beside measured ones.

Needs numpy, the scheduler and the cost model. Lesson 12 and ``k3lab compare`` use it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kimik3_lab.benchmark.foreign_rows import blank_row
from kimik3_lab.performance.published import (
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    WINDOW_S,
    PublishedPoint,
    load_points,
)
from kimik3_lab.simulation.closed_loop import simulate_closed_loop
from kimik3_lab.simulation.point_scores import PRESETS
from kimik3_lab.simulation.spec import SimulationSpec

__all__ = ["published_rows", "simulated_rows"]


def published_rows(
    concurrencies: Iterable[int] | None = None, *, ttft_statistic: str = "mean"
) -> list[dict[str, Any]]:
    """Return the published points as rows, each with ``version``.

    Parameters
    ----------
    concurrencies
        Which; all by default.
    ttft_statistic
        The post does not say which statistic its time to first token is: the column that gets it.

    Examples
    --------
    >>> [(row["version"], row["completed_in_window"]) for row in published_rows([16])]
    [('0.27.1', 31), ('main-2026-09-13', 87)]
    """
    wanted = None if concurrencies is None else set(concurrencies)
    return [
        {"version": point.version, **_published(point, ttft_statistic)}
        for point in load_points()
        if wanted is None or point.concurrency in wanted
    ]


def _published(point: PublishedPoint, ttft_statistic: str) -> dict[str, Any]:
    row = blank_row()
    row |= {
        "concurrency": point.concurrency,
        "completed_in_window": point.completed_requests,
        "window_s": WINDOW_S,
        "requests_per_s": point.completed_requests / WINDOW_S,
        "output_tokens_per_s": point.exact_throughput_tok_s,
        "e2e_s_mean": point.latency_s,
        f"ttft_ms_{ttft_statistic}": point.ttft_ms,
        "tpot_ms_mean": point.ms_per_token,
        "prompt_tokens": float(PROMPT_TOKENS),
        "output_tokens": float(OUTPUT_TOKENS),
    }
    return row


def simulated_rows(
    concurrencies: Iterable[int], *, versions: Iterable[str] = tuple(PRESETS), seed: int = 0
) -> list[dict[str, Any]]:
    """Simulate the published workload and return rows, each with ``version``.

    Parameters
    ----------
    concurrencies
        Load levels. The cell of concurrency 1 finds a server that has just been started, as in the
        post.
    versions
        Published versions to simulate: keys of :data:`~.point_scores.PRESETS`.
    seed
        Of the accepted lengths.

    Examples
    --------
    >>> row = simulated_rows([1], versions=["0.27.1"])[0]
    >>> row["version"], row["window_s"], row["output_tokens"]
    ('0.27.1', 120.0, 1000.0)
    """
    table = []
    for version in versions:
        if version not in PRESETS:
            raise ValueError(f"no published version {version!r}; there are: {', '.join(PRESETS)}")
        spec = SimulationSpec(PRESETS[version])
        for concurrency in concurrencies:
            result = simulate_closed_loop(
                spec, concurrency, seed=seed, keep_records=False, cold=concurrency == 1
            )
            row = blank_row()
            row |= {
                "concurrency": concurrency,
                "attempted": result.attempted,
                "completed": result.completed,
                "failed": 0,
                "completed_in_window": result.completed_in_window,
                "window_s": result.window.duration,
                "requests_per_s": result.completed_in_window / result.window.duration,
                "output_tokens_per_s": result.output_tokens_per_s,
                "prompt_tokens": float(PROMPT_TOKENS),
                "output_tokens": float(OUTPUT_TOKENS),
            }
            for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_s"):
                for statistic in ("mean", "median", "p90", "p99"):
                    row[f"{name}_{statistic}"] = result.latency(name, statistic)
            table.append({"version": version, **row})
    return table

"""Which calls a measured configuration serves, and how a tuner's winners join a stored table.

Needs PyTorch, through :mod:`k3_kernels`; no GPU. Every tuner stores with it.

A size that was measured serves the sizes around it, up to its bound; the next begins there. A run
over some of a table's sizes therefore replaces the constants of those intervals and no others. A
bucket keeps the size that it was ``measured_at`` and, where an earlier run measured it, that run's
``provenance``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from k3_kernels import tuned

__all__ = ["edges", "keep", "measured_sizes", "merged", "middles"]


def middles(sizes: Iterable[int]) -> dict[int, int | None]:
    """Let each size serve up to the geometric middle between it and the next, the last all beyond.

    Examples
    --------
    >>> middles([16, 1, 4])
    {1: 2, 4: 8, 16: None}
    """
    order = sorted(set(sizes))
    bounds = [math.isqrt(low * high) for low, high in itertools.pairwise(order)]
    return dict(zip(order, [*bounds, None], strict=True))


def edges(sizes: Iterable[int]) -> dict[int, int | None]:
    """Let each size serve what is larger than the one before, the last all beyond.

    Examples
    --------
    >>> edges([12, 768, 192])
    {12: 12, 192: 192, 768: None}
    """
    order = sorted(set(sizes))
    return {size: None if size == order[-1] else size for size in order}


def measured_sizes(device: str, operator: str, shape: str) -> set[int]:
    """Return the sizes that a stored table says its buckets were measured at."""
    entry = tuned.stored(device, operator, shape) or {"buckets": []}
    return {bucket["measured_at"] for bucket in entry["buckets"] if "measured_at" in bucket}


def merged(
    old: Mapping[str, Any] | None,
    winners: Mapping[int, Mapping[str, Any]],
    bounds: Mapping[int, int | None],
) -> list[dict[str, Any]]:
    """Return the buckets of a table after a run.

    Parameters
    ----------
    old
        The shape's entry so far, None if there is none.
    winners
        By measured size, a bucket's contents: ``config`` and what else is known, such as ``us``.
    bounds
        Every size that the tuner can measure, with the largest that it serves (None: all beyond).
        With a winner for each of them nothing of ``old`` stays.

    Raises
    ------
    ValueError
        If there is no winner, or one of a size that has no bound.

    Examples
    --------
    >>> bounds = middles([1, 4, 16])
    >>> old = {"buckets": merged(None, {n: {"config": n} for n in bounds}, bounds)}
    >>> new = merged(old, {4: {"config": "new"}}, bounds)
    >>> [(bucket["up_to"], bucket["config"]) for bucket in new]
    [(2, 1), (8, 'new'), (None, 16)]
    """
    unknown = sorted(set(winners) - set(bounds))
    if unknown or not winners:
        raise ValueError(f"winners of sizes among {sorted(bounds)} expected, got {sorted(winners)}")
    spans: list[tuple[float, float, dict[str, Any]]] = []
    if old and set(winners) != set(bounds):
        earlier = {k: v for k, v in old.get("provenance", {}).items() if k != "us"}
        low = 0.0
        for bucket in old["buckets"]:
            high = math.inf if bucket["up_to"] is None else bucket["up_to"]
            spans.append((low, high, {"provenance": earlier, **bucket}))
            low = high
    low = 0.0
    for size in sorted(bounds):
        bound = bounds[size]
        high = math.inf if bound is None else bound
        if size in winners:
            spans = [piece for span in spans for piece in _without(span, low, high)]
            spans.append((low, high, {"measured_at": size, **winners[size]}))
        low = high
    spans.sort(key=lambda span: span[1])
    return [{**rest, "up_to": None if math.isinf(high) else int(high)} for _, high, rest in spans]


def _without(
    span: tuple[float, float, dict[str, Any]], low: float, high: float
) -> list[tuple[float, float, dict[str, Any]]]:
    """Return what is left of a bucket outside of (low, high]."""
    first, last, bucket = span
    pieces = [(first, min(last, low), bucket), (max(first, high), last, bucket)]
    return [piece for piece in pieces if piece[0] < piece[1]]


def keep(
    device: str,
    operator: str,
    shape: str,
    winners: Mapping[int, Mapping[str, Any]],
    bounds: Mapping[int, int | None],
    made: Mapping[str, Any],
) -> Path:
    """Write a run's winners into the device's table, say what stays of earlier runs.

    Parameters
    ----------
    device, operator, shape
        See :func:`k3_kernels.tuned.store`.
    winners, bounds
        See :func:`merged`.
    made
        How it was measured: versions, date, command.
    """
    buckets = merged(tuned.stored(device, operator, shape), winners, bounds)
    path = tuned.store(device, operator, shape, buckets, made)
    earlier = sum("provenance" in bucket for bucket in buckets)
    stays = f", {earlier} of {len(buckets)} buckets stay from earlier runs" if earlier else ""
    print(f"{path.name}: {operator} {shape} measured at {', '.join(map(str, winners))}{stays}")
    last = buckets[-1]["up_to"]
    if last is not None:
        print(f"  beyond {last} nothing is stored, so calls run by rule; measure {max(bounds)} too")
    return path

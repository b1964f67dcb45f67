"""From request records to a summary: latencies, throughput, and how sure they are.

Needs numpy; scipy for the intervals. Used by lessons 00, 10 and 12.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from kimik3_lab.benchmark.intervals import (
    Interval,
    bootstrap_interval,
    poisson_interval,
    samples_needed,
)
from kimik3_lab.benchmark.records import RequestRecord
from kimik3_lab.benchmark.summary import LatencyStats, Summary, Throughput
from kimik3_lab.benchmark.window import Window

__all__ = ["summarise"]

_QUANTILES = {"median": 0.5, "p90": 0.9, "p99": 0.99}


def summarise(
    records: Sequence[RequestRecord], window: Window, *, confidence: float = 0.95, seed: int = 0
) -> Summary:
    """Summarise a cell.

    Parameters
    ----------
    records
        All requests of the cell, failed and cancelled ones included.
    window
        The part that counts.
    confidence
        Coverage of every interval, 0 to 1.
    seed
        For the bootstrap.

    Examples
    --------
    >>> from kimik3_lab.benchmark import RequestRecord, Window
    >>> records = [
    ...     RequestRecord(i, start=i, token_times=[i + 0.5, i + 1.0], end=i + 1.0,
    ...                   output_tokens=2, status="completed")
    ...     for i in range(10)
    ... ]
    >>> summary = summarise(records, Window.of_duration(10))
    >>> summary.in_window, summary.ttft_ms.median, summary.throughput.output_tokens_per_s
    (10, 500.0, 2.25)
    """
    completed = [r for r in records if r.status == "completed"]
    inside = [r for r in completed if window.touches(r)]
    stats = partial(_latency, confidence=confidence, seed=seed)
    sources = sorted({r.output_tokens_from for r in inside})
    cached = [r.cached_tokens for r in records if r.cached_tokens is not None]
    chunks = sum(len(r.token_times) for r in completed)
    per_chunk = (
        sum(r.output_tokens for r in completed if r.token_times) / chunks if chunks else None
    )
    return Summary(
        window=window,
        attempted=len(records),
        completed=len(completed),
        failed=sum(r.status == "failed" for r in records),
        cancelled=sum(r.status == "cancelled" for r in records),
        in_window=len(inside),
        ttft_ms=stats([r.ttft * 1e3 for r in inside if r.ttft is not None]),
        tpot_ms=stats([r.tpot * 1e3 for r in inside if r.tpot is not None]),
        itl_ms=_gap_latency(inside, confidence, seed),
        e2e_s=stats([r.e2e for r in inside]),
        throughput=_throughput(records, inside, window, per_chunk or 1.0, confidence),
        prompt_tokens=_mean([r.prompt_tokens for r in inside if r.prompt_tokens is not None]),
        output_tokens=_mean([r.output_tokens for r in inside]),
        output_tokens_from=" and ".join(sources) or None,
        cached_tokens=sum(cached) if cached else None,
        tokens_per_chunk=per_chunk,
        notes=_notes(completed, window, per_chunk, sources, cached),
    )


def _latency(values: list[float], *, confidence: float, seed: int) -> LatencyStats:
    if not values:
        return LatencyStats(0, notes=("no request in the window",))
    data = np.asarray(values)
    fields: dict[str, Any] = {
        "mean": float(data.mean()),
        "mean_ci": bootstrap_interval([data], np.mean, confidence, seed),
    }
    notes = []
    for name, quantile in _QUANTILES.items():
        if (needed := samples_needed(quantile, confidence)) > len(data):
            notes.append(f"{name} needs {needed} requests in the window, got {len(data)}")
            continue
        fields[name] = float(np.quantile(data, quantile))
        statistic = partial(np.quantile, q=quantile)
        fields[f"{name}_ci"] = bootstrap_interval([data], statistic, confidence, seed)
    return LatencyStats(len(data), **fields, notes=tuple(notes))


def _gap_latency(inside: list[RequestRecord], confidence: float, seed: int) -> LatencyStats:
    """Inter-token latency: gaps pooled over requests.

    Gaps of one request resemble each other, so the interval of the mean resamples requests, and a
    percentile needs its number of requests as well as of gaps.
    """
    gaps = [np.diff(r.token_times) * 1e3 for r in inside if len(r.token_times) > 1]
    if not gaps:
        return LatencyStats(0, notes=("no request in the window has two tokens",))
    sums, sizes = np.array([g.sum() for g in gaps]), np.array([float(g.size) for g in gaps])
    data = np.concatenate(gaps)
    # Below 6 requests even a median may be that of one odd request; tails come from many gaps.
    enough = len(gaps) >= samples_needed(0.5, confidence)
    fields: dict[str, Any] = {}
    notes = []
    for name, quantile in _QUANTILES.items():
        if enough and len(data) >= (needed := samples_needed(quantile, confidence)):
            fields[name] = float(np.quantile(data, quantile))
        elif enough:
            notes.append(f"{name} needs {needed} gaps in the window, got {len(data)}")
        else:
            needed = samples_needed(0.5, confidence)
            notes.append(f"{name} needs {needed} requests in the window, got {len(gaps)}")
    return LatencyStats(
        len(data),
        mean=float(data.mean()),
        mean_ci=bootstrap_interval([sums, sizes], _ratio_of_sums, confidence, seed),
        **fields,
        notes=tuple(notes),
    )


def _ratio_of_sums(sums: np.ndarray, sizes: np.ndarray, axis: int = -1) -> np.ndarray:
    ratio: np.ndarray = sums.sum(axis=axis) / sizes.sum(axis=axis)
    return ratio


def _throughput(
    records: Sequence[RequestRecord],
    inside: list[RequestRecord],
    window: Window,
    tokens_per_chunk: float,
    confidence: float,
) -> Throughput:
    ended = [r for r in inside if window.contains(r.end)]
    count, count_ci = len(ended), poisson_interval(len(ended), confidence)
    if not window.duration:
        return Throughput(count, count_ci)
    per_request = _mean([r.output_tokens for r in ended]) or 0.0
    observed = sum(
        sum(map(window.contains, r.token_times)) * _weight(r, tokens_per_chunk) for r in records
    )
    busy = sum(max(0.0, min(r.end, window.close) - max(r.start, window.open)) for r in records)
    concurrency = busy / window.duration
    latency = _mean([r.e2e for r in inside])
    return Throughput(
        completed=count,
        completed_ci=count_ci,
        requests_per_s=count / window.duration,
        requests_per_s_ci=Interval(*(end / window.duration for end in count_ci)),
        output_tokens_per_s=count * per_request / window.duration,
        # Without a completed request there is no length to turn the count into tokens.
        output_tokens_per_s_ci=(
            Interval(*(end * per_request / window.duration for end in count_ci)) if count else None
        ),
        observed_tokens_per_s=observed / window.duration,
        mean_concurrency=concurrency,
        completed_by_littles_law=concurrency * window.duration / latency if latency else None,
    )


def _weight(record: RequestRecord, usual: float) -> float:
    """Tokens a chunk: known for a completed request, otherwise as usual in this cell."""
    if record.status == "completed" and (own := record.tokens_per_chunk):
        return own
    return usual


def _notes(
    completed: list[RequestRecord],
    window: Window,
    per_chunk: float | None,
    sources: Sequence[str],
    cached: list[int],
) -> tuple[str, ...]:
    notes = []
    if not any(window.contains(r.end) for r in completed):
        notes.append("no request completed in the window: run longer or with more requests")
    if sum(cached):
        prompt = sum(r.prompt_tokens or 0 for r in completed)
        share = f" ({sum(cached) / prompt:.0%} of all)" if prompt else ""
        notes.append(
            f"the server took {sum(cached)} prompt tokens{share} from its prefix cache: TTFT and "
            "throughput measure that cache. Use a fresh seed, or turn prefix caching off"
        )
    if per_chunk is not None and per_chunk > 1.05:
        notes.append(f"{per_chunk:.2f} tokens a chunk: ITL is between chunks, TPOT between tokens")
    if "chunks" in sources:
        notes.append("no usage from the server for some requests: their tokens are counted chunks")
    short = [
        r for r in completed
        if r.requested_output_tokens is not None and r.output_tokens != r.requested_output_tokens
    ]  # fmt: skip
    if short:
        notes.append(
            f"{len(short)} of {len(completed)} answers do not have the length asked for: does "
            "the server obey ignore_eos?"
        )
    return tuple(notes)


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None

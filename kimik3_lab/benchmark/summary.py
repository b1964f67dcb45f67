"""What a cell's numbers are called, in which unit, and what each one means.

Needs numpy (through the intervals). Used by lessons 00, 10 and 12.
"""

from __future__ import annotations

from dataclasses import dataclass

from kimik3_lab.benchmark.intervals import Interval
from kimik3_lab.benchmark.window import Window

__all__ = ["LatencyStats", "Summary", "Throughput"]


@dataclass(frozen=True, slots=True)
class LatencyStats:
    """One latency over the requests in the window; the unit is in the name of its field.

    ``count`` samples. A percentile that they cannot support is None, and ``notes`` says how many
    requests it takes. Intervals resample requests (bootstrap).
    """

    count: int
    mean: float | None = None
    mean_ci: Interval | None = None
    median: float | None = None
    median_ci: Interval | None = None
    p90: float | None = None
    p90_ci: Interval | None = None
    p99: float | None = None
    p99_ci: Interval | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Throughput:
    """Rates over the window.

    Attributes
    ----------
    completed
        Requests that ended inside the window: the count that all else here rests on.
    completed_ci
        Poisson interval of that count.
    requests_per_s, requests_per_s_ci
        Count over window length.
    output_tokens_per_s, output_tokens_per_s_ci
        The published method: output tokens of those requests over the window length. All tokens of
        a request fall due when it ends, so short windows see steps of one whole request.
    observed_tokens_per_s
        Tokens that arrived inside the window over its length, whichever request they belong to.
    mean_concurrency
        Requests in flight, averaged over the window.
    completed_by_littles_law
        ``mean_concurrency * window / mean latency``: far from ``completed`` means a window too
        short for its requests, or a load that has not settled.
    """

    completed: int
    completed_ci: Interval
    requests_per_s: float | None = None
    requests_per_s_ci: Interval | None = None
    output_tokens_per_s: float | None = None
    output_tokens_per_s_ci: Interval | None = None
    observed_tokens_per_s: float | None = None
    mean_concurrency: float | None = None
    completed_by_littles_law: float | None = None


@dataclass(frozen=True, slots=True)
class Summary:
    """What a cell measured. Counts are over the whole cell except ``in_window``.

    Attributes
    ----------
    attempted, completed, failed, cancelled
        All requests sent, and how they ended; cancelled ones were cut off by the cell's end.
    in_window
        Completed requests whose latencies count.
    ttft_ms, tpot_ms, itl_ms, e2e_s
        Time to first token, time per output token, inter-token latency, end-to-end latency.
    throughput
        Rates, see :class:`Throughput`.
    prompt_tokens, output_tokens
        Mean lengths of the requests in the window; ``output_tokens_from`` says who counted.
    cached_tokens
        Prompt tokens served from a cache, over all requests; None if the server does not say.
    tokens_per_chunk
        Mean tokens a chunk; above 1, ITL is between chunks.
    notes
        What a reader must know before quoting a number.
    """

    window: Window
    attempted: int
    completed: int
    failed: int
    cancelled: int
    in_window: int
    ttft_ms: LatencyStats
    tpot_ms: LatencyStats
    itl_ms: LatencyStats
    e2e_s: LatencyStats
    throughput: Throughput
    prompt_tokens: float | None
    output_tokens: float | None
    output_tokens_from: str | None
    cached_tokens: int | None
    tokens_per_chunk: float | None
    notes: tuple[str, ...]

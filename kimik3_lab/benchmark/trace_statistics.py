"""What a trace asks of a server, in numbers: lengths, bursts, and how much its prompts share.

Needs numpy. Lesson 12 and ``k3lab trace`` show these numbers beside the published ones; the
generators of :mod:`kimik3_lab.benchmark.synthetic_traces` are held to them.

One ratio does not describe sharing: what a cache of ``n`` blocks finds depends on how long ago a
block was used last. So hits are counted for caches of several sizes that forget the block that was
not used for longest (LRU).
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kimik3_lab.benchmark.prefix_lru import PrefixLru
from kimik3_lab.benchmark.trace_request import BLOCK_TOKENS, TraceError, TraceRequest

__all__ = [
    "CAPACITIES",
    "ArrivalStatistics",
    "LengthStatistics",
    "SessionStatistics",
    "SharingStatistics",
    "TraceStatistics",
    "hit_ratio",
    "index_of_dispersion",
    "trace_statistics",
]

#: Sizes of the caches that hits are counted for, in blocks of 512 tokens.
CAPACITIES = (1_000, 5_000, 10_000, 50_000)


@dataclass(frozen=True, slots=True)
class LengthStatistics:
    """Tokens of prompts or of answers; ``log_mean`` and ``log_sd`` are of natural logarithms."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float
    log_mean: float
    log_sd: float

    @classmethod
    def of(cls, tokens: Sequence[int]) -> LengthStatistics:
        """Measure lengths, all at least 1."""
        values = np.asarray(tokens, dtype=float)
        p50, p90, p99 = np.quantile(values, (0.5, 0.9, 0.99))
        logs = np.log(values)
        numbers = (values.mean(), p50, p90, p99, values.max(), logs.mean(), logs.std())
        return cls(*map(float, numbers))


@dataclass(frozen=True, slots=True)
class ArrivalStatistics:
    """How evenly requests arrive.

    Attributes
    ----------
    rate
        Requests a second, from the first arrival to the last; None if all came at once.
    gap_cv
        Standard deviation of the gaps over their mean: 1 for a Poisson process.
    zero_gaps
        Share of the gaps that are 0: requests stamped with the same time.
    idc_1s, idc_10s, idc_60s
        Index of dispersion: variance over mean of the arrivals in bins of that length, 1 for a
        Poisson process. None if there are fewer than two whole bins.
    """

    rate: float | None
    gap_cv: float
    zero_gaps: float
    idc_1s: float | None
    idc_10s: float | None
    idc_60s: float | None


@dataclass(frozen=True, slots=True)
class SharingStatistics:
    """How much of the prompts was seen before, by prefix.

    Attributes
    ----------
    infinite_hit_ratio
        Share of all prompt tokens that a cache without limit would have found.
    lru_hit_ratio
        The same for LRU caches, by their size in blocks.
    used_once
        Share of the different blocks that one prompt only has.
    distinct_blocks
        Number of different blocks.
    """

    infinite_hit_ratio: float
    lru_hit_ratio: dict[int, float]
    used_once: float
    distinct_blocks: int


@dataclass(frozen=True, slots=True)
class SessionStatistics:
    """Conversations. Those that reach over an end of the trace count with the turns inside.

    Attributes
    ----------
    count, turns_p50
        Sessions, and their median number of requests. A session ``a/b`` is a subagent of ``a`` and
        counts as part of neither.
    with_subagents
        Share of the sessions that have subagents.
    """

    count: int
    turns_p50: float
    with_subagents: float

    @classmethod
    def of(cls, names: Iterable[str]) -> SessionStatistics | None:
        """Measure the sessions of requests; None if there are none."""
        turns = Counter(names)
        agents = {name: count for name, count in turns.items() if "/" not in name}
        if not agents:
            return None
        parents = {name.partition("/")[0] for name in turns if "/" in name}
        return cls(
            count=len(agents),
            turns_p50=float(np.median(list(agents.values()))),
            with_subagents=len(parents & agents.keys()) / len(agents),
        )


@dataclass(frozen=True, slots=True)
class TraceStatistics:
    """All of it. ``sharing`` and ``sessions`` are None for a trace that says nothing of them.

    ``log_correlation`` is that of the logarithms of prompt and answer length.
    """

    requests: int
    duration_s: float
    input_tokens: LengthStatistics
    output_tokens: LengthStatistics
    log_correlation: float
    arrivals: ArrivalStatistics
    sharing: SharingStatistics | None
    sessions: SessionStatistics | None


def trace_statistics(
    requests: Iterable[TraceRequest],
    *,
    capacities: Sequence[int] = CAPACITIES,
    block_tokens: int = BLOCK_TOKENS,
) -> TraceStatistics:
    """Measure a trace.

    Parameters
    ----------
    requests
        In order of arrival. Their times, lengths and block names are kept in memory.
    capacities
        Sizes of LRU caches, in blocks.
    block_tokens
        Tokens of a block.

    Raises
    ------
    TraceError
        If there are fewer than two requests.

    Examples
    --------
    >>> trace = [TraceRequest(t, 1024, 10, (0, name)) for t, name in enumerate((1, 2, 1))]
    >>> found = trace_statistics(trace, capacities=(1,))
    >>> round(found.sharing.infinite_hit_ratio, 2), found.sharing.lru_hit_ratio
    (0.5, {1: 0.3333333333333333})
    >>> found.arrivals.rate, found.arrivals.gap_cv
    (1.0, 0.0)
    """
    # Arrays, for a public trace may have millions of rows.
    times, given, answered = array("d"), array("q"), array("q")
    chains: list[tuple[int, ...]] = []
    sessions: list[str] = []
    for request in requests:
        times.append(request.timestamp)
        given.append(request.input_tokens)
        answered.append(request.output_tokens)
        if request.hash_ids is not None:
            chains.append(request.hash_ids)
        if request.session is not None:
            sessions.append(request.session)
    if len(times) < 2:
        raise TraceError(f"statistics need two requests or more, got {len(times)}")
    if chains and len(chains) < len(times):
        raise TraceError(
            f"{len(chains)} of {len(times)} requests have hash_ids: give all of them or none"
        )
    sharing = _sharing(given, chains, capacities, block_tokens) if any(chains) else None
    return TraceStatistics(
        requests=len(times),
        duration_s=times[-1] - times[0],
        input_tokens=LengthStatistics.of(given),
        output_tokens=LengthStatistics.of(answered),
        log_correlation=_log_correlation(given, answered),
        arrivals=_arrivals(np.asarray(times)),
        sharing=sharing,
        sessions=SessionStatistics.of(sessions),
    )


def _log_correlation(given: Sequence[int], answered: Sequence[int]) -> float:
    logs = np.log(np.asarray([given, answered], dtype=float))
    if (np.ptp(logs, axis=1) == 0).any():
        return 0.0  # a length that is always the same goes along with nothing
    return float(np.corrcoef(logs)[0, 1])


def _arrivals(times: np.ndarray) -> ArrivalStatistics:
    gaps = np.diff(times)
    if (gaps < 0).any():
        raise TraceError("requests must be in order of arrival: sort them by timestamp first")
    mean = float(gaps.mean())
    return ArrivalStatistics(
        rate=1 / mean if mean else None,
        gap_cv=float(gaps.std()) / mean if mean else 0.0,
        zero_gaps=float((gaps == 0).mean()),
        idc_1s=index_of_dispersion(times, 1.0),
        idc_10s=index_of_dispersion(times, 10.0),
        idc_60s=index_of_dispersion(times, 60.0),
    )


def index_of_dispersion(times: np.ndarray | Sequence[float], bin_s: float) -> float | None:
    """Variance over mean of the arrivals in bins of ``bin_s`` seconds from the first one on.

    The last bin is left out unless it is whole; None with fewer than two bins.

    Examples
    --------
    >>> index_of_dispersion([0.0, 0.1, 0.2, 0.3, 2.0], 1.0)  # bins of 4 and 0
    2.0
    """
    moments = np.asarray(times, dtype=float)
    moments = moments - moments[0]
    bins = int(moments[-1] / bin_s)
    if bins < 2:
        return None
    counts = np.bincount((moments / bin_s).astype(int), minlength=bins)[:bins]
    mean = counts.mean()
    return float(counts.var() / mean) if mean else None


def _sharing(
    given: Sequence[int],
    chains: Sequence[tuple[int, ...]],
    capacities: Sequence[int],
    block_tokens: int,
) -> SharingStatistics:
    uses = Counter(name for chain in chains for name in chain)
    return SharingStatistics(
        infinite_hit_ratio=hit_ratio(given, chains, len(uses), block_tokens),
        lru_hit_ratio={n: hit_ratio(given, chains, n, block_tokens) for n in capacities},
        used_once=sum(count == 1 for count in uses.values()) / len(uses),
        distinct_blocks=len(uses),
    )


def hit_ratio(
    input_tokens: Sequence[int],
    chains: Sequence[tuple[int, ...]],
    capacity: int,
    block_tokens: int = BLOCK_TOKENS,
) -> float:
    """Share of the prompt tokens that an LRU cache of ``capacity`` blocks finds.

    A prompt finds its blocks from the first one up to the first that is missing; then all of its
    blocks are the most recently used ones (:class:`~kimik3_lab.benchmark.prefix_lru.PrefixLru`).
    """
    cache = PrefixLru(capacity)
    found = 0
    for tokens, chain in zip(input_tokens, chains, strict=True):
        found += min(cache.match(chain) * block_tokens, tokens)
        cache.add(chain)
    total = sum(input_tokens)
    return found / total if total else 0.0

"""The engine's own counters, written for Prometheus.

Needs prometheus_client. Part of :mod:`kimik3_lab.serving.server.metrics`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from kimik3_lab.serving.engine import EngineStats
    from kimik3_lab.serving.spec_decode import SpecDecodingStats

__all__ = ["EngineSnapshot"]

#: Metric, field of SchedulerStats, what it is.
_GAUGES = (
    ("vllm:num_requests_running", "num_running_reqs", "Requests with a seat."),
    ("vllm:num_requests_waiting", "num_waiting_reqs", "Requests that wait for a seat."),
    ("vllm:kv_cache_usage_perc", "kv_cache_usage", "Share of the blocks in use; 1 is all of them."),
)
_COUNTERS = (
    ("vllm:prefix_cache_queries", "prefix_cache_queries", "Tokens looked up in the prefix cache."),
    ("vllm:prefix_cache_hits", "prefix_cache_hits", "Tokens found in the prefix cache."),
    ("vllm:num_preemptions", "num_preemptions", "Requests that lost their blocks to another."),
)
_DRAFTS = (
    ("num_drafts", "Drafts that were verified."),
    ("num_draft_tokens", "Tokens of these drafts."),
    ("num_accepted_tokens", "Tokens of drafts that were kept."),
)


class EngineSnapshot(Collector):
    """What the engine counted up to its last step.

    The engine's thread takes a snapshot, and whoever asks for the metrics reads it: the engine
    itself belongs to its thread.

    Parameters
    ----------
    labels
        Name and value, for every line.
    """

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._names, self._values = tuple(labels), tuple(labels.values())
        self._stats: EngineStats | None = None
        self._executor_counters: Mapping[str, int] = {}

    def take(self, engine: Any) -> None:
        """Copy the counters of ``engine``, and those of its executor if that has any."""
        stats = getattr(engine, "stats", None)
        if stats is not None:
            self._stats = stats()
        counters = getattr(getattr(engine, "executor", None), "counters", None)
        if counters is not None:
            self._executor_counters = asdict(counters)

    def collect(self) -> Iterable[Metric]:
        """Write the snapshot; the registry calls this when somebody asks."""
        stats = self._stats
        scheduler = None if stats is None else stats.scheduler
        for name, field, what in _GAUGES:
            family = GaugeMetricFamily(name, what, labels=self._names)
            family.add_metric(self._values, getattr(scheduler, field, 0))
            yield family
        for name, field, what in _COUNTERS:
            yield self._counter(name, what, getattr(scheduler, field, 0))
        if scheduler is not None and scheduler.spec_decoding_stats is not None:
            yield from self._drafts(scheduler.spec_decoding_stats)
        if stats is not None:
            yield self._counter("k3lab:engine_steps", "Steps begun.", stats.num_steps)
            yield self._counter(
                "k3lab:scheduled_tokens",
                "Tokens computed, drafts and those computed again among them.",
                stats.num_scheduled_tokens,
            )
        for name, value in self._executor_counters.items():
            yield self._counter(f"k3lab:executor_{name}", f"The executor's {name}.", value)

    def _drafts(self, drafts: SpecDecodingStats) -> Iterable[Metric]:
        for field, what in _DRAFTS:
            yield self._counter(f"vllm:spec_decode_{field}", what, getattr(drafts, field))
        family = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Drafts that were kept up to this position.",
            labels=(*self._names, "position"),
        )
        for position, count in enumerate(drafts.num_accepted_tokens_per_pos):
            family.add_metric((*self._values, str(position)), count)
        yield family

    def _counter(self, name: str, what: str, value: float) -> Metric:
        family = CounterMetricFamily(name, what, labels=self._names)
        family.add_metric(self._values, value)
        return family

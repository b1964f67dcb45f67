"""What is known of public traces, to hold a file or a generator against.

Needs the standard library only. Lesson 12 and ``k3lab trace`` print it. The figures were computed
from the published repositories or are their authors' own; no trace is part of the lab.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from kimik3_lab.benchmark.trace_statistics import TraceStatistics

__all__ = ["PUBLISHED_TRACES", "Comparison", "PublishedTrace", "compare"]


@dataclass(frozen=True)
class PublishedTrace:
    """Published figures of one trace.

    Attributes
    ----------
    source
        Repository, with the file.
    licence
        Of the trace.
    figures
        Statistic to value, named as :func:`compare` names them. Lengths in tokens, rates a second,
        ratios from 0 to 1.
    at_least
        Statistics of which only a lower bound is published.
    """

    source: str
    licence: str
    figures: Mapping[str, float]
    at_least: frozenset[str] = field(default_factory=frozenset)


_MOONCAKE = "https://github.com/kvcache-ai/Mooncake, FAST25-release/traces/"
_AZURE = "https://github.com/Azure/AzurePublicDataset, data/"

#: By the name of the trace, which is also that of its generator where there is one.
PUBLISHED_TRACES: dict[str, PublishedTrace] = {
    "mooncake-conversation": PublishedTrace(
        _MOONCAKE + "conversation_trace.jsonl",
        "Apache-2.0",
        {
            "requests an hour": 12_031 * 3_600 / 3_537,
            "input mean": 12_035, "input p50": 6_909, "input p90": 27_367, "input p99": 85_400,
            "input log mean": 8.74, "input log sd": 1.20,
            "output mean": 343, "output p50": 350, "output p90": 597,
            "log correlation": 0.05,
            "zero gaps": 0.90, "IDC 1 s": 7.9, "IDC 10 s": 2.1, "IDC 60 s": 2.9,
            "hits, no limit": 0.374, "hits, 1,000 blocks": 0.044, "hits, 5,000 blocks": 0.110,
            "hits, 10,000 blocks": 0.211, "hits, 50,000 blocks": 0.355,
            "blocks used once": 0.76,
        },
    ),
    "mooncake-synthetic": PublishedTrace(
        _MOONCAKE + "synthetic_trace.jsonl",
        "Apache-2.0",
        {
            "input mean": 15_325, "input p50": 11_587, "output mean": 149, "output p50": 69,
            "log correlation": -0.49, "gap CV": 1.01, "hits, no limit": 0.651,
        },
    ),
    "mooncake-toolagent": PublishedTrace(
        _MOONCAKE + "toolagent_trace.jsonl (figures of the paper, FAST 2025)",
        "Apache-2.0",
        {
            "requests an hour": 23_608 * 3_600 / 3_537,
            "input mean": 8_596, "output mean": 182, "hits, no limit": 0.59,
        },
    ),
    "azure-code": PublishedTrace(
        _AZURE + "AzureLLMInferenceTrace_code.csv (2023)",
        "CC-BY 4.0",
        {
            "requests an hour": 8_819 * 3_600 / 3_435,
            "input mean": 2_048, "input p50": 1_469, "input p99": 7_436,
            "output mean": 28, "output p50": 13, "output p90": 55,
            "gap CV": 13.2, "IDC 10 s": 71,
        },
    ),
    "azure-conv": PublishedTrace(
        _AZURE + "AzureLLMInferenceTrace_conv.csv (2023)",
        "CC-BY 4.0",
        {
            "requests an hour": 19_366 * 3_600 / 3_510,
            "input mean": 1_155, "input p50": 1_020, "input p90": 2_734,
            "output mean": 211, "output p50": 129, "output p90": 424,
            "gap CV": 1.09, "IDC 60 s": 20.6,
        },
    ),
    "agentic": PublishedTrace(
        "vLLM's AgentX replay, as its blog describes it",
        "figures only",
        {
            "input p50": 142_000, "output p50": 444, "turns p50": 43,
            "sessions with subagents": 0.44, "hits, no limit": 0.95,
        },
        frozenset({"hits, no limit"}),
    ),
}  # fmt: skip


class Comparison(NamedTuple):
    """One statistic: what is published, and what was found; None where there is none."""

    name: str
    published: float | None
    found: float | None

    @property
    def deviation(self) -> float | None:
        """Difference over the published value: 0.1 is a tenth too much."""
        if self.published is None or self.found is None:
            return None
        return (self.found - self.published) / abs(self.published)


def compare(found: TraceStatistics, published: PublishedTrace | None = None) -> list[Comparison]:
    """Put statistics beside published ones, in a fixed order.

    Examples
    --------
    >>> from kimik3_lab.benchmark.synthetic_traces import synthetic_trace
    >>> from kimik3_lab.benchmark.trace_statistics import trace_statistics
    >>> trace = synthetic_trace("azure-conv", 600.0)
    >>> rows = compare(trace_statistics(trace), PUBLISHED_TRACES["azure-conv"])
    >>> next(row.published for row in rows if row.name == "output p90")
    424
    """
    known = published.figures if published else {}
    return [Comparison(name, known.get(name), value) for name, value in _found(found).items()]


def _found(found: TraceStatistics) -> dict[str, float | None]:
    rate = found.arrivals.rate
    rows: dict[str, float | None] = {"requests an hour": None if rate is None else rate * 3_600}
    for side, lengths in (("input", found.input_tokens), ("output", found.output_tokens)):
        for name in ("mean", "p50", "p90", "p99", "max", "log_mean", "log_sd"):
            rows[f"{side} {name.replace('_', ' ')}"] = getattr(lengths, name)
    rows["log correlation"] = found.log_correlation
    arrivals = found.arrivals
    rows |= {
        "gap CV": arrivals.gap_cv,
        "zero gaps": arrivals.zero_gaps,
        "IDC 1 s": arrivals.idc_1s,
        "IDC 10 s": arrivals.idc_10s,
        "IDC 60 s": arrivals.idc_60s,
    }
    if (sharing := found.sharing) is not None:
        rows["hits, no limit"] = sharing.infinite_hit_ratio
        rows |= {f"hits, {n:,} blocks": hits for n, hits in sharing.lru_hit_ratio.items()}
        rows["blocks used once"] = sharing.used_once
    if (sessions := found.sessions) is not None:
        rows["turns p50"] = sessions.turns_p50
        rows["sessions with subagents"] = sessions.with_subagents
    return rows

"""A benchmark client for any OpenAI-compatible server: the lab's own, vLLM, or another.

Needs aiohttp, numpy, scipy, tqdm and rich; no torch, and no code of the server. Used by lessons
00, 10 and 12 and by ``k3lab bench``.

``traces`` reads what others were asked, ``synthetic_traces`` makes up the like.
``workloads`` says what to ask, ``config`` how, ``openai_stream`` times one request, ``load`` drives
many, ``metrics`` and ``intervals`` say what they mean, ``report`` keeps them.
"""

from __future__ import annotations

from kimik3_lab.benchmark.client import (
    BenchmarkResult,
    CellResult,
    run_benchmark,
    run_benchmark_async,
)
from kimik3_lab.benchmark.config import BenchmarkConfig, Load
from kimik3_lab.benchmark.intervals import Interval, poisson_interval, samples_needed
from kimik3_lab.benchmark.metrics import summarise
from kimik3_lab.benchmark.openai_stream import EndpointError
from kimik3_lab.benchmark.records import RequestRecord
from kimik3_lab.benchmark.report import ResultError, load_result, print_table, rows, save_result
from kimik3_lab.benchmark.summary import LatencyStats, Summary, Throughput
from kimik3_lab.benchmark.synthetic_traces import SYNTHETIC_TRACES, synthetic_trace
from kimik3_lab.benchmark.trace_statistics import TraceStatistics, trace_statistics
from kimik3_lab.benchmark.traces import TraceError, TraceRequest, read_trace, write_trace
from kimik3_lab.benchmark.window import Window
from kimik3_lab.benchmark.workloads import Workload, WorkloadError

__all__ = [
    "SYNTHETIC_TRACES",
    "BenchmarkConfig",
    "BenchmarkResult",
    "CellResult",
    "EndpointError",
    "Interval",
    "LatencyStats",
    "Load",
    "RequestRecord",
    "ResultError",
    "Summary",
    "Throughput",
    "TraceError",
    "TraceRequest",
    "TraceStatistics",
    "Window",
    "Workload",
    "WorkloadError",
    "load_result",
    "poisson_interval",
    "print_table",
    "read_trace",
    "rows",
    "run_benchmark",
    "run_benchmark_async",
    "samples_needed",
    "save_result",
    "summarise",
    "synthetic_trace",
    "trace_statistics",
    "write_trace",
]

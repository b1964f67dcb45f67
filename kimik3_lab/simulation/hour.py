"""An hour of made-up conversations on one node and on three: what is carried, and its price here.

Needs numpy, the scheduler and the cost model. Lesson 11 reads the record
``data/results/simulated/conversation_hour.json``, made by ``python -m kimik3_lab.simulation.hour
--output FILE``: minutes.

At 0.4 times the rate of Mooncake's conversations a node is at its limit: 16,200 prompt tokens come
in a second, and it computes about as many. So what a second of prompt costs beside decodes decides,
and how many tokens its cache keeps; the cases change one of them at a time.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kimik3_lab.benchmark.synthetic_traces import synthetic_trace
from kimik3_lab.benchmark.trace_request import TraceRequest
from kimik3_lab.json_file import write_json
from kimik3_lab.provenance import provenance
from kimik3_lab.simulation.arrivals import simulate_arrivals
from kimik3_lab.simulation.fleet import simulate_fleet
from kimik3_lab.simulation.requests import SimulationRequest
from kimik3_lab.simulation.spec import SimulationSpec
from kimik3_lab.simulation.switches import find_preset
from kimik3_lab.simulation.trace_requests import to_simulation_requests

__all__ = ["CASES", "HourCase", "HourResult", "simulate_hour"]

WORKLOAD = "mooncake-conversation"
#: A machine that is done so many seconds after the last arrival has carried the load.
SETTLED_S = 60.0
_PAGE_MB = 4096 / 1e6


@dataclass(frozen=True, slots=True)
class HourCase:
    """One run: a rung of the ladder, the rate, and what differs from the default."""

    name: str
    preset: str
    rate_scale: float
    replicas: int = 1
    constants: Mapping[str, float] = field(default_factory=dict)


CASES: tuple[HourCase, ...] = (
    HourCase("one node", "look-ahead-cap", 0.4),
    HourCase(
        "one node, prompts cost no more beside decodes",
        "look-ahead-cap",
        0.4,
        constants={"mixed_batch_token": 0.0},
    ),
    HourCase("one node, rows spread over its GPUs (DCP8)", "context-parallelism", 0.4),
    HourCase("one node, fewer requests", "look-ahead-cap", 0.3),
    HourCase("three nodes, prefix-aware", "look-ahead-cap", 1.0, replicas=3),
)


@dataclass(frozen=True, slots=True)
class HourResult:
    """What a case came to.

    Attributes
    ----------
    requests, prompt_tokens_per_s
        That came, and the prompt tokens of a second on average over the hour.
    completed, end_s
        Requests that ended, and when the last one did.
    cached_share
        Of the prompt tokens, those found in a prefix cache.
    ttft_median_s, ttft_p90_s, tpot_ms
        Latencies.
    cpu_s
        Seconds of one core that a node took here.
    memory_mb
        Resident memory of this process when a quarter, a half, three quarters and all of the
        requests of one node had arrived, beyond what it had before. Empty for several nodes, and
        where the system does not tell.
    """

    requests: int
    prompt_tokens_per_s: float
    completed: int
    end_s: float
    cached_share: float
    ttft_median_s: float
    ttft_p90_s: float
    tpot_ms: float
    cpu_s: float
    memory_mb: tuple[float, ...]


def simulate_hour(case: HourCase, duration_s: float = 3600.0, seed: int = 0) -> HourResult:
    """Simulate one case.

    Examples
    --------
    >>> result = simulate_hour(CASES[3], duration_s=20.0)
    >>> result.completed == result.requests > 0
    True
    """
    trace = synthetic_trace(WORKLOAD, duration_s, rate_scale=case.rate_scale, seed=seed)
    spec = SimulationSpec(find_preset(case.preset), constants=case.constants)
    memory: list[float] = []
    began = time.process_time()
    if case.replicas == 1:
        result: Any = simulate_arrivals(spec, _watched(trace, memory), seed=seed)
        cached = result.totals.cached_tokens
    else:
        result = simulate_fleet(
            spec,
            to_simulation_requests(trace),
            replicas=case.replicas,
            router="prefix-aware",
            processes=1,
            seed=seed,
        )
        cached = result.cached_tokens
    prompts = sum(request.input_tokens for request in trace)
    return HourResult(
        requests=len(trace),
        prompt_tokens_per_s=prompts / duration_s,
        completed=result.completed,
        end_s=result.duration_s,
        cached_share=cached / prompts,
        ttft_median_s=(result.latency("ttft_ms", "median") or 0.0) / 1e3,
        ttft_p90_s=(result.latency("ttft_ms", "p90") or 0.0) / 1e3,
        tpot_ms=result.latency("tpot_ms") or 0.0,
        cpu_s=(time.process_time() - began) / case.replicas,
        memory_mb=tuple(memory),
    )


def _watched(trace: Sequence[TraceRequest], memory: list[float]) -> Iterator[SimulationRequest]:
    """Yield the requests, and note the memory at each quarter of them."""
    before = _resident_mb()
    marks = {max(len(trace) * quarter // 4, 1) for quarter in (1, 2, 3, 4)}
    for number, request in enumerate(to_simulation_requests(trace), 1):
        yield request
        if before is not None and number in marks:
            memory.append(round((_resident_mb() or 0.0) - before, 1))


def _resident_mb() -> float | None:
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    except (OSError, IndexError, ValueError):  # not Linux
        return None
    return pages * _PAGE_MB


def main() -> None:
    """Simulate an hour of conversations on one node and on three."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--duration", type=float, default=3600.0, help="seconds of the trace")
    parser.add_argument("--output", type=Path, help="write all of it as JSON")
    arguments = parser.parse_args()
    rows = []
    for case in CASES:
        # A process of its own for each: else one case would find the memory of the last.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            found = process.submit(simulate_hour, case, arguments.duration).result()
        carried = found.end_s <= arguments.duration + SETTLED_S
        rows.append({**asdict(case), **asdict(found), "carried": carried})
        print(
            f"{case.name} ({case.preset}), rate x {case.rate_scale:g}: {found.requests:,} requests,"
            f" {found.prompt_tokens_per_s:,.0f} prompt tokens/s, {found.cached_share:.1%} cached; "
            f"{'carried' if carried else 'NOT carried'}: done at {found.end_s:,.0f} s, TTFT "
            f"{found.ttft_median_s:.1f} s (p90 {found.ttft_p90_s:.1f}), {found.tpot_ms:.0f} ms a "
            f"token; {found.cpu_s:.0f} s of a core a node, memory {list(found.memory_mb)} MB",
            flush=True,
        )
    if arguments.output is not None:
        origin = provenance(device="simulated")
        write_json(
            arguments.output,
            {"provenance": origin, "workload": WORKLOAD, "duration_s": arguments.duration,
             "cases": rows},
        )  # fmt: skip


if __name__ == "__main__":
    main()

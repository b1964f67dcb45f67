"""Traces made up to be like public ones, by name: no file needed, the same for the same seed.

Needs numpy. Used by lesson 12, by ``k3lab simulate``, ``k3lab plan`` and ``k3lab trace``.

Each generator is fitted to the published statistics of one trace
(:mod:`kimik3_lab.benchmark.published_traces`): lengths, bursts and, where prompts are known, how
much of them a cache of a given size finds. Nothing of the traces themselves is in here. What is
not published had to be chosen; the comments say so. ``k3lab trace --workload NAME`` prints both
side by side.
"""

from __future__ import annotations

from dataclasses import dataclass
from zlib import crc32

import numpy as np

from kimik3_lab.benchmark.length_curve import LengthCurve
from kimik3_lab.benchmark.synthetic_agents import AgentSessions
from kimik3_lab.benchmark.synthetic_arrivals import BurstyArrivals, RateWaves
from kimik3_lab.benchmark.synthetic_sessions import ChatSessions, Templates
from kimik3_lab.benchmark.trace_request import TraceError, TraceRequest

__all__ = ["SYNTHETIC_TRACES", "SingleRequests", "synthetic_trace"]

_EVEN = RateWaves(0.0)


@dataclass(frozen=True)
class SingleRequests:
    """Requests that have nothing to do with each other.

    Attributes
    ----------
    input_tokens, output_tokens
        Lengths, independent of each other.
    arrivals
        Bursts, or a rate in requests a second.
    waves
        Slow changes of the rate.
    """

    input_tokens: LengthCurve
    output_tokens: LengthCurve
    arrivals: BurstyArrivals | float
    waves: RateWaves = _EVEN

    @property
    def rate(self) -> float:
        """Requests a second."""
        bursty = isinstance(self.arrivals, BurstyArrivals)
        return self.arrivals.rate if bursty else self.arrivals  # type: ignore[union-attr, return-value]

    def requests(
        self, duration_s: float, rate_scale: float, rng: np.random.Generator
    ) -> list[TraceRequest]:
        """Generate ``duration_s`` seconds, with arrivals ``rate_scale`` times as often."""
        if isinstance(self.arrivals, BurstyArrivals):
            times = self.arrivals.times(duration_s, rate_scale, rng)
        else:
            count = rng.poisson(self.arrivals * rate_scale * duration_s)
            times = np.sort(rng.uniform(0, duration_s, count))
        times = self.waves.warp(times, duration_s, rng)
        given = self.input_tokens.tokens(rng.standard_normal(len(times)))
        answered = self.output_tokens.tokens(rng.standard_normal(len(times)))
        columns = (times.tolist(), given.tolist(), answered.tolist())
        return [TraceRequest(*row) for row in zip(*columns, strict=True)]


#: Quantiles without a comment are published; the others were chosen so that the mean comes out.
SYNTHETIC_TRACES: dict[str, ChatSessions | SingleRequests | AgentSessions] = {
    # Mooncake's conversations: 12,031 requests in 3,537 s. The three lowest quantiles and the
    # limits were counted in the trace by others. Sessions were fitted to the six hit ratios.
    "mooncake-conversation": ChatSessions(
        rate=12_031 / 3_537,
        input_tokens=LengthCurve(
            ((0.001, 891), (0.108, 1_024), (0.401, 5_000), (0.5, 6_909), (0.9, 27_367),
             (0.99, 85_400)),
            least=891,
            most=126_195,
        ),
        output_tokens=LengthCurve(((0.1, 100), (0.5, 350), (0.9, 597), (0.99, 850)), most=2_000),
        single_share=0.593,
        mean_turns=3.62,
        likeness=0.706,
        return_median_s=173.0,
        return_spread=1.14,
        templates=Templates(),
        log_correlation=0.05,
        waves=RateWaves(0.105),
        stamp_s=3.0,
    ),
    # Mooncake's tools and agents: of the lengths only the means are published, of the sharing one
    # hit ratio. All quantiles, templates and times are chosen.
    "mooncake-toolagent": ChatSessions(
        rate=23_608 / 3_537,
        input_tokens=LengthCurve(
            ((0.1, 2_400), (0.5, 6_000), (0.9, 16_300), (0.99, 48_000)), least=600, most=126_195
        ),
        output_tokens=LengthCurve(((0.1, 12), (0.5, 45), (0.9, 520), (0.99, 1_900)), most=2_000),
        single_share=0.52,
        mean_turns=4.6,
        likeness=0.55,
        return_median_s=60.0,
        return_spread=1.0,
        templates=Templates(count=40, zipf=1.1, blocks=9.0),
        waves=RateWaves(0.10),
    ),
    # Azure's code completion of 2023: 8,819 requests in about 57 minutes.
    "azure-code": SingleRequests(
        input_tokens=LengthCurve(
            ((0.1, 600), (0.5, 1_469), (0.9, 4_500), (0.99, 7_436)), least=3, most=7_500
        ),
        output_tokens=LengthCurve(((0.1, 6), (0.5, 13), (0.9, 55), (0.99, 240)), most=2_000),
        arrivals=BurstyArrivals(burst_size=140.0, gap_in_burst_s=0.082, silence_s=43.0),
    ),
    # Azure's conversations of 2023: 19,366 requests in about 58 minutes.
    "azure-conv": SingleRequests(
        input_tokens=LengthCurve(
            ((0.1, 90), (0.5, 1_020), (0.9, 2_734), (0.99, 4_000)), least=2, most=14_050
        ),
        output_tokens=LengthCurve(((0.1, 55), (0.5, 129), (0.9, 424), (0.99, 1_300)), most=2_000),
        arrivals=19_366 / 3_510,
        waves=RateWaves(0.25),
    ),
    # Agents as vLLM's AgentX replays them: medians of prompt, answer and turns, the share of
    # sessions with subagents and a bound on the reuse are published, all else is chosen.
    "agentic": AgentSessions(
        rate=1.0,
        turns=LengthCurve(((0.5, 43), (0.9, 130)), most=400),
        output_tokens=LengthCurve(((0.5, 444), (0.9, 1_500)), most=16_000),
        template_tokens=24_576,
        task_tokens=LengthCurve(((0.5, 8_000), (0.9, 32_000)), least=100, most=120_000),
        tool_tokens=LengthCurve(((0.5, 2_000), (0.9, 8_000)), least=20, most=30_000),
        context_limit=400_000,
        compacted_tokens=60_000,
        subagent_share=0.44,
        subagent_turns=LengthCurve(((0.5, 6), (0.9, 15)), most=60),
        think_median_s=4.0,
        think_spread=1.3,
    ),
}  # fmt: skip


def synthetic_trace(
    name: str, duration_s: float = 3_600.0, *, rate_scale: float = 1.0, seed: int = 0
) -> list[TraceRequest]:
    """Generate a trace.

    Parameters
    ----------
    name
        One of :data:`SYNTHETIC_TRACES`.
    duration_s
        Seconds of it.
    rate_scale
        Requests arrive that many times as often as in the original, from more or fewer sessions:
        the time between turns stays.
    seed
        Same seed, same trace.

    Returns
    -------
    list of TraceRequest
        In order of arrival.

    Raises
    ------
    TraceError
        If there is no such generator, or a number is out of range.

    Examples
    --------
    >>> trace = synthetic_trace("azure-conv", 60.0, seed=1)
    >>> trace == synthetic_trace("azure-conv", 60.0, seed=1)
    True
    >>> 200 < len(trace) < 500
    True
    """
    if name not in SYNTHETIC_TRACES:
        raise TraceError(f"no workload {name!r}; there are {', '.join(SYNTHETIC_TRACES)}")
    for field, value in (("duration_s", duration_s), ("rate_scale", rate_scale)):
        if not 0 < value < float("inf"):
            raise TraceError(f"{field} must be a number above 0, got {value!r}")
    rng = np.random.default_rng([seed, crc32(name.encode())])
    return SYNTHETIC_TRACES[name].requests(duration_s, rate_scale, rng)

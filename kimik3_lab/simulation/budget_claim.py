"""What one pull request does alone, beside what it claims: the token budget of 51725.

Needs the standard library, the scheduler and the cost model. Lesson 11 uses it as a check, because
nothing was fitted to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from kimik3_lab.serving.presets import V0_27_1, Preset
from kimik3_lab.simulation.closed_loop import simulate_closed_loop
from kimik3_lab.simulation.spec import SimulationSpec

__all__ = ["CLAIMED_THROUGHPUT_GAIN", "CLAIMED_TTFT_GAIN", "BudgetAlone", "budget_alone"]

#: What pull request 51725 claims: TTFT falls by so many percent.
CLAIMED_TTFT_GAIN = (55.0, 65.0)
#: And the most by which throughput grows.
CLAIMED_THROUGHPUT_GAIN = 41.5


@dataclass(frozen=True, slots=True)
class BudgetAlone:
    """Pull request 51725 by itself at one concurrency: 8,192 rows a step, K = 7.

    Attributes
    ----------
    ttft_gain, throughput_gain
        Percent by which TTFT falls and output throughput grows.
    """

    concurrency: int
    ttft_gain: float
    throughput_gain: float

    @property
    def inside(self) -> bool:
        """Whether the TTFT gain lies in the published range."""
        low, high = CLAIMED_TTFT_GAIN
        return low <= self.ttft_gain <= high


def budget_alone(
    concurrencies: Sequence[int] = (1, 4, 16),
    make_spec: Callable[[Preset], SimulationSpec] = SimulationSpec,
    seeds: Sequence[int] = (0,),
) -> list[BudgetAlone]:
    """Simulate what the adaptive token budget does alone; nothing was fitted to its claims.

    The claims were made for 8,000 tokens in and 1,000 out on TP8, with a drafter of K = 7.
    """
    before = make_spec(V0_27_1)
    before = replace(before, scheduler={**before.scheduler, "num_speculative_tokens": 7})
    after = replace(before, scheduler={**before.scheduler, "token_budget": "adaptive"})
    statistic = before.scenario.ttft_statistic
    gains = []
    for concurrency in concurrencies:
        ttft, rate = [], []
        for spec in (before, after):
            runs = [
                simulate_closed_loop(spec, concurrency, seed=seed, keep_records=False)
                for seed in seeds
            ]
            ttft.append(fmean(run.latency("ttft_ms", statistic) or 0.0 for run in runs))
            # Tokens by Little's law: a count of ten requests would say little.
            rate.append(fmean(concurrency / (run.latency("e2e_s") or 1.0) for run in runs))
        gains.append(
            BudgetAlone(
                concurrency=concurrency,
                ttft_gain=100.0 * (1.0 - ttft[1] / ttft[0]),
                throughput_gain=100.0 * (rate[1] / rate[0] - 1.0),
            )
        )
    return gains

"""What one pull request does alone, beside what it claims: the token budget of 51725.

Needs the standard library, the scheduler and the cost model. Lesson 11 uses it as a check, because
nothing was fitted to it.

The claim was made with prefix caching on, unlike the published comparison. That matters even where
no two prompts share anything: chunks then end where a block ends, and states are kept there. With
K = 7 a prompt of 8,000 tokens takes six steps instead of four on v0.27.1 (1,536 four times, 768,
1,088), and two instead of one with the adaptive budget (6,912 and 1,088).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from kimik3_lab.serving.presets import V0_27_1, Preset
from kimik3_lab.simulation.closed_loop import simulate_closed_loop
from kimik3_lab.simulation.results import SimulationResult
from kimik3_lab.simulation.spec import SimulationSpec

__all__ = [
    "CLAIMED_THROUGHPUT_GAIN",
    "CLAIMED_TTFT_GAIN",
    "BudgetAlone",
    "budget_alone",
    "budget_specs",
]

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
        Percent by which TTFT falls, in the statistic of the scenario, and output throughput grows.
    ttft_mean_gain
        The same of the mean TTFT.
    ttft_range
        Smallest and largest ``ttft_gain`` of a single seed.
    prefix_caching
        Whether it was on, as in the claim.
    """

    concurrency: int
    ttft_gain: float
    throughput_gain: float
    ttft_mean_gain: float
    ttft_range: tuple[float, float]
    prefix_caching: bool = True

    @property
    def outside(self) -> float:
        """Points by which the TTFT gain misses the published range; negative below it, 0 inside."""
        low, high = CLAIMED_TTFT_GAIN
        return min(self.ttft_gain - low, 0.0) + max(self.ttft_gain - high, 0.0)

    @property
    def inside(self) -> bool:
        """Whether the TTFT gain lies in the published range."""
        return self.outside == 0.0


def budget_specs(
    make_spec: Callable[[Preset], SimulationSpec] = SimulationSpec, *, prefix_caching: bool = True
) -> tuple[SimulationSpec, SimulationSpec]:
    """Make v0.27.1 with a drafter of K = 7, and the same with the adaptive token budget.

    Examples
    --------
    >>> before, after = budget_specs()
    >>> before.scheduler_config.scheduled_token_limit, after.scheduler_config.scheduled_token_limit
    (2048, 8192)
    """
    before = make_spec(V0_27_1)
    before = replace(
        before,
        scheduler={**before.scheduler, "num_speculative_tokens": 7},
        cache={**before.cache, "enable_prefix_caching": prefix_caching},
    )
    return before, replace(before, scheduler={**before.scheduler, "token_budget": "adaptive"})


def budget_alone(
    concurrencies: Sequence[int] = (1, 4, 16),
    make_spec: Callable[[Preset], SimulationSpec] = SimulationSpec,
    seeds: Sequence[int] = (0,),
    *,
    prefix_caching: bool = True,
) -> list[BudgetAlone]:
    """Simulate what the adaptive token budget does alone; nothing was fitted to its claims.

    The claims were made for 8,000 tokens in and 1,000 out on TP8, with a drafter of K = 7 and
    prefix caching on. Without it the check is another one: that of the published command.
    """
    specs = budget_specs(make_spec, prefix_caching=prefix_caching)
    statistic = specs[0].scenario.ttft_statistic
    gains = []
    for concurrency in concurrencies:
        before, after = (
            [
                simulate_closed_loop(spec, concurrency, seed=seed, keep_records=False)
                for seed in seeds
            ]
            for spec in specs
        )
        single = [_ttft_gain([b], [a], statistic) for b, a in zip(before, after, strict=True)]
        # Tokens by Little's law: a count of ten requests would say little.
        rates = [fmean(concurrency / _latency(run, "e2e_s") for run in r) for r in (before, after)]
        gains.append(
            BudgetAlone(
                concurrency=concurrency,
                ttft_gain=_ttft_gain(before, after, statistic),
                throughput_gain=100.0 * (rates[1] / rates[0] - 1.0),
                ttft_mean_gain=_ttft_gain(before, after, "mean"),
                ttft_range=(min(single), max(single)),
                prefix_caching=prefix_caching,
            )
        )
    return gains


def _ttft_gain(
    before: Sequence[SimulationResult], after: Sequence[SimulationResult], statistic: str
) -> float:
    """Percent by which TTFT falls, from averages over runs."""
    then, now = (fmean(_latency(run, "ttft_ms", statistic) for run in r) for r in (before, after))
    return 100.0 * (1.0 - now / then)


def _latency(run: SimulationResult, name: str, statistic: str = "mean") -> float:
    found = run.latency(name, statistic)
    if not found:
        raise ValueError(
            f"no request ended in the {run.duration_s:g} s of {run.preset} at {run.load}: the "
            "machine is too slow for this check"
        )
    return found

"""Configurations that a planner may choose from, and what the cost model alone says of them.

Needs the standard library and the cost model. Used by :mod:`kimik3_lab.simulation.planner`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kimik3_lab.benchmark.prefix_lru import PrefixLru
from kimik3_lab.performance.parallelism import Parallelism
from kimik3_lab.performance.placement import LayoutError
from kimik3_lab.serving.presets import Preset
from kimik3_lab.simulation.load_estimate import Pace
from kimik3_lab.simulation.requests import SimulationRequest
from kimik3_lab.simulation.slo import Slo
from kimik3_lab.simulation.spec import SimulationSpec
from kimik3_lab.simulation.switches import preset_id, set_switches

__all__ = ["DEFAULT_PARALLEL", "Bound", "Candidate", "candidates", "lower_bound"]

#: Layouts that are tried where none are named: one node whole, split in each way, and two nodes.
DEFAULT_PARALLEL = (
    Parallelism(tp=8),
    Parallelism(tp=8, ep=8),
    Parallelism(tp=8, dcp=8),
    Parallelism(tp=16),
    Parallelism(tp=8, dp=2, ep=16),
)
#: Behind the last arrival, time that a run may still take: latencies of an SLO are shorter.
_SLACK_S = 120.0


@dataclass(frozen=True)
class Candidate:
    """One way to build a replica.

    Attributes
    ----------
    spec
        The replica.
    gpu_price
        Of one GPU for an hour, in any unit; 1 counts GPUs.
    """

    spec: SimulationSpec
    gpu_price: float = 1.0

    @property
    def gpus(self) -> int:
        """GPUs of a replica."""
        return self.spec.parallel.num_gpus

    @property
    def price(self) -> float:
        """Of a replica for an hour."""
        return self.gpus * self.gpu_price

    @property
    def name(self) -> str:
        """Hardware, layout, preset and K."""
        spec = self.spec
        return (
            f"{spec.accelerator.name} {spec.parallel.name} {preset_id(spec.preset)} "
            f"K={spec.num_speculative_tokens}"
        )


def candidates(
    hardware: Sequence[str],
    parallel: Iterable[Parallelism],
    presets: Iterable[Preset],
    num_speculative_tokens: Sequence[int] | None = None,
    *,
    prices: Mapping[str, float] | None = None,
    base: SimulationSpec | None = None,
) -> tuple[list[Candidate], dict[str, str]]:
    """Combine choices, and set aside what cannot run at all.

    Parameters
    ----------
    hardware
        Names of GPUs.
    parallel
        How a replica may be spread.
    presets
        Rules of scheduler and cache.
    num_speculative_tokens
        Values of K; the presets' own if left out.
    prices
        Price of a GPU for an hour, by name; all cost 1 if left out.
    base
        Takes the other settings (scenario, switches) from here.

    Returns
    -------
    list of Candidate, dict
        What can run; and name to reason for what cannot.

    Raises
    ------
    ValueError
        If a price is missing or no number above 0.

    Examples
    --------
    >>> from kimik3_lab.serving.presets import MAIN_2026_09_13
    >>> found, refused = candidates(["B300", "H200"], [Parallelism(tp=8)], [MAIN_2026_09_13])
    >>> [candidate.name for candidate in found]
    ['B300 TP8 main-2026-09-13 K=8']
    >>> [name.split()[0] for name in refused]
    ['H200']
    """
    from dataclasses import replace

    found: list[Candidate] = []
    refused: dict[str, str] = {}
    layouts, rungs = list(parallel), list(presets)
    for name in hardware:
        price = 1.0 if prices is None else prices.get(name)
        if price is None or not 0 < price < math.inf:
            raise ValueError(f"no price above 0 for {name}, got {price!r}: give one for each GPU")
        for layout in layouts:
            for preset in rungs:
                for k in num_speculative_tokens or (None,):
                    spec = SimulationSpec(preset, name, layout)
                    if base is not None:
                        spec = replace(base, preset=preset, hardware=name, parallel=layout)
                    label = f"{name} {layout.name} {preset_id(preset)}"
                    try:
                        if k is not None:
                            label += f" K={k}"
                            spec = set_switches(spec, {"num_speculative_tokens": k})
                        spec.scheduler_config, spec.cache_config  # noqa: B018
                    except (LayoutError, ValueError) as error:
                        refused[label] = str(error)
                        continue
                    found.append(Candidate(spec, price))
    return found, refused


class Bound(NamedTuple):
    """What no simulation is needed for.

    Attributes
    ----------
    replicas
        Fewer of them cannot carry the load.
    impossible
        Why no number of them can keep the promise; empty if that is not known.
    """

    replicas: int
    impossible: str


def lower_bound(candidate: Candidate, requests: Sequence[SimulationRequest], slo: Slo) -> Bound:
    """Bound the number of replicas from below, by the cost model alone.

    The machine is taken to be better than it can be: every prefix that was ever seen is cached if
    anything is, each row costs no more than in the fullest step, drafts are all accepted, and a
    request that is served has the machine to itself.

    Parameters
    ----------
    candidate
        The replica.
    requests
        The whole load, in order of arrival.
    slo
        The promise.
    """
    pace = Pace.of(candidate.spec, context=1)
    caches = candidate.spec.cache_config.enable_prefix_caching
    new_tokens = _new_tokens(requests) if caches else [r.prompt_tokens for r in requests]
    prefill = [tokens * pace.row_s for tokens in new_tokens]
    work = sum(prefill) + pace.row_s * sum(r.output_tokens for r in requests)
    span = requests[-1].arrival_s - requests[0].arrival_s if requests else 0.0
    replicas = max(1, math.ceil(work / (span + _SLACK_S)))
    alone = {
        "ttft_ms": sorted(1e3 * s for s in prefill),
        "tpot_ms": [1e3 * pace.step_s / (1 + candidate.spec.num_speculative_tokens)],
    }
    for name, values in alone.items():
        limit = slo.limits.get(name)
        if limit is None or not values:
            continue
        # The rank below the percentile, so that rounding cannot refuse what would do.
        best = values[int(slo.percentile / 100 * (len(values) - 1))]
        if best > limit:
            told = "TTFT" if name == "ttft_ms" else "TPOT"
            return Bound(
                replicas,
                f"even on an idle machine p{slo.percentile} {told} is {best:,.1f} ms or more, the "
                f"limit is {limit:,g} ms",
            )
    return Bound(replicas, "")


def _new_tokens(requests: Sequence[SimulationRequest]) -> list[int]:
    """Prompt tokens that must be computed if nothing is ever forgotten."""
    seen = PrefixLru(1 << 62)
    tokens = []
    for request in requests:
        known = 0
        if request.hash_ids is not None:
            known = seen.match(request.hash_ids) * request.hash_block_size
            seen.add(request.hash_ids)
        tokens.append(request.prompt_tokens - min(known, request.prompt_tokens - 1))
    return tokens

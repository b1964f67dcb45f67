"""Time of the routed experts: a start, the weights that somebody picked, and the arithmetic.

Needs numpy. Lesson 11 fits it to the published tables. The three are added up: with few tokens an
expert has a row or two, and its kernel cannot hide its start behind them; with many tokens the
measured times are the sum as well.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from kimik3_lab.config import K3Config
from kimik3_lab.performance.coverage import ExpertCoverage, coverage, effective_tokens
from kimik3_lab.performance.hardware import Accelerator
from kimik3_lab.performance.parallelism import Parallelism
from kimik3_lab.performance.scenarios import MoeBackend, Scenario
from kimik3_lab.performance.step_work import StepWork

__all__ = ["TILES", "ExpertLayers"]

#: Tokens of a step, and measured over computed time: kernels change their tiles in steps, and the
#: tables of TensorRT-LLM (even, skewed, TP8, EP8) and of Marlin agree on where. Their means.
TILES = (
    (1, 0.97),
    (8, 1.05),
    (32, 1.01),
    (64, 1.04),
    (128, 0.87),
    (256, 0.89),
    (1024, 1.06),
    (8192, 1.0),
)
_TILE_TOKENS, _TILE_FACTORS = zip(*((math.log(n), f) for n, f in TILES), strict=True)


class ExpertLayers:
    """The routed experts of all MoE layers, on the busiest rank.

    Parameters
    ----------
    backend
        Which kernel runs them.
    deferred
        Whether the next kernel takes their weighted sum.
    """

    def __init__(
        self,
        config: K3Config,
        gpu: Accelerator,
        parallel: Parallelism,
        scenario: Scenario,
        constants: Mapping[str, float],
        *,
        backend: MoeBackend,
        deferred: bool,
    ) -> None:
        self._parallel, self._reuse = parallel, scenario.token_reuse
        self._num_experts = config.num_experts
        if scenario.expert_load is None:
            self._coverage = coverage(
                config.num_experts, config.num_experts_per_token, scenario.routing_skew
            )
        else:
            self._coverage = ExpertCoverage(scenario.expert_load)
        self.layers = config.num_hidden_layers - config.first_k_dense_replace
        _, experts = parallel.weight_bytes(config)
        #: Bytes of one layer's experts on one rank, padding included.
        self.layer_bytes = experts * parallel.pp / self.layers
        #: Operations of one token in one layer, over all ranks that share it.
        self._flops = (
            2.0 * 3 * config.routed_expert_hidden_size * config.moe_intermediate_size
        ) * config.num_experts_per_token
        kind = "whole" if parallel.whole_experts else "sliced"
        if backend == "marlin":
            self._latency = constants["marlin_latency"]
            self._bandwidth = min(
                constants["marlin_bandwidth"], gpu.bandwidth * constants["marlin_share"]
            )
            self._rate = constants["marlin_flops"]
        else:
            self._latency = constants["moe_latency"]
            self._bandwidth = gpu.bandwidth * constants[f"expert_bandwidth_{kind}"]
            self._rate = gpu.fp8_flops * constants[f"expert_flops_{kind}"]
            if deferred:
                self._latency = max(0.0, self._latency - constants["finalize_gain"])
        self._known: dict[tuple[int, int], float] = {}

    def distinct(self, work: StepWork) -> float:
        """Experts of a layer that the step reads, over all ranks.

        ``work`` is that of a copy of the trunk, or their mean where copies differ.
        """
        copies = self._parallel.dp
        seqs = work.num_prefill_seqs + work.num_decode_seqs
        tokens = effective_tokens(work.num_tokens, seqs, self._reuse)
        return self._coverage.distinct(copies * tokens)

    def weight_bytes(self, work: StepWork) -> float:
        """Bytes of experts that one rank reads in a step, on average over the ranks."""
        return self.layers * self.layer_bytes * self.distinct(work) / self._num_experts

    def flops(self, work: StepWork) -> float:
        """Operations of one rank in a step, on average over the ranks."""
        return self.layers * self._flops * work.num_tokens / self._parallel.tp

    def seconds(self, work: StepWork) -> float:
        """Seconds of all layers."""
        key = (work.num_tokens, work.num_prefill_seqs + work.num_decode_seqs)
        if (found := self._known.get(key)) is None:
            found = self._known[key] = self._seconds(work)
        return found

    def _seconds(self, work: StepWork) -> float:
        distinct = self.distinct(work)
        read = self.layer_bytes * distinct / self._num_experts
        if self._parallel.whole_experts:
            read *= self._busiest(distinct)
        flops = self.flops(work) / self.layers
        seconds = self._latency + read / self._bandwidth + flops / self._rate
        tokens = math.log(max(1, work.num_tokens * self._parallel.dp))
        tiles = float(np.interp(tokens, _TILE_TOKENS, _TILE_FACTORS))
        return self.layers * seconds * tiles

    def _busiest(self, distinct: float) -> float:
        """Experts that the busiest rank reads, over the mean of all ranks.

        Where experts fall on ranks by chance, the count of a rank is nearly binomial, and the
        largest of R counts lies about sqrt(2 ln R) deviations above the mean.
        """
        ranks = self._parallel.ep
        mean = distinct / ranks
        if mean <= 0:
            return 1.0
        spread = math.sqrt(2 * math.log(ranks) * mean * (1 - distinct / self._num_experts))
        return min(mean + spread, self._num_experts / ranks) / mean

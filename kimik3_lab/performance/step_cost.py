"""Seconds that one engine step takes, by part: the cost model of machines that serve Kimi K3.

Needs numpy. Lesson 11 builds it term by term; the simulator asks it at every step.

A step is priced on the busiest rank. Within a captured graph kernels follow each other without a
gap, and the shared experts run beside the routed ones. A larger step is launched kernel by kernel,
and takes at least as long as the host needs for that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kimik3_lab.config import K3Config
from kimik3_lab.performance.attention_cost import KdaLayers, MlaLayers
from kimik3_lab.performance.collectives import Collectives
from kimik3_lab.performance.constants import constants_with
from kimik3_lab.performance.dense_cost import DenseProducts
from kimik3_lab.performance.draft_cost import Drafting
from kimik3_lab.performance.expert_cost import ExpertLayers
from kimik3_lab.performance.hardware import Accelerator, accelerator
from kimik3_lab.performance.parallelism import Parallelism
from kimik3_lab.performance.scenarios import Scenario
from kimik3_lab.performance.step_work import StepWork, even_share, work_of_all
from kimik3_lab.performance.wiring import residual_reads

__all__ = [
    "BLACKWELL_GRAPH_ROWS",
    "EXECUTION_SWITCHES",
    "GRAPH_ROWS",
    "MIXED_TOKENS",
    "PARTS",
    "CostModel",
    "StepCost",
]

#: Most rows of a step that is replayed from a captured graph (``max_cudagraph_capture_size``): vLLM
#: 0.27.1, and every release on GPUs before Blackwell.
GRAPH_ROWS: Final = 512
#: The same from 0.28.0 on, on Blackwell of the data centre (``_set_cudagraph_sizes`` in
#: ``vllm/config/vllm.py``).
BLACKWELL_GRAPH_ROWS: Final = 1024
#: Prompt tokens beyond which a mixed step is not charged more: as many as the constant was set on.
MIXED_TOKENS: Final = 8192
#: Ways to compute a step faster, by the names that :mod:`kimik3_lab.serving.presets` uses.
EXECUTION_SWITCHES: Final = frozenset({
    "kda_prefill_in_place",
    "skinny_gemm",
    "deferred_finalize",
    "other_step_changes",
    "zero_copy_mixed_batch",
})  # fmt: skip
#: Parts of a step and what they stand for, in the order of a report.
PARTS: Final[Mapping[str, str]] = {
    "routed_experts": "routed experts",
    "shared_experts": "shared experts, as far as not hidden behind the routed ones",
    "latent_moe": "latent down and up",
    "router": "router",
    "dense_mlp": "dense feed-forward of the first layer",
    "kda": "KDA matrix products",
    "kda_state": "KDA convolution and state",
    "mla": "MLA matrix products",
    "mla_attention": "MLA attention",
    "all_reduce": "all-reduces and other exchanges",
    "residuals_and_norms": "norms, gates, residual mixtures",
    "head": "output head and sampling",
    "drafter": "drafter",
    "mixed_batch": "extra of a step with prompts and decodes",
    "decode_step_residual": "v0.27.1: decode step beyond all other parts",
    "launch_floor": "waiting for the host to launch",
    "pipeline": "hand-over between pipeline stages",
    "host": "host between steps",
}


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of one step.

    Attributes
    ----------
    total_s
        All of it.
    parts
        Seconds by a key of :data:`PARTS`; they add up to ``total_s``.
    """

    total_s: float
    parts: dict[str, float]


class CostModel:
    """Prices steps on one kind of machine, with one set of switches, under one scenario.

    Parameters
    ----------
    hardware
        A GPU, or its name in :data:`~kimik3_lab.performance.hardware.ACCELERATORS`.
    execution
        Names of :data:`EXECUTION_SWITCHES` that are thrown.
    scenario
        What public figures do not settle; :meth:`Scenario.default` if left out.
    constants
        Values that replace those of :data:`~kimik3_lab.performance.constants.CONSTANTS`, and of
        the scenario.

    Raises
    ------
    KeyError
        If the GPU or a constant is unknown.
    ValueError
        If a switch is unknown.
    LayoutError
        If the model cannot be divided like that.

    Examples
    --------
    >>> from kimik3_lab.performance.step_work import decode_work
    >>> model = CostModel(
    ...     K3Config.released(), "B300", Parallelism(tp=8), execution=EXECUTION_SWITCHES
    ... )
    >>> cost = model.step_cost(decode_work(1, context=8500))
    >>> 0.007 < cost.total_s < 0.011
    True
    """

    def __init__(
        self,
        config: K3Config,
        hardware: Accelerator | str,
        parallel: Parallelism,
        *,
        execution: frozenset[str] = frozenset(),
        scenario: Scenario | None = None,
        constants: Mapping[str, float] | None = None,
    ) -> None:
        if unknown := sorted(execution - EXECUTION_SWITCHES):
            raise ValueError(
                f"no execution switch {unknown[0]!r}; expected some of "
                f"{', '.join(sorted(EXECUTION_SWITCHES))}"
            )
        gpu = accelerator(hardware) if isinstance(hardware, str) else hardware
        scenario = scenario or Scenario.default()
        self.config, self.gpu, self.parallel = config, gpu, parallel
        self.execution, self.scenario = execution, scenario
        values = constants_with({**dict(scenario.constants), **(constants or {})})
        self._constants = values
        later = "other_step_changes" in execution
        tp = parallel.tp
        self.dense = DenseProducts(config, gpu, tp, values, skinny="skinny_gemm" in execution)
        self.experts = ExpertLayers(
            config,
            gpu,
            parallel,
            scenario,
            values,
            backend=scenario.moe_backend if later else scenario.moe_backend_0_27_1,
            deferred="deferred_finalize" in execution,
        )
        self.kda = KdaLayers(config, gpu, tp, values, in_place="kda_prefill_in_place" in execution)
        self.mla = MlaLayers(config, gpu, parallel, values, cache_itemsize=scenario.cache_itemsize)
        style = scenario.all_reduce if later else scenario.all_reduce_0_27_1
        self._collectives = Collectives(gpu, tp, style, values)
        self._context = Collectives(gpu, parallel.dcp, style, values)
        self._dispatch = Collectives(gpu, tp * parallel.dp, style, values)
        self._drafting = Drafting(config, gpu, tp, self.dense, self._collectives, values)
        self._floor = config.num_hidden_layers * (
            values["eager_layer"] if later else values["eager_layer_0_27_1"]
        )
        # Of the four GPUs only those of Blackwell have FP4 units.
        self.graph_rows = BLACKWELL_GRAPH_ROWS if later and gpu.fp4_flops else GRAPH_ROWS
        self._residual = 0.0 if later else values["decode_step_residual"]
        # Seen on the later version only: before, #51725 alone shortened first tokens by more than
        # such an extra would have left.
        self._mixed = values["mixed_batch_token"] if later else 0.0
        if "zero_copy_mixed_batch" not in execution:
            self._mixed += values["mixed_batch_copies_token"]
        reads = tuple(residual_reads(config))
        # Each read of the residual stream is followed by a norm that writes, and each sublayer
        # adds to the running sum: three more rows.
        self._streams = sum(read.sources + 3 for read in reads)
        self._by_rows: dict[int, dict[str, float]] = {}
        self._behind: dict[tuple[int, int, int, int], tuple[float, float]] = {}

    def step_cost(self, work: StepWork) -> StepCost:
        """Price one step; with ``dp`` copies of the trunk, one in which all have this much to do.

        Examples
        --------
        >>> from kimik3_lab.performance.step_work import prefill_work
        >>> model = CostModel(K3Config.released(), "B300", Parallelism(tp=8))
        >>> cost = model.step_cost(prefill_work(1024))
        >>> abs(cost.total_s - sum(cost.parts.values())) < 1e-12
        True
        """
        return self._cost(work, work)

    def lockstep_cost(self, works: Sequence[StepWork]) -> StepCost:
        """Price a step of all copies of the trunk: that of the slowest, for which the others wait.

        The experts see the rows of all copies. A copy without work (``num_tokens`` of 0) runs a
        dummy batch, which is taken to cost no more than a step with work.

        Raises
        ------
        ValueError
            If there is not one of ``works`` for each copy, or none of them has a row.

        Examples
        --------
        >>> from kimik3_lab.performance.step_work import decode_work
        >>> model = CostModel(K3Config.released(), "B300", Parallelism(tp=8, dp=2, ep=16))
        >>> even, none = decode_work(64, context=8000), StepWork(num_tokens=0)
        >>> alone = model.lockstep_cost([even, none]).total_s
        >>> alone < model.lockstep_cost([even, even]).total_s == model.step_cost(even).total_s
        True
        """
        if len(works) != self.parallel.dp:
            raise ValueError(
                f"got the work of {len(works)} copies, {self.parallel.name} has {self.parallel.dp}"
            )
        busy = {work for work in works if work.num_tokens}
        if not busy:
            raise ValueError("no copy has a row to compute: a step without work is not run")
        mean = even_share(work_of_all(works), len(works))
        costs = [self._cost(work, mean) for work in works if work in busy]
        return max(costs, key=lambda cost: cost.total_s)

    def _cost(self, work: StepWork, mean: StepWork) -> StepCost:
        """Price the step of a copy, where all copies on average have ``mean`` to do."""
        rows = work.num_tokens
        parts = self._by_rows.get(rows)
        if parts is None:
            parts = self._by_rows[rows] = self._row_parts(rows)
        parts = parts.copy()
        if self.parallel.dp > 1:
            parts["all_reduce"] += self._exchange_rows(mean.num_tokens)
        captured = rows <= self.graph_rows
        experts = parts["routed_experts"] = self.experts.seconds(mean)
        if captured:
            parts["shared_experts"] = max(0.0, parts["shared_experts"] - experts)
        parts["kda_state"] = self.kda.seconds(work)
        parts["mla_attention"] = self.mla.seconds(work)
        if self.parallel.dcp > 1 and work.num_decode_seqs:
            parts["all_reduce"] += self._context_exchange(work.num_decode_tokens)
        if work.num_prefill_tokens and work.num_decode_seqs:
            parts["mixed_batch"] = min(work.num_prefill_tokens, MIXED_TOKENS) * self._mixed
        if captured:
            if work.num_decode_seqs and self._residual:
                parts["decode_step_residual"] = self._residual
        else:
            parts["launch_floor"] = max(0.0, self._floor - sum(parts.values()))
        drafts = work.num_speculative_tokens
        key = (rows, work.num_logits, work.num_draft_seqs, drafts)
        behind = self._behind.get(key)
        if behind is None:
            behind = (self._drafting.head(work.num_logits), self._drafting.drafts(work))
            self._behind[key] = behind
        parts["head"], parts["drafter"] = behind
        parts["host"] = self._constants["step_host"]
        return StepCost(sum(parts.values()), parts)

    def moved_bytes(self, work: StepWork) -> dict[str, float]:
        """Bytes that one rank moves in a step, on average over the ranks; activations left out.

        The keys are those of :class:`~kimik3_lab.performance.step_bytes.StepBytes`, and for a step
        of decodes under even routing without reuse so are the values.
        """
        return {
            "trunk": self.dense.weight_bytes,
            "experts": self.experts.weight_bytes(work),
            "state": self.kda.moved_bytes(work),
            "rows": self.mla.read_bytes(work),
        }

    def floor_seconds(self, work: StepWork) -> float:
        """Time that no kernel can beat: bytes at full bandwidth, or operations at full rate."""
        flops = self.dense.flops(work) + self.mla.pair_flops(work)
        arithmetic = flops / self.gpu.bf16_flops
        arithmetic += self.experts.flops(work) / (self.gpu.fp8_flops or self.gpu.bf16_flops)
        stages = self.parallel.pp
        return max(sum(self.moved_bytes(work).values()) / self.gpu.bandwidth, arithmetic / stages)

    def _row_parts(self, rows: int) -> dict[str, float]:
        """Parts that depend on the number of rows alone."""
        config, values = self.config, self._constants
        parts = self.dense.parts(rows)
        hidden = 2.0 * config.hidden_size * rows
        latent = 2.0 * config.routed_expert_hidden_size * rows
        reduce, layers = self._collectives.all_reduce, config.num_hidden_layers
        exchanged = layers * reduce(hidden) + self.experts.layers * reduce(latent)
        if rows > self.graph_rows:
            # The shared experts' sum, too; in a graph it hides behind the routed experts.
            exchanged += self.experts.layers * reduce(hidden)
        parts["all_reduce"] = exchanged
        moved = hidden * self._streams
        parts["residuals_and_norms"] = layers * values["elementwise_latency"] + moved / (
            self.gpu.bandwidth * values["elementwise_bandwidth"]
        )
        if self.parallel.pp > 1:
            parts["pipeline"] = self._hand_over(hidden)
        return parts

    def _exchange_rows(self, rows: int) -> float:
        """Give every rank the rows of all copies, and take back what its experts made of them."""
        every = 2.0 * self.config.routed_expert_hidden_size * rows * self.parallel.dp
        return self.experts.layers * 2 * self._dispatch.gather(every)

    def _context_exchange(self, rows: int) -> float:
        """Send queries to all ranks and partial outputs back, in every MLA layer."""
        config = self.config
        query = 2.0 * rows * config.num_attention_heads * config.mla_cache_dim
        output = 2.0 * rows * config.num_attention_heads * config.kv_lora_rank
        gather = self._context.gather
        return self.mla.layers * (gather(query) + gather(output))

    def _hand_over(self, hidden: float) -> float:
        """Send the running sum and all closed blocks to the next stage, once a boundary."""
        config, gpu = self.config, self.gpu
        blocks = -(-config.num_hidden_layers // config.attn_res_block_size)
        inside = self.parallel.num_gpus <= gpu.domain_gpus
        rate = gpu.link_bandwidth if inside else gpu.scale_out_bandwidth
        return (self.parallel.pp - 1) * (10e-6 + hidden * (1 + blocks) / rate)

"""What is simulated: a preset on some hardware, under one scenario.

Needs the standard library, the scheduler and the cost model. Lessons 11 and 12 change one field at
a time. A specification holds plain data only, so it can be sent to another process, which makes
engine and cost model itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, cast

from kimik3_lab.config import K3Config
from kimik3_lab.performance.capacity import KV_ITEMSIZE, UTILIZATION
from kimik3_lab.performance.hardware import Accelerator, accelerator
from kimik3_lab.performance.parallelism import Parallelism
from kimik3_lab.performance.scenarios import Scenario
from kimik3_lab.serving.async_scheduler import make_scheduler
from kimik3_lab.serving.config import CacheConfig, SchedulerConfig
from kimik3_lab.serving.engine import Engine
from kimik3_lab.serving.kv_cache_capacity import blocks_per_request
from kimik3_lab.serving.kv_cache_groups import group_layers, kda_state_bytes, unify_page_size
from kimik3_lab.serving.presets import Preset
from kimik3_lab.serving.scheduler import Scheduler
from kimik3_lab.simulation.acceptance import AcceptanceModel
from kimik3_lab.simulation.data_parallel import LockstepScheduler
from kimik3_lab.simulation.executor import SimulatedExecutor, StepCosts

__all__ = ["RESERVED_BYTES", "SimulationSpec"]

#: Memory of a GPU that goes to activations, captured graphs, communication and the drafter. The
#: weights leave 50.4 GiB of the usable part of a B300, and vLLM had 46.48 GiB of it for its cache
#: (https://github.com/vllm-project/vllm/pull/51855).
RESERVED_BYTES = 4 * 2**30


@dataclass(frozen=True)
class SimulationSpec:
    """Everything that decides what a simulated machine does, but the load.

    Attributes
    ----------
    preset
        Rules of scheduler and cache, and how steps are computed.
    hardware
        Name of a GPU, or a GPU of one's own.
    parallel
        How the model is spread over GPUs. Each of ``dp`` copies has a scheduler and a cache of its
        own (:mod:`kimik3_lab.simulation.data_parallel`).
    scenario
        What public figures cannot settle.
    constants
        Constants of the cost model (:data:`kimik3_lab.performance.constants.CONSTANTS`) that are to
        have another value.
    scheduler, cache
        Fields of :class:`SchedulerConfig` and :class:`CacheConfig` that differ from the preset, for
        each copy.
    config
        Shape of the model.
    kv_dtype
        Of the MLA rows: ``bf16`` or ``fp8``.
    utilization
        Share of a GPU's memory that the server may use.
    num_blocks
        Of a copy's cache; left out, as many as fit beside weights and :data:`RESERVED_BYTES`.
    max_model_len
        Longest request; left out, the model's limit or what the cache can hold, if that is less
        (vLLM's ``--max-model-len auto``).

    Examples
    --------
    >>> from kimik3_lab.serving.presets import V0_27_1
    >>> spec = SimulationSpec(V0_27_1)
    >>> spec.cache_config.block_size, spec.cache_config.num_blocks
    (896, 2012)
    """

    preset: Preset
    hardware: str | Accelerator = "B300"
    parallel: Parallelism = field(default_factory=Parallelism)
    scenario: Scenario = field(default_factory=Scenario.default)
    constants: Mapping[str, float] = field(default_factory=dict)
    scheduler: Mapping[str, Any] = field(default_factory=dict)
    cache: Mapping[str, Any] = field(default_factory=dict)
    config: K3Config = field(default_factory=K3Config.released, repr=False)
    kv_dtype: str = "bf16"
    utilization: float = UTILIZATION
    num_blocks: int | None = None
    max_model_len: int | None = None

    def __post_init__(self) -> None:
        if self.kv_dtype not in KV_ITEMSIZE:
            raise ValueError(
                f"kv_dtype must be one of {', '.join(KV_ITEMSIZE)}, got {self.kv_dtype!r}"
            )
        if not 0.0 < self.utilization <= 1.0:
            raise ValueError(f"utilization is a share above 0, up to 1, got {self.utilization}")
        for name, kind in (("scheduler", SchedulerConfig), ("cache", CacheConfig)):
            known = {item.name for item in fields(kind)}
            if unknown := sorted(set(getattr(self, name)) - known):
                raise ValueError(
                    f"no {name} setting {', '.join(unknown)}; there are: {', '.join(sorted(known))}"
                )

    # -- memory ----------------------------------------------------------------------------------

    @property
    def accelerator(self) -> Accelerator:
        """The GPU."""
        if isinstance(self.hardware, Accelerator):
            return self.hardware
        return accelerator(self.hardware)

    @property
    def num_speculative_tokens(self) -> int:
        """K."""
        settings = {**self.preset.scheduler, **self.scheduler}
        return int(settings.get("num_speculative_tokens", 0))

    @property
    def room_bytes(self) -> int:
        """Bytes of one GPU that are left for the cache; negative if the weights do not fit."""
        usable = round(self.accelerator.memory_bytes * self.utilization)
        trunk, experts = self.parallel.weight_bytes(self.config)
        return int(usable - trunk - experts - RESERVED_BYTES)

    def _page(self) -> tuple[int, int]:
        """Tokens of a block, and bytes of one on a GPU.

        The page rule of vLLM: a block is so long that its rows take as many bytes as a state.
        """
        kda = self.config.linear_attn_config
        state = kda_state_bytes(
            kda.num_heads // self.parallel.tp,
            kda.head_dim,
            kda.short_conv_kernel_size,
            self.num_speculative_tokens,
        )
        row = self.config.mla_cache_dim * KV_ITEMSIZE[self.kv_dtype]
        page = unify_page_size(state, row)
        size = self.cache.get("block_size", page.block_size)
        layers = {"mla": len(self.config.mla_layer_ids), "kda": len(kda.kda_layers)}
        # With a pipeline each GPU has its share of the layers.
        per_block = group_layers(layers).bytes_per_block(max(size * row, state))
        return size, -(-per_block // self.parallel.pp)

    @property
    def cache_config(self) -> CacheConfig:
        """Settings of the cache, which each data-parallel copy has one of.

        Raises
        ------
        ValueError
            If the weights leave no room, with the numbers.
        """
        size, block_bytes = self._page()
        num_blocks = self.num_blocks
        if num_blocks is None:
            num_blocks = max(self.room_bytes, 0) // block_bytes
            if num_blocks < 2:
                raise ValueError(
                    f"{self.parallel.name} on {self.accelerator.name}: weights and "
                    f"{RESERVED_BYTES / 1e9:.1f} GB of reserve leave {self.room_bytes / 1e9:.1f} GB"
                    f" of {self.accelerator.memory_bytes * self.utilization / 1e9:.1f} GB; take "
                    "more or larger GPUs, or raise the share of memory that may be used"
                )
        settings: dict[str, Any] = {"block_size": size, "dcp_world_size": self._spread.dcp}
        return self.preset.cache_config(num_blocks, **{**settings, **self.cache})

    @property
    def _spread(self) -> Parallelism:
        """How the model is spread, with the context parallelism that a preset may ask for."""
        settings = {**self.preset.cache, **self.cache}
        if self.parallel.dcp > 1:
            return self.parallel
        return replace(self.parallel, dcp=settings.get("dcp_world_size", 1))

    @property
    def scheduler_config(self) -> SchedulerConfig:
        """Settings of the scheduler."""
        return self.preset.scheduler_config(self._max_model_len(), **self.scheduler)

    def _max_model_len(self) -> int:
        """Find the longest request: the model's limit, or what the cache can hold."""
        if self.max_model_len is not None:
            return self.max_model_len
        cache, k = self.cache_config, self.num_speculative_tokens
        fixed = blocks_per_request(cache, 0, k).total + cache.num_groups
        room = (cache.num_usable_blocks - fixed) * cache.scheduler_block_size
        # The drafter writes behind the last token.
        return max(min(self.config.max_position_embeddings, room - 2 * (k + 1)), 2)

    # -- the machine -----------------------------------------------------------------------------

    def make_costs(self) -> StepCosts:
        """Make the cost model."""
        from kimik3_lab.performance.step_cost import CostModel

        return CostModel(
            self.config,
            self.accelerator,
            self._spread,
            execution=self.preset.execution,
            scenario=replace(self.scenario, cache_itemsize=KV_ITEMSIZE[self.kv_dtype]),
            constants=self.constants,
        )

    def make_engine(self, seed: int = 0, *, cold: bool = False) -> tuple[Engine, SimulatedExecutor]:
        """Make an engine whose executor is simulated.

        Parameters
        ----------
        seed
            Of the accepted lengths.
        cold
            Whether the server has just been started (``cold_start_s`` of the scenario).
        """
        k, scenario = self.num_speculative_tokens, self.scenario
        acceptance = None
        if k:
            acceptance = AcceptanceModel.of_mean(
                scenario.acceptance_length,
                k,
                at=scenario.acceptance_num_drafts,
                spread=scenario.acceptance_spread,
                seed=seed,
            )
        executor = SimulatedExecutor(
            self.make_costs(),
            k,
            acceptance,
            cold_start_s=scenario.cold_start_s if cold else 0.0,
        )
        copies = [
            make_scheduler(self.scheduler_config, self.cache_config)
            for _ in range(self.parallel.dp)
        ]
        # The engine only calls what both kinds have.
        scheduler = copies[0] if len(copies) == 1 else cast(Scheduler, LockstepScheduler(copies))
        return Engine(scheduler, executor), executor

"""A rung of the ladder on one rank: scheduler, executor and drafter over weights that are there.

Needs torch and Triton. The rank ladder builds each rung with it.
"""

from __future__ import annotations

from dataclasses import dataclass

from kimik3_lab.rank.acceptance import Script, ScriptedProposer
from kimik3_lab.rank.workload import ObservedExecutor
from kimik3_lab.reference.drafter import DSparkDrafter
from kimik3_lab.reference.model import K3ForCausalLM
from kimik3_lab.serving.engine import Engine
from kimik3_lab.serving.executors.cuda_graphs import DecodeGraphs
from kimik3_lab.serving.executors.execution import ExecutionConfig
from kimik3_lab.serving.executors.torch_executor import TorchExecutor
from kimik3_lab.serving.executors.triton_model import TritonK3
from kimik3_lab.serving.executors.triton_moe import TritonMoE
from kimik3_lab.serving.presets import LADDER, Preset
from kimik3_lab.serving.scheduler import Scheduler

__all__ = ["Rung", "Sizes", "make_rung", "rank_presets"]


@dataclass(frozen=True)
class Sizes:
    """Sizes that the presets leave open.

    Attributes
    ----------
    prompt_tokens, output_tokens : int
        Of a request.
    num_drafts : int
        K.
    num_blocks : int
        Of the cache.
    bound : int
        Length that recorded steps are made for, so that one recording serves the whole cell.
    block_size : int, optional
        Instead of the preset's, for small models.
    max_num_seqs : int, optional
        Instead of the preset's, which reserves drafts for 1,024 requests.
    batch : int, optional
        Divides every budget of the presets, for small models: 1 leaves them alone.
    """

    prompt_tokens: int = 8000
    output_tokens: int = 1000
    num_drafts: int = 8
    num_blocks: int = 1400
    bound: int = 16384
    block_size: int = 896
    max_num_seqs: int = 1024
    batch: int = 1

    @property
    def max_model_len(self) -> int:
        """Room for a request and the drafts behind it."""
        return self.prompt_tokens + self.output_tokens + 4 * self.num_drafts


@dataclass
class Rung:
    """What serves one rung."""

    preset: Preset
    engine: Engine
    executor: TorchExecutor
    observed: ObservedExecutor
    script: Script

    @property
    def graphs(self) -> DecodeGraphs | None:
        """Recorded steps, if there are any."""
        return self.executor.graphs

    @property
    def model(self) -> TritonK3 | None:
        """The model on our kernels."""
        compute = self.executor.compute
        inner = compute.compute if isinstance(compute, DecodeGraphs) else compute
        return inner if isinstance(inner, TritonK3) else None

    def experts(self) -> list[TritonMoE]:
        """Return the MoE layers."""
        return [] if self.model is None else self.model.moe_layers


#: What a rung changes can be seen only where prompts begin alike, or with more than one GPU.
_NOTHING_TO_SEE = {
    "padding alone",
    "exact prompt boundaries",
    "sparse retention",
    "context parallelism",
}


def rank_presets() -> tuple[Preset, ...]:
    """Return the rungs that matter to one GPU and to prompts that have nothing in common.

    Settings add up, so a rung that is left out is in the next one.

    Examples
    --------
    >>> [preset.name for preset in rank_presets()][8:]
    ['prefix caching', 'internal checkpoints', 'recovery records', 'look-ahead cap']
    """
    return tuple(p for p in LADDER if p.name not in _NOTHING_TO_SEE)


def make_rung(
    preset: Preset,
    model: K3ForCausalLM,
    drafter: DSparkDrafter | None,
    sizes: Sizes,
    script: Script,
    *,
    backend: str = "triton",
    graphs: bool | None = None,
    choices: dict[tuple[int, int, int], object] | None = None,
) -> Rung:
    """Build a rung over a model that is shared by all.

    Parameters
    ----------
    preset
        The rung.
    model, drafter
        Without a drafter nothing is speculated.
    sizes
        Of workload and cache.
    script
        Says tokens and acceptance.
    backend
        ``"reference"`` for tests.
    graphs
        Whether steps are recorded; left out, they are on a GPU.
    choices
        Measured choices for products with few rows.
    """
    if graphs is None:
        graphs = model.device.type == "cuda" and backend == "triton"
    limits = {
        name: value // sizes.batch
        for name, value in preset.scheduler.items()
        if name == "max_num_batched_tokens"
    }
    speculation = {} if drafter is not None else {
        "speculative_method": None,
        "num_speculative_tokens": 0,
    }  # fmt: skip
    if drafter is not None:
        speculation = {"num_speculative_tokens": sizes.num_drafts}
    scheduler_config = preset.scheduler_config(
        sizes.max_model_len, **{**limits, **speculation, "max_num_seqs": sizes.max_num_seqs}
    )
    states = {} if drafter is not None else {"speculative_states": "slots"}
    cache_config = preset.cache_config(
        sizes.num_blocks, **{"block_size": sizes.block_size, **states}
    )
    execution = ExecutionConfig.from_preset(preset, cuda_graphs=graphs)
    executor = TorchExecutor(
        model,
        cache_config,
        sizes.max_num_seqs,
        backend=backend,  # type: ignore[arg-type]
        execution=execution,
        drafter=drafter,
        num_speculative_tokens=sizes.num_drafts if drafter is not None else None,
    )
    executor.verifier = script.verify
    if executor.proposer is not None:
        executor.proposer = ScriptedProposer(executor.proposer, script)  # type: ignore[assignment]
    observed = ObservedExecutor(executor)
    engine = Engine(Scheduler(scheduler_config, cache_config), observed)
    rung = Rung(preset, engine, executor, observed, script)
    if rung.graphs is not None:
        rung.graphs.shortest = sizes.bound
    if rung.model is not None and choices:
        rung.model.skinny.choices.update(choices)  # type: ignore[arg-type]
    return rung

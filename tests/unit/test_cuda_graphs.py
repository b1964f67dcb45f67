"""Recorded decode steps: buffers, shapes and counters, with a recorder that only repeats.

Whether a GPU replays what it recorded is in tests/kernels/test_triton_backend.py.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from drafter_support import random_drafter

from kimik3_lab.config import K3Config
from kimik3_lab.drafter_config import DSparkConfig
from kimik3_lab.reference.initialization import random_model
from kimik3_lab.reference.model import K3ForCausalLM
from kimik3_lab.serving import CacheConfig, Engine, SamplingParams, Scheduler, SchedulerConfig
from kimik3_lab.serving.executors.cuda_graphs import CudaRecorder, DecodeGraphs
from kimik3_lab.serving.executors.graph_recordings import no_collection
from kimik3_lab.serving.executors.torch_executor import TorchExecutor

PROMPTS = [[0, 5, 9], [0, 7, 7, 8, 3, 20, 21], [0, *range(10, 64), *range(5, 20)], [0, 4]]


@pytest.fixture(scope="module")
def model() -> K3ForCausalLM:
    return random_model(K3Config.micro(), seed=0, dtype=torch.float64).requires_grad_(False)


def repeat(function: Callable[[], None], warm_up: Callable[[], None]) -> Callable[[], None]:
    """Record nothing: the function itself is what repeats it, on the same buffers."""
    return function


class Run:
    """The engine with graphs or without, over prompts of any lengths."""

    def __init__(self, model: K3ForCausalLM, *, graphs: bool, drafts: int = 0, **options) -> None:
        config, kwargs = {}, {}
        if drafts:
            config = {"speculative_method": "dspark", "num_speculative_tokens": drafts}
            drafter = random_drafter(DSparkConfig.for_target(model.config), seed=1)
            kwargs = {"drafter": drafter, "num_speculative_tokens": drafts}
        max_graphs = options.pop("max_graphs", 64)
        cache = CacheConfig(num_blocks=33, block_size=16, **options)
        self.executor = TorchExecutor(model, cache, 4, **kwargs)
        self.graphs: DecodeGraphs | None = None
        if graphs:
            self.graphs = DecodeGraphs(
                self.executor.compute, self.executor.cache, recorder=repeat, max_graphs=max_graphs
            )
            self.executor.compute = self.graphs
        self.engine = Engine(Scheduler(SchedulerConfig(4, 96, 128, **config), cache), self.executor)

    def generate(self, max_tokens: int = 12) -> list[list[int]]:
        params = [
            SamplingParams(max_tokens=max_tokens + i, ignore_eos=True) for i in range(len(PROMPTS))
        ]
        results = self.engine.generate(PROMPTS, params, progress=False)
        return [result.token_ids for result in results]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"drafts": 3},
        {"drafts": 3, "speculative_states": "records"},
        {"drafts": 2, "num_kda_groups": 2, "enable_prefix_caching": True},
        {"num_kda_groups": 2, "enable_prefix_caching": True},
    ],
    ids=str,
)
def test_no_token_changes(model: K3ForCausalLM, options: dict) -> None:
    plain, recorded = Run(model, graphs=False, **options), Run(model, graphs=True, **options)
    assert recorded.generate() == plain.generate()
    assert recorded.graphs is not None
    assert recorded.graphs.num_replays > recorded.graphs.num_recordings > 0
    # Everything else costs what it cost before.
    ours, theirs = recorded.executor.counters, plain.executor.counters
    assert ours.launches < theirs.launches
    ours.launches = theirs.launches
    assert ours == theirs
    assert not recorded.executor.cache.latent[:, 0].any()


def test_a_graph_is_made_for_each_shape_and_used_again(model: K3ForCausalLM) -> None:
    run = Run(model, graphs=True)
    run.generate()
    made = run.graphs.num_recordings
    # Contexts of up to 64 and of up to 128 rows; four requests, and fewer as they end.
    assert 2 <= made <= 8
    run.generate()
    assert run.graphs.num_recordings == made


def test_graphs_that_are_not_used_are_dropped(model: K3ForCausalLM) -> None:
    few = Run(model, graphs=True, max_graphs=1)
    assert few.generate() == Run(model, graphs=False).generate()
    assert len(few.graphs._graphs) == 1
    before = few.graphs.num_recordings
    few.generate()
    assert few.graphs.num_recordings > before


def test_steps_with_prompts_are_computed_as_always(model: K3ForCausalLM) -> None:
    run = Run(model, graphs=True)
    run.engine.generate([PROMPTS[0]], SamplingParams(max_tokens=1), progress=False)
    assert run.graphs.num_replays == run.graphs.num_recordings == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_without_a_gpu_there_is_nothing_to_record_with() -> None:
    with pytest.raises(RuntimeError, match="leave cuda_graphs at False"):
        CudaRecorder()


@pytest.mark.parametrize("enabled", [True, False])
def test_nothing_is_collected_while_a_graph_is_recorded(enabled: bool) -> None:
    """A cycle that holds an older graph is freed before, not in the middle."""

    class Cycle:
        def __init__(self) -> None:
            self.me = self

    before, freed = gc.isenabled(), weakref.ref(Cycle())
    gc.enable() if enabled else gc.disable()
    try:
        with pytest.raises(RuntimeError, match="capture"), no_collection():
            assert freed() is None
            assert not gc.isenabled()
            raise RuntimeError("capture failed")
        assert gc.isenabled() is enabled
    finally:
        gc.enable() if before else gc.disable()

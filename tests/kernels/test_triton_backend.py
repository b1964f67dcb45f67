"""The executor's Triton backend against the reference: each part, then the whole engine."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="running kernels needs Triton")

from kimik3_lab.config import K3Config
from kimik3_lab.drafter_config import DSparkConfig
from kimik3_lab.paths import default_model_dir
from kimik3_lab.reference import checkpoint, mxfp4
from kimik3_lab.reference.drafter import DSparkDrafter
from kimik3_lab.reference.initialization import random_model
from kimik3_lab.reference.model import K3ForCausalLM
from kimik3_lab.reference.moe import LatentMoE
from kimik3_lab.reference.residuals import ResidualStream
from kimik3_lab.serving import CacheConfig, Engine, SamplingParams, Scheduler, SchedulerConfig
from kimik3_lab.serving.engine import GenerationResult
from kimik3_lab.serving.executors.execution import ExecutionConfig
from kimik3_lab.serving.executors.kda_states import Commit
from kimik3_lab.serving.executors.paged_cache import PagedCache
from kimik3_lab.serving.executors.paged_mixer import PagedMixer
from kimik3_lab.serving.executors.step_counters import StepCounters
from kimik3_lab.serving.executors.step_metadata import StepMetadata
from kimik3_lab.serving.executors.step_parts import Segment, StateRows
from kimik3_lab.serving.executors.torch_executor import TorchExecutor
from kimik3_lab.serving.executors.triton_kda_inputs import KdaWeights
from kimik3_lab.serving.executors.triton_linear import Skinny
from kimik3_lab.serving.executors.triton_mixer import TritonMixer
from kimik3_lab.serving.executors.triton_model import TritonK3, TritonKda, TritonStream
from kimik3_lab.serving.executors.triton_moe import TritonMoE, pack_experts

CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(scope="module")
def model(device: str) -> K3ForCausalLM:
    return random_model(K3Config.micro(), seed=0).requires_grad_(False).to(device)


def normal(seed: int, *shape: int, device: str = "cpu") -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device)


# -- attention residuals -----------------------------------------------------------------------


def test_the_stream_reads_what_the_reference_reads(model: K3ForCausalLM, device: str) -> None:
    """Six sublayers, with blocks that begin at the first and at the fifth."""
    ours = TritonStream(normal(0, 3, 64, device=device), 2, 1e-5, StepCounters())
    theirs = ResidualStream(normal(0, 3, 64, device=device))
    layer = model.model.layers[0]
    norm = layer.input_layernorm
    for i in range(6):
        query, key_norm = (
            normal(10 + i, 1, 64, device=device),
            1 + normal(20 + i, 64, device=device),
        )
        x = ours.read(query, key_norm, norm, closes_block=i in (0, 4))
        torch.testing.assert_close(x, norm(theirs.read(query, key_norm)), **CLOSE)
        if i in (0, 4):
            theirs.start_block()
        output = normal(30 + i, 3, 64, device=device)
        ours.add(output)
        theirs.add(output)
        torch.testing.assert_close(ours.prefix, theirs.prefix, **CLOSE)


def test_the_stream_refuses_what_has_no_order(device: str) -> None:
    stream = TritonStream(torch.ones(1, 8, device=device), 1, 1e-5, StepCounters())
    stream.add(torch.ones(1, 8, device=device))
    with pytest.raises(RuntimeError, match="two outputs without a read"):
        stream.add(torch.ones(1, 8, device=device))


# -- experts -----------------------------------------------------------------------------------


def on_the_grid(moe: LatentMoE) -> None:
    """Round all experts to what an MXFP4 checkpoint can hold."""
    for expert in moe.experts:
        for linear in (expert.w1, expert.w2, expert.w3):
            linear.weight.copy_(mxfp4.dequantize(*mxfp4.quantize(linear.weight)))


@pytest.mark.parametrize("kind", ["bf16", "mxfp4"])
@pytest.mark.parametrize("deferred", [False, True])
def test_the_experts_layer(kind: str, deferred: bool, device: str) -> None:
    config = dataclasses.replace(K3Config.micro(), expert_dtype=kind)
    moe = random_model(config, seed=3).requires_grad_(False).to(device)
    moe = moe.model.layers[1].block_sparse_moe
    if kind == "mxfp4":
        on_the_grid(moe)
    counters = StepCounters()
    skinny = Skinny(enabled=deferred, counters=counters)
    ours = TritonMoE(moe, config, deferred_finalize=deferred, skinny=skinny)
    hidden = normal(1, 5, 64, device=device)
    torch.testing.assert_close(ours(hidden), moe(hidden), **CLOSE)
    assert counters.launches == (6 if deferred else 7)


def test_experts_off_the_grid_are_not_packed(device: str) -> None:
    config = dataclasses.replace(K3Config.micro(), expert_dtype="mxfp4")
    moe = LatentMoE(config, device=device).requires_grad_(False)
    for i, expert in enumerate(moe.experts):
        expert.w1.weight.copy_(normal(i, *expert.w1.weight.shape, device=device))
    with pytest.raises(ValueError, match="not on its grid"):
        pack_experts(moe, config)


# -- KDA ---------------------------------------------------------------------------------------


class Pair:
    """The same steps through the reference's mixer and ours, each with a cache of its own.

    Requests have rows of the cache as an executor would give them: ``states="slots"`` keeps a row
    for each draft, ``"records"`` one row and records.
    """

    NUM_DRAFTS = 2

    def __init__(self, model: K3ForCausalLM, states: str, mixed_batch: str, groups: int) -> None:
        config = model.config
        cache_config = CacheConfig(
            num_blocks=24,
            block_size=16,
            num_kda_groups=groups,
            enable_prefix_caching=groups > 0,
            speculative_states=states,
        )
        execution = ExecutionConfig(mixed_batch=mixed_batch)
        caches = [
            PagedCache(
                config,
                cache_config,
                8,
                num_speculative_tokens=self.NUM_DRAFTS,
                device=model.device,
            )
            for _ in range(2)
        ]
        for cache in caches:
            cache.recurrent.fill_(torch.nan)
            cache.conv.fill_(torch.nan)
        kda = [model.model.layers[i].self_attn for i in config.kda_layer_ids]
        weights = {layer.layer_id: KdaWeights.of(layer) for layer in kda}
        self.model, self.layers, self.groups = model, kda, caches[0].num_state_groups
        skinny = Skinny(enabled=True, counters=caches[1].counters)
        self.fused = {
            layer.layer_id: TritonKda(SimpleNamespace(self_attn=layer), skinny) for layer in kda
        }
        self.theirs = PagedMixer(config, caches[0], execution)
        self.ours = TritonMixer(config, caches[1], weights, execution)
        self.size = 1 + caches[0].num_scratch
        self.last_row = caches[0].recurrent.shape[1] - 1
        self.seed = 0

    def rows(self, request: int, num_accepted: int = 1, checkpoint: int = 0) -> list[StateRows]:
        """State rows of a request in each group; row 0 is the null block where there are groups."""
        first = 1 + request * self.size
        return [
            StateRows(list(range(first, first + self.size)), num_accepted, checkpoint)
            for _ in range(self.groups)
        ]

    def begin(self, *requests: int) -> None:
        for mixer in (self.theirs, self.ours):
            mixer.cache.reset_states([self.rows(r)[0].rows[0] for r in requests])

    def step(self, *segments: Segment) -> None:
        """Run all KDA layers over random inputs, and compare outputs and whole caches."""
        ordered = sorted(segments, key=lambda s: s.order)
        total = sum(s.count for s in ordered)
        for mixer in (self.theirs, self.ours):
            mixer.step = StepMetadata(mixer.cache, ordered)
        for layer in self.layers:
            self.seed += 1
            x = normal(self.seed, total, 64, device=str(self.model.device))
            out = self.fused[layer.layer_id](x, self.ours)
            torch.testing.assert_close(out, layer(x, self.theirs), **CLOSE)
        self.compare()

    def commit(self, *commits: Commit) -> None:
        self.theirs.commit(commits)
        self.ours.commit(commits)
        self.compare()

    def compare(self) -> None:
        ours, theirs = self.ours.cache, self.theirs.cache
        torch.testing.assert_close(ours.recurrent, theirs.recurrent, **CLOSE, equal_nan=True)
        # Columns behind what is kept may hold anything; those that the next step can read are
        # compared by that step.
        history = ours.history
        torch.testing.assert_close(
            ours.conv[..., :history], theirs.conv[..., :history], **CLOSE, equal_nan=True
        )


@pytest.mark.slow
@pytest.mark.parametrize("states", ["slots", "records"])
@pytest.mark.parametrize(("groups", "mixed_batch"), [(0, "zero_copy"), (2, "gather")])
def test_a_mixed_step_does_what_the_reference_does(
    model: K3ForCausalLM, states: str, mixed_batch: str, groups: int
) -> None:
    pair = Pair(model, states, mixed_batch, groups)
    pair.begin(0, 1, 2, 3)
    # Two prompts, one with a state exported from its inside.
    pair.step(
        Segment(0, 0, 5, 0, pair.rows(0)),
        Segment(1, 0, 20, 0, pair.rows(1, checkpoint=pair.last_row), checkpoint_at=16),
    )
    # Drafts for one, a token for another, and the prompts of two more.
    pair.step(
        Segment(0, 5, 3, 2, pair.rows(0)),
        Segment(1, 20, 1, 0, pair.rows(1)),
        Segment(2, 0, 4, 0, pair.rows(2)),
        Segment(3, 0, 2, 0, pair.rows(3)),
    )
    assert (pair.ours.counters.gather_bytes > 0) == (mixed_batch == "gather")
    accepted = 2
    if states == "records":
        rows = tuple(r.rows[0] for r in pair.rows(0))
        pair.commit(Commit(accepted, rows, 0, rows))
        accepted = 1
    # On from the middle of a verification: drafts again, beside a request that has one row each.
    pair.step(
        Segment(0, 7, 3, 2, pair.rows(0, accepted)),
        Segment(2, 4, 3, 2, pair.rows(2)),
        Segment(3, 2, 1, 0, pair.rows(3)),
    )
    accepted = 3
    if states == "records":
        rows = tuple(r.rows[0] for r in pair.rows(0))
        other = tuple(r.rows[0] for r in pair.rows(2))
        boundary = tuple(pair.last_row - 1 for _ in rows)
        pair.commit(Commit(3, rows, 2, boundary), Commit(1, other, 0, other))
        accepted = 1
    pair.step(Segment(0, 10, 1, 0, pair.rows(0, accepted)), Segment(2, 5, 1, 0, pair.rows(2)))
    ours, theirs = pair.ours.counters, pair.theirs.counters
    assert ours.kda_state_writes == theirs.kda_state_writes
    assert ours.recovery_commits == theirs.recovery_commits == (3 if states == "records" else 0)


def test_float64_is_refused(model: K3ForCausalLM) -> None:
    wide = random_model(K3Config.micro(), seed=0, dtype=torch.float64)
    cache = PagedCache(wide.config, CacheConfig(num_blocks=4), 1, dtype=torch.float64)
    with pytest.raises(TypeError, match="load the model in float32"):
        TritonK3(wide, cache)


# -- the engine --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("states", "groups"), [("slots", 0), ("records", 3)])
def test_the_engine_says_the_same(model: K3ForCausalLM, states: str, groups: int) -> None:
    """Greedy tokens and their logarithms, with a drafter: prompts, verification, roll-back.

    The micro K3 has two KDA layers, so of three state groups one is empty.
    """
    assert len(model.config.kda_layer_ids) < 3
    torch.manual_seed(0)
    drafter = DSparkDrafter(DSparkConfig.for_target(model.config)).eval().requires_grad_(False)
    prompts = [[0, 5, 9], [0, 7, 7, 8, 3]]
    params = SamplingParams(max_tokens=4, ignore_eos=True, logprobs=2)
    results = {}
    for backend in ("reference", "triton"):
        cache = CacheConfig(num_blocks=33, speculative_states=states, num_kda_groups=groups)
        config = SchedulerConfig(2, 32, 64, speculative_method="dspark", num_speculative_tokens=2)
        executor = TorchExecutor(
            model, cache, 2, backend=backend, drafter=drafter, num_speculative_tokens=2,
            execution=ExecutionConfig(deferred_finalize=True),
        )  # fmt: skip
        engine = Engine(Scheduler(config, cache), executor)
        results[backend] = engine.generate(prompts, params, progress=False)
        assert executor.counters.drafter_forwards > 0
    for ours, theirs in zip(results["triton"], results["reference"], strict=True):
        assert ours.token_ids == theirs.token_ids
        for a, b in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
            assert [token for token, _ in a.top] == [token for token, _ in b.top]


# -- on a GPU ----------------------------------------------------------------------------------


def _says(
    model: K3ForCausalLM, backend: str, prompts: list[list[int]], *, cuda_graphs: bool = False
) -> tuple[list[GenerationResult], TorchExecutor]:
    """Greedy continuations of all prompts, decoded together."""
    cache = CacheConfig(num_blocks=129)
    executor = TorchExecutor(
        model, cache, 4, backend=backend, execution=ExecutionConfig(cuda_graphs=cuda_graphs)
    )
    engine = Engine(Scheduler(SchedulerConfig(4, 256, 256), cache), executor)
    params = SamplingParams(max_tokens=32, ignore_eos=True, logprobs=2)
    return engine.generate(prompts, params, progress=False), executor


def _agree(ours: GenerationResult, theirs: GenerationResult) -> int:
    """Compare two continuations up to a step where two tokens were as good; return its number."""
    for step, (a, b) in enumerate(zip(ours.logprobs, theirs.logprobs, strict=True)):
        assert b.top[0][1] == pytest.approx(dict(a.top).get(b.top[0][0]), abs=5e-3)
        if a.token_id != b.token_id:
            assert b.top[0][1] - b.top[1][1] < 1e-2
            return step
    return len(ours.token_ids)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_recorded_steps_say_what_launched_ones_say(model: K3ForCausalLM) -> None:
    prompts = [[0, 5, 9], [0, 7, 7, 8, 3], [0, *range(4, 64)]]
    launched, plain = _says(model, "triton", prompts)
    recorded, executor = _says(model, "triton", prompts, cuda_graphs=True)
    assert [r.token_ids for r in recorded] == [r.token_ids for r in launched]
    assert executor.counters.launches < plain.counters.launches / 10
    assert executor.counters.kda_state_writes == plain.counters.kda_state_writes


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_recorded_verification_commits_what_launched_ones_commit(model: K3ForCausalLM) -> None:
    """Records are the graph's own memory, and the commit after it reads them."""
    torch.manual_seed(0)
    drafter = DSparkDrafter(DSparkConfig.for_target(model.config)).eval().requires_grad_(False)
    cache = CacheConfig(num_blocks=65, speculative_states="records")
    said = []
    for cuda_graphs in (False, True):
        config = SchedulerConfig(4, 64, 128, speculative_method="dspark", num_speculative_tokens=3)
        executor = TorchExecutor(
            model, cache, 4, backend="triton", drafter=drafter, num_speculative_tokens=3,
            execution=ExecutionConfig(cuda_graphs=cuda_graphs),
        )  # fmt: skip
        engine = Engine(Scheduler(config, cache), executor)
        params = SamplingParams(max_tokens=24, ignore_eos=True)
        results = engine.generate([[0, 5, 9], [0, 7, 7, 8]], params, progress=False)
        said.append([result.token_ids for result in results])
    assert said[0] == said[1]


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_trained_model_says_the_same_on_both_backends() -> None:
    """MXFP4 experts, KDA heads of 64: what ``k3lab serve`` runs."""
    trained = checkpoint.load(default_model_dir(), dtype=torch.float32).to("cuda")
    prompts = [[0, *range(100, 140)], [0, 300, 301, 302], [0, *range(700, 900)]]
    ours, _ = _says(trained, "triton", prompts)
    theirs, _ = _says(trained, "reference", prompts)
    steps = [_agree(a, b) for a, b in zip(ours, theirs, strict=True)]
    assert sum(steps) > 32  # of 96

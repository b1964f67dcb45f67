"""Steps in flight on the Triton backend: the same tokens, and on a GPU nobody waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="running kernels needs Triton")

from kimik3_lab.config import K3Config
from kimik3_lab.drafter_config import DSparkConfig
from kimik3_lab.reference.drafter import DSparkDrafter
from kimik3_lab.reference.initialization import random_model
from kimik3_lab.reference.model import K3ForCausalLM
from kimik3_lab.serving import CacheConfig, Engine, SamplingParams, SchedulerConfig, make_scheduler
from kimik3_lab.serving.executors.cuda_graphs import DecodeGraphs
from kimik3_lab.serving.executors.drafts import DraftRequest
from kimik3_lab.serving.executors.execution import ExecutionConfig
from kimik3_lab.serving.executors.torch_executor import TorchExecutor

K = 2
#: How drafts are taken back, with and without columns.
STATES = {
    "none": {},
    "slots": {"speculative_states": "slots"},
    "columns": {
        "speculative_states": "slots", "num_kda_groups": 2, "enable_prefix_caching": True,
    },
    "records": {
        "speculative_states": "records", "num_kda_groups": 2, "enable_prefix_caching": True,
    },
}  # fmt: skip
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(scope="module")
def model(device: str) -> K3ForCausalLM:
    return random_model(K3Config.micro(), seed=0).requires_grad_(False).to(device)


@pytest.fixture(scope="module")
def drafter(model: K3ForCausalLM) -> DSparkDrafter:
    torch.manual_seed(0)
    return DSparkDrafter(DSparkConfig.for_target(model.config)).eval().requires_grad_(False)


def make_engine(
    model: K3ForCausalLM,
    drafter: DSparkDrafter | None,
    states: dict[str, Any],
    *,
    ahead: bool,
    cuda_graphs: bool = False,
) -> Engine:
    cache = CacheConfig(num_blocks=65, block_size=16, **states)
    speculation = {"speculative_method": "dspark", "num_speculative_tokens": K} if drafter else {}
    config = SchedulerConfig(4, 64, 128, async_scheduling=ahead, **speculation)
    executor = TorchExecutor(
        model, cache, 4, backend="triton", drafter=drafter,
        num_speculative_tokens=K if drafter else None,
        execution=ExecutionConfig(deferred_finalize=True, cuda_graphs=cuda_graphs),
    )  # fmt: skip
    return Engine(make_scheduler(config, cache), executor)


def say(
    engine: Engine, prompts: list[list[int]], max_tokens: int, **params: Any
) -> list[list[int]]:
    sampling = SamplingParams(max_tokens, ignore_eos=True, **params)
    return [r.token_ids for r in engine.generate(prompts, sampling, progress=False)]


def repeat(function: Callable[[], None], warm_up: Callable[[], None]) -> Callable[[], None]:
    """Record nothing: the function itself is what repeats it, on the same buffers."""
    return function


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the tests for a GPU say more")
def test_no_token_changes_in_the_interpreter(model: K3ForCausalLM, drafter: DSparkDrafter) -> None:
    """Across a block boundary, with the drafter's kernels, recorded as a GPU would."""
    prompts = [[0, *range(5, 18)], [0, 7]]
    engine = make_engine(model, drafter, STATES["records"], ahead=True)
    executor = engine.executor
    graphs = executor.compute = DecodeGraphs(executor.compute, executor.cache, recorder=repeat)
    graphs.shortest = 32
    assert say(engine, prompts, 4) == [
        model.generate(prompt, 4, stop_token_ids=()) for prompt in prompts
    ]
    assert graphs.num_replays > 0
    assert executor.num_host_waits == 1


def test_the_tables_are_drafted_from_and_into(
    model: K3ForCausalLM, drafter: DSparkDrafter, device: str
) -> None:
    """Tokens would not tell: a wrong draft is rejected. Seats change while their number stays."""
    executor = make_engine(model, drafter, STATES["none"], ahead=True).executor
    proposer, tables = executor.proposer, executor.async_steps.tables
    proposer.latent.normal_(generator=torch.Generator(device).manual_seed(0))
    for seat in range(4):
        executor.cache.set_blocks(seat, 0, [1 + 2 * seat, 2 + 2 * seat])
    tables.last_token[:4] = torch.tensor([5, 6, 7, 8])
    tables.num_computed[:4] = torch.tensor([3, 20, 17, 9])
    params = SamplingParams()
    for seats in ([2, 0, 1], [3, 0, 2], [1]):
        index = torch.tensor(seats, device=device)
        requests = [DraftRequest(f"r{seat}", 0, 20, [], params, None, seat) for seat in seats]
        anchors, contexts = tables.last_token[index], tables.num_computed[index]
        expected = tables.drafts.clone()
        expected[index] = proposer.propose_async(requests, anchors, contexts)
        proposer.propose_seats(seats, 20, tables)
        assert torch.equal(tables.drafts[:-1], expected[:-1])
        assert len({tuple(draft) for draft in tables.drafts[index].tolist()}) == len(seats)
        tables.last_token += 3
        tables.num_computed += 1


# -- on a GPU ----------------------------------------------------------------------------------

PROMPTS = [[0, 5, 9], [0, 7, 7, 8, 3], [0, *range(4, 60)], [0, *range(9, 40)]]


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("states", STATES)
def test_no_token_changes_on_a_gpu(
    model: K3ForCausalLM, drafter: DSparkDrafter, states: str
) -> None:
    drafts = None if states == "none" else drafter
    said = [
        say(make_engine(model, drafts, STATES[states], ahead=ahead, cuda_graphs=True), PROMPTS, 24)
        for ahead in (False, True)
    ]
    assert said[0] == said[1]


def run_watched(engine: Engine, decides: Callable[[Any], bool], **params: Any) -> int:
    """Run three times; the third time no step that ``decides`` picks may wait for the device.

    The device is kept busy before each of them. Returns how many there were.
    """
    executor, count = engine.executor, 0
    for _ in range(2):  # compiles and records, without hits on prefixes and with them
        say(engine, PROMPTS, 24, **params)
    execute = executor.execute_model_async

    def execute_watched(plan: Any) -> Any:
        nonlocal count
        if not decides(plan):
            return execute(plan)
        torch.cuda._sleep(50_000_000)  # some 30 ms
        torch.cuda.set_sync_debug_mode("error")
        try:
            pending = execute(plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        if pending.copies is not None:
            assert not pending.copies._event.query(), "the host has waited"
            count += 1
        return pending

    executor.execute_model_async = execute_watched
    waits = executor.num_host_waits
    say(engine, PROMPTS, 24, **params)
    assert executor.num_host_waits == waits + 1  # for the very last step
    return count


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("states", STATES)
def test_nobody_waits_between_two_decode_steps(
    model: K3ForCausalLM, drafter: DSparkDrafter, states: str, temperature: float
) -> None:
    if temperature and states != "none":
        pytest.skip("a draw with drafts in flight waits for the host")
    drafts = None if states == "none" else drafter
    engine = make_engine(model, drafts, STATES[states], ahead=True, cuda_graphs=True)
    params = {"temperature": temperature, "top_p": 0.9, "seed": 1, "logprobs": 1}
    assert run_watched(engine, lambda plan: not plan.scheduled_new_reqs, **params) > 5


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("states", STATES)
def test_nobody_waits_for_a_step_with_prompts(
    model: K3ForCausalLM, drafter: DSparkDrafter, states: str
) -> None:
    drafts = None if states == "none" else drafter
    engine = make_engine(model, drafts, STATES[states], ahead=True, cuda_graphs=True)
    assert run_watched(engine, lambda plan: bool(plan.num_scheduled_tokens)) > 5

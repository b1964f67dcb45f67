"""One rank of eight at its true widths, on a GPU: the kernels say what the reference says."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("triton", reason="running kernels needs Triton")

from kimik3_lab.config import K3Config
from kimik3_lab.drafter_config import DSparkConfig
from kimik3_lab.rank.acceptance import Script
from kimik3_lab.rank.build import Sizes, make_rung
from kimik3_lab.rank.routing_skew import load_profile
from kimik3_lab.rank.step_times import StepTimer
from kimik3_lab.rank.weights import rank_drafter, rank_model
from kimik3_lab.reference.state import SequenceMixer
from kimik3_lab.serving.engine import Engine
from kimik3_lab.serving.executors.execution import ExecutionConfig
from kimik3_lab.serving.executors.torch_executor import TorchExecutor
from kimik3_lab.serving.presets import LADDER, MAIN_2026_09_13
from kimik3_lab.serving.sampling_params import SamplingParams
from kimik3_lab.serving.scheduler import Scheduler

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SIZES = Sizes(prompt_tokens=60, output_tokens=24, num_blocks=64, bound=128, max_num_seqs=4)


@pytest.fixture(scope="module")
def model():
    config = dataclasses.replace(K3Config.rank_slice(layers=5), attn_res_block_size=3)
    return rank_model(config, load_profile(), device="cuda", keep_codes=True)


@pytest.fixture(scope="module")
def drafter(model):
    return rank_drafter(DSparkConfig.rank_slice(model.config), device="cuda")


def says(model, drafter, preset, backend: str, *, graphs: bool) -> tuple[list, TorchExecutor]:
    """Greedy continuations of two prompts, with the real rule of verification."""
    script = Script(model.config.vocab_size, SIZES.num_drafts, 3.4)
    rung = make_rung(preset, model, drafter, SIZES, script, backend=backend)
    plain = rung.executor
    execution = dataclasses.replace(ExecutionConfig.from_preset(preset), cuda_graphs=graphs)
    executor = TorchExecutor(
        model, plain.cache_config, SIZES.max_num_seqs, backend=backend, execution=execution,
        drafter=drafter, num_speculative_tokens=SIZES.num_drafts,
    )  # fmt: skip
    config = rung.engine.scheduler.scheduler_config
    engine = Engine(Scheduler(config, plain.cache_config), executor)
    params = SamplingParams(max_tokens=24, ignore_eos=True, logprobs=2)
    prompts = [script.tokens(r, 0, 40 + 20 * r) for r in range(2)]
    return engine.generate(prompts, params, progress=False), executor


def reference_logits(model, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        ids = torch.tensor(tokens, device="cuda")
        return model(ids, SequenceMixer(model.new_state())).float()


def test_the_slice_is_as_close_to_the_truth_as_the_reference(model, drafter) -> None:
    """Logits in bfloat16 against float32: a prompt, and a verification behind a shorter one.

    Routing turns on the last bit of a score here and there, so errors are compared, not bounded.
    """
    script = Script(model.config.vocab_size, SIZES.num_drafts, 3.4)
    tokens = script.tokens(3, 0, 60)
    rounded = reference_logits(model, tokens)
    kinds = {name: parameter.dtype for name, parameter in model.named_parameters()}
    truth = reference_logits(model.float(), tokens)
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(kinds[name])
    rung = make_rung(MAIN_2026_09_13, model, drafter, SIZES, script)
    timer, executor = StepTimer(rung), rung.executor

    def error(logits: torch.Tensor, rows: slice = slice(None)) -> float:
        return float((logits.float() - truth[rows]).norm() / truth[rows].norm())

    (whole,) = timer.segments(1, 0, 60, 0)
    allowed = 1.5 * error(rounded) + 0.01
    ours = timer._eager([whole], tokens, list(range(60)), executor.proposer.new_taps())()
    assert error(ours) < allowed, (error(ours), error(rounded))
    begin = dataclasses.replace(whole, count=51)
    executor.cache.reset_states([state.rows[0] for state in whole.states])
    timer._eager([begin], tokens[:51], [50], executor.proposer.new_taps())()
    step = dataclasses.replace(whole, start=51, count=9, num_drafts=8)
    verified = rung.graphs.replay(
        [step], tokens[51:], executor.mixer, num_logits=9, taps=executor.proposer.new_taps()
    )
    assert error(verified, slice(51, 60)) < allowed, (error(verified, slice(51, 60)), allowed)


@pytest.mark.parametrize("name", ["v0.27.1", "deferred finalize", "recovery records"])
def test_recorded_rungs_say_what_launched_ones_say(model, drafter, name: str) -> None:
    preset = next(p for p in LADDER if p.name == name)
    recorded, executor = says(model, drafter, preset, "triton", graphs=True)
    launched, plain = says(model, drafter, preset, "triton", graphs=False)
    assert executor.graphs.num_replays > 3
    assert [r.token_ids for r in recorded] == [r.token_ids for r in launched]
    assert executor.counters.launches < plain.counters.launches / 4

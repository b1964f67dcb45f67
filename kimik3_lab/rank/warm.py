"""Compile what the ladder needs, in several processes: ``python -m kimik3_lab.rank --warm``.

Needs torch, Triton and a GPU. Triton compiles a kernel when it first runs, one after the other: two
minutes for the whole ladder. Each process here takes the same steps with a part of the model, the
rest passing its input on, so that the compilers share the processors. Triton keeps what they made
on disk.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kimik3_lab.config import K3Config
from kimik3_lab.drafter_config import DSparkConfig
from kimik3_lab.rank import curves, ladder
from kimik3_lab.rank.acceptance import ScriptedProposer
from kimik3_lab.rank.build import Rung
from kimik3_lab.rank.ladder import Bench, Plan
from kimik3_lab.rank.step_times import StepTimer
from kimik3_lab.serving.presets import LADDER, MAIN_2026_09_13, V0_27_1, Preset

__all__ = ["PARTS", "warm_all", "warm_part"]

_BY_NAME = {preset.name: preset for preset in LADDER}
_RECORDS = _BY_NAME["look-ahead cap"]
_CHECKPOINTS = _BY_NAME["internal checkpoints"]


def _pass_on(x: Tensor, mixer: object = None) -> Tensor:
    return x


def _keep(rung: Rung, *kinds: str, drafts: bool = False) -> None:
    """Let all parts of the model but these pass their input on."""
    model, executor = rung.model, rung.executor
    assert model is not None
    for parts in (model._attention, model._ffn):
        for index, part in enumerate(parts):
            if type(part).__name__ not in kinds:
                parts[index] = _pass_on  # type: ignore[call-overload]
    if not drafts and isinstance(executor.proposer, ScriptedProposer):
        executor.proposer.proposer.propose = lambda requests: {}  # type: ignore[method-assign]
        executor.proposer.write = lambda *_: None  # type: ignore[method-assign]
        assert rung.graphs is not None
        rung.graphs.after = lambda *_: None


@torch.inference_mode()
def _steps(bench: Bench, preset: Preset, *kinds: str, drafts: bool = False) -> None:
    rung = bench.rung(preset)
    _keep(rung, *kinds, drafts=drafts)
    timer, graphs, executor = StepTimer(rung), rung.graphs, rung.executor
    assert graphs is not None and executor.proposer is not None
    for number in (1, 2, 4, 8, 16, 64):
        if number > max(bench.plan.requests) and timer.cache.num_scratch:
            continue  # curves go so far on the last rung only, which keeps records
        if drafts:
            timer.decode(number, 2000, 8, replays=1)
            continue
        segments, rows = timer.segments(number, 2000, 9, 8), 9 * number
        taps = executor.proposer.new_taps()
        graphs.recording(segments, [5] * rows, executor.mixer, num_logits=rows, taps=taps)
    for count, start in ((8000, 0), (1024, 0), (1024, 7000), (16000, 0), (995, 1024)):
        timer.prefill(count, start, repeats=1)
    for beside in range(1, 16):  # verification beside a chunk is launched, whatever its number
        timer.mixed(beside, 2000, 8, max(2, 1024 - 9 * beside))()
    for concurrency in (1, 16):
        ladder.measure_cell(bench, rung, concurrency, concurrency)


def _plain(bench: Bench, *kinds: str) -> None:
    rung = bench.rung(MAIN_2026_09_13, speculate=False)
    _keep(rung, *kinds)
    timer = StepTimer(rung)
    for number in (1, 4, 16):
        timer.decode(number, 2000, 0, replays=1)


def _moe(bench: Bench, tokens: Sequence[int]) -> None:
    for preset in (MAIN_2026_09_13, V0_27_1):
        layer = bench.rung(preset).experts()[0]
        for count in tokens:
            with torch.inference_mode():
                layer(torch.randn(count, bench.config.hidden_size, device="cuda").bfloat16())


#: What each process compiles.
PARTS: dict[str, Callable[[Bench], None]] = {
    "moe 1": lambda bench: _moe(bench, (9, 18, 1)),
    "moe 2": lambda bench: _moe(bench, (36, 72, 4)),
    "moe 3": lambda bench: _moe(bench, (144, 16, 576)),
    "moe 4": lambda bench: _moe(bench, (1024, 880, 889, 2048)),
    "moe 5": lambda bench: _moe(bench, (8000, 16000, 16375, 4096)),
    "kda old": lambda bench: _steps(bench, V0_27_1, "TritonKda"),
    "kda new": lambda bench: (_steps(bench, MAIN_2026_09_13, "TritonKda"),
                              _plain(bench, "TritonKda")),
    "kda records": lambda bench: _steps(bench, _RECORDS, "TritonKda"),
    "kda checkpoints": lambda bench: _steps(bench, _CHECKPOINTS, "TritonKda"),
    "mla": lambda bench: (_steps(bench, _RECORDS, "TritonMla"),
                          _plain(bench, "TritonMla")),
    "drafter": lambda bench: _steps(bench, _RECORDS, "TritonMLP", drafts=True),
    "products": lambda bench: curves.choose_products(bench),
}  # fmt: skip


def warm_part(name: str, plan: Plan) -> None:
    """Compile one part, in this process."""
    began = time.perf_counter()
    # Two blocks of attention residuals, as the whole slice has, and a layer for each of five taps.
    config = dataclasses.replace(K3Config.rank_slice(layers=5), attn_res_block_size=3)
    # Who takes no steps needs no cache: thirteen processes share the memory of one GPU.
    blocks = 64 if name.startswith(("moe", "products")) else 800
    sizes = dataclasses.replace(plan.sizes, output_tokens=30, num_blocks=blocks)
    bench = Bench(
        dataclasses.replace(plan, sizes=sizes, requests={1: 1, 16: 16}),
        config, DSparkConfig.rank_slice(config), device="cuda", dtype=torch.bfloat16,
        share_experts=True,
    )  # fmt: skip
    ready = time.perf_counter()
    PARTS[name](bench)
    torch.cuda.synchronize()
    print(f"{name}: {ready - began:.1f} s + {time.perf_counter() - ready:.1f} s", flush=True)


def warm_all(*, timeout: float) -> int:
    """Compile all parts, each in a process of its own. Return how many did not come to an end."""
    command = [sys.executable, "-m", "kimik3_lab.rank", "--warm-part"]
    running = {name: subprocess.Popen([*command, name]) for name in PARTS}
    stop, failed = time.monotonic() + timeout, 0
    for name, process in running.items():
        try:
            code = process.wait(max(0.1, stop - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            code = -9
        if code:
            print(f"{name} ended with {code}", flush=True)
            failed += 1
    return failed

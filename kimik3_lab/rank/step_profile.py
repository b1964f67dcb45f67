"""Where the time of a step goes: its kernels by name. ``python -m kimik3_lab.rank --profile``.

Needs torch and a GPU.
"""

from __future__ import annotations

import time

import torch

from kimik3_lab.rank.ladder import Bench
from kimik3_lab.rank.step_times import StepTimer
from kimik3_lab.serving.presets import Preset

__all__ = ["print_profile"]


@torch.inference_mode()
def print_profile(bench: Bench, preset: Preset, *, most: int = 28) -> None:
    """Print the kernels of a recorded verification for one and for 16 requests, and of a prompt."""
    rung = bench.rung(preset)
    timer, sizes = StepTimer(rung), bench.plan.sizes
    executor, graphs = rung.executor, rung.graphs
    assert graphs is not None
    for number in (1, 16):
        segments = timer.segments(
            number, sizes.prompt_tokens, 1 + sizes.num_drafts, sizes.num_drafts
        )
        tokens = rung.script.tokens(3, 0, number * (1 + sizes.num_drafts))
        taps = executor.proposer.new_taps() if executor.proposer else None
        recording = graphs.recording(
            segments, tokens, executor.mixer, num_logits=len(tokens), taps=taps
        )
        assert recording is not None and recording.replay is not None
        _print(f"verification, {number} requests", recording.replay, most)
    for number in (1, 4, 16):
        print(number, timer.decode(number, sizes.prompt_tokens, sizes.num_drafts), flush=True)
    proposer = timer.proposer
    if proposer is not None:
        for key, found in list(proposer.recordings.items())[:1]:
            _print(f"drafter {key}", found.replay, most)
    for count in (1024, sizes.prompt_tokens):
        _print(f"prompt of {count}", timer.prepare_prefill(count), most)


def _print(title: str, run: object, most: int) -> None:
    assert callable(run)
    run()
    torch.cuda.synchronize()
    began = time.perf_counter()
    run()
    host = time.perf_counter() - began
    torch.cuda.synchronize()
    wall = time.perf_counter() - began
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        run()
        torch.cuda.synchronize()
    rows = sorted(found.key_averages(), key=lambda r: -r.self_device_time_total)
    total = sum(r.self_device_time_total for r in rows)
    launches = sum(r.count for r in rows)
    print(
        f"-- {title}: {total / 1e3:.2f} ms in {launches} kernels, {1e3 * wall:.2f} ms in all, of "
        f"which the host took {1e3 * host:.2f} to launch"
    )
    for row in rows[:most]:
        print(f"{row.self_device_time_total:9.0f} us {row.count:5}  {row.key[:90]}")

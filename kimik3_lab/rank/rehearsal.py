"""What happens once, done before anything counts: the warm-up of a rung of the rank ladder.

Needs torch and Triton; does little without a GPU. The first rung would otherwise pay for the
kernels and plans of all others: before there was this rehearsal, the rung that was measured second
had a TTFT of 1.9 s where the fourth, with the same steps, had 1.6. And while it rehearsed with two
requests only, the rung that stops chunks at checkpoints had one step of 3.8 s among 16 requests.
"""

from __future__ import annotations

import gc

import torch

from kimik3_lab.rank.build import Rung
from kimik3_lab.rank.ladder import Bench
from kimik3_lab.rank.step_times import StepTimer
from kimik3_lab.rank.workload import run_cell
from kimik3_lab.serving.executors.triton_attention import STEP, chunk_expanded

__all__ = ["rehearse"]


def rehearse(bench: Bench, rung: Rung) -> None:
    """Do all that happens once before anything counts, so that no rung pays for the others.

    Steps are recorded for all batch sizes; kernels are compiled for prompts, for verification
    beside them, and for both together at any number of requests; attention is planned for every
    piece of a prompt; the prompts of every cell are computed once, with other texts; and what is
    there by now is kept out of the garbage collector's rounds, as vLLM does (``freeze_gc_heap`` in
    ``vllm/v1/engine/core.py``).
    """
    sizes, most = bench.plan.sizes, max(bench.plan.requests)
    _plan_attention(bench, rung)
    if rung.graphs is not None:
        timer = StepTimer(rung)
        number = 1
        while number <= most:
            timer.decode(number, sizes.prompt_tokens, sizes.num_drafts, replays=1)
            number *= 2
        limit = min(1024, rung.engine.scheduler.scheduler_config.scheduled_token_limit)
        for beside in range(1, most):
            verified = beside * (1 + sizes.num_drafts)
            timer.mixed(beside, sizes.prompt_tokens, sizes.num_drafts, max(2, limit - verified))()
    script, engine = rung.script, rung.engine
    waves = [(min(sizes.prompt_tokens, 64), 1)]
    if bench.device.type == "cuda":  # nothing is compiled or planned in the interpreter
        waves += [(sizes.prompt_tokens, number) for number in sorted(bench.plan.requests)]
    for i, (prompt, number) in enumerate(waves):
        run_cell(
            engine, script, prompt_tokens=prompt, output_tokens=2 * sizes.num_drafts,
            concurrency=number, num_requests=number, first_request=100_000 * (1 + i),
        )  # fmt: skip
    gc.collect()
    gc.freeze()


@torch.inference_mode()
def _plan_attention(bench: Bench, rung: Rung) -> None:
    """Attend once with every shape that a piece of a prompt may have.

    cuDNN makes a plan for each shape when it first sees it, tens of milliseconds each, and keeps it
    for the process.
    """
    config, model = bench.config, bench.model
    layers = config.mla_layer_ids
    if bench.attention_planned or bench.device.type != "cuda" or rung.model is None or not layers:
        return
    bench.attention_planned = True
    kv_b = model.model.layers[layers[0]].self_attn.kv_b_proj.weight
    longest = -(-bench.plan.sizes.prompt_tokens // STEP) * STEP
    for start in range(0, longest, STEP):
        for count in range(STEP, longest - start + 1, STEP):
            q = kv_b.new_zeros(count, config.num_attention_heads, config.qk_head_dim)
            chunk_expanded(q, kv_b.new_zeros(start + count, config.mla_cache_dim), kv_b)

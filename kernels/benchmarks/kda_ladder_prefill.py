"""Parts of :mod:`benchmarks.kda_ladder` on prompts: the rungs, the walk alone, a checkpoint.

Needs a CUDA device.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from k3_kernels.kda_ladder import LadderLayer
from k3_kernels.kda_ladder_prefill import (
    PREFILL_RUNGS,
    WALKS,
    LadderPrompt,
    WalkConfig,
    chunked_rule,
    climb_prefill,
)
from k3_kernels.kda_prefill import kda_prefill

from benchmarks.cases import Case
from benchmarks.floors import HEAD_DIM, floor_us, kda_prefill_bytes
from benchmarks.inputs.kda import GATE_LOWER_BOUND
from benchmarks.inputs.kda_prefill import KdaPrefillProblem
from benchmarks.kda_ladder_rows import HEADS, Row, check, time_calls

__all__ = ["checkpoint", "prefill", "walks"]

TOKENS = 8192
PROMPT, CHECKPOINT = 8000, 7680
#: Values and warps of a program of the walk, and pieces of a sequence.
WALK_CUTS = ((128, 4), (128, 8), (64, 4), (32, 4), (16, 4))
SEGMENTS = (1, 2, 4, 8)


def _prefill_problem(tokens: int, generator: torch.Generator) -> KdaPrefillProblem:
    case = Case("kda_prefill", f"H={HEADS},1x{tokens}", {"heads": HEADS}, lengths=(tokens,))
    return KdaPrefillProblem(case, generator)


def _prompt(problem: KdaPrefillProblem, index: int) -> tuple[LadderPrompt, LadderLayer]:
    p, lists = problem, (problem.q, problem.k, problem.v, problem.g, problem.beta)
    prompt = LadderPrompt(*(rows[index][0] for rows in lists))
    return prompt, LadderLayer(p.A_log, p.A_log, p.dt_bias, p.A_log, GATE_LOWER_BOUND)


def prefill(generator: torch.Generator) -> Iterable[Row]:
    """Time every rung over 8192 tokens, and each launch of a rung alone."""
    problem = _prefill_problem(TOKENS, generator)

    def call(rung: str, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return climb_prefill(rung, *_prompt(problem, index), problem.state, 0), problem.state

    def alone(config: WalkConfig, part: str, index: int) -> None:
        chunked_rule(*_prompt(problem, index), problem.state, 0, config, only=part)

    calls = {rung: partial(call, rung) for rung in PREFILL_RUNGS}
    errors = {rung: check(rung, problem, calls[rung]) for rung in calls}
    parts = {
        f"{rung}/{part}": partial(alone, config, part)
        for rung, config in WALKS.items()
        for part in ("prepare", *(("survey", "starts") if config.segments > 1 else ()), "walk")
    }
    timed = time_calls(calls, problem.sets)
    launches = time_calls(parts, problem.sets)
    for rung in PREFILL_RUNGS:
        mine = {k.split("/")[1]: t["us"] for k, t in launches.items() if k.split("/")[0] == rung}
        yield {
            "part": "prefill", "rung": rung, "tokens": TOKENS, **timed[rung],
            "bytes": problem.bytes_moved, "floor_us": problem.floor_us, "error": errors[rung],
            "launches_us": mine,
        }  # fmt: skip


def walks(generator: torch.Generator) -> Iterable[Row]:
    """Time the walk alone with states cut differently, and whole prompts with more segments."""
    problem = _prefill_problem(TOKENS, generator)

    def call(config: WalkConfig, only: str | None, index: int) -> None:
        chunked_rule(*_prompt(problem, index), problem.state, 0, config, only=only)

    cuts = {f"{v},{w}": partial(call, WalkConfig(v, w), "walk") for v, w in WALK_CUTS}
    for name, timed in time_calls(cuts, problem.sets).items():
        block_v, warps = map(int, name.split(","))
        yield {
            "part": "walks", "block_v": block_v, "num_warps": warps, "segments": 1,
            "programs": HEADS * HEAD_DIM // block_v, **timed,
        }  # fmt: skip
    base = WALKS["segments"]
    cuts = {str(n): partial(call, replace(base, segments=n), None) for n in SEGMENTS}
    for name, timed in time_calls(cuts, problem.sets).items():
        yield {"part": "segments", "segments": int(name), "tokens": TOKENS, **timed}


def checkpoint(generator: torch.Generator) -> Iterable[Row]:
    """Time 8000 tokens with the state after 7680 kept on the way, and in two calls."""
    problem = _prefill_problem(PROMPT, generator)
    state = torch.zeros(3, *problem.state.shape[1:], device=problem.state.device)

    def numbers(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=state.device)

    slot, other, keep, at = numbers(0), numbers(1), numbers(2), numbers(CHECKPOINT)

    def call(first: int, last: int, index: int, **options: Any) -> torch.Tensor:
        rows = (x[index][0, first:last] for x in (problem.q, problem.k, problem.v, problem.g))
        beta = problem.beta[index][0, first:last]
        return kda_prefill(
            *rows, beta, problem.A_log, problem.dt_bias, state, options.pop("slots", slot),
            lower_bound=GATE_LOWER_BOUND, **options,
        )  # fmt: skip

    def plain(index: int) -> torch.Tensor:
        return call(0, PROMPT, index)

    def export(index: int) -> torch.Tensor:
        return call(0, PROMPT, index, checkpoint_at=at, checkpoint_slots=keep)

    def split(index: int) -> torch.Tensor:
        first = call(0, CHECKPOINT, index, slots=other)
        slot_state = torch.ones_like(other)
        rest = call(CHECKPOINT, PROMPT, index, slots=other, has_initial_state=slot_state)
        return torch.cat((first, rest))

    whole = export(0).float()
    difference = float((split(0).float() - whole).norm() / whole.norm())
    kept = float((state[2] - state[1]).norm() / state[1].norm())
    if not (difference < 2e-2 and torch.isfinite(state).all() and kept > 0):
        raise AssertionError(f"two calls differ from one with a checkpoint by {difference:.3g}")
    timed = time_calls({"none": plain, "export": export, "split": split}, problem.sets)
    for way, row in timed.items():
        yield {
            "part": "checkpoint", "way": way, "tokens": PROMPT, "at": CHECKPOINT, **row,
            "floor_us": floor_us(kda_prefill_bytes(HEADS, PROMPT, 1)), "difference": difference,
        }  # fmt: skip

"""Time the rungs of the KDA ladders: ``python -m benchmarks.kda_ladder``.

Needs a CUDA device. One KDA layer as one of eight tensor-parallel ranks sees it, 12 heads. Rungs of
a size are compared with a float64 recurrence and then timed in turns. The result is what lesson 06
shows; ``--part`` chooses parts of it:

``decode``      every rung at 1 to 256 requests
``programs``    the delta rule alone, cut into programs of different size
``verify``      eight drafts: a state for each token, or records and a commit
``prefill``     every rung over 8192 tokens, and each launch of a rung alone
``walks``       the walk alone with states cut differently, and with more segments
``checkpoint``  8000 tokens with the state after 7680 kept on the way, and in two calls
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from k3_kernels.kda_decode import kda_decode
from k3_kernels.kda_ladder import (
    DECODE_RUNGS,
    LadderLayer,
    LadderStep,
    RuleConfig,
    climb_decode,
    delta_rule,
    state_passes,
)
from k3_kernels.kda_ladder_prefill import (
    PREFILL_RUNGS,
    WALKS,
    LadderPrompt,
    WalkConfig,
    chunked_rule,
    climb_prefill,
)
from k3_kernels.kda_prefill import kda_prefill
from k3_kernels.kda_records import KDARecords
from k3_kernels.kda_recover import kda_recover

from benchmarks.cases import Case
from benchmarks.floors import HEAD_DIM, floor_us, kda_prefill_bytes
from benchmarks.inputs.kda import GATE_LOWER_BOUND, NORM_EPS
from benchmarks.inputs.kda_decode import KdaDecodeProblem
from benchmarks.inputs.kda_prefill import KdaPrefillProblem
from benchmarks.provenance import provenance
from benchmarks.timing import input_sets, time_side_by_side

__all__ = ["PARTS", "measure"]

HEADS, BATCHES, TOKENS = 12, (1, 16, 64, 256), 8192
#: Drafts of a verify step, and its tokens: the one before the drafts is always computed.
DRAFTS, VERIFIED, ACCEPTED = 8, 9, 4
PROMPT, CHECKPOINT = 8000, 7680
#: Values and warps of a program of the delta rule, and of a walk.
PROGRAMS = ((8, 1), (16, 1), (32, 1), (32, 4), (64, 4), (128, 4), (128, 8))
WALK_CUTS = ((128, 4), (128, 8), (64, 4), (32, 4), (16, 4))
SEGMENTS = (1, 2, 4, 8)
_STATE = HEADS * HEAD_DIM * HEAD_DIM * 4

Row = dict[str, Any]


def _time(calls: dict[str, Callable[[int], object]], sets: int) -> dict[str, Row]:
    timings = time_side_by_side(calls, sets, seconds=0.05)
    return {
        name: {"us": t.median_us, "p10_us": t.p10_us, "p90_us": t.p90_us, "graph": t.graph}
        for name, t in timings.items()
    }


def _agrees(name: str, problem: Any, call: Callable[[int], object]) -> float:
    error = float(problem.error(call))
    if not error <= problem.tolerance:
        raise AssertionError(
            f"{name}: relative error {error:.3g} against float64, expected at most "
            f"{problem.tolerance:g}"
        )
    return error


# -- decoding --------------------------------------------------------------------------------------


def _decode_problem(batch: int, generator: torch.Generator) -> KdaDecodeProblem:
    sizes = {"heads": HEADS, "batch": batch}
    return KdaDecodeProblem(Case("kda_decode", f"H={HEADS},B={batch}", sizes), generator)


def _decode(generator: torch.Generator) -> Iterable[Row]:
    for batch in BATCHES:
        yield from _decode_at(_decode_problem(batch, generator))


def _decode_at(problem: KdaDecodeProblem) -> Iterable[Row]:
    layer = LadderLayer(
        problem.conv_weight.T.contiguous().T, problem.A_log, problem.dt_bias, problem.norm_weight,
        GATE_LOWER_BOUND, NORM_EPS,
    )  # fmt: skip
    window = problem.conv_state.transpose(1, 2)

    def call(rung: str, index: int) -> torch.Tensor:
        lists = (problem.qkv, problem.raw_gate, problem.beta, problem.output_gate)
        qkv, gate, beta, opening = (rows[index] for rows in lists)
        step = LadderStep(qkv, gate[0], beta[0], opening)
        return climb_decode(rung, step, layer, window, problem.state, problem.slots[index])

    calls = {rung: partial(call, rung) for rung in DECODE_RUNGS}
    name = f"B={problem.batch}"
    errors = {rung: _agrees(f"{rung}, {name}", problem, calls[rung]) for rung in calls}
    for rung, timed in _time(calls, problem.sets).items():
        yield {
            "part": "decode", "rung": rung, "batch": problem.batch, **timed,
            "state_passes": state_passes(rung), "state_bytes": problem.batch * _STATE,
            "bytes": problem.bytes_moved, "floor_us": problem.floor_us, "error": errors[rung],
        }  # fmt: skip


def _programs(generator: torch.Generator) -> Iterable[Row]:
    for batch in (16, 256):
        yield from _programs_at(_decode_problem(batch, generator))


def _programs_at(problem: KdaDecodeProblem) -> Iterable[Row]:
    weights = (problem.conv_weight, problem.A_log, problem.dt_bias, problem.norm_weight)
    layer = LadderLayer(*weights, GATE_LOWER_BOUND, NORM_EPS)

    def call(config: RuleConfig, index: int) -> torch.Tensor:
        q, k, v = problem.qkv[index].unflatten(1, (3, HEADS, HEAD_DIM)).unbind(1)
        gates = problem.raw_gate[index][0], problem.beta[index][0]
        return delta_rule(q, k, v, *gates, layer, problem.state, problem.slots[index], config)

    calls = {f"{v},{w}": partial(call, RuleConfig(v, w)) for v, w in PROGRAMS}
    for name, timed in _time(calls, problem.sets).items():
        block_v, warps = map(int, name.split(","))
        yield {
            "part": "programs", "batch": problem.batch, "block_v": block_v, "num_warps": warps,
            "programs": problem.batch * HEADS * HEAD_DIM // block_v, **timed,
            "floor_us": floor_us(2 * problem.batch * _STATE),
        }  # fmt: skip


def _verify(generator: torch.Generator) -> Iterable[Row]:
    for batch in BATCHES[:3]:
        yield from _verify_at(batch, generator)


def _verify_at(batch: int, generator: torch.Generator) -> Iterable[Row]:
    sets = input_sets(2 * batch * _STATE, most=64)  # of the call that moves the least
    width, count, device = HEADS * HEAD_DIM, sets * batch * VERIFIED, generator.device

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, generator=generator)

    sizes = (3 * width, width, HEADS, width)  # q | k | v, gate, beta, output gate
    inputs = [normal(sets, batch * VERIFIED, size).bfloat16() for size in sizes]
    taps, A_log, dt_bias = 0.5 * normal(4, 3 * width).T, 0.3 * normal(HEADS), 0.3 * normal(width)
    norm = 1 + 0.1 * normal(HEAD_DIM)
    state = 0.1 * normal(count, HEADS, HEAD_DIM, HEAD_DIM)
    window = normal(count, 2 + VERIFIED, 3 * width).bfloat16().transpose(1, 2)
    order = torch.randperm(count, device=device, generator=generator).int()
    slots = order.view(sets, batch, VERIFIED)
    own = [slots[i, :, 0].contiguous() for i in range(sets)]
    starts = torch.arange(batch + 1, device=device, dtype=torch.int32) * VERIFIED
    accepted = torch.full((batch,), ACCEPTED, dtype=torch.int32, device=device)
    records = [
        KDARecords.empty(batch, VERIFIED, HEADS, HEAD_DIM, device=device) for _ in range(sets)
    ]

    def step(index: int, where: torch.Tensor, tokens: int, **options: Any) -> torch.Tensor:
        rows = (x[index, : tokens * batch] for x in inputs)
        return kda_decode(*rows, taps, A_log, dt_bias, norm, window, state, where, **options)

    def one_token(i: int) -> torch.Tensor:
        return step(i, own[i], 1)

    def snapshots(i: int) -> torch.Tensor:
        return step(i, slots[i], VERIFIED, cu_seqlens=starts)

    def recorded(i: int) -> torch.Tensor:
        return step(i, own[i], VERIFIED, cu_seqlens=starts, records=records[i])

    def commit(i: int) -> None:
        kda_recover(state, records[i], own[i], accepted, A_log, dt_bias, conv_state=window)

    at, kept = own[0].long(), slots[0, :, ACCEPTED - 1].long()
    before, inputs_before = state[at].clone(), window[at].clone()
    expected, expected_state = snapshots(0).float(), state[kept].clone()
    state[at], window[at] = before, inputs_before
    difference = (recorded(0).float() - expected).norm() / expected.norm()
    commit(0)
    recovered = (state[at] - expected_state).norm() / expected_state.norm()
    if not max(difference, recovered) < 1e-2:
        raise AssertionError(
            f"records differ from snapshots at B={batch}: outputs by {difference:.3g}, the state "
            f"after {ACCEPTED} tokens by {recovered:.3g}"
        )
    calls: dict[str, Callable[[int], object]] = {
        "one_token": one_token, "snapshots": snapshots, "records": recorded, "commit": commit
    }  # fmt: skip
    record = records[0].nbytes // VERIFIED  # of one token of all requests
    moved = {
        "one_token": 2 * batch * _STATE,
        "snapshots": (1 + VERIFIED) * batch * _STATE,
        "records": batch * _STATE + VERIFIED * record,
        "commit": 2 * batch * _STATE + ACCEPTED * record,
    }
    for way, timed in _time(calls, sets).items():
        yield {
            "part": "verify", "way": way, "batch": batch, "drafts": DRAFTS, "accepted": ACCEPTED,
            **timed, "bytes": moved[way], "floor_us": floor_us(moved[way]),
            "difference": max(float(difference), float(recovered)),
        }  # fmt: skip


# -- prompts ---------------------------------------------------------------------------------------


def _prefill_problem(tokens: int, generator: torch.Generator) -> KdaPrefillProblem:
    case = Case("kda_prefill", f"H={HEADS},1x{tokens}", {"heads": HEADS}, lengths=(tokens,))
    return KdaPrefillProblem(case, generator)


def _prompt(problem: KdaPrefillProblem, index: int) -> tuple[LadderPrompt, LadderLayer]:
    p, lists = problem, (problem.q, problem.k, problem.v, problem.g, problem.beta)
    prompt = LadderPrompt(*(rows[index][0] for rows in lists))
    return prompt, LadderLayer(p.A_log, p.A_log, p.dt_bias, p.A_log, GATE_LOWER_BOUND)


def _prefill(generator: torch.Generator) -> Iterable[Row]:
    problem = _prefill_problem(TOKENS, generator)

    def call(rung: str, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return climb_prefill(rung, *_prompt(problem, index), problem.state, 0), problem.state

    def alone(config: WalkConfig, part: str, index: int) -> None:
        chunked_rule(*_prompt(problem, index), problem.state, 0, config, only=part)

    calls = {rung: partial(call, rung) for rung in PREFILL_RUNGS}
    errors = {rung: _agrees(rung, problem, calls[rung]) for rung in calls}
    parts = {
        f"{rung}/{part}": partial(alone, config, part)
        for rung, config in WALKS.items()
        for part in ("prepare", *(("survey", "starts") if config.segments > 1 else ()), "walk")
    }
    timed = _time(calls, problem.sets)
    launches = _time(parts, problem.sets)
    for rung in PREFILL_RUNGS:
        mine = {k.split("/")[1]: t["us"] for k, t in launches.items() if k.split("/")[0] == rung}
        yield {
            "part": "prefill", "rung": rung, "tokens": TOKENS, **timed[rung],
            "bytes": problem.bytes_moved, "floor_us": problem.floor_us, "error": errors[rung],
            "launches_us": mine,
        }  # fmt: skip


def _walks(generator: torch.Generator) -> Iterable[Row]:
    problem = _prefill_problem(TOKENS, generator)

    def call(config: WalkConfig, only: str | None, index: int) -> None:
        chunked_rule(*_prompt(problem, index), problem.state, 0, config, only=only)

    cuts = {f"{v},{w}": partial(call, WalkConfig(v, w), "walk") for v, w in WALK_CUTS}
    for name, timed in _time(cuts, problem.sets).items():
        block_v, warps = map(int, name.split(","))
        yield {
            "part": "walks", "block_v": block_v, "num_warps": warps, "segments": 1,
            "programs": HEADS * HEAD_DIM // block_v, **timed,
        }  # fmt: skip
    base = WALKS["segments"]
    cuts = {str(n): partial(call, replace(base, segments=n), None) for n in SEGMENTS}
    for name, timed in _time(cuts, problem.sets).items():
        yield {"part": "segments", "segments": int(name), "tokens": TOKENS, **timed}


def _checkpoint(generator: torch.Generator) -> Iterable[Row]:
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
    timed = _time({"none": plain, "export": export, "split": split}, problem.sets)
    for way, row in timed.items():
        yield {
            "part": "checkpoint", "way": way, "tokens": PROMPT, "at": CHECKPOINT, **row,
            "floor_us": floor_us(kda_prefill_bytes(HEADS, PROMPT, 1)), "difference": difference,
        }  # fmt: skip


PARTS: dict[str, Callable[[torch.Generator], Iterable[Row]]] = {
    "decode": _decode,
    "programs": _programs,
    "verify": _verify,
    "prefill": _prefill,
    "walks": _walks,
    "checkpoint": _checkpoint,
}


def measure(seed: int, parts: Iterable[str] = tuple(PARTS)) -> list[Row]:
    """Time the chosen parts; return their rows."""
    rows = []
    for part in parts:
        for row in PARTS[part](torch.Generator("cuda").manual_seed(seed)):
            rows.append(row)
            keys = ("rung", "way", "batch", "block_v", "num_warps", "segments", "tokens")
            name = " ".join(str(row[key]) for key in keys if key in row)
            floor = row.get("floor_us")
            share = f"{floor / row['us']:6.1%}" if floor else ""
            print(f"{row['part']:<10} {name:<22} {row['us']:10.1f} us  {share}", flush=True)
        torch.cuda.empty_cache()
    return rows


def main() -> None:
    """Parse the command line, measure, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kda_ladder", description=__doc__)
    parser.add_argument("--part", choices=tuple(PARTS), action="append", dest="parts")
    parser.add_argument("--seed", type=int, default=6)
    parser.add_argument("--output", type=Path, metavar="FILE")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("timing the rungs needs a CUDA device, and PyTorch finds none here")
    rows = measure(options.seed, options.parts or tuple(PARTS))
    if options.output:
        made = provenance({}, seed=options.seed)
        chosen = "".join(f" --part {part}" for part in options.parts or ())
        made["command"] = f"python -m benchmarks.kda_ladder{chosen}"
        result = {"schema_version": 1, "provenance": made, "rows": rows}
        options.output.parent.mkdir(parents=True, exist_ok=True)
        unfinished = options.output.with_name(options.output.name + ".part")
        unfinished.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        unfinished.replace(options.output)


if __name__ == "__main__":
    main()

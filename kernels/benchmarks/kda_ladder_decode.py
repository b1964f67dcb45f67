"""Decoding parts of :mod:`benchmarks.kda_ladder`: the rungs, the rule's programs, verification.

Needs a CUDA device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
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
from k3_kernels.kda_records import KDARecords
from k3_kernels.kda_recover import kda_recover

from benchmarks.cases import Case
from benchmarks.floors import HEAD_DIM, floor_us
from benchmarks.inputs.kda import GATE_LOWER_BOUND, NORM_EPS
from benchmarks.inputs.kda_decode import KdaDecodeProblem
from benchmarks.kda_ladder_rows import HEADS, STATE_BYTES, Row, check, time_calls
from benchmarks.timing import input_sets

__all__ = ["decode", "programs", "verify"]

BATCHES = (1, 16, 64, 256)
#: Drafts of a verify step, and its tokens: the one before the drafts is always computed.
DRAFTS, VERIFIED, ACCEPTED = 8, 9, 4
#: Values and warps of a program of the delta rule.
PROGRAMS = ((8, 1), (16, 1), (32, 1), (32, 4), (64, 4), (128, 4), (128, 8))


def _decode_problem(batch: int, generator: torch.Generator) -> KdaDecodeProblem:
    sizes = {"heads": HEADS, "batch": batch}
    return KdaDecodeProblem(Case("kda_decode", f"H={HEADS},B={batch}", sizes), generator)


def decode(generator: torch.Generator) -> Iterable[Row]:
    """Time every rung at 1 to 256 requests."""
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
    errors = {rung: check(f"{rung}, {name}", problem, calls[rung]) for rung in calls}
    for rung, timed in time_calls(calls, problem.sets).items():
        yield {
            "part": "decode", "rung": rung, "batch": problem.batch, **timed,
            "state_passes": state_passes(rung), "state_bytes": problem.batch * STATE_BYTES,
            "bytes": problem.bytes_moved, "floor_us": problem.floor_us, "error": errors[rung],
        }  # fmt: skip


def programs(generator: torch.Generator) -> Iterable[Row]:
    """Time the delta rule alone, cut into programs of different size."""
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
    for name, timed in time_calls(calls, problem.sets).items():
        block_v, warps = map(int, name.split(","))
        yield {
            "part": "programs", "batch": problem.batch, "block_v": block_v, "num_warps": warps,
            "programs": problem.batch * HEADS * HEAD_DIM // block_v, **timed,
            "floor_us": floor_us(2 * problem.batch * STATE_BYTES),
        }  # fmt: skip


def verify(generator: torch.Generator) -> Iterable[Row]:
    """Time eight drafts: with a state for each token, or with records and a commit."""
    for batch in BATCHES[:3]:
        yield from _verify_at(batch, generator)


def _verify_at(batch: int, generator: torch.Generator) -> Iterable[Row]:
    sets = input_sets(2 * batch * STATE_BYTES, most=64)  # of the call that moves the least
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
        "one_token": 2 * batch * STATE_BYTES,
        "snapshots": (1 + VERIFIED) * batch * STATE_BYTES,
        "records": batch * STATE_BYTES + VERIFIED * record,
        "commit": 2 * batch * STATE_BYTES + ACCEPTED * record,
    }
    for way, timed in time_calls(calls, sets).items():
        yield {
            "part": "verify", "way": way, "batch": batch, "drafts": DRAFTS, "accepted": ACCEPTED,
            **timed, "bytes": moved[way], "floor_us": floor_us(moved[way]),
            "difference": max(float(difference), float(recovered)),
        }  # fmt: skip

"""vLLM's Triton kernel for bfloat16 experts, as it chooses its launch and as it could be tuned.

Needs vLLM's Triton source and its compiled operators. ``vllm_triton`` launches with vLLM's own
default (it has no tuned file for K3's shapes on an H200). ``vllm_triton_tuned`` tries a few other
launches on each case and is timed with the quickest: what a user could get from vLLM's tuner.
"""

from __future__ import annotations

import contextlib
import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.adapter import Absent, Adapter, Call
from benchmarks.inputs.moe import BETA, LINEAR_BETA, MoeProblem
from benchmarks.peers import native

__all__ = ["ADAPTERS"]

_HOMES = ("fused_moe", "fused_moe_kernel_only")
_PACKAGE = "vllm.model_executor.layers.fused_moe"


@dataclass(frozen=True)
class _Launch:
    m: int
    n: int
    k: int
    group: int
    warps: int
    stages: int


_TRIED = (
    _Launch(16, 128, 64, 1, 4, 4), _Launch(16, 64, 256, 1, 4, 3), _Launch(16, 64, 128, 1, 4, 4),
    _Launch(64, 128, 64, 1, 4, 4), _Launch(128, 128, 64, 16, 8, 3), _Launch(128, 256, 64, 1, 8, 4),
)  # fmt: skip


def _kernel() -> Any:
    for home in _HOMES:
        with contextlib.suppress(ImportError, AttributeError):
            return importlib.import_module(f"{_PACKAGE}.{home}").fused_moe_kernel
    raise Absent(f"{_PACKAGE} has no fused_moe_kernel that imports")


def _find() -> str:
    native.require("_C", "situ_and_mul")
    native.require("_moe_C", "moe_align_block_size")
    native.require("_moe_C", "moe_sum")
    _kernel()
    return f"vllm {native.vllm_version()}"


def _default(tokens: int, experts: int) -> _Launch:
    """Return vLLM 0.33's launch for bfloat16 without a tuned file (``get_default_config``)."""
    sizes = ((32, 16), (96, 32), (512, 64))
    m = next((block for most, block in sizes if tokens <= most), 128)
    small = tokens <= 64
    return _Launch(
        m, 64 if small else 128, 128 if small else 64, 16 if tokens // experts > 128 else 1,
        4 if tokens <= 128 else 8, 4 if tokens <= 32 else 3,
    )  # fmt: skip


def _call_with(problem: MoeProblem, launch: _Launch) -> Call:
    import triton.language as tl

    kernel = _kernel()
    w13, w2, rank = problem.shared.w13, problem.shared.w2, problem.shared.rank
    tokens, top_k, inner, hidden = problem.tokens, rank.top_k, rank.intermediate, w2.shape[1]
    pairs = tokens * top_k
    # vLLM skips sorting when a block would hold one pair anyway.
    unsorted = pairs * 4 <= rank.experts

    def gemm(a: Tensor, b: Tensor, out: Tensor, weights: Tensor | None, aligned: Any, choices: int):
        sorted_ids, blocks, padded = aligned
        if sorted_ids is None:
            rows = pairs * launch.m
        else:
            rows = len(sorted_ids)
            if len(a) < launch.m:
                rows = min(rows, pairs * launch.m)
        columns, depth = b.shape[1:]
        grid = (-(-rows // launch.m) * -(-columns // launch.n),)
        kernel[grid](
            a, b, out, None, None, None, weights, sorted_ids, blocks, padded, columns, depth, rows,
            pairs, a.stride(0), a.stride(1), b.stride(0), b.stride(2), b.stride(1), out.stride(0),
            out.stride(1), 0, 0, 0, 0, 0, 0, 0, 0, 0, naive_block_assignment=sorted_ids is None,
            BLOCK_SIZE_M=launch.m, BLOCK_SIZE_N=launch.n, BLOCK_SIZE_K=launch.k,
            GROUP_SIZE_M=launch.group, SPLIT_K=1, MUL_ROUTED_WEIGHT=weights is not None,
            top_k=choices, compute_type=tl.bfloat16, use_fp8_w8a8=False, use_int8_w8a8=False,
            use_int8_w8a16=False, per_channel_quant=False, HAS_BIAS=False, SWAP_AB=False,
            USE_TD=False, num_warps=launch.warps, num_stages=launch.stages,
        )  # fmt: skip

    def call(index: int) -> Tensor:
        x, ids = problem.x[index], problem.expert_ids[index]
        aligned: tuple[Tensor | None, Tensor, Tensor]
        if unsorted:
            count = torch.full((1,), pairs * launch.m, dtype=torch.int32, device=x.device)
            aligned = (None, ids.view(-1), count)
        else:
            aligned = native.align_pairs(ids, rank.experts, launch.m)
        gate_up = x.new_empty(pairs, 2 * inner)
        gemm(x, w13, gate_up, None, aligned, top_k)
        middle = native.situ_and_mul(gate_up, BETA, LINEAR_BETA)
        down = x.new_empty(pairs, hidden)
        gemm(middle, w2, down, problem.weights[index], aligned, 1)
        out = torch.empty_like(x)
        torch.ops._moe_C.moe_sum(down.view(tokens, top_k, hidden), out, None, None)
        return out

    return call


def _prepare(problem: MoeProblem) -> Call:
    return _call_with(problem, _default(problem.tokens, problem.shared.rank.experts))


def _prepare_tuned(problem: MoeProblem) -> Call:
    small = problem.tokens <= 256
    tried = [launch for launch in _TRIED if (launch.m == 16) == small]
    calls = [_call_with(problem, launch) for launch in tried]
    return min(calls, key=lambda call: _quick_us(call, problem.sets))


def _quick_us(call: Call, sets: int) -> float:
    times = []
    for round_ in range(4):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        for index in range(sets):
            call(index)
        end.record()
        end.synchronize()
        if round_:
            times.append(start.elapsed_time(end))
    return min(times)


_OPERATORS = ("moe_bf16_tp8", "moe_bf16_ep8")
ADAPTERS = (
    Adapter("vllm_triton", _OPERATORS, _find, _prepare),
    Adapter("vllm_triton_tuned", _OPERATORS, _find, _prepare_tuned),
)

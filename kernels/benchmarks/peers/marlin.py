"""Marlin: vLLM's MXFP4 experts where a recipe pins them (its K3 recipe on Hopper does).

Needs vLLM's compiled operators. The calls and the layout of weights and scales follow vLLM 0.33,
``fused_moe/experts/marlin_moe.py`` and ``quantization/utils/marlin_utils_fp4.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.adapter import Adapter, Call
from benchmarks.inputs.moe import BETA, LINEAR_BETA, MoeProblem, MoeWeights
from benchmarks.peers import native

__all__ = ["ADAPTERS"]

#: The number that stands for float4_e2m1f in vLLM's operators: exponent 2, mantissa 1, signed,
#: finite values only and no NaN, one field after the other.
_FLOAT4_E2M1 = 2 | 1 << 8 | 1 << 16 | 1 << 49


def _find() -> str:
    native.require("_C", "gptq_marlin_repack")
    native.require("_C", "situ_and_mul")
    native.require("_moe_C", "moe_align_block_size")
    native.require("_moe_C", "moe_wna16_marlin_gemm")
    return f"vllm {native.vllm_version()}"


def _prepare(problem: MoeProblem) -> Call:
    shared = problem.shared
    if "marlin" not in shared.prepared:
        shared.prepared["marlin"] = _convert(shared)
    w13, s13, w2, s2 = shared.prepared["marlin"]
    rank, hidden = shared.rank, problem.x[0].shape[1]
    tokens, top_k, inner = problem.tokens, rank.top_k, rank.intermediate
    pairs = tokens * top_k
    # vLLM's rule: the smallest block that an expert's mean load does not fill.
    loads = (block for block in (8, 16, 32, 48, 64) if pairs / rank.experts / block < 0.9)
    block = next(loads, 64)
    workspace = torch.zeros(4 * _multiprocessors(), dtype=torch.int32, device=w13.device)

    def gemm(
        x: Tensor, w: Tensor, s: Tensor, weights: Tensor, aligned: tuple[Tensor, ...],
        sizes: tuple[int, int, int], choices: int, weighted: bool,
    ) -> Tensor:  # fmt: skip
        rows, columns, inner_size = sizes
        out = x.new_empty(pairs, columns)
        torch.ops._moe_C.moe_wna16_marlin_gemm(
            x, out, w, None, s, None, None, None, workspace, *aligned, weights, block, choices,
            weighted, _FLOAT4_E2M1, rows, columns, inner_size, False, True, False, -1, -1, -1,
        )  # fmt: skip
        return out

    def call(index: int) -> Tensor:
        weights = problem.weights[index]
        aligned = native.align_pairs(problem.expert_ids[index], rank.experts, block)
        sizes = (tokens, 2 * inner, hidden)
        gate_up = gemm(problem.x[index], w13, s13, weights, aligned, sizes, top_k, False)
        middle = native.situ_and_mul(gate_up, BETA, LINEAR_BETA)
        down = gemm(middle, w2, s2, weights, aligned, (pairs, hidden, inner), 1, True)
        return down.view(tokens, top_k, hidden).sum(1)

    return call


def _convert(shared: MoeWeights) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    assert shared.s13 is not None and shared.s2 is not None
    return (
        _weights(shared.w13), _scales(shared.s13),
        _weights(shared.w2), _scales(shared.s2),
    )  # fmt: skip


def _weights(packed: Tensor) -> Tensor:
    rows, columns = packed.shape[1], packed.shape[2] * 2
    return torch.stack([
        torch.ops._C.gptq_marlin_repack(
            expert.view(torch.int32).T.contiguous(), columns, rows, 4, False
        )
        for expert in packed
    ])  # fmt: skip


def _scales(scale: Tensor) -> Tensor:
    experts, rows, _ = scale.shape
    # Sixty-four neighbouring rows are dealt out in columns of eight, then swapped within fours.
    dealt = scale.transpose(1, 2).reshape(-1, 8, 8).transpose(1, 2).reshape(-1, 4)
    swapped = dealt[:, [0, 2, 1, 3]].reshape(experts, -1, rows)
    return swapped.contiguous().view(torch.float8_e8m0fnu)


def _multiprocessors() -> int:
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


ADAPTERS = (Adapter("marlin", ("moe_mxfp4_tp8", "moe_mxfp4_ep8"), _find, _prepare),)

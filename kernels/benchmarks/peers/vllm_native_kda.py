"""vLLM's compiled KDA: the fused decode step, and FlashKDA for prefill.

Needs vLLM's compiled operators (0.33). Both are what vLLM chooses for K3 on Hopper.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.adapter import Adapter, Call
from benchmarks.floors import HEAD_DIM
from benchmarks.inputs.kda import GATE_LOWER_BOUND, NORM_EPS
from benchmarks.inputs.kda_decode import KdaDecodeProblem
from benchmarks.inputs.kda_prefill import KdaPrefillProblem
from benchmarks.peers import native

__all__ = ["ADAPTERS"]


def _find_decode() -> str:
    native.require("_C", "fused_kda_decode")
    return f"vllm {native.vllm_version()}"


def _prepare_decode(problem: KdaDecodeProblem) -> Call:
    # One [4, HD] block of convolution taps for q, k and v each; the window channel-first.
    taps = problem.conv_weight.view(3, -1, 4).transpose(1, 2).contiguous()
    window = problem.conv_state.transpose(1, 2)
    shape = (1, problem.batch, problem.heads, HEAD_DIM)

    def call(index: int) -> Tensor:
        out = problem.qkv[index].new_empty(shape)
        torch.ops._C.fused_kda_decode(
            problem.qkv[index], taps, None, window, problem.raw_gate[index], problem.beta[index],
            problem.A_log, problem.dt_bias, problem.slots[index], problem.state, out,
            GATE_LOWER_BOUND, problem.output_gate[index], problem.norm_weight, NORM_EPS,
        )  # fmt: skip
        return out

    return call


def _find_prefill() -> str:
    native.require("_flashkda_C", "fwd")
    return f"vllm {native.vllm_version()}"


def _prepare_prefill(problem: KdaPrefillProblem) -> Call:
    size = torch.ops._flashkda_C.get_workspace_size(
        problem.tokens, problem.heads, problem.sequences
    )
    workspace = torch.empty(size, dtype=torch.uint8, device=problem.state.device)
    final = torch.empty_like(problem.state)
    bias = problem.dt_bias.view(problem.heads, HEAD_DIM)

    def call(index: int) -> tuple[Tensor, Tensor]:
        v = problem.v[index]
        out = torch.empty_like(v)
        torch.ops._flashkda_C.fwd(
            problem.q[index], problem.k[index], v, problem.g[index], problem.beta[index],
            HEAD_DIM**-0.5, out, workspace, problem.A_log, bias, GATE_LOWER_BOUND, problem.state,
            final, problem.cu_seqlens, None, None,
        )  # fmt: skip
        return out, final

    return call


ADAPTERS = (
    Adapter("vllm_native", ("kda_decode",), _find_decode, _prepare_decode),
    Adapter("flash_kda", ("kda_prefill",), _find_prefill, _prepare_prefill),
)

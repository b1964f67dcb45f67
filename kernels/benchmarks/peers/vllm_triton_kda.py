"""vLLM's Triton KDA: a decode step as a chain of three kernels, and the chunked prefill.

Needs vLLM's Triton sources (0.33). vLLM takes these paths where its compiled ones are missing.
"""

from __future__ import annotations

import importlib

import torch
from torch import Tensor

from benchmarks.adapter import Absent, Adapter, Call
from benchmarks.floors import HEAD_DIM
from benchmarks.inputs.kda import GATE_LOWER_BOUND, NORM_EPS
from benchmarks.inputs.kda_decode import KdaDecodeProblem
from benchmarks.inputs.kda_prefill import KdaPrefillProblem
from benchmarks.peers import native
from benchmarks.peers.autotuning import chosen_for_this_case

__all__ = ["ADAPTERS"]

_KDA = "vllm.models.kimi_k3.nvidia.ops.third_party.kda"
_CONV = "vllm.model_executor.layers.mamba.ops.causal_conv1d"
_NORM = "vllm.third_party.flash_linear_attention.ops.kda"


def _find() -> str:
    try:
        for module in (f"{_KDA}.fused_recurrent", _KDA, _CONV, _NORM):
            importlib.import_module(module)
    except ImportError as error:
        raise Absent(f"does not import: {error}") from error
    return f"vllm {native.vllm_version()}"


def _prepare_decode(problem: KdaDecodeProblem) -> Call:
    step = importlib.import_module(f"{_KDA}.fused_recurrent").fused_recurrent_kda_packed_decode
    conv = importlib.import_module(_CONV).causal_conv1d_update
    norm = importlib.import_module(_NORM).rms_norm_gated
    window = problem.conv_state.transpose(1, 2)
    shape = (problem.batch, problem.heads, HEAD_DIM)

    def call(index: int) -> Tensor:
        qkv = problem.qkv[index]
        mixed = conv(
            qkv, window, problem.conv_weight, None, activation="silu",
            conv_state_indices=problem.slots[index], validate_data=False,
            out=qkv.new_empty(qkv.shape),
        )  # fmt: skip
        out, _ = step(
            mixed, problem.raw_gate[index], problem.beta[index], problem.A_log, problem.dt_bias,
            GATE_LOWER_BOUND, problem.state, problem.slots[index],
        )  # fmt: skip
        return norm(
            out.view(shape), problem.output_gate[index], problem.norm_weight, None, "sigmoid",
            eps=NORM_EPS,
        )  # fmt: skip

    return call


def _prepare_prefill(problem: KdaPrefillProblem) -> Call:
    chunk_kda = importlib.import_module(_KDA).chunk_kda_with_fused_gate
    cu_seqlens = problem.cu_seqlens.long()

    def call(index: int) -> tuple[Tensor, Tensor]:
        v = problem.v[index]
        out, state = chunk_kda(
            problem.q[index], problem.k[index], v, problem.g[index], problem.beta[index],
            problem.A_log, problem.dt_bias, initial_state=problem.state, output_final_state=True,
            lower_bound=GATE_LOWER_BOUND, use_qk_l2norm_in_kernel=True, cu_seqlens=cu_seqlens,
            out=torch.empty_like(v),  # else it overwrites v
        )  # fmt: skip
        return out, state

    with chosen_for_this_case():
        call(0)
        torch.cuda.synchronize()
    return call


ADAPTERS = (
    Adapter("vllm_triton_chain", ("kda_decode",), _find, _prepare_decode),
    Adapter("vllm_triton", ("kda_prefill",), _find, _prepare_prefill),
)

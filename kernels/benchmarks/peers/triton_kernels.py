"""OpenAI's triton_kernels, the copy that vLLM carries: MXFP4 experts with Hopper's weight layout.

Needs ``triton_kernels`` (or vLLM, which has it under ``third_party``) and vLLM's compiled SiTU.
vLLM itself does not choose it for K3, because its fused activation is another one; it is measured
with SiTU as a kernel of its own. The order of the calls follows vLLM 0.33,
``fused_moe/experts/gpt_oss_triton_kernels_moe.py``.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from benchmarks.adapter import Absent, Adapter, Call
from benchmarks.inputs.moe import BETA, LINEAR_BETA, MoeProblem, MoeWeights
from benchmarks.peers import native

__all__ = ["ADAPTERS"]

_PACKERS = (
    "vllm.model_executor.layers.fused_moe.experts.gpt_oss_triton_kernels_moe",
    "vllm.tk_pack",
)


def _find() -> str:
    native.require("_C", "situ_and_mul")
    _packer()
    try:
        importlib.import_module("triton_kernels.matmul_ogs")
    except ImportError as error:
        raise Absent(f"does not import: {error}") from error
    return f"vllm {native.vllm_version()}"


def _packer() -> ModuleType:
    """Find vLLM's bit packing of routing, and put its copy of triton_kernels on the path."""
    for entry in sys.path:
        carried = Path(entry or ".") / "vllm" / "third_party"
        if (carried / "triton_kernels").is_dir() and str(carried) not in sys.path:
            sys.path.append(str(carried))
            break
    for name in _PACKERS:
        with contextlib.suppress(ImportError):
            module = importlib.import_module(name)
            if hasattr(module, "pack_bitmatrix"):
                return module
    raise Absent("vLLM's pack_bitmatrix does not import")


def _convert(shared: MoeWeights) -> tuple[Any, ...]:
    import triton_kernels.matmul_ogs_details.opt_flags as opt_flags
    from triton_kernels.matmul_ogs import FlexCtx, PrecisionConfig
    from triton_kernels.numerics import InFlexData
    from triton_kernels.tensor import FP4, convert_layout, wrap_torch_tensor
    from triton_kernels.tensor_details import layout

    opt_flags.update_opt_flags_constraints({"split_k": 1})
    values, value_options = layout.make_default_matmul_mxfp4_w_layout(mx_axis=1)
    scales, scale_options = layout.make_default_matmul_mxfp4_w_scale_layout(mx_axis=1, num_warps=8)

    def swizzle(packed: Tensor, scale: Tensor) -> tuple[Any, Any]:
        weight = wrap_torch_tensor(packed.transpose(-2, -1), dtype=FP4)
        factor = wrap_torch_tensor(scale.transpose(-2, -1))
        return (
            convert_layout(weight, values, **value_options),
            PrecisionConfig(
                weight_scale=convert_layout(factor, scales, **scale_options),
                flex_ctx=FlexCtx(rhs_data=InFlexData()),
            ),
        )

    assert shared.s13 is not None and shared.s2 is not None
    return (*swizzle(shared.w13, shared.s13), *swizzle(shared.w2, shared.s2))


def _prepare(problem: MoeProblem) -> Call:
    from triton_kernels.matmul_ogs import matmul_ogs
    from triton_kernels.routing import routing_from_bitmatrix
    from triton_kernels.tensor import Bitmatrix

    shared = problem.shared
    if "triton_kernels" not in shared.prepared:
        shared.prepared["triton_kernels"] = _convert(shared)
    w13, precision13, w2, precision2 = shared.prepared["triton_kernels"]
    pack = _packer().pack_bitmatrix
    experts, top_k = shared.rank.experts, shared.rank.top_k
    tokens, inner = problem.tokens, shared.rank.intermediate
    words = -(-experts // 32)

    def call(index: int) -> Any:
        x = problem.x[index]
        ids = problem.expert_ids[index].to(torch.int16)
        bits = torch.zeros(tokens, words, dtype=torch.uint32, device=x.device)
        pack[(-(-tokens // 512),)](
            bits, ids, tokens, words, top_k, BLOCK_SIZE_M=512, BLOCK_SIZE_K=32
        )
        matrix = Bitmatrix(
            bits, shape=[tokens, words * 32], shape_max=[tokens, None], scratchpad=None
        )
        routing, gather, scatter = routing_from_bitmatrix(
            matrix, problem.weights[index].to(torch.bfloat16), ids, experts, top_k
        )
        gate_up = matmul_ogs(
            x, w13, None, routing, gather_indx=gather, precision_config=precision13
        )
        middle = native.situ_and_mul(gate_up.view(-1, 2 * inner), BETA, LINEAR_BETA)
        out = matmul_ogs(
            middle, w2, None, routing, scatter_indx=scatter, precision_config=precision2,
            gammas=routing.gate_scal,
        )  # fmt: skip
        return out.view(tokens, -1)

    return call


ADAPTERS = (Adapter("triton_kernels", ("moe_mxfp4_tp8", "moe_mxfp4_ep8"), _find, _prepare),)

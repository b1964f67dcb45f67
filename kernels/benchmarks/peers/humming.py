"""Humming: what vLLM 0.33 chooses by itself for K3's MXFP4 experts on Hopper.

Needs the package ``humming`` (``humming-kernels``), vLLM's compiled operators for sorting and its
Triton kernel for the weighted sum. The order of the calls follows vLLM 0.33,
``fused_moe/experts/fused_humming_moe.py``, with the GEMM of the type *indexed* in both shapes and
Humming's own heuristics. Humming compiles at run time.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.adapter import Absent, Adapter, Call
from benchmarks.inputs.moe import BETA, LINEAR_BETA, MoeProblem, MoeWeights
from benchmarks.peers import native

__all__ = ["ADAPTERS"]

_COMPUTE = json.dumps(
    {"use_batch_invariant": False, "use_f16_accum": False, "gemm_type": "indexed"}
)
_SITU = f"""[](float g, float u) {{
    const float bounded = {BETA}f * tanhf(g / {BETA}f) / (1.f + expf(-g));
    return bounded * {LINEAR_BETA}f * tanhf(u / {LINEAR_BETA}f);
}}(a, b)"""


def _find() -> str:
    native.require("_moe_C", "moe_align_block_size")
    _load_compiler_data()
    try:
        importlib.import_module("humming.forward")
        importlib.import_module("vllm.model_executor.layers.fused_moe.moe_fused_mul_sum")
    except ImportError as error:
        raise Absent(f"does not import: {error}") from error
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version("humming-kernels")
    return "unpacked"


def _load_compiler_data() -> None:
    """Load what NVRTC looks for by name alone, where PyTorch's wheels keep it."""
    try:
        nvidia = importlib.import_module("nvidia")
    except ImportError:
        return
    for folder in nvidia.__path__:
        for library in sorted(Path(folder).glob("cu*/lib/libnvrtc-builtins.so*")):
            with contextlib.suppress(OSError):
                ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


class _Layer:
    """One of the two matrices of all experts in Humming's layout, and its ranges of sizes."""

    def __init__(self, packed: Tensor, scale: Tensor, stacks: list[int]) -> None:
        from humming.config import GemmType
        from humming.schema import Mxfp4WeightSchema
        from humming.transform import prepare_and_transform_humming_tensors
        from humming.tune import get_heuristics_config

        experts, rows, columns = packed.shape[0], packed.shape[1], packed.shape[2] * 2
        schema, tensors = Mxfp4WeightSchema().convert_humming(
            tensors={"weight": packed, "weight_scale": scale}, shape_n_stacks=stacks,
            shape_k_stacks=[columns], param_dtype=torch.bfloat16, num_experts=experts,
        )  # fmt: skip
        self.config, self.tensors = prepare_and_transform_humming_tensors(
            tensors=tensors, shape_n=rows, shape_k=columns, pad_n_to_multiple=256,
            pad_k_to_multiple=128, input_schema=None, weight_schema=schema, has_bias=False,
            num_experts=experts, torch_dtype=torch.bfloat16, device=packed.device,
        )  # fmt: skip
        self.ranges = get_heuristics_config(layer_config=self.config, gemm_type=GemmType.INDEXED)
        self._ranges = json.dumps(self.ranges)

    def block(self, pairs: int) -> int:
        """Rows of a block that the heuristics choose for so many pairs."""
        fitting = (tuned for low, high, tuned in self.ranges if low < pairs <= high)
        return next((tuned["block_shape"][0] for tuned in fitting), 64)

    def __call__(
        self, x: Tensor, out: Tensor, aligned: tuple[Tensor, ...], top_k: int, locks: Tensor
    ) -> None:
        from humming.forward import humming_forward

        sorted_ids, expert_ids, padded = aligned
        humming_forward(
            self.config, inputs=x, weight=self.tensors["weight"],
            weight_scale=self.tensors["weight_scale"],
            weight_scale_2=self.tensors.get("weight_scale_2"), outputs=out, sorted_ids=sorted_ids,
            expert_ids=expert_ids, num_tokens_padded=padded, locks=locks, top_k=top_k,
            valid_shape_m=len(out), compute_config=_COMPUTE, tuning_config=self._ranges,
        )  # fmt: skip


def _layers(shared: MoeWeights) -> tuple[_Layer, _Layer]:
    if "humming" not in shared.prepared:
        inner, hidden = shared.rank.intermediate, shared.w2.shape[1]
        assert shared.s13 is not None and shared.s2 is not None
        shared.prepared["humming"] = (
            _Layer(shared.w13, shared.s13, [inner, inner]),
            _Layer(shared.w2, shared.s2, [hidden]),
        )
    layers: tuple[_Layer, _Layer] = shared.prepared["humming"]
    return layers


def _prepare(problem: MoeProblem) -> Call:
    from humming.forward import may_process_input
    from vllm.model_executor.layers.fused_moe.moe_fused_mul_sum import moe_fused_mul_sum

    gate_up, down = _layers(problem.shared)
    rank, hidden = problem.shared.rank, problem.x[0].shape[1]
    tokens, top_k, inner = problem.tokens, rank.top_k, rank.intermediate
    pairs = tokens * top_k
    processors = torch.cuda.get_device_properties(problem.x[0].device).multi_processor_count
    locks = torch.zeros(8 * processors, dtype=torch.int32, device=problem.x[0].device)

    def call(index: int) -> Any:
        x, ids = problem.x[index], problem.expert_ids[index]
        aligned = native.align_pairs(ids, rank.experts, gate_up.block(pairs))
        first = x.new_empty(pairs, 2 * inner)
        gate_up(x, first, aligned, top_k, locks)
        middle, _, _ = may_process_input(
            down.config, inputs=first, outputs=x.new_empty(pairs, inner),
            activation_type="binary_split", activation_impl=_SITU,
        )  # fmt: skip
        if down.block(pairs) != gate_up.block(pairs):
            aligned = native.align_pairs(ids, rank.experts, down.block(pairs))
        second = x.new_empty(pairs, hidden)
        down(middle, second, aligned, 1, locks)
        out = torch.empty_like(x)
        moe_fused_mul_sum(second.view(tokens, top_k, hidden), problem.weights[index], out, ids)
        return out

    return call


ADAPTERS = (Adapter("humming", ("moe_mxfp4_tp8", "moe_mxfp4_ep8"), _find, _prepare),)

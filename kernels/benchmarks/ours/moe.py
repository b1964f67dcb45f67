"""Our expert layer on the benchmark's inputs.

Needs PyTorch and Triton.
"""

from __future__ import annotations

from typing import Any

from benchmarks.adapter import Adapter, Call
from benchmarks.inputs.moe import BETA, LINEAR_BETA, MoeProblem, MoeWeights
from benchmarks.ours.operators import operator

__all__ = ["ADAPTERS"]


def _find() -> str:
    operator("moe", "moe_experts")
    return "this checkout"


def _prepare(problem: MoeProblem) -> Call:
    moe_experts = operator("moe", "moe_experts")
    experts = _weights(problem.shared)

    def call(index: int) -> Any:
        return moe_experts(
            problem.x[index], experts, problem.expert_ids[index], problem.weights[index],
            beta=BETA, linear_beta=LINEAR_BETA,
        )  # fmt: skip

    return call


def _weights(shared: MoeWeights) -> Any:
    if "ours" not in shared.prepared:
        if shared.format == "mxfp4":
            pack = operator("moe_weights", "pack_mxfp4")
            experts = pack(shared.w13, shared.s13, shared.w2, shared.s2)
        else:
            experts = operator("moe_weights", "BF16Experts")(shared.w13, shared.w2)
        shared.prepared["ours"] = experts
    return shared.prepared["ours"]


_OPERATORS = ("moe_mxfp4_tp8", "moe_mxfp4_ep8", "moe_bf16_tp8", "moe_bf16_ep8")
ADAPTERS = (Adapter("ours", _OPERATORS, _find, _prepare),)

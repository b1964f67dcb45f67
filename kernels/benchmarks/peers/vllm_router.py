"""vLLM's compiled routers: ``grouped_topk``, which it chooses for K3, and ``topk_sigmoid``.

Needs vLLM's compiled operators (0.33).
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.adapter import Adapter, Call
from benchmarks.inputs.router import TOP_K, RouterProblem
from benchmarks.peers import native

__all__ = ["ADAPTERS"]

_SIGMOID = 1  # vLLM's number for the scoring function


def _find(operator: str) -> str:
    native.require("_moe_C", operator)
    return f"vllm {native.vllm_version()}"


def _prepare_grouped(problem: RouterProblem) -> Call:
    def call(index: int) -> tuple[Tensor, Tensor]:
        weights, ids = torch.ops._moe_C.grouped_topk(
            problem.logits[index], 1, 1, TOP_K, True, 1.0, problem.bias, _SIGMOID
        )
        return weights, ids

    return call


def _prepare_sigmoid(problem: RouterProblem) -> Call:
    def call(index: int) -> tuple[Tensor, Tensor]:
        logits = problem.logits[index]
        shape = (len(logits), TOP_K)
        weights = logits.new_empty(shape)
        ids, sources = (logits.new_empty(shape, dtype=torch.int32) for _ in range(2))
        torch.ops._moe_C.topk_sigmoid(weights, ids, sources, logits, True, problem.bias, 1.0, None)
        return weights, ids

    return call


ADAPTERS = (
    Adapter("vllm_grouped_topk", ("router",), lambda: _find("grouped_topk"), _prepare_grouped),
    Adapter("vllm_topk_sigmoid", ("router",), lambda: _find("topk_sigmoid"), _prepare_sigmoid),
)

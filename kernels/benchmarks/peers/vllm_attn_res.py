"""vLLM's AttnRes on Hopper: its Triton kernel (the compiled one is for Blackwell only).

Needs vLLM's ``models/kimi_k3/nvidia/ops/attn_res.py`` (0.33).
"""

from __future__ import annotations

import importlib

from torch import Tensor

from benchmarks.adapter import Absent, Adapter, Call
from benchmarks.inputs.attn_res import BLOCKS, EPS, AttnResProblem
from benchmarks.peers import native

__all__ = ["ADAPTERS"]

_MODULE = "vllm.models.kimi_k3.nvidia.ops.attn_res"


def _find() -> str:
    try:
        importlib.import_module(_MODULE)
    except ImportError as error:
        raise Absent(f"does not import: {error}") from error
    return f"vllm {native.vllm_version()}"


def _prepare(problem: AttnResProblem) -> Call:
    attn_res = importlib.import_module(_MODULE).attn_res

    def call(index: int) -> tuple[Tensor, Tensor]:
        prefix = problem.prefix[index]
        out = attn_res(
            prefix, problem.delta[index], problem.blocks_by_token[index], problem.key_norm,
            problem.query, problem.norm, BLOCKS, -1, EPS, EPS,
        )  # fmt: skip
        return out, prefix  # it adds delta in place

    return call


ADAPTERS = (Adapter("vllm_triton", ("attnres8",), _find, _prepare),)

"""The operators of :mod:`k3_kernels` on the benchmark's inputs.

Needs PyTorch and Triton. An operator that this version of the package does not have is reported as
absent, so that an older checkout can be measured too.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.adapter import Absent, Adapter, Call
from benchmarks.inputs.attn_res import EPS, AttnResProblem
from benchmarks.inputs.kda import GATE_LOWER_BOUND, NORM_EPS
from benchmarks.inputs.kda_decode import KdaDecodeProblem
from benchmarks.inputs.kda_prefill import KdaPrefillProblem
from benchmarks.inputs.kda_recover import KdaRecoverProblem
from benchmarks.inputs.mla_decode import SCALE, MlaDecodeProblem
from benchmarks.inputs.router import TOP_K, RouterProblem

__all__ = ["ADAPTERS", "operator"]


def operator(module: str, name: str) -> Callable[..., Any]:
    """Return a public name of the package from the module that defines it.

    Raises
    ------
    Absent
        If this checkout has no such operator.
    """
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(f"k3_kernels.{module}"), name)
    except (ImportError, AttributeError) as error:
        raise Absent(f"this k3_kernels has no {name}: {error}") from error
    return found


def _find(module: str, name: str) -> Callable[[], str]:
    def find() -> str:
        operator(module, name)
        return "this checkout"

    return find


def _attn_res(problem: AttnResProblem) -> Call:
    attn_res = operator("attn_res", "attn_res")

    def call(index: int) -> tuple[Tensor, Tensor]:
        prefix = problem.prefix[index]
        result: tuple[Tensor, Tensor] = attn_res(
            problem.blocks[index], prefix, problem.delta[index], problem.query, problem.key_norm,
            problem.norm, key_eps=EPS, norm_eps=EPS, prefix_out=prefix,
        )  # fmt: skip
        return result

    return call


def _route(problem: RouterProblem) -> Call:
    route = operator("routing", "route")

    def call(index: int) -> tuple[Tensor, Tensor]:
        routing = route(problem.logits[index], problem.bias, TOP_K)
        return routing.weights, routing.expert_ids

    return call


def _kda_decode(problem: KdaDecodeProblem) -> Call:
    kda_decode = operator("kda_decode", "kda_decode")
    taps = problem.conv_weight.T.contiguous().T  # tap by tap in memory, as the kernel reads them
    window = problem.conv_state.transpose(1, 2)

    def call(index: int) -> Any:
        return kda_decode(
            problem.qkv[index], problem.raw_gate[index][0], problem.beta[index][0],
            problem.output_gate[index], taps, problem.A_log, problem.dt_bias, problem.norm_weight,
            window, problem.state, problem.slots[index], lower_bound=GATE_LOWER_BOUND,
            norm_eps=NORM_EPS, null_slot=0,
        )  # fmt: skip

    return call


def _kda_prefill(problem: KdaPrefillProblem) -> Call:
    kda_prefill = operator("kda_prefill", "kda_prefill")
    count, device = problem.sequences, problem.state.device
    slots = torch.arange(count, dtype=torch.int32, device=device)
    continued = torch.ones(count, dtype=torch.bool, device=device)
    cu_seqlens = problem.cu_seqlens if count > 1 else None

    def call(index: int) -> tuple[Tensor, Tensor]:
        rows = (part[index][0] for part in (problem.q, problem.k, problem.v, problem.g))
        out = kda_prefill(
            *rows, problem.beta[index][0], problem.A_log, problem.dt_bias, problem.state, slots,
            cu_seqlens=cu_seqlens, has_initial_state=continued, lower_bound=GATE_LOWER_BOUND,
        )  # fmt: skip
        return out, problem.state

    return call


def _kda_recover(problem: KdaRecoverProblem) -> Call:
    kda_recover = operator("kda_recover", "kda_recover")
    records_of = operator("kda_records", "KDARecords")
    accepted = torch.full(
        (problem.batch,), problem.accepted, dtype=torch.int32, device=problem.state.device
    )
    records = [
        records_of(u=u, key=key, gate=gate)
        for u, key, gate in zip(problem.u, problem.key, problem.gate, strict=True)
    ]

    def call(index: int) -> None:
        kda_recover(
            problem.state, records[index], problem.slots[index], accepted, problem.A_log,
            problem.dt_bias, lower_bound=GATE_LOWER_BOUND, null_slot=0,
        )  # fmt: skip

    return call


def _mla_decode(problem: MlaDecodeProblem) -> Call:
    mla_decode = operator("mla_decode", "mla_decode")

    def call(index: int) -> Tensor:
        result: Tensor = mla_decode(
            problem.q_latent[index], problem.q_pe[index], problem.pool, problem.tables[index],
            problem.lengths, scale=SCALE,
        )  # fmt: skip
        return result

    return call


ADAPTERS = (
    Adapter("ours", ("attnres8",), _find("attn_res", "attn_res"), _attn_res),
    Adapter("ours", ("router",), _find("routing", "route"), _route),
    Adapter("ours", ("kda_decode",), _find("kda_decode", "kda_decode"), _kda_decode),
    Adapter("ours", ("kda_prefill",), _find("kda_prefill", "kda_prefill"), _kda_prefill),
    Adapter("ours", ("kda_recover",), _find("kda_recover", "kda_recover"), _kda_recover),
    Adapter("ours", ("mla_decode",), _find("mla_decode", "mla_decode"), _mla_decode),
)

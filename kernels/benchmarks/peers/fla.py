"""flash-linear-attention: its chunked KDA for prefill.

Needs the package ``fla`` (``fla-core`` 0.6).
"""

from __future__ import annotations

import importlib
import os
from importlib import metadata

import torch
from torch import Tensor

from benchmarks.adapter import Absent, Adapter, Call
from benchmarks.inputs.kda import GATE_LOWER_BOUND
from benchmarks.inputs.kda_prefill import KdaPrefillProblem
from benchmarks.peers.autotuning import chosen_for_this_case

__all__ = ["ADAPTERS"]


def _find() -> str:
    # Choices kept on disk could come from a run beside other work; see the module autotuning.
    os.environ.setdefault("FLA_CACHE_RESULTS", "0")
    try:
        importlib.import_module("fla.ops.kda")
    except ImportError as error:
        raise Absent(f"does not import: {error}") from error
    try:
        return metadata.version("fla-core")
    except metadata.PackageNotFoundError:
        return "unpacked"


def _prepare(problem: KdaPrefillProblem) -> Call:
    from fla.ops.kda import chunk_kda

    cu_seqlens = problem.cu_seqlens.long() if problem.sequences > 1 else None

    @torch.inference_mode()
    def call(index: int) -> tuple[Tensor, Tensor]:
        out, state = chunk_kda(
            problem.q[index], problem.k[index], problem.v[index], problem.g[index],
            problem.beta[index], initial_state=problem.state, output_final_state=True,
            use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True, safe_gate=True, lower_bound=GATE_LOWER_BOUND,
            state_v_first=True, cu_seqlens=cu_seqlens, A_log=problem.A_log,
            dt_bias=problem.dt_bias,
        )  # fmt: skip
        return out, state

    with chosen_for_this_case():
        call(0)
        torch.cuda.synchronize()
    return call


ADAPTERS = (Adapter("fla", ("kda_prefill",), _find, _prepare),)

"""Build the inputs of a list of cases one after the other, sharing what an operator's cases share.

Needs PyTorch.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from benchmarks.adapter import Problem
from benchmarks.cases import Case
from benchmarks.inputs.attn_res import AttnResProblem
from benchmarks.inputs.kda_decode import KdaDecodeProblem
from benchmarks.inputs.kda_prefill import KdaPrefillProblem
from benchmarks.inputs.kda_recover import KdaRecoverProblem
from benchmarks.inputs.mla_decode import MlaDecodeProblem
from benchmarks.inputs.moe import MoeProblem, MoeWeights
from benchmarks.inputs.router import RouterProblem

__all__ = ["problems"]

_PROBLEMS = {
    "attnres8": AttnResProblem,
    "router": RouterProblem,
    "kda_decode": KdaDecodeProblem,
    "kda_prefill": KdaPrefillProblem,
    "kda_recover": KdaRecoverProblem,
    "mla_decode": MlaDecodeProblem,
}


def problems(
    cases: Iterable[Case], *, seed: int, device: str = "cuda", load_file: Path | None = None
) -> Iterator[tuple[Case, Problem]]:
    """Yield each case with its inputs; those of the case before are given up first."""
    generator = torch.Generator(device=device).manual_seed(seed)
    shared: tuple[str, MoeWeights] | None = None
    for case in cases:
        if not case.operator.startswith("moe_"):
            shared = None
            _give_back_memory()
            yield case, _PROBLEMS[case.operator](case, generator)
            continue
        if shared is None or shared[0] != case.operator:
            shared = None
            _give_back_memory()
            shared = (case.operator, MoeWeights(case.operator, generator))
        yield case, MoeProblem(case, shared[1], generator, load_file)


def _give_back_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()

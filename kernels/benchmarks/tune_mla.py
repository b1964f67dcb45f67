"""Measure the launch constants of :func:`k3_kernels.mla_decode` at K3's heads on one of 8 ranks.

``python -m benchmarks.tune_mla``; see :mod:`benchmarks.tuning`.
"""

from __future__ import annotations

import sys
from functools import partial

import torch
from k3_kernels.mla_decode import MLADecodeConfig, mla_decode

from benchmarks import cases
from benchmarks.floors import LATENT_RANK
from benchmarks.inputs.mla_decode import SCALE, MlaDecodeProblem
from benchmarks.tuning import Case, tune

HEADS = 12
#: Tokens of a request, requests, and the most requests that a case's constants serve.
SIZES = ((1, 1, 4), (1, 16, None), (4, 1, 4), (4, 16, None), (9, 1, 4), (9, 16, None))


def candidates(tokens: int) -> list[MLADecodeConfig]:
    """List what the compiler's reports leave open: tile, warps, stages, side, programs."""
    if tokens == 1:
        shapes = [
            (16, 64, 8, 3, False, 132), (16, 64, 4, 2, True, 132), (16, 64, 4, 3, False, 132),
            (16, 64, 8, 2, False, 264), (16, 64, 4, 2, False, 264), (16, 32, 4, 3, False, 264),
            (16, 32, 4, 5, False, 132), (16, 64, 8, 2, True, 132), (16, 32, 4, 2, True, 264),
            (16, 32, 4, 3, True, 132), (64, 64, 8, 2, False, 132), (16, 64, 4, 3, False, 264),
        ]  # fmt: skip
    else:
        shapes = [
            (64, 32, 8, 3, False, 132), (64, 64, 8, 2, False, 132), (64, 32, 8, 4, False, 132),
            (32, 64, 4, 2, True, 132), (64, 32, 8, 3, False, 264), (64, 16, 8, 4, False, 132),
            (32, 64, 8, 3, False, 132), (32, 32, 8, 3, False, 264), (32, 64, 4, 2, True, 264),
        ]  # fmt: skip
    configs = [MLADecodeConfig(*shape, 64, True) for shape in shapes]
    return configs + [MLADecodeConfig(*shape, 64, False) for shape in shapes[:2]]


def case(tokens: int, batch: int, bound: int | None, most_sets: int | None) -> Case:
    """Make the inputs of one case."""
    sizes = {"heads": HEADS, "batch": batch, "tokens": tokens, "length": 8192}
    generator = torch.Generator(device="cuda").manual_seed(tokens)
    problem = MlaDecodeProblem(cases.Case("mla_decode", "", sizes), generator, most_sets)

    def call(config: MLADecodeConfig, index: int) -> torch.Tensor:
        return mla_decode(
            problem.q_latent[index], problem.q_pe[index], problem.pool, problem.tables[index],
            problem.lengths, scale=SCALE, config=config,
        )  # fmt: skip

    def error(config: MLADecodeConfig) -> float:
        return problem.error(partial(call, config))

    rows = tokens * HEADS
    shape = f"R={LATENT_RANK},rows={16 if rows <= 16 else 64 if rows <= 64 else 128}"
    return Case(
        shape, batch, bound, problem.sets, candidates(tokens), call, error, problem.tolerance,
        problem.floor_us,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(tune("mla_decode", [partial(case, *size) for size in SIZES]))

"""Measure the launch constants of :func:`k3_kernels.finalize.finalize` at K3's shape.

``python -m benchmarks.tune_finalize``; see :mod:`benchmarks.tuning`.
"""

from __future__ import annotations

import sys
from functools import partial

import torch
from k3_kernels.finalize import FinalizeConfig, finalize

from benchmarks.timing import input_sets, relative_error
from benchmarks.tuning import Case, tune

WIDTH, TOP_K = 3584, 16
#: Tokens of a case, and the largest number of tokens its constants serve.
SIZES = ((1, 8), (16, 32), (64, 132), (256, 512), (1024, 2048), (8192, None))


def candidates(norm: bool) -> list[FinalizeConfig]:
    """List pieces of a row and warps."""
    if norm:
        found = [(512, 8), (512, 16), (1024, 8), (1024, 16), (512, 2)]
    else:
        found = [(128, 1), (256, 2), (512, 4), (4096, 8)]
    return [
        FinalizeConfig(block_d, warps, -(-WIDTH // block_d) if norm else 1, pdl)
        for block_d, warps in found
        for pdl in (False, True)
    ]


def case(tokens: int, bound: int | None, norm: bool, most_sets: int | None) -> Case:
    """Make the inputs of one case."""
    moved = tokens * (TOP_K + 1) * WIDTH * 2
    sets = most_sets or min(input_sets(moved), max(2, 2**31 // moved))
    pairs = torch.randn(sets, tokens * TOP_K, WIDTH, dtype=torch.bfloat16, device="cuda")
    weights = torch.rand(tokens, TOP_K, device="cuda")
    norm_weight = 1 + 0.1 * torch.randn(WIDTH, device="cuda") if norm else None
    out = torch.empty(tokens, WIDTH, dtype=torch.bfloat16, device="cuda")

    def call(config: FinalizeConfig, index: int) -> None:
        finalize(pairs[index], weights, norm_weight=norm_weight, out=out, config=config)

    def error(config: FinalizeConfig) -> float:
        out.fill_(torch.nan)
        call(config, sets - 1)
        shown = slice(-256, None)
        rows = pairs[sets - 1].view(tokens, TOP_K, WIDTH)[shown].double()
        total = (rows * weights[shown, :, None]).sum(1)
        if norm_weight is not None:
            total = total * (total.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * norm_weight
        return relative_error(out[shown], total) if bool(out.isfinite().all()) else float("inf")

    shape = f"k={TOP_K},D={WIDTH},norm={int(norm)}"
    floor = moved / 4.3e12 * 1e6
    return Case(shape, tokens, bound, sets, candidates(norm), call, error, 4e-3, floor)


if __name__ == "__main__":
    every = [partial(case, *size, norm) for norm in (True, False) for size in SIZES]
    sys.exit(tune("finalize", every))

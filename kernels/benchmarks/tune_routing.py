"""Measure the launch constants of :func:`k3_kernels.routing.route` at K3's shape.

``python -m benchmarks.tune_routing``; see :mod:`benchmarks.tuning`.
"""

from __future__ import annotations

import sys
from functools import partial

import torch
from k3_kernels.routing import RouteConfig, route

from benchmarks.timing import input_sets
from benchmarks.tuning import Case, tune

EXPERTS, TOP_K = 896, 16
#: Tokens of a case, and the largest number of tokens its constants serve.
SIZES = ((1, 8), (16, 32), (64, 128), (256, 512), (1024, 2048), (8192, None))


def candidates(tokens: int) -> list[RouteConfig]:
    """List what the instruction counts leave open."""
    few = tokens <= 256
    found = [RouteConfig(warps, "network", pdl) for warps in (1, 2, 4, 8) for pdl in (False, True)]
    return [*found, RouteConfig(4 if few else 1, "argmax"), RouteConfig(4 if few else 1, "topk")]


def case(tokens: int, bound: int | None, most_sets: int | None) -> Case:
    """Make the inputs of one case."""
    moved = tokens * (EXPERTS * 4 + TOP_K * 8)
    sets = most_sets or input_sets(moved)
    logits = torch.randn(sets, tokens, EXPERTS, device="cuda")
    bias = 0.1 * torch.randn(EXPERTS, device="cuda")
    ids = torch.empty(tokens, TOP_K, dtype=torch.int32, device="cuda")
    weights = torch.empty(tokens, TOP_K, device="cuda")

    def call(config: RouteConfig, index: int) -> None:
        route(logits[index], bias, TOP_K, expert_ids_out=ids, weights_out=weights, config=config)

    def error(config: RouteConfig) -> float:
        ids.fill_(-1)
        weights.fill_(torch.nan)
        call(config, sets - 1)
        scores = logits[sets - 1].double().sigmoid()
        chosen = ids.long()
        if not bool(((chosen >= 0) & (chosen < EXPERTS)).all()):
            return float("inf")
        preference = scores + bias.double()
        best = preference.topk(TOP_K, -1).values
        wrong = (preference.gather(1, chosen) - best).abs().max()
        expected = scores.gather(1, chosen)
        expected /= expected.sum(-1, keepdim=True)
        relative = (weights.double() - expected).norm() / expected.norm()
        return float(torch.maximum(wrong, relative).nan_to_num(nan=float("inf")))

    shape = f"E={EXPERTS},k={TOP_K}"
    floor = moved / 4.3e12 * 1e6
    return Case(shape, tokens, bound, sets, candidates(tokens), call, error, 1e-6, floor)


if __name__ == "__main__":
    sys.exit(tune("routing", [partial(case, *size) for size in SIZES]))

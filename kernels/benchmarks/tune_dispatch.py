"""Measure the launch constants of :func:`k3_kernels.dispatch.dispatch` at K3's shapes.

``python -m benchmarks.tune_dispatch``; see :mod:`benchmarks.tuning`.
"""

from __future__ import annotations

import sys
from functools import partial

import torch
from k3_kernels.dispatch import Dispatch, DispatchConfig, dispatch, max_padded_pairs

from benchmarks.timing import input_sets
from benchmarks.tuning import Case, tune

TOP_K = 16
#: Experts, tokens of a case, the largest number of pairs its constants serve, rows of a block.
SIZES = (
    (896, 1, 16, 8),
    (896, 4, 64, 8),
    (896, 16, 256, 8),
    (896, 64, 1024, 8),
    (896, 256, 4096, 16),
    (896, 1024, 16384, 64),
    (896, 8192, None, 128),
)


def candidates(pairs: int) -> list[DispatchConfig]:
    """List one program up to a thousand pairs, and slices of a few lengths beyond."""
    found = []
    if pairs <= 256:
        found += [
            DispatchConfig(warps, pdl=pdl)
            for warps in (1, 2, 4, 8)
            if 32 * warps <= max(32, pairs)
            for pdl in (False, True)
        ]
    if pairs >= 256:
        found += [
            DispatchConfig(max(1, length // share), 0, length, pdl=pdl)
            for length in (32, 64, 128, 256, 512, 1024)
            if 4 <= pairs // length <= 128
            for share in ((128, 256) if length <= 512 else (128,))
            for pdl in ((False, True) if share == 128 else (False,))
        ]
    return found


def case(
    experts: int, tokens: int, bound: int | None, block_size: int, most_sets: int | None
) -> Case:
    """Make the inputs of one case: uniform routing, sixteen different experts a token."""
    pairs = tokens * TOP_K
    longest = max_padded_pairs(pairs, experts, block_size)
    moved = 4 * (pairs + longest + longest // block_size)
    sets = most_sets or input_sets(moved)
    scores = torch.rand(sets * tokens, experts, device="cuda")
    ids = scores.topk(TOP_K, -1).indices.int().view(sets, tokens, TOP_K)

    def call(config: DispatchConfig, index: int) -> Dispatch:
        return dispatch(ids[index], experts, block_size, config=config)

    def error(config: DispatchConfig) -> float:
        done = call(config, sets - 1)
        flat = ids[sets - 1].flatten()
        order = flat.argsort(stable=True).tolist()
        counts = flat.bincount(minlength=experts).tolist()
        expected: list[int] = []
        blocks: list[int] = []
        for expert, count in enumerate(counts):
            used = -(-count // block_size)
            expected += order[:count] + [pairs] * (used * block_size - count)
            order = order[count:]
            blocks += [expert] * used
        same = (
            int(done.num_tokens_post_padded) == len(expected)
            and done.sorted_token_ids.tolist() == expected + [pairs] * (longest - len(expected))
            and done.block_expert_ids.tolist()
            == blocks + [-1] * (longest // block_size - len(blocks))
        )
        return 0.0 if same else float("inf")

    floor = moved / 4.3e12 * 1e6
    return Case("pairs", pairs, bound, sets, candidates(pairs), call, error, 0.0, floor)


if __name__ == "__main__":
    sys.exit(tune("dispatch", [partial(case, *size) for size in SIZES]))

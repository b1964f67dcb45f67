"""Time the rungs of the expert layer's ladder: ``python -m benchmarks.moe_ladder``.

Needs a CUDA device. Every rung computes the same layer on the same inputs; each is compared with
the loop in PyTorch before it is timed. The result is what lesson 04 shows.
"""

from __future__ import annotations

import argparse
import json
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import torch
from k3_kernels.moe_ladder import RUNGS, LadderWeights, climb

from benchmarks.cases import RANKS
from benchmarks.floors import LATENT, floor_us, moe_bytes, moe_flops
from benchmarks.provenance import provenance
from benchmarks.timing import relative_error, time_side_by_side

__all__ = ["measure"]

TOKENS = (1, 16, 64, 256)
#: Largest relative difference from the loop: both round activations and sums to bfloat16.
TOLERANCE = 1e-2


def measure(rank: str, seed: int) -> list[dict[str, Any]]:
    """Time every rung at every number of tokens on one rank's experts; return rows."""
    experts, inner, top_k = vars(RANKS[rank]).values()
    generator = torch.Generator("cuda").manual_seed(seed)
    on = {"device": "cuda", "generator": generator}

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, dtype=torch.uint8, **on)

    weights = LadderWeights(
        integers(0, 256, experts, 2 * inner, LATENT // 2),
        integers(118, 122, experts, 2 * inner, LATENT // 32),
        integers(0, 256, experts, LATENT, inner // 2),
        integers(118, 122, experts, LATENT, inner // 32),
        1 + 0.1 * torch.randn(LATENT, **on),
    )
    rows = []
    for tokens in TOKENS:
        sets = {1: 8, 16: 6, 64: 4}.get(tokens, 3)
        data = []
        for _ in range(sets):
            x = torch.randn(tokens, LATENT, **on).bfloat16()
            scores = torch.rand(tokens, experts, **on)
            ids = scores.topk(top_k, -1).indices.to(torch.int32).contiguous()
            share = 0.1 + torch.rand(tokens, top_k, **on)
            data.append((x, ids, share / share.sum(-1, keepdim=True)))
        distinct = statistics.mean(len(ids.unique()) for _, ids, _ in data)
        flops = moe_flops(tokens * top_k, inner)
        expected: torch.Tensor | None = None
        for rung in RUNGS:
            bits = 2 if rung == "grouped_bf16" else 17 / 32
            moved = moe_bytes(tokens, distinct, inner, bits)

            call = partial(_call, rung, weights, data)
            result = call(0)
            expected = result if expected is None else expected
            error = relative_error(result, expected)
            if not error <= TOLERANCE:
                raise AssertionError(f"{rung} differs from the loop at T={tokens}: {error}")
            graph = rung != RUNGS[0]  # the loop waits for the GPU and cannot be captured
            if graph:
                timing = time_side_by_side({rung: call}, sets, seconds=0.05)[rung].median_us
            else:
                timing = _eager_us(call, sets)
            floor = floor_us(moved, flops)
            rows.append(
                {
                    "rank": rank, "tokens": tokens, "rung": rung, "us": timing, "bytes": moved,
                    "flops": flops, "floor_us": floor, "fraction_of_floor": floor / timing,
                    "difference_from_loop": error, "graph": graph, "distinct_experts": distinct,
                }
            )  # fmt: skip
            print(
                f"{rank} T={tokens:<4} {rung:<14} {timing:10.1f} us  {floor / timing:6.1%}",
                flush=True,
            )
    return rows


def _call(rung: str, weights: LadderWeights, data: list[Any], index: int) -> torch.Tensor:
    x, ids, share = data[index]
    return climb(rung, x, weights, ids, share)


def _eager_us(call: Any, sets: int) -> float:
    times = []
    for index in range(min(3, sets)):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call(index)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


def main() -> None:
    """Parse the command line, measure, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.moe_ladder", description=__doc__)
    parser.add_argument("--rank", choices=tuple(RANKS), default="tp8")
    parser.add_argument("--seed", type=int, default=4)
    parser.add_argument("--output", type=Path, metavar="FILE")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("timing the rungs needs a CUDA device, and PyTorch finds none here")
    rows = measure(options.rank, options.seed)
    if options.output:
        made = provenance({}, seed=options.seed)
        result = {"schema_version": 1, "provenance": made, "rows": rows}
        options.output.parent.mkdir(parents=True, exist_ok=True)
        unfinished = options.output.with_name(options.output.name + ".part")
        unfinished.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        unfinished.replace(options.output)
    else:
        print(json.dumps(rows[-1]))


if __name__ == "__main__":
    main()

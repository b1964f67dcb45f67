"""Find the launch constants of the expert kernels on this GPU: ``python -m benchmarks.tune_moe``.

Needs a CUDA device. First every variant is compiled, in as many processes as there are cores, since
compiling costs more than measuring. Then gate-up and down are timed on their own, the best of each
are timed as whole calls, and the winner of every token count goes into ``k3_kernels/tuned``.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from k3_kernels import moe, tuned
from k3_kernels.moe_config import MoEConfig, shape_key
from k3_kernels.moe_gemm import down, gate_up
from k3_kernels.moe_weights import BF16Experts, ExpertWeights, MXFP4Experts, PackedMatrices

from benchmarks.timing import time_side_by_side

HIDDEN = 3584
#: Experts of a rank, width, choices of a token that fall on them: tensor and expert parallel by 8.
SHAPES = {"tp8": (896, 384, 16), "ep8": (112, 3072, 2)}
CASES = tuple(
    (kind, shape, tokens)
    for kind, counts in (
        ("mxfp4", (1, 4, 16, 64, 256, 1024, 2048, 8192)),
        ("bf16", (1, 4, 16, 64, 256, 1024, 2048, 8192)),
    )
    for shape in SHAPES
    for tokens in counts
)
Case = tuple[str, str, int]


def families(kind: str, shape: str, tokens: int) -> list[list[MoEConfig]]:
    """List what is worth trying; within a family only the fields of one GEMM differ at a time.

    A family's first entry is its base. Entries that change ``gate_`` fields are compared by the
    time of gate-up alone, those that change ``down_`` fields by the time of down alone.
    """
    _, inner, top_k = SHAPES[shape]
    load = tokens * top_k / SHAPES[shape][0]
    short = inner <= 512
    if kind == "bf16":
        return list(_plain(load, short))
    if load > 12:
        return list(_many(load, short))
    return list(_few(tokens * top_k, short))


def _few(pairs: int, short: bool) -> Iterator[list[MoEConfig]]:
    if pairs <= 16:
        gates = [(2, 2, 3), (4, 1, 3), (4, 1, 2), (3, 2, 3), (7, 1, 3), (5, 1, 3)]
    elif pairs <= 64:
        gates = [(1, 2, 3), (2, 2, 3), (1, 1, 3), (2, 1, 3), (4, 1, 3)]
    else:
        gates = [(1, 2, 3), (1, 2, 2), (1, 1, 3), (1, 1, 4), (1, 1, 5)]
    if short:
        rows = (1, 2) if pairs <= 16 else (2, 4, 7) if pairs <= 64 else (4, 7, 14)
        downs = [(1, True, r, s) for r in rows for s in (2, 3)]
    elif pairs <= 64:
        downs = [(split, False, u, s) for split in (1, 2, 4) for u, s in ((2, 3), (1, 4), (1, 3))]
    else:
        downs = [(1, False, u, s) for u, s in ((2, 3), (2, 2), (1, 4), (1, 3))]
    for direct in (True, False) if 64 < pairs <= 256 else (pairs <= 64,):
        base = MoEConfig(direct=direct, down_resident=short)
        family = [
            replace(base, gate_split=split, gate_unroll=unroll, gate_stages=stages)
            for split, unroll, stages in gates
        ]
        for split, resident, third, stages in downs:
            changed = {"down_row_blocks": third} if resident else {"down_unroll": third}
            family.append(replace(family[0], down_split=split, down_stages=stages, **changed))
        yield family


def _many(load: float, short: bool) -> Iterator[list[MoEConfig]]:
    if load <= 24:
        block, extra = 32, 0
        gates = [(64, 4, 3, 0), (64, 4, 3, 128), (64, 4, 3, 104), (64, 4, 2, 104)]
    elif load <= 48:
        block, extra = 64, 0
        gates = [(64, 4, 3, 0), (64, 4, 3, 168), (64, 4, 2, 168), (64, 4, 2, 128)]
    else:
        block, extra = 128, 32
        gates = [(64, 4, 2, 0), (128, 8, 3, 0)]
    base = MoEConfig(prefill=True, block_m=block, extra_m=extra, down_resident=short)
    if short and block == 128:
        downs = [(128, 8, 14, 3, 0), (128, 8, 28, 3, 0), (128, 8, 14, 2, 0)]
    elif short:
        downs = [(64, 4, 14, 3, 0), (64, 4, 14, 3, 128), (64, 4, 28, 3, 0), (64, 4, 14, 2, 128)]
    elif block == 128:
        downs = [(128, 8, 1, 3, 0), (128, 8, 2, 3, 0), (128, 8, 4, 3, 0)]
    else:
        downs = [
            (64, 4, 1, 3, 0), (64, 4, 1, 3, 128), (64, 4, 1, 3, 96), (128, 8, 1, 3, 0),
            (128, 8, 1, 3, 96), (128, 8, 1, 4, 128), (128, 8, 2, 3, 0),
        ]  # fmt: skip
    yield from _family(base, gates, downs)
    yield from _family(replace(base, fit=True), gates, downs)


def _plain(load: float, short: bool) -> Iterator[list[MoEConfig]]:
    block, extra = (
        (16, 0) if load <= 12 else (32, 0) if load <= 24 else (64, 0) if load <= 48 else (128, 32)
    )
    for block_k in (128,) if block == 16 else (64,):
        base = MoEConfig(prefill=True, block_m=block, extra_m=extra, block_k=block_k)
        gates = [(64, 4, 3, 0), (64, 4, 4, 0)] if block < 128 else [(64, 4, 3, 0)]
        rows = (1, 4) if short else (1,)
        downs = [(128, 8, r, 3, 0) for r in rows] + [(64, 4, r, 3, 0) for r in rows]
        yield from _family(base, gates, downs)
        if load > 12:
            yield from _family(replace(base, fit=True), gates, downs)


def _family(
    base: MoEConfig,
    gates: list[tuple[int, int, int, int]],
    downs: list[tuple[int, int, int, int, int]],
) -> Iterator[list[MoEConfig]]:
    family = [
        replace(base, gate_block_n=n, gate_warps=warps, gate_stages=stages, gate_registers=most)
        for n, warps, stages, most in gates
    ]
    for n, warps, rows, stages, most in downs:
        family.append(
            replace(
                family[0], down_block_n=n, down_warps=warps, down_row_blocks=rows,
                down_stages=stages, down_registers=most,
            )
        )  # fmt: skip
    yield family


def make_experts(kind: str, shape: str, *, copies: bool = True) -> ExpertWeights:
    """Draw weights of a rank. Any bits are valid MXFP4 words; scales are 2 ** -9 to 2 ** -6.

    Without ``copies`` all experts share one expert's memory: enough to compile for, not to run.
    """
    experts, inner, _ = SHAPES[shape]
    stored = experts if copies else 1

    def tensor(size: tuple[int, ...], low: int, high: int) -> torch.Tensor:
        drawn = torch.randint(low, high, (stored, *size), dtype=torch.uint8, device="cuda")
        return drawn.view(torch.int32)

    def packed(rows: int, columns: int, matrices: int) -> PackedMatrices:
        tiles = (-(-rows // 64), -(-columns // 128), matrices, 64)
        words = tensor((*tiles, 64), 0, 256).expand(experts, *tiles, 16)
        scales = tensor((*tiles, 4), 118 + 126, 122 + 126)[..., 0].expand(experts, *tiles)
        return PackedMatrices(words, scales, rows, columns, "rotated", False)

    if kind == "mxfp4":
        return MXFP4Experts(packed(inner, HIDDEN, 2), packed(HIDDEN, inner, 1))
    if not copies:  # contiguous is what BF16Experts asks for, so only the kernel's view is small
        meta = {"device": "meta", "dtype": torch.bfloat16}
        small = BF16Experts(
            torch.empty(experts, 2 * inner, HIDDEN, **meta),
            torch.empty(experts, HIDDEN, inner, **meta),
        )
        return small
    gate_up = torch.empty(experts, 2 * inner, HIDDEN, dtype=torch.bfloat16, device="cuda")
    below = torch.empty(experts, HIDDEN, inner, dtype=torch.bfloat16, device="cuda")
    return BF16Experts(gate_up.normal_(0, 0.02), below.normal_(0, 0.02))


def draw(shape: str, tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw tokens, uniform routing and weights."""
    experts, _, top_k = SHAPES[shape]
    generator = torch.Generator(device="cuda").manual_seed(seed)
    x = torch.randn(tokens, HIDDEN, device="cuda", generator=generator).bfloat16()
    scores = torch.rand(tokens, experts, device="cuda", generator=generator)
    ids = scores.topk(top_k, -1).indices.to(torch.int32).contiguous()
    weights = torch.rand(tokens, top_k, device="cuda", generator=generator) + 0.1
    return x, ids, weights / weights.sum(-1, keepdim=True)


def compile_one(job: tuple[Case, MoEConfig, str]) -> str | None:
    """Compile one variant's gate-up or down (in a process of its own); return an error or None."""
    from triton.runtime.jit import JITFunction

    (kind, shape, tokens), config, which = job
    launch = JITFunction.run

    def only_compile(self: Any, *args: Any, warmup: bool, grid: Any, **options: Any) -> Any:
        return launch(self, *args, warmup=True, grid=grid, **options)

    JITFunction.run = only_compile
    try:
        experts = make_experts(kind, shape, copies=False)
        x, ids, weights = draw(shape, tokens, 0)
        groups = moe.make_groups(experts, ids, config)
        if which == "gate":
            gate_up(x, experts, groups, ids.shape[1], config)
        else:
            act = x.new_empty(groups.num_rows, experts.intermediate_size)
            down(act, experts, groups, weights, config)
    except Exception as error:
        return f"{job}: {type(error).__name__}: {str(error)[-300:]}"
    finally:
        JITFunction.run = launch
    return None


def _jobs(cases: list[Case]) -> list[tuple[Case, MoEConfig, str]]:
    jobs = {}
    for case in cases:
        for family in families(*case):
            for config in family:
                for which in ("gate", "down"):
                    jobs[(_fields(config, which), case[0], case[1], _size(case, config))] = (
                        case, config, which,
                    )  # fmt: skip
    return list(jobs.values())


def _size(case: Case, config: MoEConfig) -> int:
    """Return the part of the token count that a compiled kernel depends on."""
    pairs = case[2] * SHAPES[case[1]][2]
    return max(16, pairs) if config.direct else 16 if pairs % 16 == 0 else 0


def _fields(config: MoEConfig, which: str) -> tuple[Any, ...]:
    own = [v for k, v in vars(config).items() if k.startswith(which)]
    shared = (config.direct, config.prefill, config.block_m, config.extra_m, config.fit)
    return (which, *shared, config.block_k, *own)


@dataclass(frozen=True)
class _Bench:
    """Input sets of one case, and what is timed on them."""

    experts: ExpertWeights
    data: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    seconds: float

    def clock(self, call: Callable[[int], object]) -> float:
        """Return microseconds of one call, infinity if it does not run."""
        try:
            timing = time_side_by_side({"": call}, len(self.data), seconds=self.seconds)
        except Exception as error:
            print(type(error).__name__, str(error)[:300], flush=True)
            return math.inf
        return timing[""].median_us

    def parts(self, config: MoEConfig) -> dict[str, Callable[[int], object]]:
        """Return gate-up and down on their own, with everything they need at hand."""
        groups = [moe.make_groups(self.experts, ids, config) for _, ids, _ in self.data]
        acts = [
            x.new_empty(group.num_rows, self.experts.intermediate_size).normal_()
            for (x, _, _), group in zip(self.data, groups, strict=True)
        ]
        out = acts[0].new_empty(groups[0].num_pairs * config.down_split, HIDDEN)

        def gate(index: int) -> object:
            x, ids, _ = self.data[index]
            return gate_up(x, self.experts, groups[index], ids.shape[1], config, out=acts[index])

        def below(index: int) -> object:
            weights = self.data[index][2]
            return down(acts[index], self.experts, groups[index], weights, config, out=out)

        return {"gate": gate, "down": below}

    def whole(self, config: MoEConfig) -> Callable[[int], object]:
        """Return the whole expert call."""
        results = [torch.empty_like(x) for x, _, _ in self.data]

        def call(index: int) -> object:
            x, ids, weights = self.data[index]
            return moe.moe_experts(x, self.experts, ids, weights, out=results[index], config=config)

        return call


def tune(case: Case, experts: ExpertWeights, seconds: float) -> dict[str, Any]:
    """Time all variants of one case; return the best and the table of what was seen."""
    kind, shape, tokens = case
    sets = {1: 8, 4: 8, 16: 6, 64: 4, 256: 3}.get(tokens, 2)
    bench = _Bench(experts, [draw(shape, tokens, seed) for seed in range(sets)], seconds)
    seen: list[dict[str, Any]] = []
    finals: list[tuple[float, MoEConfig]] = []
    for family in families(*case):
        times: dict[tuple[Any, ...], float] = {}
        for config in family:
            parts = bench.parts(config)
            for which, call in parts.items():
                key = _fields(config, which)
                if key not in times:
                    times[key] = bench.clock(call)
                    seen.append({"variant": list(key), "us": times[key]})
        gate, below = (
            min((times[_fields(c, which)], index) for index, c in enumerate(family))
            for which in ("gate", "down")
        )
        lower = {k: v for k, v in vars(family[below[1]]).items() if k.startswith("down")}
        best = replace(family[gate[1]], **lower)
        whole = bench.clock(bench.whole(best))
        finals.append((whole, best))
        print(
            f"{kind} {shape} T={tokens} whole {whole:.1f} gate {gate[0]:.1f} down {below[0]:.1f} "
            f"{best.to_dict()}",
            flush=True,
        )
    us, best = min(finals, key=lambda final: final[0])
    return {"case": list(case), "us": us, "config": best.to_dict(), "seen": seen}


def main() -> None:
    """Parse the command line, compile, time, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tune_moe", description=__doc__)
    parser.add_argument("--cases", default="", help="such as mxfp4:tp8:1,bf16:ep8:64; default all")
    parser.add_argument("--seconds", type=float, default=0.03, help="replaying time of a variant")
    parser.add_argument("--report", type=Path, help="write everything that was seen as JSON")
    parser.add_argument("--store", action="store_true", help="write k3_kernels/tuned")
    arguments = parser.parse_args()
    cases: list[Case] = list(CASES)
    if arguments.cases:
        parts = [case.split(":") for case in arguments.cases.split(",")]
        cases = [(kind, shape, int(tokens)) for kind, shape, tokens in parts]
    if not torch.cuda.is_available():
        raise SystemExit("tuning needs a CUDA device, and PyTorch finds none on this machine")
    start = time.time()
    jobs = _jobs(cases)
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        errors = [error for error in pool.map(compile_one, jobs) if error]
    print(f"compiled {len(jobs)} variants in {time.time() - start:.0f} s", *errors, sep="\n")
    results = []
    weights: tuple[tuple[str, str], ExpertWeights] | None = None
    for case in cases:
        if weights is None or weights[0] != case[:2]:
            weights = None
            weights = (case[:2], make_experts(*case[:2]))
        results.append(tune(case, weights[1], arguments.seconds) | {
            "key": shape_key(weights[1])})  # fmt: skip
        if arguments.report:
            arguments.report.write_text(json.dumps(results) + "\n", encoding="utf-8")
    print(f"{time.time() - start:.0f} s in all")
    if arguments.store:
        _store(results)


def _store(results: list[dict[str, Any]]) -> None:
    import triton

    made = {
        "date_utc": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "command": "python -m benchmarks.tune_moe --store",
    }
    for key in {result["key"] for result in results}:
        mine = [result for result in results if result["key"] == key]
        mine.sort(key=lambda result: result["case"][2])
        sizes = [result["case"][2] for result in mine]
        # Constants hold up to the geometric middle between two measured sizes.
        bounds = [math.isqrt(a * b) for a, b in itertools.pairwise(sizes)] + [None]
        buckets = [{"up_to": bound, "config": result["config"]}
                   for bound, result in zip(bounds, mine, strict=True)]  # fmt: skip
        tuned.store(torch.cuda.get_device_name(), "moe", key, buckets, made)


if __name__ == "__main__":
    main()

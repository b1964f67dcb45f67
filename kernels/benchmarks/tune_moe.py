"""Find the launch constants of the expert kernels on this GPU: ``python -m benchmarks.tune_moe``.

Needs a CUDA device. First every variant is compiled, in as many processes as there are cores, since
compiling costs more than measuring. Then gate-up and down are timed on their own, the best of each
are timed as whole calls, and with ``--write`` the winner of every token count goes into
``k3_kernels/tuned``. ``--cases`` replaces the constants of those token counts alone.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any

import torch
from k3_kernels import moe
from k3_kernels.moe_config import MoEConfig, shape_key
from k3_kernels.moe_gemm import down, gate_up
from k3_kernels.moe_weights import BF16Experts, ExpertWeights, random_mxfp4

from benchmarks import buckets, tuner_options
from benchmarks.inputs.routings import draw_experts, popularity
from benchmarks.moe_candidates import CASES, HIDDEN, SHAPES, Case, families
from benchmarks.timing import time_side_by_side

#: From so many tokens on, one input set has even load and the next a skewed one.
MIXED_FROM = 1024


def make_experts(kind: str, shape: str, *, copies: bool = True) -> ExpertWeights:
    """Draw weights of a rank.

    Without ``copies`` all experts share one expert's memory: enough to compile for, not to run.
    """
    experts, inner, _ = SHAPES[shape]
    if kind == "mxfp4":
        return random_mxfp4(experts, HIDDEN, inner, device="cuda", copies=copies)
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


def draw(
    shape: str, tokens: int, seed: int, load: str = "uniform"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw tokens, routing of a load, and weights."""
    experts, _, top_k = SHAPES[shape]
    generator = torch.Generator(device="cuda").manual_seed(seed)
    x = torch.randn(tokens, HIDDEN, device="cuda", generator=generator).bfloat16()
    ids = draw_experts(tokens, top_k, popularity(experts, load, generator), generator)
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
    more = (config.fit_extra, config.listed, config.block_k)
    return (which, *shared, *more, *own)


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
    mixed = ("uniform", "skewed" if tokens >= MIXED_FROM else "uniform")
    data = [draw(shape, tokens, seed, mixed[seed % 2]) for seed in range(sets)]
    bench = _Bench(experts, data, seconds)
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


def read_cases(text: str) -> list[Case]:
    """Read the cases of a command line.

    Raises
    ------
    argparse.ArgumentTypeError
        If one is not written as format:rank:tokens.

    Examples
    --------
    >>> read_cases("mxfp4:tp8:1,bf16:ep8:64")
    [('mxfp4', 'tp8', 1), ('bf16', 'ep8', 64)]
    """
    kinds = dict.fromkeys(kind for kind, _, _ in CASES)
    chosen = []
    for case in text.split(","):
        kind, _, rest = case.strip().partition(":")
        shape, _, tokens = rest.partition(":")
        if kind not in kinds or shape not in SHAPES or not tokens.isdecimal() or int(tokens) < 1:
            raise argparse.ArgumentTypeError(
                f"no case {case!r}; write format:rank:tokens, such as mxfp4:tp8:16, with the "
                f"formats {', '.join(kinds)} and the ranks {', '.join(SHAPES)}"
            )
        chosen.append((kind, shape, int(tokens)))
    return chosen


def main(words: Sequence[str] | None = None) -> None:
    """Parse the command line, compile, time, write."""
    parser = tuner_options.parser("tune_moe", __doc__, seconds=0.03)
    parser.add_argument(
        "--cases", type=read_cases, default=list(CASES), metavar="A,B",
        help="such as mxfp4:tp8:1,bf16:ep8:64; default: all",
    )  # fmt: skip
    tuner_options.old_names(parser)
    options = parser.parse_args(words)
    cases: list[Case] = options.cases
    tuner_options.need_gpu()
    start = time.time()
    jobs = _jobs(cases)
    if options.warm:
        jobs = jobs[options.warm[0] :: options.warm[1]]
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        errors = [error for error in pool.map(compile_one, jobs) if error]
    print(f"compiled {len(jobs)} variants in {time.time() - start:.0f} s", *errors, sep="\n")
    if options.warm:
        return
    results = []
    weights: tuple[tuple[str, str], ExpertWeights] | None = None
    for case in cases:
        if weights is None or weights[0] != case[:2]:
            weights = None
            weights = (case[:2], make_experts(*case[:2]))
        results.append(tune(case, weights[1], options.seconds) | {
            "key": shape_key(weights[1])})  # fmt: skip
        if options.output:
            tuner_options.write_json(options.output, results)
    print(f"{time.time() - start:.0f} s in all")
    if options.write:
        store(results)


def store(results: Sequence[dict[str, Any]]) -> None:
    """Write the winners into ``k3_kernels/tuned``; token counts that were not measured stay.

    Constants hold up to the geometric middle between two measured token counts.
    """
    device, made = torch.cuda.get_device_name(), tuner_options.made()
    for key in dict.fromkeys(result["key"] for result in results):
        mine = [r for r in results if r["key"] == key and math.isfinite(r["us"])]
        if not mine:
            continue
        winners = {r["case"][2]: {"config": r["config"], "us": round(r["us"], 2)} for r in mine}
        sizes = {tokens for *rank, tokens in CASES if rank == mine[0]["case"][:2]}
        if not sizes <= set(winners):
            sizes |= buckets.measured_sizes(device, "moe", key)
        bounds = buckets.middles({*sizes, *winners})
        buckets.keep(device, "moe", key, winners, bounds, made)


if __name__ == "__main__":
    main()

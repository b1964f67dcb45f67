"""``python -m kimik3_lab.rank``: climb the ladder with one rank of eight on one GPU.

Needs torch, Triton and a GPU with 100 GiB; ``--micro`` takes the same steps with a tiny model in
Triton's interpreter (``TRITON_INTERPRET=1``), to try the command without a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kimik3_lab.config import K3Config
from kimik3_lab.drafter_config import DSparkConfig
from kimik3_lab.paths import data_dir
from kimik3_lab.provenance import provenance
from kimik3_lab.rank import curves, ladder, results, warm
from kimik3_lab.rank.build import Sizes, rank_presets
from kimik3_lab.rank.ladder import Bench, Plan
from kimik3_lab.rank.step_profile import print_profile
from kimik3_lab.rank.weights import micro_rank
from kimik3_lab.serving.presets import MAIN_2026_09_13, Preset

__all__ = ["main", "micro_plan"]

_LEFT_OUT = [
    "collectives: sums and gathers over the eight ranks are not done",
    "69 of 93 layers, and 6 of 8 attention-residual blocks",
    "text: weights and tokens are random, acceptance follows a script",
    "HTTP: requests enter the engine in the same process",
    "the shared-expert stream, programmatic launches between different kernels",
]


def micro_plan(concurrency: Sequence[int] = (1, 2)) -> Plan:
    """Return the same plan for the smallest model: every rung, tiny prompts.

    Examples
    --------
    >>> len(micro_plan().presets) == len(rank_presets())
    True
    """
    sizes = Sizes(
        prompt_tokens=40, output_tokens=8, num_drafts=2, num_blocks=96, bound=64, block_size=16,
        max_num_seqs=4, batch=256,
    )  # fmt: skip
    return Plan(
        sizes=sizes,
        requests={c: c for c in concurrency},
        tokens_per_verify=2.0,
        decode_grid=((1, 40), (2, 20)),
        prefill_grid=((16, 0), (16, 16)),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kimik3_lab.rank",
        description="Climb the ladder from vLLM 0.27.1 to main of 2026-09-13 and beyond, with one "
        "tensor-parallel rank of Kimi K3 on one GPU: true widths, random weights, no collectives.",
    )
    parser.add_argument("--output", type=Path, help="write the rows to this JSON file")
    parser.add_argument("--concurrency", default="1,4,16", help="cells of each rung")
    parser.add_argument("--rungs", help="only these rungs, by name, separated by commas")
    parser.add_argument("--layers", type=int, default=24, help="layers of the slice")
    parser.add_argument(
        "--quick", action="store_true", help="first and September rung only, no curves"
    )
    parser.add_argument("--warm", action="store_true", help="compile only, in several processes")
    parser.add_argument("--warm-part", help=argparse.SUPPRESS)
    parser.add_argument("--warm-timeout", type=float, default=150, help="seconds for --warm")
    parser.add_argument("--micro", action="store_true", help="a tiny model, for the interpreter")
    parser.add_argument("--no-curves", action="store_true", help="leave the cost curves out")
    parser.add_argument("--profile", action="store_true", help="list the kernels of one step")
    parser.add_argument("--time-limit", type=float, default=1e9, help="begin no cell after this")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def _bench(args: argparse.Namespace) -> Bench:
    concurrency = [int(c) for c in args.concurrency.split(",")]
    if args.micro:
        plan = micro_plan(concurrency if args.concurrency != "1,4,16" else (1, 2))
        config, device, dtype = micro_rank(), "cpu", torch.float32
        drafter = DSparkConfig.for_target(config)
    else:
        plan = Plan(requests={c: c for c in concurrency})
        config = K3Config.rank_slice(layers=args.layers)
        drafter, device, dtype = DSparkConfig.rank_slice(config), "cuda", torch.bfloat16
    presets = plan.presets
    if args.quick:
        presets = (presets[0], MAIN_2026_09_13)
    if args.rungs:
        wanted = args.rungs.split(",")
        known = {p.name: p for p in rank_presets()}
        unknown = [name for name in wanted if name not in known]
        if unknown:
            raise SystemExit(f"unknown rungs {unknown}; there are {list(known)}")
        presets = tuple(known[name] for name in wanted)
    plan = dataclasses.replace(plan, presets=presets, seed=args.seed)
    return Bench(plan, config, drafter, device=device, dtype=dtype)


def _curves(bench: Bench, preset: Preset, body: dict[str, Any], *, micro: bool) -> None:
    rung = bench.rung(preset)
    body["distinct_experts"] = curves.distinct_experts(
        bench, rung, (1, 3) if micro else (1, 9, 36, 144, 1024)
    )
    body["curves"] = {"rung": preset.name, **curves.cost_curves(bench, preset, rung)}
    del rung
    batches = (1,) if micro else (1, 4, 16)
    body["plain_decode"] = curves.plain_decode(bench, preset, batches)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    args = _parser().parse_args(argv)
    if not args.micro and not torch.cuda.is_available():
        print("there is no CUDA device: try --micro with TRITON_INTERPRET=1", file=sys.stderr)
        return 2
    if args.warm_part:
        warm.warm_part(args.warm_part, Plan())
        return 0
    if args.warm:
        return 1 if warm.warm_all(timeout=args.warm_timeout) else 0
    began = time.perf_counter()

    def tell(line: str) -> None:
        print(f"{time.perf_counter() - began:6.1f} s  {line}", flush=True)

    bench = _bench(args)
    plan = bench.plan
    tell(f"weights of {bench.config.num_hidden_layers} layers drawn")
    body: dict[str, Any] = {
        "schema_version": 1,
        "label": ["Miniature", "Measured"],
        "what": "one tensor-parallel rank of eight on one GPU, collectives left out",
        "left_out": _LEFT_OUT,
        "workload": {
            **dataclasses.asdict(plan.sizes),
            "requests": {str(c): n for c, n in plan.requests.items()},
            "tokens_per_verify": plan.tokens_per_verify,
            "layers": bench.config.num_hidden_layers,
            "cell": "one wave: all requests are sent at once, and it ends with the last token",
            "seed": plan.seed,
        },
        "rows": [],
    }
    kernels = data_dir() / "results" / "h200" / "kernels.json"
    if kernels.is_file():
        body["operators"] = results.operators(json.loads(kernels.read_text(encoding="utf-8")))
    on_gpu = bench.device.type == "cuda"
    body["provenance"] = provenance(
        device=torch.cuda.get_device_name() if on_gpu else "cpu",
        command="python -m kimik3_lab.rank --output data/results/h200/ladder.json",
    )
    if bench.device.type == "cuda" and any("skinny_gemm" in p.execution for p in plan.presets):
        body["products"] = curves.choose_products(bench)
        tell("products with few rows measured")
    place = {preset.name: i for i, preset in enumerate(plan.presets)}
    stop = time.monotonic() + args.time_limit - (time.perf_counter() - began)

    def climb(presets: Sequence[Preset]) -> None:
        for row in ladder.climb(bench, tell, presets=presets, stop=stop, failed=failed):
            body["rows"].append(row)
            body["rows"].sort(key=lambda r: (place[r["rung"]], r["concurrency"]))
            tell(
                f"{row['rung']:24} c={row['concurrency']:<3} "
                f"{row['output_tokens_per_s']:8.1f} tok/s  ttft {row['ttft_ms']:7.1f} ms  "
                f"tpot {row['tpot_ms']:6.3f} ms  step {row.get('decode_step_ms', 0):6.2f} ms  "
                f"floor {row['fraction_of_floor']:.0%}"
            )
            if args.output:
                results.save(body, args.output)

    failed: dict[str, str] = {}
    body["not_measured"] = failed
    inorder, last = ladder.order(plan.presets), plan.presets[-1]
    climb(inorder[:2])
    if not (args.quick or args.no_curves):
        _curves(bench, last, body, micro=args.micro)
        tell("cost curves measured")
    climb(inorder[2:])
    if args.profile and bench.device.type == "cuda" and time.monotonic() < stop:
        print_profile(bench, last)
    if {"v0.27.1", MAIN_2026_09_13.name} <= {row["rung"] for row in body["rows"]}:
        body["september_over_first"] = results.gains(body["rows"], MAIN_2026_09_13.name)
        tell(f"September over first: {body['september_over_first']}")
    results.check_rows(body["rows"])
    if args.output:
        results.save(body, args.output)
        tell(f"written to {args.output}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""``python -m kimik3_lab.parallel.measure``: collectives and K3 layers on two GPUs, timed.

Needs torch; Triton for the layers. Without as many GPUs as ranks it runs on the CPU with gloo, on a
layer of toy size in Triton's interpreter: that proves that the command works, and its times mean
nothing, which the result says.

Order matters. Collectives are timed first. From these, and from what the kernels were measured to
do on *one* GPU (``data/results/h200/kernels.json``), the layers are predicted; only then are the
layers timed. A prediction thus never has seen a layer.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from kimik3_lab.parallel.groups import Ranks
from kimik3_lab.parallel.launch import run_ranks
from kimik3_lab.parallel.measure_cases import Plan, measure_collectives, measure_layers, say
from kimik3_lab.performance.layer_cost import LayerCost
from kimik3_lab.performance.measured_collectives import MeasuredCollectives
from kimik3_lab.provenance import provenance

__all__ = ["main"]

SCHEMA_VERSION = 1


def _measure(
    ranks: Ranks, plan: Plan, compiled: bool, made: dict[str, Any], output: Path | None
) -> dict[str, Any]:
    started = time.monotonic()
    from kimik3_lab.parallel.gpu_experts import check_experts

    body: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "dry_run": not plan.on_gpu,
        "complete": False,
        "ranks": ranks.size,
        "provenance": made,
        "collectives": measure_collectives(ranks, plan),
        "layers": [],
    }
    mode = "graph" if plan.on_gpu else "eager"
    table = MeasuredCollectives.from_rows(body["collectives"], ranks.size, mode=mode)
    cost = LayerCost(plan.config, "H200", table)
    say(ranks, f"collectives after {time.monotonic() - started:.0f} s")
    small = dataclasses.replace(plan.config, num_experts=4 * ranks.size, num_experts_per_token=2)
    body["check_relative_error"] = check_experts(small, ranks, 4, plan.device(), plan.dtype)
    say(ranks, f"sum over ranks against one rank: {body['check_relative_error']}")
    if output and not ranks.rank:
        _write(output, body)
    for row in measure_layers(ranks, plan, cost, compiled=compiled):
        body["layers"].append(row)
        if output and not ranks.rank:
            _write(output, body)  # a run that is cut short leaves what it has
    body |= {"complete": True, "seconds": round(time.monotonic() - started, 1)}
    if output and not ranks.rank:
        _write(output, body)
    return body


def warm(kind: str, tokens: int, size: int, *, compiled: bool) -> None:
    """Compile what one case needs, on one GPU and without other ranks.

    The kernels are compiled for the shape of a rank. Compiling the cases side by side before the
    timed run takes as long as the slowest of them.
    """
    from kimik3_lab.parallel.gpu_experts import check_experts, draw_routing
    from kimik3_lab.parallel.gpu_layer import GpuLayer, LayerShape

    plan = Plan.make(on_gpu=True, quick=False, ranks=size)
    device = plan.device()
    if not tokens:
        small = dataclasses.replace(plan.config, num_experts=4 * size, num_experts_per_token=2)
        for rank in range(size):
            check_experts(small, _Alone(rank, size), 4, device, plan.dtype)
        return
    shape = LayerShape.of(plan.config, kind, Ranks(0, size))
    layer = GpuLayer(shape, tokens, device=device, compiled=compiled)
    generator = torch.Generator(device).manual_seed(0)
    routing = draw_routing(tokens, plan.config, "uniform", generator)
    layer.whole(Ranks(), routing)
    torch.cuda.synchronize()


class _Alone(Ranks):
    """A rank that has nobody to exchange with and leaves its part as it is."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x


def _describe(plan: Plan, backend: str, size: int) -> dict[str, Any]:
    made = provenance(
        device=f"{size} x {torch.cuda.get_device_name(0)}" if plan.on_gpu else "cpu",
        command=" ".join(["python -m kimik3_lab.parallel.measure", *sys.argv[1:]]),
    )
    made["backend"] = backend
    made["environment"] = {
        name: os.environ[name] for name in ("NCCL_NVLS_ENABLE",) if name in os.environ
    }
    if plan.on_gpu:
        made["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())
        made["driver"] = _driver()
    return made


def _driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.split("\n")[0].strip() or None


def _write(path: Path, body: dict[str, Any]) -> None:
    """Write a result; a file of that name stays as it was until all is written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(json.dumps(body, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    unfinished.replace(path)


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, measure, write; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m kimik3_lab.parallel.measure")
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON to write")
    parser.add_argument("--ranks", type=int, default=2, metavar="N")
    parser.add_argument("--quick", action="store_true", help="few sizes")
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile")
    parser.add_argument(
        "--first", metavar="KIND:T", help="layers to time before all others, as ep:4096"
    )
    parser.add_argument(
        "--warm", metavar="KIND:T", help="compile one case (tp:64, ep:1, check:0), time nothing"
    )
    options = parser.parse_args(arguments)
    first = None
    if options.first:
        kind, _, tokens = options.first.partition(":")
        if kind not in ("tp", "ep") or not tokens.isdigit():
            parser.error(f"--first {options.first!r}: expected tp or ep, a colon, and tokens")
        first = kind, int(tokens)
    compiled = not options.no_compile
    if options.warm:
        kind, _, tokens = options.warm.partition(":")
        warm(kind, int(tokens), options.ranks, compiled=compiled)
        return 0
    on_gpu = torch.cuda.device_count() >= options.ranks
    backend = "nccl" if on_gpu else "gloo"
    plan = Plan.make(on_gpu=on_gpu, quick=options.quick, ranks=options.ranks, first=first)
    if not on_gpu:
        os.environ["TRITON_INTERPRET"] = "1"  # before the ranks import Triton
        found = torch.cuda.device_count()
        print(
            f"{found} GPUs for {options.ranks} ranks: dry run on the CPU with gloo and toy sizes; "
            "its times mean nothing"
        )
    made = _describe(plan, backend, options.ranks)
    output = options.output.resolve() if options.output else None
    body, *_ = run_ranks(
        _measure, options.ranks, plan, compiled and on_gpu, made, output, backend=backend
    )
    where = output or "not kept, name a file with --output"
    counts = f"{len(body['collectives'])} collectives and {len(body['layers'])} layers"
    print(f"{counts} in {body['seconds']} s; result: {where}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""``python -m kimik3_lab.parallel.measure``: collectives and K3 layers on two GPUs, timed.

Needs torch; Triton for the layers. Without as many GPUs as ranks it runs on the CPU with gloo, on a
layer of toy size in Triton's interpreter: that proves that the command works, and its times mean
nothing, which the result says.

Order matters. Collectives are timed first. From these, and from what the kernels were measured to
do on *one* GPU (``data/results/h200x2/one_gpu.json``), the layers are predicted; only then are the
layers timed. A prediction thus never has seen a layer.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from kimik3_lab.config import K3Config
from kimik3_lab.json_file import write_json
from kimik3_lab.parallel.groups import Ranks
from kimik3_lab.parallel.launch import run_ranks
from kimik3_lab.parallel.layer_shape import LayerShape
from kimik3_lab.parallel.measure_cases import Plan, measure_collectives, measure_layers, say
from kimik3_lab.parallel.measure_file import OutputError, check_output
from kimik3_lab.performance.layer_cost import LayerCost
from kimik3_lab.performance.measured_collectives import MeasuredCollectives
from kimik3_lab.provenance import provenance

__all__ = ["main", "measure"]

SCHEMA_VERSION = 1
#: Of the checks, which run before anything of a layer is timed; one in the interpreter, for time.
CHECKED_TOKENS, DRY_CHECKED_TOKENS = 4, 1


def measure(
    ranks: Ranks, plan: Plan, compiled: bool, made: dict[str, Any], output: Path | None
) -> dict[str, Any]:
    """Measure on one of the ranks; the first writes ``output``, whatever is in it so far.

    Parameters
    ----------
    made
        Provenance, for the result.
    """
    started = time.monotonic()
    from kimik3_lab.parallel.check_layer import check_layer
    from kimik3_lab.parallel.gpu_experts import check_experts

    def keep() -> None:
        if output and not ranks.rank:
            write_json(output, body)

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
    keep()
    few, device = _few_experts(plan.config, ranks.size), plan.device()
    tokens = CHECKED_TOKENS if plan.on_gpu else DRY_CHECKED_TOKENS
    body["check_relative_error"] = check_experts(few, ranks, tokens, device, plan.dtype)
    body["check_layer_relative_error"] = check_layer(few, ranks, tokens, device, plan.dtype)
    for what in ("check_relative_error", "check_layer_relative_error"):
        say(ranks, f"{what}, ranks against one rank: {body[what]}")
    keep()
    for row in measure_layers(ranks, plan, cost, compiled=compiled):
        body["layers"].append(row)
        keep()  # a run that is cut short leaves what it has
    body |= {"complete": True, "seconds": round(time.monotonic() - started, 1)}
    keep()
    return body


def _few_experts(config: K3Config, size: int) -> K3Config:
    """So many that one rank can hold all of them, to compare with."""
    return dataclasses.replace(config, num_experts=4 * size, num_experts_per_token=2)


def warm(kind: str, tokens: int, size: int, *, compiled: bool) -> None:
    """Compile what one case needs, on one GPU and without other ranks.

    The kernels are compiled for the shape of a rank. Compiling the cases side by side before the
    timed run takes as long as the slowest of them.
    """
    from kimik3_lab.parallel.check_layer import check_layer
    from kimik3_lab.parallel.gpu_experts import check_experts, draw_routing
    from kimik3_lab.parallel.gpu_layer import GpuLayer

    plan = Plan.make(on_gpu=True, quick=False, ranks=size)
    device = plan.device()
    if not tokens:
        for rank in range(size):
            alone = _few_experts(plan.config, size), _Alone(rank, size), CHECKED_TOKENS, device
            check_experts(*alone, plan.dtype)
            check_layer(*alone, plan.dtype)
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


def _describe(plan: Plan, backend: str, size: int, arguments: list[str]) -> dict[str, Any]:
    made = provenance(
        device=f"{size} x {torch.cuda.get_device_name(0)}" if plan.on_gpu else "cpu",
        command=" ".join(["python -m kimik3_lab.parallel.measure", *arguments]),
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kimik3_lab.parallel.measure",
        description="Time collectives, and layers of K3, on several GPUs of one host. Each layer "
        "is predicted before it is timed. Without as many GPUs as ranks it is a dry run on the "
        "CPU, with toy sizes and times that mean nothing.",
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE",
        help="JSON to write, after each layer; a measured file is not replaced by a dry run",
    )  # fmt: skip
    parser.add_argument(
        "--ranks", type=int, default=2, metavar="N",
        help="GPUs that share a layer out; they must divide K3's experts and heads (default: 2)",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="few sizes")
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile")
    parser.add_argument(
        "--first", type=_case, metavar="KIND:T",
        help="layers to time before all others: tp or ep and tokens that are timed, as ep:4096; "
        "a dry run takes the kind, and its own tokens",
    )  # fmt: skip
    parser.add_argument(
        "--warm", type=_case, metavar="KIND:T",
        help="compile one case on one GPU (tp:64, ep:1, or check:0 for the checks), time nothing",
    )  # fmt: skip
    return parser


def _case(text: str) -> tuple[str, int]:
    """Read ``tp:64``; ``check:0`` stands for the checks."""
    kind, _, tokens = text.partition(":")
    number = int(tokens) if tokens.isascii() and tokens.isdigit() else -1
    if (kind, number) == ("check", 0) or (kind in ("tp", "ep") and number > 0):
        return kind, number
    raise argparse.ArgumentTypeError(
        f"got {text!r}, expected tp or ep, a colon, and at least one token, as ep:4096"
    )


def _options(arguments: list[str] | None) -> tuple[argparse.Namespace, Plan]:
    """Read the command line; whatever would fail later ends it here, with exit code 2."""
    parser = _parser()
    options = parser.parse_args(arguments)
    size, found = options.ranks, torch.cuda.device_count()
    if size < 1:
        parser.error(f"--ranks {size}: expected at least 1")
    if options.warm and not found:
        parser.error("--warm compiles on a GPU, and there is none here: leave it out for a dry run")
    on_gpu = found >= size or bool(options.warm)
    if first := options.first:
        tokens = Plan.make(on_gpu=True, quick=options.quick, ranks=size).tokens
        if first[1] not in tokens:
            known = ", ".join(map(str, tokens))
            parser.error(f"--first {first[0]}:{first[1]}: tokens that are timed here are {known}")
    plan = Plan.make(on_gpu=on_gpu, quick=options.quick, ranks=size, first=first)
    try:
        for kind in plan.kinds:
            LayerShape.of(plan.config, kind, Ranks(0, size))
    except ValueError as error:
        parser.error(f"--ranks {size}: {error}")
    if options.output and not options.warm:
        options.output = options.output.resolve()
        try:
            check_output(options.output, dry_run=not on_gpu)
        except OutputError as error:
            parser.error(f"--output: {error}")
    return options, plan


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, measure, write; return the exit code."""
    options, plan = _options(arguments)
    compiled = not options.no_compile
    if options.warm:
        warm(*options.warm, options.ranks, compiled=compiled)
        return 0
    backend = "nccl" if plan.on_gpu else "gloo"
    if not plan.on_gpu:
        os.environ["TRITON_INTERPRET"] = "1"  # before the ranks import Triton
        found = torch.cuda.device_count()
        print(
            f"{found} GPUs for {options.ranks} ranks: dry run on the CPU with gloo and toy sizes; "
            "its times mean nothing"
        )
    given = sys.argv[1:] if arguments is None else arguments
    made = _describe(plan, backend, options.ranks, given)
    body, *_ = run_ranks(
        measure, options.ranks, plan, compiled and plan.on_gpu, made, options.output,
        backend=backend,
    )  # fmt: skip
    where = options.output or "not kept, name a file with --output"
    counts = f"{len(body['collectives'])} collectives and {len(body['layers'])} layers"
    print(f"{counts} in {body['seconds']} s; result: {where}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""``python -m kimik3_lab.rank``: climb the ladder with one rank of eight on one GPU.

Needs torch, Triton and a GPU with 100 GiB; ``--micro`` takes the same steps with a tiny model in
Triton's interpreter (``TRITON_INTERPRET=1``), to try the command without a GPU.

A call with ``--output`` goes on where the last one stopped, see :mod:`kimik3_lab.rank.resume`: with
``--time-limit`` several short calls make one ladder.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from kimik3_lab.config import K3Config
from kimik3_lab.drafter_config import DSparkConfig
from kimik3_lab.paths import data_dir, repository_dir
from kimik3_lab.provenance import provenance
from kimik3_lab.rank import curves, ladder, options, results, resume, warm
from kimik3_lab.rank.build import Sizes, rank_presets
from kimik3_lab.rank.ladder import Bench, Plan
from kimik3_lab.rank.rehearsal import rehearse
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


def _bench(args: argparse.Namespace) -> Bench:
    concurrency = args.concurrency
    if args.micro:
        plan = micro_plan(concurrency if concurrency != [1, 4, 16] else (1, 2))
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
        presets = tuple(preset for preset in rank_presets() if preset.name in args.rungs)
    plan = dataclasses.replace(plan, presets=presets, seed=args.seed)
    return Bench(plan, config, drafter, device=device, dtype=dtype)


def _curves(bench: Bench, preset: Preset, *, micro: bool) -> Iterator[tuple[str, Any]]:
    """Measure what is no row, part by part."""
    rung = bench.rung(preset)
    rehearse(bench, rung)
    rows = (1, 3) if micro else (1, 9, 36, 144, 1024)
    yield "distinct_experts", curves.distinct_experts(bench, rung, rows)
    yield "curves", {"rung": preset.name, **curves.cost_curves(bench, preset, rung)}
    del rung
    batches = (1,) if micro else (1, 4, 16)
    yield "plain_decode", curves.plain_decode(bench, preset, batches)


def _command(argv: Sequence[str]) -> str:
    """Return the command without the folders of this machine."""
    home = repository_dir()
    words = []
    for word in argv:
        path = Path(word)
        if path.is_absolute():
            word = str(path.relative_to(home)) if path.is_relative_to(home) else path.name
        words.append(word)
    return shlex.join(["python", "-m", "kimik3_lab.rank", *words])


def _body(bench: Bench, command: str) -> dict[str, Any]:
    """Return a file without rows."""
    plan, on_gpu = bench.plan, bench.device.type == "cuda"
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
        "sources": resume.sources(),
        "rows": [],
        "not_measured": {},
        "complete": False,
        "provenance": provenance(
            device=torch.cuda.get_device_name() if on_gpu else "cpu",
            command=command,
        ),
    }
    kernels = data_dir() / "results" / "h200" / "kernels.json"
    if on_gpu and kernels.is_file():
        body["operators"] = results.operators(json.loads(kernels.read_text(encoding="utf-8")))
    return body


class _Run:
    """One call of the command: what is measured, what is kept, and where it is written."""

    def __init__(self, args: argparse.Namespace, began: float, command: str) -> None:
        self.args, self.began = args, began
        self.stop = time.monotonic() + args.time_limit - (time.perf_counter() - began)
        self.bench = _bench(args)
        self.tell(f"weights of {self.bench.config.num_hidden_layers} layers drawn")
        self.body = _body(self.bench, command)
        last = self.bench.plan.presets[-1].name
        parts, why = resume.kept(args.output, self.body, curves_of=last)
        self.tell(why)
        self.body.update(parts)
        self.place = {preset.name: i for i, preset in enumerate(rank_presets())}
        self.failed: dict[str, str] = {}

    def tell(self, line: str) -> None:
        """Show a line."""
        print(f"{time.perf_counter() - self.began:6.1f} s  {line}", flush=True)

    @property
    def wants_curves(self) -> bool:
        """Whether this call measures curves, too."""
        return not (self.args.quick or self.args.no_curves)

    def save(self) -> None:
        """Bring the file up to date."""
        body, presets = self.body, self.bench.plan.presets
        body["rows"].sort(key=lambda r: (self.place[r["rung"]], r["concurrency"]))
        lacks = resume.missing_cells(
            body["rows"], [p.name for p in rank_presets()], list(self.bench.plan.requests)
        )
        asked = {p.name for p in presets}
        body["not_measured"] = {
            name: self.failed.get(
                name,
                f"not yet at concurrency {', '.join(map(str, cells))}"
                if name in asked else "not asked for",
            )
            for name, cells in lacks.items()
        }  # fmt: skip
        body["complete"] = not lacks and all(part in body for part in resume.CURVES)
        gained = results.gains(body["rows"], MAIN_2026_09_13.name)
        if gained:
            body["september_over_first"] = gained
        results.check_rows(body["rows"])
        if self.args.output:
            results.save(body, self.args.output)

    def products(self) -> None:
        """Choose how products with few rows are computed: measure, or take the earlier choice."""
        bench = self.bench
        if bench.device.type != "cuda" or not any(
            "skinny_gemm" in p.execution for p in bench.plan.presets
        ):
            return
        if "products" in self.body:
            bench.choices = curves.choices_of(self.body["products"])
            return
        self.body["products"] = curves.choose_products(bench)
        self.tell("products with few rows measured")

    def rows(self) -> None:
        """Measure the cells that are missing, the rungs that matter most first."""
        rows, requests = self.body["rows"], self.bench.plan.requests
        presets = ladder.order(self.bench.plan.presets)
        lacks = resume.missing_cells(rows, [p.name for p in presets], list(requests))
        for row in ladder.climb(
            self.bench, self.tell, presets=[p for p in presets if p.name in lacks],
            cells=lacks, stop=self.stop, failed=self.failed,
            prepare=lambda rung: rehearse(self.bench, rung),
        ):  # fmt: skip
            rows.append(row)
            self.tell(
                f"{row['rung']:24} c={row['concurrency']:<3} "
                f"{row['output_tokens_per_s']:8.1f} tok/s  ttft {row['ttft_ms']:7.1f} ms  "
                f"tpot {row['tpot_ms']:6.3f} ms  step {row.get('decode_step_ms', 0):6.2f} ms  "
                f"prompt step {row['prompt_step_ms']:6.1f} ms, longest "
                f"{row['longest_step_ms']:6.1f}  floor {row['fraction_of_floor']:.0%}"
            )
            self.save()

    def curves(self) -> None:
        """Measure the parts that are no rows, if they are missing and there is time."""
        if all(part in self.body for part in resume.CURVES) or time.monotonic() > self.stop:
            return
        last = self.bench.plan.presets[-1]
        try:
            for name, part in _curves(self.bench, last, micro=self.args.micro):
                self.body[name] = part
                self.tell(f"{name} measured")
                self.save()
        except (RuntimeError, ValueError) as error:
            self.tell(f"no curves of {last.name}: {type(error).__name__}: {str(error)[:300]}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    began = time.perf_counter()
    words = list(sys.argv[1:] if argv is None else argv)
    args = options.read(words)
    if not args.micro and not torch.cuda.is_available():
        print("there is no CUDA device: try --micro with TRITON_INTERPRET=1", file=sys.stderr)
        return 2
    if args.warm_part:
        warm.warm_part(args.warm_part, Plan())
        return 0
    if args.warm:
        return 1 if warm.warm_all(timeout=args.warm_timeout) else 0
    run = _Run(args, began, _command(words))
    run.products()
    run.rows()
    if run.wants_curves:
        run.curves()
    if args.profile and run.bench.device.type == "cuda" and time.monotonic() < run.stop:
        print_profile(run.bench, run.bench.plan.presets[-1])
    run.save()
    run.tell(f"September over first: {run.body.get('september_over_first', 'not measured yet')}")
    if args.output:
        state = "complete" if run.body["complete"] else "not complete: call again to go on"
        run.tell(f"written to {args.output}, {state}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Find the launch constants of the KDA kernels on this GPU: ``python -m benchmarks.tune_kda``.

Needs a CUDA device. Every variant is compiled first, in as many processes as there are cores, since
compiling costs more than measuring. Then each is checked against float64 and timed, case by case,
and with ``--write`` the winners go into ``k3_kernels/tuned``.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from k3_kernels.kda_decode import KDADecodeConfig, kda_decode
from k3_kernels.kda_prefill import KDAPrefillConfig, kda_prefill
from k3_kernels.kda_records import KDARecords
from k3_kernels.kda_recover import KDARecoverConfig, kda_recover

from benchmarks import buckets, tuner_options
from benchmarks.cases import Case, find_case
from benchmarks.floors import HEAD_DIM
from benchmarks.inputs.kda_decode import KdaDecodeProblem
from benchmarks.inputs.kda_prefill import KdaPrefillProblem
from benchmarks.inputs.kda_recover import KdaRecoverProblem
from benchmarks.timing import time_side_by_side

#: block_v, chunk, num_warps, stages, early; all with pdl, which no shape lost by.
DECODE = [
    KDADecodeConfig(*values, True)
    for values in (
        (128, 32, 8, 1, True), (128, 64, 8, 1, True), (64, 64, 8, 2, True), (64, 64, 4, 2, True),
        (32, 64, 4, 3, True), (32, 64, 4, 4, True), (16, 64, 4, 4, True), (16, 64, 4, 5, True),
        (8, 32, 2, 6, True), (8, 32, 2, 8, True), (8, 64, 2, 6, True), (8, 64, 2, 8, True),
        (8, 64, 1, 6, False),
    )
]  # fmt: skip
#: Up to 64 requests of 12 heads: bytes of the state that travel early, with the loads pinned.
DECODE += [
    replace(config, prefetch=prefetch, pin=True)
    for config in DECODE
    if config.early and config.num_warps > 1
    for prefetch in ((16384, 65536) if config.block_v < 128 else (65536,))
]
VERIFY = [
    KDADecodeConfig(128, chunk, warps, 1, True, pdl)
    for chunk, warps, pdl in ((32, 8, False), (32, 8, True), (16, 8, True), (32, 4, True))
]
#: block_v, slice_v, num_warps; ahead
RECOVER = [
    KDARecoverConfig(*values, True, ahead)
    for *values, ahead in (
        (16, 8, 2, 1), (16, 8, 2, 2), (16, 4, 2, 4), (8, 8, 1, 1), (32, 8, 2, 1), (32, 8, 2, 2),
        (32, 8, 2, 4), (32, 4, 2, 4), (32, 4, 2, 8), (64, 8, 2, 1), (64, 8, 2, 3), (64, 4, 2, 8),
        (64, 16, 4, 1), (64, 16, 4, 2), (64, 8, 4, 4), (128, 8, 2, 1), (128, 8, 2, 3),
    )
]  # fmt: skip
RECOVER += [
    replace(config, prefetch=prefetch, pin=pin, late_u=late_u)
    for config in RECOVER
    if config.ahead <= 2
    for prefetch, pin, late_u in (
        (True, False, False), (False, True, False), (True, True, False), (True, True, True)
    )
]  # fmt: skip
#: block_k, chunk_warps, chunk_registers; block_v, scan_warps, scan_stages, segments; chunk_stages
PREFILL = [
    KDAPrefillConfig(*values)
    for values in (
        (32, 4, 0, 64, 4, 2, 5, 2), (32, 4, 0, 64, 4, 3, 5, 1), (64, 4, 0, 64, 4, 3, 5, 1),
        (32, 4, 0, 64, 4, 3, 5, 2), (32, 4, 168, 64, 4, 3, 4, 1), (32, 4, 0, 64, 4, 3, 3, 2),
        (32, 4, 0, 128, 8, 2, 1, 2), (32, 4, 0, 64, 4, 3, 1, 2), (32, 4, 0, 128, 8, 2, 8, 2),
    )
]  # fmt: skip
PREFILL_CASES = ("H=12,1x8192", "H=12,1x2048", "H=12,8x1024", "H=96,1x8192", "H=96,8x1024")
#: Heads and requests, each product once; recover and verify have 12 heads.
DECODE_CASES = [(12, batch) for batch in (1, 4, 8, 16, 32, 64, 128, 256)]
DECODE_CASES += [(96, batch) for batch in (64, 256)]
RECOVER_CASES = (1, 4, 8, 16, 32, 64)
VERIFY_CASES = (1, 16, 64)
DRAFTS = 8
VARIANTS: dict[str, list[Any]] = {
    "decode": DECODE, "recover": RECOVER, "verify": VERIFY, "prefill": PREFILL
}  # fmt: skip
Job = tuple[str, Any]


def compile_one(job: Job) -> str | None:
    """Compile one variant in a process of its own; return an error or None."""
    from triton.runtime.jit import JITFunction

    kind, config = job
    launch = JITFunction.run

    def only_compile(self: Any, *args: Any, warmup: bool, grid: Any, **options: Any) -> Any:
        return launch(self, *args, warmup=True, grid=grid, **options)

    JITFunction.run = only_compile
    try:
        _call_of(kind, _small(kind), config)(0)
    except Exception as error:
        return f"{job}: {type(error).__name__}: {str(error)[-300:]}"
    finally:
        JITFunction.run = launch
    return None


def _small(kind: str) -> Any:
    generator = torch.Generator(device="cuda").manual_seed(0)
    sizes = {"heads": 12, "batch": 40, "accepted": DRAFTS}  # two input sets or three
    if kind == "recover":
        return KdaRecoverProblem(Case("kda_recover", "", sizes), generator)
    if kind == "prefill":
        case = Case("kda_prefill", "", {"heads": 12}, lengths=(512,))
        return KdaPrefillProblem(case, generator)
    return KdaDecodeProblem(Case("kda_decode", "", sizes), generator)


def _call_of(kind: str, problem: Any, config: Any) -> Callable[[int], Any]:
    """Return a call on the benchmark's inputs, with outputs that exist already."""
    if kind == "recover":
        return _recover_call(problem, config)
    if kind.startswith("prefill"):
        return _prefill_call(problem, config, kind.partition(":")[2] or None)
    taps = problem.conv_weight.T.contiguous().T
    if kind == "decode":
        outs = [torch.empty_like(gate) for gate in problem.output_gate]
        window = problem.conv_state.transpose(1, 2)

        def decode(index: int) -> torch.Tensor:
            return kda_decode(
                problem.qkv[index], problem.raw_gate[index][0], problem.beta[index][0],
                problem.output_gate[index], taps, problem.A_log, problem.dt_bias,
                problem.norm_weight, window, problem.state, problem.slots[index], null_slot=0,
                out=outs[index], config=config,
            )  # fmt: skip

        return decode

    # Verify: the tokens of a set are one more than the drafts, inputs as for so many requests.
    tokens, batch = DRAFTS + 1, problem.batch // (DRAFTS + 1)
    width = problem.heads * HEAD_DIM
    wide = problem.state.new_zeros(len(problem.state), 3 + DRAFTS, 3 * width, dtype=torch.bfloat16)
    cu_seqlens = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * tokens
    records = KDARecords.empty(batch, tokens, problem.heads, HEAD_DIM, device="cuda")
    rows = slice(0, batch * tokens)
    out = torch.empty_like(problem.output_gate[0][rows])

    def verify(index: int) -> torch.Tensor:
        return kda_decode(
            problem.qkv[index][rows], problem.raw_gate[index][0][rows],
            problem.beta[index][0][rows], problem.output_gate[index][rows], taps, problem.A_log,
            problem.dt_bias, problem.norm_weight, wide.transpose(1, 2), problem.state,
            problem.slots[index][:batch], cu_seqlens=cu_seqlens, records=records, null_slot=0,
            out=out, config=config,
        )  # fmt: skip

    return verify


def _recover_call(problem: Any, config: Any) -> Callable[[int], Any]:
    accepted = torch.full((problem.batch,), problem.accepted, dtype=torch.int32, device="cuda")
    records = [
        KDARecords(*parts) for parts in zip(problem.u, problem.key, problem.gate, strict=True)
    ]

    def recover(index: int) -> None:
        kda_recover(
            problem.state, records[index], problem.slots[index], accepted, problem.A_log,
            problem.dt_bias, null_slot=0, config=config,
        )  # fmt: skip

    return recover


def _prefill_call(problem: Any, config: Any, only: str | None) -> Callable[[int], Any]:
    count = problem.sequences
    slots = torch.arange(count, dtype=torch.int32, device="cuda")
    continued = torch.ones(count, dtype=torch.bool, device="cuda")
    cu_seqlens = problem.cu_seqlens if count > 1 else None
    out = torch.empty_like(problem.v[0][0])

    def prefill(index: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = (part[index][0] for part in (problem.q, problem.k, problem.v, problem.g))
        kda_prefill(
            *rows, problem.beta[index][0], problem.A_log, problem.dt_bias, problem.state, slots,
            cu_seqlens=cu_seqlens, has_initial_state=continued, out=out, config=config, only=only,
        )  # fmt: skip
        return out, problem.state

    return prefill


def measure(
    kind: str, name: str, problem: Any, configs: Sequence[Any], seconds: float
) -> dict[str, Any]:
    """Check and time every variant of one case; return the table, best first."""
    rows = []
    for config in configs:
        try:
            call = _call_of(kind, problem, config)
            checked = kind != "verify" and ":" not in kind
            error = problem.error(call) if checked else 0.0
            timing = time_side_by_side({"": call}, problem.sets, seconds=seconds)[""]
        except Exception as failure:
            print(kind, name, config, type(failure).__name__, str(failure)[:200], flush=True)
            continue
        rows.append({"config": asdict(config), "us": timing.median_us, "error": error})
    rows.sort(key=lambda row: row["us"] if row["error"] < problem.tolerance else float("inf"))
    print(f"{kind} {name} floor {problem.floor_us:.2f} us", flush=True)
    for row in rows:
        values = ",".join(str(value) for value in row["config"].values())
        print(f"   {values:>14} {row['us']:9.2f} us  {row['error']:.1e}", flush=True)
    limits = {"floor_us": problem.floor_us, "tolerance": problem.tolerance}
    return {"kind": kind, "case": name, **limits, "rows": rows}


def run(kinds: Iterable[str], seconds: float, report: Path | None) -> list[dict[str, Any]]:
    """Measure everything asked for; the report is complete after every case."""
    results: list[dict[str, Any]] = []

    def add(result: dict[str, Any], size: int) -> None:
        results.append({**result, "size": size})
        if report:
            tuner_options.write_json(report, results)

    generator = torch.Generator(device="cuda").manual_seed(1)
    problem: Any = None
    if "decode" in kinds:
        for heads, batch in DECODE_CASES:
            case = Case("kda_decode", f"H={heads},B={batch}", {"heads": heads, "batch": batch})
            problem = None  # the last one's memory first
            problem = KdaDecodeProblem(case, generator)
            add(measure("decode", case.name, problem, DECODE, seconds), heads * batch)
    if "recover" in kinds:
        for batch in RECOVER_CASES:
            sizes = {"heads": 12, "batch": batch, "accepted": DRAFTS}
            case = Case("kda_recover", f"K={DRAFTS},B={batch}", sizes)
            problem = None
            problem = KdaRecoverProblem(case, generator)
            add(measure("recover", case.name, problem, RECOVER, seconds), 12 * batch)
    if "prefill" in kinds:
        for name in PREFILL_CASES:
            case = find_case("kda_prefill", name)
            problem = None
            problem = KdaPrefillProblem(case, generator)
            size = case.sizes["heads"] * len(case.lengths)
            add(measure("prefill", name, problem, PREFILL, seconds), size)
            if name != PREFILL_CASES[0]:
                continue
            for part, least in (("prepare", 1), ("survey", 2), ("starts", 3), ("walk", 1)):
                configs = [c for c in PREFILL if c.segments >= least]
                measure(f"prefill:{part}", name, problem, configs, seconds)
    if "verify" in kinds:
        for batch in VERIFY_CASES:
            sizes = {"heads": 12, "batch": batch * (DRAFTS + 1)}
            problem = None
            problem = KdaDecodeProblem(Case("kda_decode", "", sizes), generator)
            name = f"H=12,B={batch},K={DRAFTS}"
            add(measure("verify", name, problem, VERIFY, seconds), 12 * batch)
    return results


def case_sizes(kind: str) -> list[int]:
    """Return what a kind's cases vary, head-requests or head-sequences."""
    if kind == "decode":
        return [heads * batch for heads, batch in DECODE_CASES]
    if kind == "prefill":
        found = [find_case("kda_prefill", name) for name in PREFILL_CASES]
        return [case.sizes["heads"] * len(case.lengths) for case in found if case]
    return [12 * batch for batch in (RECOVER_CASES if kind == "recover" else VERIFY_CASES)]


def store(results: Sequence[dict[str, Any]]) -> None:
    """Write the winners into ``k3_kernels/tuned``; a size without a right variant stays."""
    device, made = torch.cuda.get_device_name(), tuner_options.made()
    for kind in dict.fromkeys(result["kind"] for result in results):
        winners = {
            result["size"]: {"config": row["config"], "us": round(row["us"], 2)}
            for result in results
            for row in result["rows"][:1]
            if result["kind"] == kind and row["error"] < result["tolerance"]
        }
        if winners:
            between = buckets.middles if kind in ("decode", "recover") else buckets.edges
            bounds = between(case_sizes(kind))
            buckets.keep(device, f"kda_{kind}", f"D={HEAD_DIM}", winners, bounds, made)


def read_kinds(text: str) -> list[str]:
    """Read the kinds of a command line.

    Raises
    ------
    argparse.ArgumentTypeError
        If there is no such kind; the message lists those that there are.
    """
    kinds = [kind.strip() for kind in text.split(",")]
    unknown = [kind for kind in kinds if kind not in VARIANTS]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"no kind {', '.join(map(repr, unknown))}; there are {', '.join(VARIANTS)}"
        )
    return kinds


def main(words: Sequence[str] | None = None) -> None:
    """Parse the command line, compile, time, write."""
    parser = tuner_options.parser("tune_kda", __doc__, seconds=0.03)
    parser.add_argument(
        "--kinds", type=read_kinds, default=list(VARIANTS), metavar="A,B",
        help=f"of {', '.join(VARIANTS)}; default: all",
    )  # fmt: skip
    tuner_options.old_names(parser)
    options = parser.parse_args(words)
    tuner_options.need_gpu()
    start = time.time()
    jobs: list[Job] = [(kind, config) for kind in options.kinds for config in VARIANTS[kind]]
    if options.warm:
        jobs = jobs[options.warm[0] :: options.warm[1]]
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        errors = [error for error in pool.map(compile_one, jobs) if error]
    print(f"compiled {len(jobs)} variants in {time.time() - start:.0f} s", *errors, sep="\n")
    if options.warm:
        return
    results = run(options.kinds, options.seconds, options.output)
    print(f"{time.time() - start:.0f} s in all")
    if options.write:
        store(results)


if __name__ == "__main__":
    main()

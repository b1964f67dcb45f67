"""What the tuners of routing, dispatch, finalize and AttnRes share: compile, check, time, store.

Needs a CUDA device. ``python -m benchmarks.tune_routing`` and its neighbours measure the candidates
of every case side by side and print the best; ``--write`` stores the winners in
``k3_kernels/tuned``. ``--warm 3/16`` only compiles every sixteenth candidate: start it sixteen
times beforehand, since compiling takes longer than measuring.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from k3_kernels import tuned

from benchmarks.provenance import provenance
from benchmarks.timing import time_side_by_side

__all__ = ["Case", "tune"]


@dataclass
class Case:
    """One size of one shape, with inputs on the GPU.

    ``call(config, index)`` runs the operator on an input set; ``error(config)`` checks its result
    on fresh, poisoned outputs and returns a relative error, infinite if it is wrong; ``bound`` is
    the largest size that the measured constants will be used for.
    """

    shape: str
    size: int
    bound: int | None
    sets: int
    candidates: Sequence[Any]
    call: Callable[[Any, int], object]
    error: Callable[[Any], float]
    tolerance: float
    floor_us: float


def tune(operator: str, cases: Sequence[Callable[[int | None], Case]]) -> int:
    """Run a tuner's command line.

    Parameters
    ----------
    operator
        Name of the operator's module.
    cases
        Each makes one case; the argument bounds its input sets.
    """
    parser = argparse.ArgumentParser(description=f"measure the launch constants of {operator}")
    parser.add_argument("--warm", metavar="I/N", help="compile every N-th candidate, do not time")
    parser.add_argument("--write", action="store_true", help="store the winners")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write all times as JSON")
    parser.add_argument("--seconds", type=float, default=0.02, help="GPU time a candidate")
    parser.add_argument("--show", type=int, default=4, help="candidates to print of each case")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("Tuning needs a CUDA device, and PyTorch finds none on this machine.")
        return 1
    if options.warm:
        _warm(cases, *(int(part) for part in options.warm.split("/")))
        return 0
    rows: list[dict[str, Any]] = []
    for make in cases:
        rows += _measure(make(None), options.seconds, options.show)
        torch.cuda.empty_cache()
    result = {"operator": operator, "provenance": provenance({}, seed=0), "rows": rows}
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        unfinished = options.output.with_name(options.output.name + ".part")
        unfinished.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        unfinished.replace(options.output)
    if options.write:
        print(f"wrote {_store(operator, result)}")
    return 0


def _warm(cases: Sequence[Callable[[int | None], Case]], first: int, step: int) -> None:
    for make in cases:
        case = make(1)
        for config in list(case.candidates)[first::step]:
            try:
                case.call(config, 0)
                torch.cuda.synchronize()
            except Exception as error:  # reported again, with its case, when it is measured
                print(f"{case.shape} {case.size} {config}: {type(error).__name__}", flush=True)


def _measure(case: Case, seconds: float, show: int) -> list[dict[str, Any]]:
    start = time.time()
    good: dict[Any, float] = {}
    for config in case.candidates:
        try:
            error = case.error(config)
        except Exception as failure:  # too many registers or too much shared memory, say
            print(f"  {config} fails: {str(failure)[:160]}", flush=True)
            continue
        if error <= case.tolerance:
            good[config] = error
        else:
            print(f"  WRONG {config}: error {error:.3g}", flush=True)
    times = time_side_by_side(
        {repr(config): _bind(case.call, config) for config in good}, case.sets, seconds=seconds
    )
    rows = [
        {
            "shape": case.shape,
            "size": case.size,
            "bound": case.bound,
            "config": asdict(config),
            **asdict(times[repr(config)]),
            "floor_us": case.floor_us,
            "error": error,
        }
        for config, error in good.items()
    ]
    rows.sort(key=lambda row: row["median_us"])
    print(
        f"{case.shape} size {case.size} floor {case.floor_us:.2f} us ({time.time() - start:.1f} s)"
    )
    for row in rows[:show] + rows[-1:]:
        fields = " ".join(f"{name}={value}" for name, value in row["config"].items())
        print(f"  {row['median_us']:9.2f} us  {fields}", flush=True)
    return rows


def _bind(call: Callable[[Any, int], object], config: Any) -> Callable[[int], object]:
    return lambda index: call(config, index)


def _store(operator: str, result: dict[str, Any]) -> Path:
    """Keep the fastest configuration of every case."""
    shapes: dict[str, dict[int, dict[str, Any]]] = {}
    for row in result["rows"]:  # fastest first within a case
        shapes.setdefault(row["shape"], {}).setdefault(row["size"], row)
    path = Path()
    for shape, sizes in shapes.items():
        buckets = [
            {"up_to": row["bound"], "config": row["config"], "median_us": row["median_us"]}
            for _, row in sorted(sizes.items())
        ]
        made = result["provenance"]
        kept = ("torch", "triton", "driver", "date_utc", "sources_sha256", "command")
        path = tuned.store(
            made["device"], operator, shape, buckets, {name: made[name] for name in kept}
        )
    return path

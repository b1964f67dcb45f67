"""What the tuners of routing, dispatch, finalize and AttnRes share: compile, check, time, store.

Needs a CUDA device. ``python -m benchmarks.tune_routing`` and its neighbours measure the candidates
of every case side by side and print the best; ``--write`` stores the winners in
``k3_kernels/tuned``, and a case without a right candidate keeps what is stored. ``--warm 3/16``
only compiles every sixteenth candidate: start it sixteen times beforehand, since compiling takes
longer than measuring.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks import buckets, tuner_options
from benchmarks.provenance import provenance
from benchmarks.timing import time_side_by_side

__all__ = ["Case", "store", "tune"]


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
    name = operator.removesuffix("_decode")
    about = f"Measure the launch constants of {operator} on this GPU."
    parser = tuner_options.parser(f"tune_{name}", about, seconds=0.02)
    parser.add_argument("--show", type=int, default=4, help="candidates to print of each case")
    options = parser.parse_args()
    tuner_options.need_gpu()
    if options.warm:
        _warm(cases, *options.warm)
        return 0
    rows: list[dict[str, Any]] = []
    bounds: dict[str, dict[int, int | None]] = {}
    for make in cases:
        case = make(None)
        bounds.setdefault(case.shape, {})[case.size] = case.bound
        rows += _measure(case, options.seconds, options.show)
        del case
        torch.cuda.empty_cache()
    result = {"operator": operator, "provenance": provenance({}, seed=0), "rows": rows}
    if options.output:
        tuner_options.write_json(options.output, result)
    if options.write:
        store(operator, rows, bounds)
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


def store(
    operator: str, rows: Sequence[dict[str, Any]], bounds: dict[str, dict[int, int | None]]
) -> None:
    """Keep the fastest configuration of every case that has one.

    ``rows`` have the fastest first within a case; ``bounds`` holds the cases of each shape.
    """
    fastest: dict[str, dict[int, dict[str, Any]]] = {}
    for row in rows:
        kept = {"config": row["config"], "median_us": row["median_us"]}
        fastest.setdefault(row["shape"], {}).setdefault(row["size"], kept)
    device, made = torch.cuda.get_device_name(), tuner_options.made()
    for shape, winners in fastest.items():
        buckets.keep(device, operator, shape, winners, bounds[shape], made)

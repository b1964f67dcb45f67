"""Run the tests that need a GPU, then each kernel once under compute-sanitizer's memcheck.

    make test-gpu
    .venv/bin/python tools/check_on_gpu.py --workers 12 --output data/results/h200/checks.json

Needs a CUDA device, and ``compute-sanitizer`` of the CUDA toolkit for the second part; without it
that part is left out, and the result says so. First all tests that are marked ``gpu``, then the
other kernel tests, which on a GPU run compiled, then memcheck. Most of the time Triton compiles, so
many processes pay off: give ``--workers`` as many as there are cores.

Memcheck sees an access outside an allocation. PyTorch cuts tensors out of large allocations, where
a stray read meets another tensor and passes, so its allocator is turned off, but for tests that
record a CUDA graph: these cannot do without it.

The result has one entry for each test file and one for each pass of memcheck. What the time limit
cut off is counted as not run. Until the end it lies in ``FILE.partial.json``.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kimik3_lab.json_file import write_json
from kimik3_lab.provenance import provenance

ROOT = Path(__file__).resolve().parents[1]
KERNEL_TESTS = "tests/kernels"
#: Compiling ahead of time asks no GPU, and takes one process minutes.
NO_GPU = [f"--ignore={KERNEL_TESTS}/test_compile_targets.py"]
#: Tests of a file that record a CUDA graph, by words in their names.
GRAPH = "graph or graphs or captured or recorded"
#: Memcheck makes a kernel up to a hundred times slower, so each file shows it its small cases.
MEMCHECK = {
    "routing": "gpu", "dispatch": "gpu", "moe": "gpu and small_sizes", "finalize": "gpu",
    "attn_res": "gpu and early", "mla_decode": "gpu and head_counts", "kda_conv": "gpu",
    "kda_decode": "gpu", "kda_prefill": "equals_the_recurrence", "kda_recover": "gpu",
    "seat_tables": "gpu", "decode_operators": "equal or normed or rotated or multiplied",
}  # fmt: skip

#: A line of ``pytest -v``: xdist's first, then plain pytest's.
_WORDS = "(PASSED|FAILED|ERROR|SKIPPED|XFAIL)"
_OUTCOME = re.compile(
    rf"^\[gw\d+\] \[ *\d+%\] {_WORDS} (\S+?\.py)::|^(\S+?\.py)::.* {_WORDS}\b.*\[ *\d+%\]"
)
_COLLECTED = re.compile(r"\[(\d+) items\]|(\d+) selected|collected (\d+) items?$")
_ERRORS = re.compile(r"ERROR SUMMARY: (\d+) errors")


@dataclass(frozen=True)
class Pass:
    """One run of memcheck over some tests of a file."""

    file: str
    tests: str
    caching_allocator: bool
    passed: int
    failed: int
    errors: int | None
    seconds: float

    @property
    def is_clean(self) -> bool:
        """Whether it ended, with every test passed and no error reported."""
        return self.errors == 0 and not self.failed and self.passed > 0


def count_outcomes(lines: Iterable[str]) -> tuple[dict[str, dict[str, int]], int]:
    """Read the output of ``pytest -v``, with xdist or without.

    Returns
    -------
    outcomes, selected
        Passed, failed and so on of each file, and how many tests there were to run.
    """
    outcomes: dict[str, Counter[str]] = {}
    selected = 0
    for line in lines:
        if found := _COLLECTED.search(line.rstrip()):
            selected = int(next(number for number in found.groups() if number))
        elif found := _OUTCOME.search(line):
            word, file = (found[1], found[2]) if found[1] else (found[4], found[3])
            outcomes.setdefault(file, Counter())[word.lower()] += 1
    return {file: dict(outcomes[file]) for file in sorted(outcomes)}, selected


def run(command: Sequence[str], seconds: float, **env: str) -> tuple[list[str], int | None]:
    """Run a command; return its lines and how it ended, None if it was stopped after a time.

    Its children end with it, and what it had printed is there in either case.
    """
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace", start_new_session=True,
        # Each process would otherwise keep all cores busy with waiting.
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **env},
    )  # fmt: skip
    stopped = threading.Event()

    def stop() -> None:
        stopped.set()
        os.killpg(process.pid, 9)

    timer = threading.Timer(max(0.0, seconds), stop)
    timer.start()
    try:
        assert process.stdout is not None
        lines = list(process.stdout)
        code = process.wait()
    except BaseException:
        os.killpg(process.pid, 9)
        raise
    finally:
        timer.cancel()
    return lines, None if stopped.is_set() else code


def pytest_command(*options: str) -> list[str]:
    """Return the command of a run of tests that prints a line for each."""
    return [sys.executable, "-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider", *options]


def run_tests(marked: str, workers: int, seconds: float) -> dict[str, Any]:
    """Run the tests of ``tests/kernels`` with these marks, in many processes."""
    began = time.monotonic()
    spread = ["-n", str(workers), "--dist", "worksteal"] if workers > 1 else []
    lines, code = run(pytest_command("-m", marked, *spread, *NO_GPU, KERNEL_TESTS), seconds)
    files, selected = count_outcomes(lines)
    total: Counter[str] = Counter()
    for counts in files.values():
        total.update(counts)
    return {
        "marked": marked,
        **{word: total[word] for word in ("passed", "failed", "error", "skipped")},
        "not_run": max(0, selected - total.total()),
        "ended": code is not None,
        "seconds": round(time.monotonic() - began, 1),
        "files": files,
        "failures": [line.strip()[:300] for line in lines if line.startswith(("FAILED", "ERROR "))],
        "end": [] if code in (0, 1, None) else [line.rstrip()[:300] for line in lines[-15:]],
    }


def run_memcheck(name: str, words: str, caching: bool, seconds: float) -> Pass | None:
    """Let memcheck watch some tests of an operator; None if the file has no such tests."""
    began = time.monotonic()
    marks = ["-m", "gpu"] if caching or words.startswith("gpu") else []
    named = words.removeprefix("gpu").removeprefix(" and ")
    chosen = GRAPH if caching else f"not ({GRAPH})" + (f" and ({named})" if named else "")
    env = {} if caching else {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    lines, code = run(
        [
            "compute-sanitizer", "--tool", "memcheck", "--print-limit", "3",
            *pytest_command(*marks, "-k", chosen, f"{KERNEL_TESTS}/test_{name}.py"),
        ],
        seconds,
        **env,
    )  # fmt: skip
    if code == 5:  # pytest found nothing to run
        return None
    files, _ = count_outcomes(lines)
    counts = Counter({word: n for found in files.values() for word, n in found.items()})
    summary = [int(found[1]) for line in lines if (found := _ERRORS.search(line))]
    return Pass(
        f"test_{name}.py", chosen, caching, counts["passed"], counts["failed"] + counts["error"],
        summary[-1] if summary and code is not None else None, round(time.monotonic() - began, 1),
    )  # fmt: skip


def memcheck_all(only: Sequence[str], workers: int, seconds: float) -> list[Pass]:
    """Let memcheck watch every operator, several at a time."""
    jobs = [(n, words, caching) for n, words in MEMCHECK.items() if n in only for caching in (0, 1)]
    until = time.monotonic() + seconds
    with ThreadPoolExecutor(max(1, min(workers, len(jobs)))) as pool:
        found = pool.map(
            lambda job: run_memcheck(job[0], job[1], bool(job[2]), until - time.monotonic()), jobs
        )
        return [one for one in found if one is not None]


def describe(body: dict[str, Any]) -> str:
    """Return what a reader wants to know of a result."""
    lines = [
        f"{part['marked']}: {part['passed']} passed, {part['failed'] + part['error']} failed, "
        f"{part['not_run']} not run, {part['seconds']:.0f} s"
        for part in body["tests"]
    ]
    for one in body["memcheck"] or []:
        errors = "did not end" if one["errors"] is None else f"{one['errors']} errors"
        lines.append(f"memcheck {one['file']}: {one['passed']} passed, {errors}")
    if body["memcheck"] is None:
        lines.append(f"memcheck: {body['memcheck_left_out']}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 0 if nothing failed, 1 if something did, 2 if it cannot run here."""
    parser = argparse.ArgumentParser(
        prog="check_on_gpu.py", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON to write")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, metavar="N")
    parser.add_argument(
        "--seconds", type=float, default=900, metavar="S", help="for each of the three parts"
    )
    parser.add_argument("--only-gpu", action="store_true", help="only tests marked gpu")
    parser.add_argument("--no-memcheck", action="store_true")
    parser.add_argument(
        "--operators", default=",".join(MEMCHECK), metavar="A,B", help="that memcheck watches"
    )
    options = parser.parse_args(arguments)
    operators = options.operators.split(",")
    if unknown := [name for name in operators if name not in MEMCHECK]:
        parser.error(f"--operators: {unknown} unknown; there are {', '.join(MEMCHECK)}")
    import torch

    if not torch.cuda.is_available():
        print(
            "there is no CUDA device here: make python-tests runs the kernels in Triton's "
            "interpreter",
            file=sys.stderr,
        )
        return 2
    body: dict[str, Any] = {
        "schema_version": 1,
        "provenance": provenance(device=torch.cuda.get_device_name()),
        "tests": [],
        "memcheck": None,
    }
    # What was done until somebody stops this, beside the last whole result and not over it.
    partial = options.output and options.output.with_suffix(".partial.json")

    def keep() -> None:
        if partial:
            write_json(partial, body)

    body["memcheck_left_out"] = "stopped before it"
    keep()
    for marked in ("gpu",) if options.only_gpu else ("gpu", "not gpu"):
        body["tests"].append(run_tests(marked, options.workers, options.seconds))
        print(describe({**body, "memcheck": []}).split("\n")[-1], flush=True)
        keep()
    if options.no_memcheck:
        body["memcheck_left_out"] = "not asked for"
    elif shutil.which("compute-sanitizer") is None:
        body["memcheck_left_out"] = "there is no compute-sanitizer on the PATH (CUDA toolkit)"
    else:
        passes = memcheck_all(operators, options.workers, options.seconds)
        body["memcheck"] = [{**asdict(one), "is_clean": one.is_clean} for one in passes]
        del body["memcheck_left_out"]
    print(describe(body))
    if partial:
        write_json(options.output, body)
        partial.unlink()
    failed = any(part["failed"] or part["error"] or part["end"] for part in body["tests"])
    failed |= any(one["errors"] or one["failed"] for one in body["memcheck"] or [])
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

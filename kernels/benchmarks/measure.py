"""Measure one case: check every implementation against the reference, then time those that pass.

Needs PyTorch and a CUDA device.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from typing import Any

from benchmarks.adapter import Absent, Call, Problem
from benchmarks.cases import Case
from benchmarks.registry import OURS, PEERS, Found
from benchmarks.rows import make_row
from benchmarks.timing import time_side_by_side

__all__ = ["DeviceLost", "measure", "warm"]

#: What PyTorch's and Triton's errors say when the process has lost its GPU context.
_LOST = (
    "illegal memory access", "misaligned address", "unspecified launch failure",
    "device-side assert", "cudaerrorlaunchfailure",
)  # fmt: skip


class DeviceLost(RuntimeError):
    """An implementation broke the process's connection to the GPU; nothing more can be measured."""


def warm(case: Case, problem: Problem, implementations: Iterable[Found]) -> dict[str, str]:
    """Run every implementation once, so that all is compiled; return what failed, and why."""
    failed = {}
    for found in implementations:
        try:
            _check(found, problem, compare=False)
        except Absent as reason:
            failed[found.adapter.name] = str(reason)
        except Exception as error:
            failed[found.adapter.name] = _say(case, found, error)
    return failed


def measure(
    case: Case, problem: Problem, implementations: Iterable[Found], *, seconds: float = 0.15
) -> dict[str, Any]:
    """Check and time a case; return its row.

    Raises
    ------
    DeviceLost
        If the GPU stopped answering; the message names the implementation.
    """
    calls: dict[str, Call] = {}
    errors: dict[str, float] = {}
    reasons: dict[str, str] = {}
    for found in implementations:
        name = found.adapter.name
        try:
            call, error = _check(found, problem)
            if error <= problem.tolerance:
                calls[name] = call
            else:
                reasons[name] = (
                    f"wrong: relative error {error:.2e}, at most {problem.tolerance:.0e} expected"
                )
                print(f"  {case.operator} {case.name} {name}: {reasons[name]}", flush=True)
            errors[name] = error
        except Absent as reason:
            reasons[name] = str(reason)
        except Exception as error:
            reasons[name] = _say(case, found, error)
    try:
        timings = time_side_by_side(calls, problem.sets, seconds=seconds) if calls else {}
    except Exception as error:
        if _is_lost(error):
            raise DeviceLost(f"{case.operator} {case.name}: {error}") from error
        # One of them cannot be timed beside the others: find out which, each alone.
        timings = {}
        for name, call in calls.items():
            try:
                timings |= time_side_by_side({name: call}, problem.sets, seconds=seconds)
            except Exception as alone:
                if _is_lost(alone):
                    raise DeviceLost(f"{case.operator} {case.name} {name}: {alone}") from alone
                reasons[name] = f"timing failed: {str(alone)[:300]}"
    for name in (OURS, *PEERS[case.operator]):
        if name not in timings:
            reasons.setdefault(name, "left out of this run")
    return make_row(
        case, floor_us=problem.floor_us, timings=timings, errors=errors, reasons=reasons,
        facts=problem.facts(), tolerance=problem.tolerance,
    )  # fmt: skip


def _check(found: Found, problem: Problem, *, compare: bool = True) -> tuple[Call, float]:
    if found.version is None:
        raise Absent(found.reason or "not found")
    problem.reset()
    call = found.adapter.prepare(problem)
    if compare:
        return call, problem.error(call)
    import torch

    call(0)
    torch.cuda.synchronize()
    return call, 0.0


def _say(case: Case, found: Found, error: Exception) -> str:
    name = found.adapter.name
    if _is_lost(error):
        raise DeviceLost(f"{case.operator} {case.name} {name}: {error}") from error
    traceback.print_exception(error, limit=-4)
    text = f"{type(error).__name__}: {error}"[:300]
    print(f"  {case.operator} {case.name} {name}: {text}", flush=True)
    return text if name != OURS else f"failed: {text}"


def _is_lost(error: BaseException) -> bool:
    return any(sign in str(error).lower() for sign in _LOST)

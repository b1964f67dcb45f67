"""How an implementation takes part in the benchmark, ours and every peer alike.

Needs the standard library only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["Absent", "Adapter", "Call", "Problem"]

#: Runs the operator on one of the problem's input sets and returns what ``Problem.error`` expects.
Call = Callable[[int], Any]


class Absent(Exception):
    """An implementation is not on this machine, or not for this problem; the text says why."""


class Problem(Protocol):
    """One case with its inputs: several sets to rotate over, and a reference to compare with."""

    sets: int
    bytes_moved: float
    floor_us: float
    tolerance: float

    def reset(self) -> None:
        """Restore what calls change in place."""

    def error(self, call: Call) -> float:
        """Run a call on fresh inputs and return its largest relative error, inf for NaN."""

    def facts(self) -> dict[str, Any]:
        """Return what a row should record about the inputs."""


@dataclass(frozen=True)
class Adapter:
    """One implementation: where it is found and how it is called.

    Parameters
    ----------
    name
        Its key in the results.
    operators
        What it can do.
    find
        Returns the version that was found, or raises :class:`Absent`.
    prepare
        Converts a problem's weights to its own layout, once, and returns the call to time.
    """

    name: str
    operators: tuple[str, ...]
    find: Callable[[], str]
    prepare: Callable[[Any], Call]

"""Build wrong kernels out of a right one, to prove that the tests notice.

A mutant is the kernel's own source with one piece of text exchanged, so it follows the kernel: when
the text is gone or ambiguous, building the mutant fails instead of testing nothing.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

__all__ = ["CONTROL", "Mutant", "build", "first_failure", "use"]


@dataclass(frozen=True)
class Mutant:
    """One deliberate mistake: ``old`` occurs exactly once in the source and becomes ``new``."""

    name: str
    old: str
    new: str

    def __str__(self) -> str:
        return self.name


#: No mistake at all: what the checks must accept when it is built the same way.
CONTROL = Mutant("control", "from __future__ import annotations\n", "\n")


def first_failure(
    runs: Iterable[tuple[Callable[..., None], Any, dict[str, Any]]], device: str
) -> str | None:
    """Run checks, each with its case and options, up to the first that refuses; say which."""
    for check, case, options in runs:
        try:
            check(case, device, **options)
        except AssertionError as error:
            return f"{case}: {error}"
    return None


def build(
    module: ModuleType, mutant: Mutant, folder: Path, imports: Mapping[str, str] | None = None
) -> ModuleType:
    """Write the changed source into ``folder`` and import it: Triton reads code from files.

    ``imports`` says which modules the copy imports in place of others.
    """
    source = inspect.getsource(module)
    count = source.count(mutant.old)
    if count != 1:
        raise ValueError(f"mutant {mutant}: {mutant.old!r} occurs {count} times, expected once")
    source = source.replace(mutant.old, mutant.new)
    for original, copy in (imports or {}).items():
        source = source.replace(f"from {original} import", f"from {copy} import")
    name = f"mutant_{mutant.name.replace('-', '_')}_{module.__name__.rpartition('.')[2]}"
    path = folder / f"{name}.py"
    path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    mutated = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mutated)
    return mutated


def use(
    operator: str, mutant: Mutant, folder: Path, patch: pytest.MonkeyPatch, *names: str
) -> None:
    """Let an operator launch the mutant of one of its modules ``<name>_kernel``.

    ``names`` has them, each behind those it imports from; without it there is one, named after the
    operator. All are built anew, so that compiled kernels call the wrong function as well.
    """
    modules = [importlib.import_module(f"k3_kernels.{name}_kernel") for name in names or [operator]]
    holders = [module for module in modules if mutant.old in inspect.getsource(module)]
    if mutant is not CONTROL and len(holders) != 1:
        raise ValueError(f"mutant {mutant}: {mutant.old!r} is in {holders}, expected one module")
    copies: dict[str, str] = {}
    for module in modules:
        change = mutant if module in holders else CONTROL
        copy = build(module, change, folder, copies)
        copies[module.__name__] = copy.__name__
        patch.setitem(sys.modules, copy.__name__, copy)
        for name in module.__all__:
            patch.setattr(module, name, getattr(copy, name))

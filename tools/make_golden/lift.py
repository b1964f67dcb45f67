"""Run single functions of another project's source file without importing the project around them.

Two ways, both leaving the functions' own text as published:

* :func:`lift` compiles only the named top-level definitions of a file, in a namespace that the
  caller supplies.
* :func:`load` imports a whole file, after putting small stand-ins for the modules that it imports
  into ``sys.modules``.

Needs the standard library only. Used by the scripts in this folder only.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["lift", "load", "sha256"]


def sha256(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def lift(
    path: Path, names: list[str], namespace: Mapping[str, Any], *, decorators: bool = True
) -> types.SimpleNamespace:
    """Compile the top-level functions and classes ``names`` of ``path``, and nothing else of it.

    Parameters
    ----------
    path
        A Python source file.
    names
        Top-level ``def`` and ``class`` names, in any order.
    namespace
        What those definitions refer to: modules, stand-ins for base classes.
    decorators
        False drops the decorators of the definitions themselves (``torch.compile``, registries).

    Raises
    ------
    LookupError
        If a name is not there: the package is not the version that the script was written for.
    """
    tree = ast.parse(path.read_text())
    kept = [
        n for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name in names
    ]
    missing = sorted(set(names) - {n.name for n in kept})
    if missing:
        raise LookupError(
            f"{path} does not define {missing}; check the pinned version of the package"
        )
    if not decorators:
        for node in kept:
            node.decorator_list = []
    scope = dict(namespace)
    exec(compile(ast.Module(body=kept, type_ignores=[]), str(path), "exec"), scope)
    return types.SimpleNamespace(**{name: scope[name] for name in names})


def load(path: Path, stand_ins: Mapping[str, Mapping[str, Any]] | None = None) -> types.ModuleType:
    """Import ``path`` whole, with ``stand_ins`` (module name to attributes) in ``sys.modules``."""
    for name, attributes in (stand_ins or {}).items():
        module = types.ModuleType(name)
        module.__path__ = []  # so that it may have submodules
        module.__dict__.update(attributes)
        sys.modules[name] = module
    spec = importlib.util.spec_from_file_location(f"oracle_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python source file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module

"""Who may import whom. Imports inside functions count as much as those at the top of a file."""

from __future__ import annotations

import ast
import json
import statistics
import subprocess
import sys
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Literal

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"kimik3_lab": ROOT / "kimik3_lab", "k3_kernels": ROOT / "kernels" / "k3_kernels"}


@dataclass(frozen=True)
class Layer:
    """A part of the lab: its modules, and what they may import besides each other."""

    name: str
    modules: tuple[str, ...]
    internal: tuple[str, ...] = ()
    external: frozenset[str] | None = frozenset()  # None: anything that the project depends on


BASE = (
    "kimik3_lab.config",
    "kimik3_lab.config_checks",
    "kimik3_lab.drafter_config",
    "kimik3_lab.json_file",
    "kimik3_lab.tensors",
    "kimik3_lab.paths",
    "kimik3_lab.provenance",
)
#: The first layer that owns a module counts, so that a part comes before the whole.
LAYERS = (
    Layer("kernels", ("k3_kernels",), external=frozenset({"torch", "triton"})),
    Layer("base", (*BASE, "kimik3_lab.__init__")),
    Layer(
        "executors",
        ("kimik3_lab.serving.executors",),
        (*BASE, "kimik3_lab.reference", "kimik3_lab.serving", "k3_kernels"),
        frozenset({"torch"}),
    ),
    Layer(
        "server",
        ("kimik3_lab.serving.server",),
        (*BASE, "kimik3_lab.__init__", "kimik3_lab.serving", "kimik3_lab.reference"),
        frozenset({
            "fastapi", "pydantic", "starlette", "sse_starlette", "uvicorn", "tokenizers", "jinja2",
            "torch", "httpx", "psutil", "prometheus_client",
        }),
    ),
    Layer("scheduling", ("kimik3_lab.serving",)),
    Layer("reference", ("kimik3_lab.reference",), BASE, frozenset({"torch", "safetensors"})),
    Layer(
        "performance",
        ("kimik3_lab.performance",),
        (*BASE, "kimik3_lab.serving"),
        frozenset({"numpy"}),
    ),
    Layer(
        "parallel",
        ("kimik3_lab.parallel",),
        (*BASE, "kimik3_lab.reference", "kimik3_lab.performance", "k3_kernels"),
        frozenset({"torch"}),
    ),
    Layer(
        "benchmark",
        ("kimik3_lab.benchmark",),
        ("kimik3_lab.paths", "kimik3_lab.provenance", "kimik3_lab.__init__"),
        frozenset({"numpy", "scipy", "aiohttp", "tokenizers", "tqdm", "rich"}),
    ),
    Layer(
        "simulation",
        ("kimik3_lab.simulation",),
        (*BASE, "kimik3_lab.serving", "kimik3_lab.performance", "kimik3_lab.benchmark"),
        frozenset({"numpy"}),
    ),
    Layer(
        "rank",
        ("kimik3_lab.rank",),
        (*BASE, "kimik3_lab.reference", "kimik3_lab.serving", "kimik3_lab.performance",
         "k3_kernels"),
        frozenset({"torch"}),
    ),
    Layer(
        "teaching",
        ("kimik3_lab.teaching",),
        (*BASE, "kimik3_lab.__init__", "kimik3_lab.reference", "kimik3_lab.serving",
         "kimik3_lab.performance", "kimik3_lab.benchmark", "kimik3_lab.simulation", "k3_kernels",
         "kimik3_lab.deploy", "kimik3_lab.reproduce"),
        None,
    ),
    Layer(
        "deploy",
        ("kimik3_lab.deploy",),
        (*BASE, "kimik3_lab.__init__", "kimik3_lab.performance"),
        frozenset({"pydantic", "yaml", "jinja2"}),
    ),
    Layer(
        "reproduce",
        ("kimik3_lab.reproduce",),
        (*BASE, "kimik3_lab.__init__", "kimik3_lab.performance", "kimik3_lab.deploy",
         "kimik3_lab.benchmark", "kimik3_lab.vllm_cpu"),
        frozenset({"pydantic"}),
    ),
    # Runs inside vLLM's own environment, next to the reference and without the engine.
    Layer(
        "vllm_cpu",
        ("kimik3_lab.vllm_cpu",),
        (*BASE, "kimik3_lab.reference"),
        frozenset({"torch", "vllm"}),
    ),
    Layer("commands", ("kimik3_lab.commands", "kimik3_lab.cli"), ("kimik3_lab",), None),
)  # fmt: skip
#: Parts that a layer may not reach although it may import the whole that they belong to.
FORBIDDEN = {
    "performance": ("kimik3_lab.serving.executors", "kimik3_lab.serving.server"),
    "simulation": ("kimik3_lab.serving.executors", "kimik3_lab.serving.server"),
    "executors": ("kimik3_lab.serving.server",),
}
#: What one function of a module may import beyond its layer, because the module works without it.
ON_DEMAND = {
    "kimik3_lab.serving.engine": {"tqdm"},  # the progress bar of Engine.generate
    "kimik3_lab.simulation.fleet": {"tqdm"},
    "kimik3_lab.simulation.drive": {"tqdm"},  # the progress bar of a long run
    "kimik3_lab.rank.measure_skew": {"tokenizers"},
    "kimik3_lab.performance.published": {"scipy"},  # the exact interval of a ratio of counts
}


def modules() -> dict[str, Path]:
    """Every module of both packages; a package is named after its ``__init__``."""
    found = {}
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = [package, *path.relative_to(folder).with_suffix("").parts]
            found[".".join(parts)] = path
    return found


MODULES = modules()


def resolve(name: str) -> str:
    """Name of the module that an import of ``name`` runs, or ``name`` if it is not one of ours."""
    for candidate in (name, f"{name}.__init__"):
        if candidate in MODULES:
            return candidate
    parent, _, _ = name.rpartition(".")
    return resolve(parent) if parent and parent.split(".")[0] in PACKAGES else name


@dataclass(frozen=True)
class Import:
    """One imported name: where, and if it runs with the module, on demand or never."""

    line: int
    name: str
    when: Literal["module", "function", "typing"]


def imports(module: str, source: str) -> list[Import]:
    """Find everything that a module imports, wherever it does so."""
    above = module.split(".")
    found: list[Import] = []

    def visit(node: ast.AST, when: Literal["module", "function", "typing"]) -> None:
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parts = [*above[: -node.level], node.module] if node.level else [node.module]
            base = ".".join(part for part in parts if part)
            names = [f"{base}.{alias.name}" for alias in node.names]
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) in ("importlib.import_module", "import_module", "__import__")
            and isinstance(node.args[0], ast.Constant)
        ):
            names = [str(node.args[0].value)]
        found.extend(Import(node.lineno, name, when) for name in names)  # type: ignore[attr-defined]
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for statement in node.body:
                visit(statement, "typing")
            for statement in node.orelse:
                visit(statement, when)
            return
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            when = "function"
        for child in ast.iter_child_nodes(node):
            visit(child, when)

    visit(ast.parse(source), "module")
    return found


def belongs(module: str, part: str) -> bool:
    return module == part or module.startswith(f"{part}.")


def layer_of(module: str) -> Layer | None:
    for layer in LAYERS:
        if any(belongs(module, part) for part in layer.modules):
            return layer
    return None


def broken_arrows(module: str, source: str) -> list[str]:
    layer = layer_of(module)
    if layer is None:
        return [f"{module} belongs to no layer: add it to this test"]
    wrong = []
    for found in imports(module, source):
        target = resolve(found.name)
        top = target.split(".")[0]
        if top in PACKAGES:
            inside = any(belongs(target, part) for part in layer.internal)
            banned = any(belongs(target, part) for part in FORBIDDEN.get(layer.name, ()))
            fine = not banned and (inside or layer_of(target) is layer)
        else:
            fine = (
                top in sys.stdlib_module_names
                or layer.external is None
                or top in layer.external
                or (found.when != "module" and top in ON_DEMAND.get(module, ()))
            )
        if not fine:
            wrong.append(f"{module}:{found.line} ({layer.name}) imports {target}")
    return wrong


@pytest.mark.parametrize("module", MODULES)
def test_arrows(module: str) -> None:
    assert broken_arrows(module, MODULES[module].read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("k3_kernels.routing", "import numpy"),
        ("k3_kernels.routing", "from kimik3_lab.config import K3Config"),
        ("kimik3_lab.config", "import torch"),
        ("kimik3_lab.serving.scheduler", "def f():\n    import torch"),
        ("kimik3_lab.serving.scheduler", "from ..config import K3Config"),
        ("kimik3_lab.serving.engine", "from kimik3_lab.serving.executors import torch_executor"),
        ("kimik3_lab.serving.engine", "import tqdm"),
        ("kimik3_lab.serving.scheduler", "def f():\n    from tqdm.auto import tqdm"),
        ("kimik3_lab.serving.scheduler", "if TYPE_CHECKING:\n    from torch import Tensor"),
        ("kimik3_lab.serving.executors.torch_executor", "import fastapi"),
        ("kimik3_lab.reference.model", "from kimik3_lab.serving import scheduler"),
        ("kimik3_lab.performance.accounting", "import torch"),
        ("kimik3_lab.performance.accounting", "import kimik3_lab.serving.executors.torch_executor"),
        ("kimik3_lab.benchmark.client", "import importlib\nimportlib.import_module('torch')"),
        ("kimik3_lab.benchmark.client", "from kimik3_lab.serving import engine"),
        (
            "kimik3_lab.simulation.executor",
            "from kimik3_lab.serving.executors import torch_executor",
        ),
        ("kimik3_lab.simulation.drive", "import scipy"),
        ("kimik3_lab.reference.model", "from kimik3_lab.teaching import plots"),
        ("kimik3_lab.teaching.session", "from kimik3_lab.commands import CommandError"),
        ("kimik3_lab.provenance", "from kimik3_lab import cli"),
        ("kimik3_lab.homeless", ""),
    ],
)
def test_a_forbidden_import_is_caught(module: str, source: str) -> None:
    assert broken_arrows(module, source) != []


def circle(graph: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_import_circle() -> None:
    graph: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        source = path.read_text(encoding="utf-8")
        # An import for types only never runs, so it closes no circle.
        found = {resolve(i.name) for i in imports(module, source) if i.when != "typing"}
        graph[module] = (found & MODULES.keys()) - {module}
    assert circle(graph) == []
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a"}}) != []


_PROBE = """
import importlib, json, sys, time
start = time.process_time()
importlib.import_module(sys.argv[1])
took = time.process_time() - start
print(json.dumps([took, sorted({name.partition(".")[0] for name in sys.modules})]))
"""
HEAVY = {"torch", "triton", "plotly", "matplotlib", "numpy", "scipy", "pandas", "fastapi", "tqdm"}


def probe(module: str) -> tuple[float, set[str]]:
    """Import a module in a fresh process: processor seconds, and the packages that it loaded.

    Processor time, because other work on the machine does not make an import slow.
    """
    command = [sys.executable, "-c", _PROBE, module]
    took, names = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return took, set(names)


def test_importing_the_lab_is_quick_and_light() -> None:
    runs = [probe("kimik3_lab") for _ in range(5)]
    assert statistics.median(took for took, _ in runs) < 0.3
    assert not runs[0][1] & HEAVY


@pytest.mark.parametrize("module", ["kimik3_lab.serving.engine", "kimik3_lab.cli"])
def test_light_parts_load_nothing_heavy(module: str) -> None:
    assert not probe(module)[1] & HEAVY


def test_an_engine_starts_without_pytorchs_compiler() -> None:
    """It takes seconds to load, and every server would wait for it; the model does without, too."""
    command = [sys.executable, "-c", "import sys, kimik3_lab.serving.executors.torch_executor\n"
               "from kimik3_lab.paths import default_model_dir\n"
               "from kimik3_lab.reference import checkpoint\n"
               "checkpoint.load(default_model_dir())\n"
               "sys.exit(bool({'torch._dynamo', 'sympy'} & set(sys.modules)))"]  # fmt: skip
    assert subprocess.run(command).returncode == 0

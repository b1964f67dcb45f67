"""One list of packages: nothing names a package twice or otherwise, and nothing is left out."""

from __future__ import annotations

import ast
import copy
import json
import re
import sys
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))[
    "project"
]
ENVIRONMENTS = {
    path.name: yaml.safe_load(path.read_text(encoding="utf-8"))
    for path in sorted(ROOT.glob("environment*.yml"))
}
EXTRAS = {"environment.yml": {"dev"}, "environment-gpu.yml": {"dev", "gpu", "bench"}}
TORCH_PIN = re.compile(r"\btorch\s*===?\s*[\d$]|^TORCH_VERSION", flags=re.MULTILINE)


def environment_faults(environment: dict[str, Any], extras: set[str]) -> list[str]:
    """Hold a conda environment file to its form: python, pip and this project, nothing else."""
    wrong = []
    if environment["channels"] != ["conda-forge", "nodefaults"]:
        wrong.append(f"channels {environment['channels']}")
    plain = [entry for entry in environment["dependencies"] if isinstance(entry, str)]
    names = [re.split(r"[=<> ]", entry)[0] for entry in plain]
    if names != ["python", "pip"]:
        wrong.append(f"conda packages {names}, expected python and pip: name others in pyproject")
    floor = next(iter(SpecifierSet(PROJECT["requires-python"]))).version
    if plain[:1] != [f"python={floor}"]:
        wrong.append(f"{plain[:1]}, but pyproject asks for python {PROJECT['requires-python']}")
    pip = [
        line
        for entry in environment["dependencies"]
        if isinstance(entry, dict)
        for line in entry["pip"]
    ]
    editable = [re.fullmatch(r"-e \.\[([\w,]+)\]", line) for line in pip]
    if len(editable) != 1 or editable[0] is None:
        wrong.append(f"pip installs {pip}, expected the project alone")
    elif set(editable[0][1].split(",")) != extras:
        wrong.append(f"extras {editable[0][1]}, expected {sorted(extras)}")
    return wrong


def project_faults(project: dict[str, Any]) -> list[str]:
    """No package is named twice in pyproject, and PyTorch is not pinned there."""
    wrong = []
    seen: dict[str, str] = {}
    groups = {"dependencies": project["dependencies"], **project["optional-dependencies"]}
    for group, lines in groups.items():
        for requirement in map(Requirement, lines):
            name = canonicalize_name(requirement.name)
            if name in seen:
                wrong.append(f"{name} in {group} and in {seen[name]}")
            seen[name] = group
            if any(s.operator in ("==", "===", "<", "<=", "~=") for s in requirement.specifier):
                wrong.append(f"{requirement} is pinned or capped: give the oldest version only")
    return wrong


def test_every_environment_is_known() -> None:
    assert ENVIRONMENTS.keys() == EXTRAS.keys()
    assert len({environment["name"] for environment in ENVIRONMENTS.values()}) == len(ENVIRONMENTS)


@pytest.mark.parametrize("name", EXTRAS)
def test_environment_files_name_the_project_only(name: str) -> None:
    assert environment_faults(ENVIRONMENTS[name], EXTRAS[name]) == []
    assert EXTRAS[name] <= PROJECT["optional-dependencies"].keys()


@pytest.mark.parametrize(
    "change",
    [
        lambda e: e["dependencies"].insert(1, "numpy>=2.0"),
        lambda e: e["dependencies"][-1]["pip"].append("torch==2.13.0"),
        lambda e: e["dependencies"].__setitem__(0, "python=3.12"),
        lambda e: e["channels"].append("defaults"),
        lambda e: e["dependencies"][-1].update(pip=["-e .[dev,extra]"]),
        lambda e: e["dependencies"].pop(),
    ],
)
def test_a_second_list_of_packages_is_caught(change: Any) -> None:
    environment = copy.deepcopy(ENVIRONMENTS["environment.yml"])
    change(environment)
    assert environment_faults(environment, EXTRAS["environment.yml"]) != []


def test_project_names_each_package_once() -> None:
    assert project_faults(PROJECT) == []


@pytest.mark.parametrize("line", ["numpy>=1.26", "Typer", "torch-geometric==2.6", "attrs<26"])
def test_a_second_or_pinned_package_is_caught(line: str) -> None:
    project = copy.deepcopy(PROJECT)
    project["optional-dependencies"]["dev"].append(line)
    assert project_faults(project) != []


def test_only_the_makefile_pins_torch() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    version = re.search(r"^TORCH_VERSION \?= ([\d.]+)$", makefile, flags=re.MULTILINE)
    assert version is not None
    wanted = next(r for r in map(Requirement, PROJECT["dependencies"]) if r.name == "torch")
    assert wanted.specifier.contains(version[1])
    files = [
        *ROOT.glob("*.toml"),
        *ROOT.glob("*.yml"),
        *ROOT.glob("requirements*.txt"),
        *ROOT.glob(".github/workflows/*"),
        ROOT / ".ci" / "run",
    ]
    assert [path.name for path in files if TORCH_PIN.search(path.read_text("utf-8"))] == []
    assert TORCH_PIN.search(makefile)


def test_continuous_integration_runs_the_oldest_python() -> None:
    body = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    steps = [step for job in body["jobs"].values() for step in job["steps"]]
    versions = [
        step["with"]["python-version"] for step in steps if "python" in step.get("uses", "")
    ]
    assert [f">={version}" for version in versions] == [PROJECT["requires-python"]]
    assert [step["run"] for step in steps if "run" in step] == [".ci/run"]


@cache
def _installed(extras: frozenset[str]) -> tuple[set[str], Mapping[str, list[str]]]:
    """Names of the packages that the project installs, and which package holds which module."""
    lines = list(PROJECT["dependencies"])
    for extra in extras:
        lines += PROJECT["optional-dependencies"][extra]
    named = {canonicalize_name(Requirement(line).name) for line in lines}
    installed = set(named)
    for name in named:
        try:
            required = map(Requirement, metadata.requires(name) or [])
        except metadata.PackageNotFoundError:  # not for this system
            continue
        installed |= {canonicalize_name(r.name) for r in required if "extra" not in str(r.marker)}
    return installed, metadata.packages_distributions()


def undeclared(source: str, extras: set[str]) -> set[str]:
    """Packages that a piece of code imports and that the project does not install.

    What a package named in pyproject itself requires counts as installed: filelock with torch,
    pydantic with fastapi.
    """
    installed, where = _installed(frozenset(extras))
    imported = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            imported.add((node.module or "").partition(".")[0])
    own = {"kimik3_lab", "k3_kernels"} | {path.stem for path in ROOT.glob("t*/**/*.py")}
    return {
        name
        for name in imported - own - sys.stdlib_module_names
        if not {canonicalize_name(d) for d in where.get(name, [name])} & installed
    }


def _cells(path: Path) -> str:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    return "\n".join(re.sub(r"^\s*[%!].*$", "", text, flags=re.MULTILINE) for text in code)


@pytest.mark.parametrize(
    ("folder", "extras"),
    [("kimik3_lab", set()), ("kernels/k3_kernels", set()), ("tests", {"dev"})],
)
def test_all_that_code_imports_is_installed(folder: str, extras: set[str]) -> None:
    found = {
        str(path.relative_to(ROOT)): missing
        for path in (ROOT / folder).rglob("*.py")
        if (missing := undeclared(path.read_text(encoding="utf-8"), extras) - _elsewhere(path))
    }
    assert found == {}


def _elsewhere(path: Path) -> set[str]:
    """What need not be installed: folders of the repository that tests reach, and vLLM's lane."""
    inside = path.is_relative_to(ROOT / "kimik3_lab" / "vllm_cpu")
    # vLLM brings OpenAI's client.
    tests = path.is_relative_to(ROOT / "tests" / "vllm")
    lane = {"vllm", "openai"} if tests else {"vllm"} if inside else set()
    return lane | ({"tools", "benchmarks"} if path.is_relative_to(ROOT / "tests") else set())


def test_all_that_notebooks_import_is_installed() -> None:
    found = {
        path.name: missing
        for path in (ROOT / "notebooks").rglob("*.ipynb")
        if ".ipynb_checkpoints" not in path.parts and (missing := undeclared(_cells(path), set()))
    }
    assert found == {}


def test_an_undeclared_import_is_caught() -> None:
    assert undeclared("def f():\n    import seaborn.axes", {"dev"}) == {"seaborn"}
    assert undeclared("from sklearn import svm\nimport torch, json", set()) == {"sklearn"}
    assert undeclared("import pytest", set()) == {"pytest"}
    assert undeclared("import pytest", {"dev"}) == set()

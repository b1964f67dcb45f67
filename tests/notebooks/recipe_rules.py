"""What every recipe of the cookbook keeps to, on top of the rules for all notebooks.

A recipe is one task: a header that says what is done, with what, how long it takes, with which
versions and when it was last seen to work; then five sections. What the header says of versions
and date is compared with what the stored run printed and with what the project pins.
"""

from __future__ import annotations

import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from rules import Notebook, Rule

__all__ = ["RECIPE_RULES"]

ROOT = Path(__file__).resolve().parents[2]
MAX_CELLS = 15
FIELDS = ("Task", "You need", "Time", "Pinned versions", "Last verified")
SECTIONS = ("Steps", "Expected output", "When it works", "When it fails", "Decide")
#: The packages that the first code cell prints, as ``lab.recipe`` names them.
BANNER = ("python", "torch", "triton", "lab")


@cache
def _project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@cache
def _torch_pin() -> str:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    found = re.search(r"^TORCH_VERSION \?= (\S+)$", text, flags=re.MULTILINE)
    assert found, "the Makefile pins PyTorch"
    return found[1]


@cache
def _vllm_releases() -> frozenset[str]:
    return frozenset(path.stem for path in (ROOT / "data/deploy/vllm_flags").glob("*.json"))


def _header(notebook: Notebook) -> list[tuple[str, str]]:
    """Field and text of every row of the table in the first cell."""
    first = "".join(notebook.cells[0]["source"]) if notebook.cells else ""
    return re.findall(r"^\| \*\*(.+?)\*\* \| (.+?) \|$", first, flags=re.MULTILINE)


def _field(notebook: Notebook, name: str) -> str:
    return dict(_header(notebook)).get(name, "")


def _printed(notebook: Notebook) -> str:
    """What the first code cell printed when the notebook was stored."""
    for _, cell, _ in notebook.of_type("code"):
        return "".join(
            "".join(output["text"])
            for output in cell["outputs"]
            if output["output_type"] == "stream"
        )
    return ""


def _section(notebook: Notebook, name: str) -> list[dict[str, Any]]:
    """Cells of one section, from the cell with its heading to the one with the next heading."""
    starts = [(number, text) for number, level, text in notebook.headings if level == 2]
    for index, (start, text) in enumerate(starts):
        if text == name:
            end = starts[index + 1][0] if index + 1 < len(starts) else len(notebook.cells) + 1
            return notebook.cells[start - 1 : max(end - 1, start)]
    return []


def is_short(notebook: Notebook) -> list[str]:
    count = len(notebook.cells)
    return [] if count <= MAX_CELLS else [f"{count} cells, at most {MAX_CELLS}"]


def says_what_it_takes(notebook: Notebook) -> list[str]:
    """A title without a number and the five fields, the task in one sentence."""
    wrong = []
    first = "".join(notebook.cells[0]["source"]) if notebook.cells else ""
    if not re.match(r"# [A-Z]\D", first):
        wrong.append(f"begins with {first.partition(chr(10))[0]!r}, expected '# Title'")
    names = tuple(name for name, _ in _header(notebook))
    if names != FIELDS:
        wrong.append(f"header with the fields {names}, expected {FIELDS}")
    task = _field(notebook, "Task")
    if not task.endswith(".") or re.search(r"[.!?]\s+[A-Z]", task):
        wrong.append(f"the task is not one sentence: {task!r}")
    return wrong


def sections_are_those_of_a_recipe(notebook: Notebook) -> list[str]:
    found = tuple(text for _, level, text in notebook.headings if level == 2)
    return [] if found == SECTIONS else [f"sections {found}, expected {SECTIONS}"]


def begins_under_its_own_name(notebook: Notebook) -> list[str]:
    """The first code cell starts the recipe, so that the banner shows its title."""
    for _, _, text in notebook.of_type("code"):
        if f'lab.recipe("{notebook.path.stem}")' in text:
            return []
        break
    return [f'the first code cell does not call lab.recipe("{notebook.path.stem}")']


def versions_are_those_that_ran(notebook: Notebook) -> list[str]:
    """The header's versions are printed by the stored run, and are what the project pins."""
    text = _field(notebook, "Pinned versions")
    pinned = dict(re.findall(r"\b(python|torch|triton|lab) (\d+(?:\.\d+)+)", text))
    wrong = [f"the header pins no {name}" for name in BANNER if name not in pinned]
    ran = dict(re.findall(r"\b(python|torch|triton|lab) (\d+(?:\.\d+)+)", _printed(notebook)))
    for name, version in pinned.items():
        if ran.get(name) != version:
            wrong.append(f"{name} {version} in the header, {ran.get(name)} in the stored run")
    project = _project()
    bounds = {r.name: r.specifier for r in map(Requirement, project["dependencies"])}
    expected = {
        "python": SpecifierSet(project["requires-python"]),
        "torch": SpecifierSet(f"=={_torch_pin()}"),
        "triton": bounds["triton"],
        "lab": SpecifierSet(f"=={project['version']}"),
    }
    for name, version in pinned.items():
        if version not in expected[name]:
            wrong.append(f"{name} {version} in the header, the project asks for {expected[name]}")
    for release in re.findall(r"\d+(?:\.\d+)+", text.partition("vLLM")[2]):
        if release not in _vllm_releases():
            wrong.append(f"vLLM {release} is no release whose options the lab knows")
    return wrong


def names_vllm_if_it_calls_it(notebook: Notebook) -> list[str]:
    """A ``vllm`` command or flag belongs to a release."""
    text = "\n".join("".join(cell["source"]) for cell in notebook.cells)
    called = re.search(r"\bvllm (serve|bench)\b", text)
    if called and not re.search(r"\bvLLM \d", _field(notebook, "Pinned versions")):
        return [f"calls {called[0]!r}, but the header pins no vLLM"]
    return []


def was_verified_when_it_says(notebook: Notebook) -> list[str]:
    said = re.match(r"(\d{4}-\d\d-\d\d)\b", _field(notebook, "Last verified"))
    ran = re.search(r"\bdate\s+(\d{4}-\d\d-\d\d)\b", _printed(notebook))
    if said and ran and said[1] == ran[1]:
        return []
    return [f"last verified {said and said[1]}, but the stored run is of {ran and ran[1]}"]


def proves_what_it_says(notebook: Notebook) -> list[str]:
    """Something promised and asserted, the trap as code, the decision as a table."""
    wrong = []
    tags = {
        tag
        for cell in _section(notebook, "Expected output")
        for tag in cell["metadata"].get("tags", ())
    }
    if "nbval-check-output" not in tags:
        wrong.append("Expected output has no cell tagged nbval-check-output")
    if not any(
        re.search(r"^assert\b", text, re.MULTILINE) for _, _, text in notebook.of_type("code")
    ):
        wrong.append("nothing is asserted")
    if not any(cell["cell_type"] == "code" for cell in _section(notebook, "When it fails")):
        wrong.append("When it fails only tells; show it in a code cell")
    decide = "\n".join("".join(cell["source"]) for cell in _section(notebook, "Decide"))
    if len(re.findall(r"^\| .+ \|$", decide, flags=re.MULTILINE)) < 3:
        wrong.append("Decide has no table with a head and two rows")
    return wrong


#: Every rule for recipes, by name; `rules.faults` holds a recipe to them.
RECIPE_RULES: dict[str, Rule] = {
    rule.__name__: rule
    for rule in (
        is_short,
        says_what_it_takes,
        sections_are_those_of_a_recipe,
        begins_under_its_own_name,
        versions_are_those_that_ran,
        names_vllm_if_it_calls_it,
        was_verified_when_it_says,
        proves_what_it_says,
    )
}

"""Every recipe keeps the rules for recipes, and every rule catches a recipe that breaks it."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import recipe_rules
import rules

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "notebooks" / "recipes"
RECIPES = sorted(FOLDER.glob("*.ipynb"))
TORCH = recipe_rules._torch_pin()
LAB = recipe_rules._project()["version"]
Json = dict[str, Any]
Change = Callable[[Json], object]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_keeps_the_rules(path: Path) -> None:
    assert rules.faults(path, recipe_rules.RECIPE_RULES) == []


def test_the_index_lists_every_recipe_and_no_other() -> None:
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"\]\((\w+)\.ipynb\)", text)
    assert sorted(listed) == sorted(path.stem for path in RECIPES)
    for path in RECIPES:
        title = "".join(rules.Notebook(path).cells[0]["source"]).partition("\n")[0]
        assert f"[{title.removeprefix('# ')}]({path.name})" in text


def _markdown(name: str, text: str) -> Json:
    return {"cell_type": "markdown", "id": name, "metadata": {}, "source": text}


def _code(name: str, count: int, text: str, printed: str, *tags: str) -> Json:
    return {
        "cell_type": "code", "id": name, "metadata": {"tags": list(tags)}, "source": text,
        "execution_count": count,
        "outputs": [{"output_type": "stream", "name": "stdout", "text": printed}],
    }  # fmt: skip


VERSIONS = f"python 3.11.7, torch {TORCH}, triton 3.9.0, lab {LAB}, vLLM 0.27.1 and 0.33.0"
HEADER = f"""# Count what you have

| | |
|---|---|
| **Task** | Count what you have and say what is missing. |
| **You need** | the lab |
| **Time** | 5 minutes |
| **Pinned versions** | {VERSIONS} |
| **Last verified** | 2026-11-30, on a CPU |"""
BANNER = f"""Recipe: Count what you have
  versions  python 3.11.7, torch {TORCH}+cpu, triton 3.9.0, lab {LAB}
  date      2026-11-30, seed 0
"""
GOOD: Json = {
    "nbformat": 4,
    "nbformat_minor": 5,
    "metadata": {"kernelspec": {"name": "python3", "display_name": "Python 3"}},
    "cells": [
        _markdown("header", HEADER),
        _code("start", 1, 'ctx = lab.recipe("count_what_you_have")', BANNER),
        _markdown("steps", "## Steps\n\nAs in `vllm serve`."),
        _markdown("expected", "## Expected output"),
        _code("count", 2, "print(n)\nassert n == 3", "3", "nbval-check-output"),
        _markdown("works", "## When it works\n\nAlways.\n\n## When it fails\n\nNever count twice."),
        _code("trap", 3, "count(twice)", "refused"),
        _markdown("decide", "## Decide\n\n| See | Do |\n|---|---|\n| 3 | go on |\n| 4 | stop |"),
    ],
}  # fmt: skip


def _cell(notebook: Json, name: str) -> Json:
    return next(cell for cell in notebook["cells"] if cell["id"] == name)


def _swap(name: str, old: str, new: str) -> Change:
    def change(notebook: Json) -> None:
        cell = _cell(notebook, name)
        assert old in cell["source"]
        cell["source"] = cell["source"].replace(old, new)

    return change


def _print(old: str, new: str) -> Change:
    def change(notebook: Json) -> None:
        output = _cell(notebook, "start")["outputs"][0]
        assert old in output["text"]
        output["text"] = output["text"].replace(old, new)

    return change


def _drop(name: str) -> Change:
    return lambda notebook: notebook["cells"].remove(_cell(notebook, name))


def _everywhere(old: str, new: str) -> Change:
    """Another version in the header and in what the run printed."""

    def change(notebook: Json) -> None:
        _swap("header", old, new)(notebook)
        _print(old, new)(notebook)

    return change


def _pad(notebook: Json) -> None:
    notebook["cells"] += [_markdown(f"more-{n}", "more") for n in range(8)]


def _untag(notebook: Json) -> None:
    _cell(notebook, "count")["metadata"]["tags"] = []


BAD: list[tuple[str, Change]] = [
    ("is_short", _pad),
    ("says_what_it_takes", _swap("header", "# Count", "# 3 Count")),
    ("says_what_it_takes", _swap("header", "| **Time** | 5 minutes |\n", "")),
    ("says_what_it_takes", _swap("header", "**You need**", "**Needs**")),
    ("says_what_it_takes", _swap("header", "is missing. |", "is missing |")),
    ("says_what_it_takes", _swap("header", "have and say", "have. Say")),
    ("sections_are_those_of_a_recipe", _swap("works", "## When it fails\n\n", "")),
    ("sections_are_those_of_a_recipe", _swap("steps", "Steps", "Step")),
    ("sections_are_those_of_a_recipe", _swap("decide", "| 4 | stop |", "| 4 | stop |\n\n## More")),
    ("sections_are_those_of_a_recipe", _drop("expected")),
    ("begins_under_its_own_name", _swap("start", "count_what_you_have", "count")),
    ("begins_under_its_own_name", _swap("start", "lab.recipe", "lab.start")),
    ("versions_are_those_that_ran", _swap("header", f", lab {LAB}", "")),
    ("versions_are_those_that_ran", _swap("header", "triton 3.9.0", "triton 3.9.1")),
    ("versions_are_those_that_ran", _print(f"torch {TORCH}", "torch 2.12.0")),
    ("versions_are_those_that_ran", _everywhere(f"torch {TORCH}", "torch 2.12.0")),
    ("versions_are_those_that_ran", _everywhere("python 3.11.7", "python 3.10.2")),
    ("versions_are_those_that_ran", _everywhere("triton 3.9.0", "triton 3.5.0")),
    ("versions_are_those_that_ran", _everywhere(f"lab {LAB}", "lab 0.0.1")),
    ("versions_are_those_that_ran", _swap("header", "0.27.1", "0.27.9")),
    ("names_vllm_if_it_calls_it", _swap("header", ", vLLM 0.27.1 and 0.33.0", "")),
    ("was_verified_when_it_says", _swap("header", "2026-11-30", "2026-11-29")),
    ("was_verified_when_it_says", _swap("header", "2026-11-30, on", "lately, on")),
    ("was_verified_when_it_says", _print("date      2026-11-30", "seed 0")),
    ("proves_what_it_says", _untag),
    ("proves_what_it_says", _swap("count", "assert n", "print(n)")),
    ("proves_what_it_says", _drop("trap")),
    ("proves_what_it_says", _swap("decide", "\n| 4 | stop |", "")),
]  # fmt: skip


def _store(folder: Path, notebook: Json) -> Path:
    path = folder / "count_what_you_have.ipynb"
    path.write_text(json.dumps(notebook), encoding="utf-8")
    return path


def test_a_good_recipe_has_no_faults(tmp_path: Path) -> None:
    path = _store(tmp_path, GOOD)
    assert rules.faults(path, recipe_rules.RECIPE_RULES) == []
    assert rules.faults(path) == []


@pytest.mark.parametrize(("rule", "change"), BAD, ids=[f"{n}-{r}" for n, (r, _) in enumerate(BAD)])
def test_each_rule_bites(tmp_path: Path, rule: str, change: Change) -> None:
    notebook = copy.deepcopy(GOOD)
    change(notebook)
    assert notebook != GOOD
    path = _store(tmp_path, notebook)
    assert recipe_rules.RECIPE_RULES[rule](rules.Notebook(path)) != []


def test_every_rule_has_a_recipe_that_breaks_it() -> None:
    assert {rule for rule, _ in BAD} == set(recipe_rules.RECIPE_RULES)

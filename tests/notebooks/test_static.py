"""Every notebook keeps every rule, and every rule catches a notebook that breaks it."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import rules

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted(
    path for path in (ROOT / "notebooks").rglob("*.ipynb") if ".ipynb_checkpoints" not in path.parts
)
Json = dict[str, Any]
Change = Callable[[Json], object]


def test_there_are_notebooks() -> None:
    assert any(path.name == "00_start_here.ipynb" for path in NOTEBOOKS)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_keeps_the_rules(path: Path) -> None:
    assert rules.faults(path) == []


def _markdown(name: str, text: str) -> Json:
    return {"cell_type": "markdown", "id": name, "metadata": {}, "source": text}


def _code(name: str, count: int, text: str, printed: str = "", *tags: str) -> Json:
    output = {"output_type": "stream", "name": "stdout", "text": printed}
    return {
        "cell_type": "code", "id": name, "metadata": {"tags": list(tags)}, "source": text,
        "execution_count": count, "outputs": [output] if printed else [],
    }  # fmt: skip


GOOD: Json = {
    "nbformat": 4,
    "nbformat_minor": 5,
    "metadata": {"kernelspec": {"name": "python3", "display_name": "Python 3"}},
    "cells": [
        _markdown("title", "# 04 — A lesson\n\n45 min\n\n**Claim.** It can be done."),
        _markdown("setup", "## Setup"),
        _code("setup-code", 1, "ctx = lab.start('04')", "Lesson 04"),
        _markdown("predict", "## Predict\n\n```\n# not a heading\n[x](not-a-link)\n```"),
        _markdown("idea", "## Idea: one\n\n![a drawing](figure.png), [more](05_next.ipynb#a)"),
        _markdown("check", "## Check"),
        _code("check-code", 2, "print(ok)", "True", "nbval-check-output"),
        _markdown("exercise", "## Exercise 1\n\n<details>the solution</details>"),
        _code("exercise-code", 3, "check_routing(mine)"),
        _markdown("gap", "## Explain the gap"),
        _markdown("say", "## What you can now say\n\n[site](https://example.org/x)"),
    ],
}  # fmt: skip


def _cell(notebook: Json, name: str) -> Json:
    return next(cell for cell in notebook["cells"] if cell["id"] == name)


def _set(name: str, key: str, value: object) -> Change:
    return lambda notebook: _cell(notebook, name).__setitem__(key, value)


def _add(name: str, text: str) -> Change:
    return lambda notebook: _cell(notebook, name).update(
        source=_cell(notebook, name)["source"] + text
    )


def _show(kind: str, value: str) -> Change:
    output = {"output_type": "display_data", "data": {kind: value}, "metadata": {}}
    return lambda notebook: _cell(notebook, "check-code")["outputs"].append(output)


def _drop(name: str) -> Change:
    return lambda notebook: notebook["cells"].remove(_cell(notebook, name))


def _swap(one: str, other: str) -> Change:
    def change(notebook: Json) -> None:
        a, b = _cell(notebook, one), _cell(notebook, other)
        a["source"], b["source"] = b["source"], a["source"]

    return change


def _error(notebook: Json) -> None:
    fault = {"output_type": "error", "ename": "ValueError", "evalue": "", "traceback": []}
    _cell(notebook, "check-code")["outputs"].append(fault)


BAD: list[tuple[str, Change]] = [
    ("is_valid_nbformat_4_5", lambda n: n.update(nbformat_minor=4)),
    ("is_valid_nbformat_4_5", _set("check", "id", "setup")),
    ("is_valid_nbformat_4_5", lambda n: _cell(n, "check").pop("id")),
    ("is_valid_nbformat_4_5", _set("check", "outputs", [])),
    ("names_the_python3_kernel", lambda n: n["metadata"].pop("kernelspec")),
    ("names_the_python3_kernel", lambda n: n["metadata"]["kernelspec"].update(name="venv")),
    ("uses_known_tags", _set("check-code", "metadata", {"tags": ["NBVAL_IGNORE_OUTPUT"]})),
    ("uses_known_tags", _set("check-code", "metadata", {"tags": ["naval-ignore-output"]})),
    ("uses_known_tags", _add("check-code", "\n#NBVAL_CHECK_OUTPUT")),
    ("promised_outputs_are_there", _set("check-code", "outputs", [])),
    ("promised_outputs_are_there", _set("check-code", "execution_count", None)),
    ("was_run_from_top_to_bottom", _set("setup-code", "execution_count", None)),
    ("was_run_from_top_to_bottom", _set("check-code", "execution_count", 7)),
    ("shows_no_errors", _error),
    ("stores_no_noise", lambda n: n["metadata"].update(widgets={})),
    ("stores_no_noise", _set("check-code", "metadata", {"execution": {"iopub.status.busy": ""}})),
    ("images_are_files_with_alt_text", _add("idea", "![x](data:image/png;base64,AAAA)")),
    ("images_are_files_with_alt_text", _set("idea", "attachments", {"a.png": {"image/png": "A"}})),
    ("images_are_files_with_alt_text", _add("idea", "![](figure.png)")),
    ("images_are_files_with_alt_text", _add("idea", '<img src="figure.png">')),
    ("cells_are_short", _set("setup-code", "source", "x = 1\n" * 41)),
    ("cells_are_short", _set("check", "source", "## Check\n" + "text\n" * 40)),
    ("file_is_small", _add("setup-code", "#" * 500_000)),
    ("has_a_title_and_a_claim", _set("title", "source", "# A lesson\n\n**Claim.** Yes.")),
    ("has_a_title_and_a_claim", _set("title", "source", "# 05 — A lesson\n\n**Claim.** Yes.")),
    ("has_a_title_and_a_claim", _set("title", "source", "# 04 — A lesson")),
    ("has_a_title_and_a_claim", _add("check", "\n# 04 — Another")),
    ("sections_are_those_of_a_lesson", _drop("setup")),
    ("sections_are_those_of_a_lesson", _drop("say")),
    ("sections_are_those_of_a_lesson", _swap("predict", "check")),
    ("sections_are_those_of_a_lesson", _set("check", "source", "## Chekc")),
    ("sections_are_those_of_a_lesson", _add("check", "\n\n## Check")),
    ("sections_are_those_of_a_lesson", _set("exercise", "source", "## Exercise 2\n<details>")),
    ("exercises_have_a_check_and_a_solution", _set("exercise", "source", "## Exercise 1")),
    ("exercises_have_a_check_and_a_solution", _set("exercise-code", "source", "mine(1)")),
    ("code_leaves_the_environment_alone", _add("setup-code", "\n!pip install torch")),
    ("code_leaves_the_environment_alone", _add("setup-code", "\n%pip install torch")),
    ("code_leaves_the_environment_alone", _set("setup-code", "source", "%%capture\nx = 1")),
    ("code_leaves_the_environment_alone", _add("setup-code", "\nsys.path.append('..')")),
    ("code_leaves_the_environment_alone", _add("setup-code", "\nclear_output(wait=True)")),
    ("code_leaves_the_environment_alone", _add("setup-code", "\ngo.FigureWidget()")),
    ("relative_links_resolve", _add("idea", "[gone](../gone.md)")),
    ("relative_links_resolve", _add("idea", '<a href="gone.md">gone</a>')),
    ("relative_links_resolve", _add("idea", "\n\n[gone]: gone.md")),
    ("outputs_name_no_machine_path", _show("text/plain", "saved to /home/me/lab/result.json")),
    ("outputs_name_no_machine_path", _show("text/html", "<b>/tmp/tmpab12/x</b>")),
    ("outputs_name_no_machine_path", _show("text/plain", "C:\\Users\\me\\lab")),
    ("outputs_name_no_machine_path", _show("text/plain", "lib/python3.11/site-packages/torch")),
    ("outputs_hold_no_scripts", _show("text/html", "<div><script>plot()</script></div>")),
    ("outputs_hold_no_scripts", _show("application/javascript", "1")),
    ("outputs_hold_no_scripts", _show("image/svg+xml", "<svg/>")),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "figure.png").touch()
    (tmp_path / "05_next.ipynb").touch()
    return tmp_path


def _faults(folder: Path, notebook: Json) -> list[str]:
    path = folder / "04_lesson.ipynb"
    path.write_text(json.dumps(notebook), encoding="utf-8")
    return rules.faults(path)


def test_a_good_notebook_has_no_faults(folder: Path) -> None:
    assert _faults(folder, GOOD) == []


@pytest.mark.parametrize(("rule", "change"), BAD, ids=[f"{n}-{r}" for n, (r, _) in enumerate(BAD)])
def test_each_rule_bites(folder: Path, rule: str, change: Change) -> None:
    notebook = copy.deepcopy(GOOD)
    change(notebook)
    assert notebook != GOOD
    path = folder / "04_lesson.ipynb"
    path.write_text(json.dumps(notebook), encoding="utf-8")
    assert rules.RULES[rule](rules.Notebook(path)) != []
    assert rules.faults(path) != []


def test_every_rule_has_a_notebook_that_breaks_it() -> None:
    assert {rule for rule, _ in BAD} == set(rules.RULES)


def test_a_file_that_is_no_notebook_is_a_fault(folder: Path) -> None:
    path = folder / "04_lesson.ipynb"
    for text in ("{", "[]", "{}"):
        path.write_text(text, encoding="utf-8")
        assert rules.faults(path) != []


def test_an_error_may_be_shown_where_it_is_taught(folder: Path) -> None:
    notebook = copy.deepcopy(GOOD)
    _error(notebook)
    _cell(notebook, "check-code")["metadata"]["tags"].append("raises-exception")
    assert _faults(folder, notebook) == []


def test_paths_inside_the_checkout_may_be_shown(folder: Path) -> None:
    notebook = copy.deepcopy(GOOD)
    for text in ("data/tiny-k3/model.safetensors", "tokens/s", "~/tmp/x", "http://x.org/home/me"):
        _show("text/plain", text)(notebook)
    assert _faults(folder, notebook) == []


def test_nbval_keeps_every_sanitizing_rule() -> None:
    """Nbval silently drops a rule that it cannot read: what it reads must be what the file says."""
    from nbval.plugin import get_sanitize_patterns

    text = (ROOT / "tests" / "nbval_sanitize.cfg").read_text(encoding="utf-8")
    written = re.findall(r"^regex: (.+)$", text, flags=re.MULTILINE)
    patterns = dict(get_sanitize_patterns(text))
    assert len(written) == text.count("\n[") == len(patterns) > 0
    assert all(patterns.values())
    for sample, shown in {
        "2026-11-29": "DATE",
        "2026-11-29T17:14:32+00:00": "DATE",
        "object at 0x7f12ab34cd": "object at ADDRESS",
        "took 12.5 ms": "took DURATION",
        "http://127.0.0.1:8000/v1": "SERVER/v1",
        "torch 2.13.0+cpu": "VERSION",
        "24 layers, 0.25": "24 layers, 0.25",
    }.items():
        for regex, replacement in patterns.items():
            sample = re.sub(regex, replacement, sample)
        assert sample == shown

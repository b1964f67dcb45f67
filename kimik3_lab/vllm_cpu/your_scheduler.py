"""Take a waiting queue that was written in a notebook, and run real vLLM with it.

Needs the standard library; running it needs the environment of :mod:`kimik3_lab.vllm_cpu.install`.
Lesson 13 writes a queue in a cell, tries it on the lab's own scheduler, and hands the same text to
vLLM. vLLM imports a scheduler by name in a process of its own, so the class must lie in a file:
:func:`module_text` makes one, :func:`run_order` runs vLLM with it and says who came out when.
"""

from __future__ import annotations

import ast
import hashlib
import json
import linecache
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType

from kimik3_lab.paths import default_model_dir
from kimik3_lab.vllm_cpu.program import run_program

__all__ = ["CLASS", "MODULE", "Order", "class_text", "digest", "module_text", "run_order"]

#: What ``--scheduler-cls`` is given.
MODULE, CLASS = "lesson_scheduler", "LessonScheduler"
_TAIL = '''

from vllm.v1.core.sched.scheduler import Scheduler


class {name}(Scheduler):
    """vLLM's own scheduler, with another queue for what waits."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.waiting = {queue}()
'''
#: Run in a process of its own: one engine, one seat, requests that are all there from the start.
_PROGRAM = """
import json, sys
from vllm import LLM, SamplingParams

model, asked, scheduler = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3] or None
llm = LLM(model, skip_tokenizer_init=True, dtype="float32", enforce_eager=True,
          enable_prefix_caching=False, attention_backend="CPU_MLA", max_model_len=512,
          max_num_seqs=1, num_gpu_blocks_override=32, scheduler_cls=scheduler)
engine, params = llm.llm_engine, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
for number, (arrival, length) in enumerate(asked):
    prompt = {"prompt_token_ids": [3 + (7 * i + length) % 500 for i in range(length)]}
    engine.add_request(str(number), prompt, params, arrival_time=arrival)
done = []
while engine.has_unfinished_requests():
    done += [[int(o.request_id), list(o.outputs[0].token_ids)] for o in engine.step() if o.finished]
name = type(engine.engine_core.engine_core.scheduler).__name__
print("ANSWER" + json.dumps({"scheduler": name, "done": done}))
"""


@dataclass(frozen=True)
class Order:
    """Which requests came out of vLLM, in their order.

    Attributes
    ----------
    scheduler
        Name of the class that planned the steps.
    done
        Numbers of the requests, as they were asked.
    tokens
        By number.
    """

    scheduler: str
    done: tuple[int, ...]
    tokens: dict[int, tuple[int, ...]]


def class_text(kind: type) -> str:
    """Return the source of a class, also of one that was written in a notebook's cell.

    ``inspect.getsource`` wants a module's file, which a notebook does not have; the cell that a
    method came from is known all the same.

    Raises
    ------
    ValueError
        If the class has no method of its own, or its source is gone.

    Examples
    --------
    >>> from kimik3_lab.vllm_cpu.shortest_first import ShortestFirstQueue
    >>> class_text(ShortestFirstQueue).splitlines()[0]
    'class ShortestFirstQueue:'
    """
    methods = [value for value in vars(kind).values() if isinstance(value, FunctionType)]
    if not methods:
        raise ValueError(f"{kind.__name__} has no method of its own: is it the class you meant?")
    text = "".join(linecache.getlines(methods[0].__code__.co_filename))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef) and node.name == kind.__name__:
            return "\n".join(text.splitlines()[node.lineno - 1 : node.end_lineno]) + "\n"
    raise ValueError(f"the source of {kind.__name__} is gone: run its cell again")


def digest(text: str) -> str:
    """Tell one text from another: the start of its SHA-256.

    >>> digest("class A: ...")
    '11659810b78e'
    """
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def module_text(queue: str, imports: Sequence[str] = ("bisect",)) -> str:
    r"""Return a module with a queue and a scheduler of vLLM that uses it.

    Parameters
    ----------
    queue
        Source of one class.
    imports
        Modules that it needs.

    Raises
    ------
    ValueError
        If the source holds no class, or several.

    Examples
    --------
    >>> print(module_text("class Queue(list):\n    pass\n").splitlines()[-1])
            self.waiting = Queue()
    """
    found = [node.name for node in ast.parse(queue).body if isinstance(node, ast.ClassDef)]
    if len(found) != 1:
        raise ValueError(f"expected the source of one class, got {len(found)}")
    head = "".join(f"import {name}\n" for name in imports)
    return f"{head}\n\n{queue.strip()}\n" + _TAIL.format(name=CLASS, queue=found[0])


def run_order(
    asked: Sequence[tuple[float, int]],
    module: str | None = None,
    *,
    model: Path | None = None,
    venv: Path | None = None,
    timeout: float = 600.0,
) -> Order:
    """Let vLLM answer requests one at a time, and see in which order they end.

    Parameters
    ----------
    asked
        Arrival in seconds and tokens of the prompt of each request. All are waiting when the first
        step is planned.
    module
        Text of a module with the scheduler; None takes vLLM's own.
    venv
        Environment that has vLLM; ``.venv-vllm`` by default.

    Raises
    ------
    VllmCpuError
        If there is no vLLM here, or it fails (with the end of what it printed).
    """
    folder = default_model_dir() if model is None else model
    with tempfile.TemporaryDirectory(prefix="k3lab-scheduler-") as place:
        name = ""
        if module is not None:
            (Path(place) / f"{MODULE}.py").write_text(module, encoding="utf-8")
            name = f"{MODULE}.{CLASS}"
        answer = run_program(
            _PROGRAM,
            [str(folder), json.dumps(list(asked)), name],
            import_from=None if module is None else Path(place),
            venv=venv,
            timeout=timeout,
        )
    tokens = {number: tuple(ids) for number, ids in answer["done"]}
    return Order(answer["scheduler"], tuple(number for number, _ in answer["done"]), tokens)

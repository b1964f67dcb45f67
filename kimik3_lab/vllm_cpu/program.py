"""Run a few lines of Python beside vLLM, in its environment, and get one answer back.

Needs the standard library; running needs the environment of :mod:`kimik3_lab.vllm_cpu.install`.
vLLM expects one engine in a process, and lesson 13's notebook lives in another environment: so what
is tried on vLLM itself (a scheduler, experts) is a program of its own. It tells its answer by
printing a line of :data:`ANSWER` and JSON; all else that it prints is vLLM's.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kimik3_lab.vllm_cpu.serve import VllmCpuError, environment, find_vllm

__all__ = ["ANSWER", "run_program"]

#: Begins the line that holds the answer.
ANSWER = "ANSWER"
_VARIABLES = {
    "OMP_NUM_THREADS": "1",
    # The program looks at objects of the engine, so that must live in the same process.
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


def run_program(
    program: str,
    arguments: Sequence[str],
    *,
    import_from: Path | None = None,
    venv: Path | None = None,
    timeout: float = 600.0,
) -> Any:
    """Run Python text in vLLM's environment and return what it answers.

    Parameters
    ----------
    program
        Prints ``ANSWER`` and JSON in one line.
    arguments
        Its ``sys.argv[1:]``.
    import_from
        A folder whose modules it may import.
    venv
        Environment that has vLLM; ``.venv-vllm`` by default.
    timeout
        Seconds until it is given up.

    Raises
    ------
    VllmCpuError
        If there is no vLLM here, or it fails (with the end of what it printed).
    """
    python = find_vllm(venv).with_name("python")
    variables = environment() | _VARIABLES
    if import_from is not None:
        paths = [str(import_from), *filter(None, [variables.get("PYTHONPATH")])]
        variables["PYTHONPATH"] = os.pathsep.join(paths)
    try:
        done = subprocess.run(
            [str(python), "-c", program, *arguments],
            capture_output=True, text=True, check=False, env=variables, timeout=timeout,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise VllmCpuError(
            f"vLLM gave no answer within {timeout:g} s; raise timeout= if the machine is busy"
        ) from error
    lines = [line for line in done.stdout.splitlines() if line.startswith(ANSWER)]
    if done.returncode or not lines:
        raise VllmCpuError(f"vLLM ended with status {done.returncode}:\n{done.stderr[-2000:]}")
    return json.loads(lines[0].removeprefix(ANSWER))

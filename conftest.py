"""Settings that every test run needs before the lab is imported."""

from __future__ import annotations

import functools
import itertools
import os
import shutil
import sys
import tempfile
import types

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Keep the reader's own files out of the tests, and choose how kernels run."""
    home = tempfile.TemporaryDirectory(prefix="k3lab-test-", ignore_cleanup_errors=True)
    config.add_cleanup(home.cleanup)
    os.environ["K3LAB_HOME"] = home.name
    if getattr(config.option, "nbval", False) or getattr(config.option, "nbval_lax", False):
        _talk_to_kernels_through_files(home.name)
        return  # a notebook sets up its own process, as it does for a reader
    # Triton reads this when a kernel is defined, so it cannot wait for a fixture.
    if not _use_gpu():
        os.environ["TRITON_INTERPRET"] = "1"
    # Tests run in parallel processes: more threads in each would only get in each other's way.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Once Triton's interpreter is imported, let it exchange Triton's functions once only."""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is not None and not hasattr(interpreter, "exchanged_by_the_lab"):
        interpreter.exchanged_by_the_lab = True
        _exchange_once(interpreter)


def _exchange_once(interpreter: types.ModuleType) -> None:
    """Leave ``triton.language`` as the interpreter needs it, for the rest of the process.

    Before each launch, and again before each call of a function inside a kernel, the interpreter
    goes through all names of ``triton.language`` to put its own functions in their places: a third
    of the time of a small kernel. It puts the same ones there each time.
    """
    if not hasattr(interpreter, "_LangPatchScope"):
        return  # another Triton, which does it in another way
    import triton.language as tl

    # It looks for the modules among the global names of a function.
    everything = types.FunctionType((lambda: None).__code__, {"tl": tl, "core": tl.core})
    interpreter._patch_lang(everything)
    interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()


def _talk_to_kernels_through_files(folder: str) -> None:
    """Let nbval's kernels listen on files that carry their own names, not on TCP ports.

    A kernel's ports are looked for here and taken by the kernel a moment later. Where several test
    processes start kernels, another one may be given the same port in between, and the kernel that
    comes second dies.

    The names are whole paths, in a folder of this process: a relative one would mean another file
    to a kernel, which runs in the folder of its notebook, than to the test that calls it.
    """
    if os.name != "posix":
        return
    import nbval.kernel

    start = functools.partial(nbval.kernel.KernelManager, transport="ipc")
    numbers = itertools.count(1)
    # Short names, too: the path of a socket may have no more than some 100 bytes.
    nbval.kernel.KernelManager = lambda **settings: start(
        connection_file=os.path.join(folder, f"{next(numbers)}.json"), **settings
    )


def _use_gpu() -> bool:
    wanted = os.environ.get("K3LAB_DEVICE")
    if wanted or not shutil.which("nvidia-smi"):
        return wanted == "cuda"
    import torch

    return torch.cuda.is_available()

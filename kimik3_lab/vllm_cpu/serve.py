"""Serve the tiny K3 in real vLLM, on a CPU: the command, and a server beside a notebook or a test.

Needs the standard library, and the environment that :mod:`kimik3_lab.vllm_cpu.install` makes.
Lesson 13, ``k3lab vllm-cpu serve`` and ``k3lab reproduce cpu`` use it.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from kimik3_lab.paths import default_model_dir
from kimik3_lab.vllm_cpu import VLLM_CPU_VERSION
from kimik3_lab.vllm_cpu.install import check_platform, default_folder

__all__ = [
    "PLUGIN_NAME",
    "RunningVllm",
    "VllmCpuError",
    "environment",
    "find_vllm",
    "serve_command",
    "start_vllm",
]

#: Name of our entry point in the group ``vllm.general_plugins``.
PLUGIN_NAME = "kimi_k3_cpu"
#: What a K3 on the CPU needs. Each is a wall that was met with vllm-cpu 0.32.0.
REQUIRED = (
    ("--dtype", "float32"),  # tokens are compared with the reference, which rounds the same
    ("--enforce-eager", None),  # there is nothing to record on a CPU
    ("--no-enable-prefix-caching", None),  # the CPU's MLA does not have it
    ("--attention-backend", "CPU_MLA"),
)


class VllmCpuError(Exception):
    """vLLM cannot be started here; the message says why and what to do."""


def find_vllm(folder: Path | None = None) -> Path:
    """Return the ``vllm`` command of the environment.

    Raises
    ------
    VllmCpuError
        If there is none, with how to get it, or why this machine cannot have it.
    """
    folder = default_folder() if folder is None else folder
    command = folder / "bin" / "vllm"
    if command.is_file():
        return command
    from kimik3_lab.vllm_cpu.install import InstallError

    try:
        check_platform(folder)
    except InstallError as error:
        raise VllmCpuError(str(error)) from error
    raise VllmCpuError(
        f"there is no vLLM in {folder}: make it with `k3lab vllm-cpu install` "
        "(minutes, 2.5 GB), or name another environment with --venv"
    )


def environment(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables of the server: ``base``, and what it does not set itself.

    Raises
    ------
    VllmCpuError
        If ``VLLM_PLUGINS`` is set and leaves our plugin out.

    Examples
    --------
    >>> environment({"VLLM_CPU_KVCACHE_SPACE": "4"})["VLLM_CPU_KVCACHE_SPACE"]
    '4'
    """
    found = dict(os.environ if base is None else base)
    plugins = found.get("VLLM_PLUGINS")
    if plugins is not None and PLUGIN_NAME not in plugins.split(","):
        raise VllmCpuError(
            f"VLLM_PLUGINS={plugins} leaves out {PLUGIN_NAME}, without which vLLM has no Kimi K3 "
            "for CPUs: add it to the list, or unset the variable"
        )
    defaults = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; the default is half of the memory
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    return defaults | found


def serve_command(
    model: Path | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    max_model_len: int = 1024,
    max_num_seqs: int = 8,
    more: Sequence[str] = (),
    vllm: str | Path = "vllm",
) -> list[str]:
    """Return the command that serves a K3 checkpoint in vLLM on the CPU.

    Parameters
    ----------
    model
        Folder of the checkpoint; the tiny K3 by default. Requests name the model after it.
    more
        Further options of ``vllm serve``. They come last, so that they win.

    Raises
    ------
    VllmCpuError
        If they ask for prefix caching.

    Examples
    --------
    >>> words = serve_command(Path("data/tiny-k3"), port=8100, more=["--max-num-seqs", "2"])
    >>> words[:2], words[-4:]
    (['vllm', 'serve'], ['--max-num-seqs', '8', '--max-num-seqs', '2'])
    """
    if "--enable-prefix-caching" in more:
        raise VllmCpuError(
            "--enable-prefix-caching: vLLM's attention for CPUs (CPU_MLA) does not have it. Leave "
            "it out; `k3lab serve` has prefix caching, and vLLM on a GPU"
        )
    folder = default_model_dir() if model is None else model
    words = [str(vllm), "serve", str(folder)]
    for name, value in REQUIRED:
        words += [name] if value is None else [name, value]
    words += ["--served-model-name", folder.resolve().name, "--host", host, "--port", str(port)]
    words += ["--max-model-len", str(max_model_len), "--max-num-seqs", str(max_num_seqs)]
    return [*words, *more]


class RunningVllm:
    """vLLM in processes of its own; leaving the ``with`` block, or :meth:`stop`, ends them.

    Attributes
    ----------
    base_url : str
        For example ``http://127.0.0.1:41234``; the API is below ``/v1``.
    log_path : pathlib.Path
        What the server prints. Kept until this process ends.
    """

    def __init__(self, process: subprocess.Popen[bytes], base_url: str, log_path: Path) -> None:
        self.process = process
        self.base_url = base_url
        self.log_path = log_path

    def stop(self, timeout: float = 30.0) -> None:
        """Ask the server to end; kill all its processes after ``timeout`` seconds."""
        if self.process.poll() is None:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout)
        # Engine and worker would outlive a server that hangs.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def log_tail(self, num_lines: int = 20) -> str:
        """Return the last lines that the server printed."""
        text = self.log_path.read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-num_lines:]) or "(nothing)"

    def __enter__(self) -> RunningVllm:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()


def start_vllm(
    model: Path | None = None,
    *,
    venv: Path | None = None,
    timeout: float = 600.0,
    more: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
) -> RunningVllm:
    """Start vLLM on a free port and wait until it answers: half a minute on an idle machine.

    Parameters
    ----------
    model, more
        As for :func:`serve_command`.
    venv
        Environment that has vLLM; ``.venv-vllm`` by default.
    timeout
        Seconds to wait.
    variables
        More environment variables.

    Raises
    ------
    VllmCpuError
        If there is no vLLM here, it dies before it answers (with the end of its log), or takes too
        long.
    """
    vllm = find_vllm(venv)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = Path(tempfile.mkdtemp(prefix="k3lab-vllm-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    log_path = folder / "server.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            serve_command(model, port=port, more=more, vllm=vllm),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment() | dict(variables or {}),
            start_new_session=True,  # one group, to be ended together
        )
    running = RunningVllm(process, f"http://127.0.0.1:{port}", log_path)
    atexit.register(running.stop, 5.0)
    try:
        _wait(running, timeout)
    except BaseException:  # also KeyboardInterrupt: leave no server behind that nobody knows of
        running.stop(0.0)
        raise
    return running


def _wait(running: RunningVllm, timeout: float) -> None:
    begin = time.monotonic()
    while not _answers(running.base_url):
        if (status := running.process.poll()) is not None:
            raise VllmCpuError(
                f"vLLM {VLLM_CPU_VERSION} ended with status {status} before it was ready. It "
                f"printed:\n{running.log_tail()}"
            )
        if time.monotonic() - begin > timeout:
            raise VllmCpuError(
                f"vLLM was not ready after {timeout:g} s; raise timeout= if the machine is busy. "
                f"It printed:\n{running.log_tail()}"
            )
        time.sleep(0.5)


def _answers(base_url: str) -> bool:
    # Without the proxies of the environment: this machine is meant.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{base_url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False

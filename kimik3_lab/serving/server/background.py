"""Start a server beside a notebook or a test, in a process of its own.

Needs httpx and psutil. Used by lessons 00, 10 and 12.

In the same process the benchmark client and the engine would share one interpreter lock, and the
client would measure itself waiting. A process of its own is also what a real deployment looks like.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import psutil

from kimik3_lab.paths import default_model_dir
from kimik3_lab.serving.server.options import (
    API_KEY_VARIABLE,
    ServeOptions,
    ServerStartError,
)

__all__ = ["RunningServer", "start_in_background"]

_COMMAND = [sys.executable, "-c", "from kimik3_lab.cli import main; main()", "serve"]
_HINT_EVERY = 10.0
_PREFIX = "k3lab-serve-"


class RunningServer:
    """A server in a process of its own; leaving the ``with`` block, or :meth:`stop`, ends it.

    Attributes
    ----------
    base_url : str
        For example ``http://127.0.0.1:41234``; the API is below ``/v1``.
    process : subprocess.Popen
        The server's process.
    log_path : pathlib.Path
        What the server prints. Kept until this process ends.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], base_url: str, model_name: str, log_path: Path
    ) -> None:
        self.process = process
        self.base_url = base_url
        self.model_name = model_name
        self.log_path = log_path

    @property
    def pid(self) -> int:
        """Number of the server's process."""
        return self.process.pid

    @property
    def is_running(self) -> bool:
        """Whether the process is alive."""
        return self.process.poll() is None

    def log_tail(self, num_lines: int = 20) -> str:
        """Return the last lines that the server printed."""
        return _tail(self.log_path, num_lines)

    def stop(self, timeout: float = 15.0) -> None:
        """Let the server end its streams and wait for it; kill it after ``timeout`` seconds."""
        _end(self.process, timeout)

    def __enter__(self) -> RunningServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        state = f"pid {self.pid}" if self.is_running else "stopped"
        return f"RunningServer({self.base_url}, {self.model_name!r}, {state})"


def start_in_background(
    model: str | Path | None = None,
    *,
    port: int = 0,
    timeout: float = 180.0,
    log_level: str = "warning",
    command: Sequence[str] = _COMMAND,
    **settings: Any,
) -> RunningServer:
    """Start ``k3lab serve`` in a process of its own and wait until it answers.

    Parameters
    ----------
    model
        Folder of the model; the tiny K3 by default.
    port
        0 takes any free port; read it from ``base_url``.
    timeout
        Seconds to wait until the server answers.
    log_level
        Least severe messages in the log.
    command
        Another command with the options of ``k3lab serve``.
    **settings
        Further fields of :class:`~kimik3_lab.serving.server.options.ServeOptions`, such as
        ``batching="static"`` or ``max_num_seqs=4``.

    Returns
    -------
    RunningServer
        Also a context manager. It ends at the latest together with this process, even when that
        is killed.

    Raises
    ------
    ServerStartError
        If the server dies before it answers, with the last lines of its log, or takes too long.
    ValueError
        If a setting is out of its range.

    Examples
    --------
    ::

        with start_in_background(max_num_seqs=4) as server:
            httpx.get(f"{server.base_url}/v1/models").json()
    """
    options = ServeOptions(
        model=Path(model if model is not None else default_model_dir()).resolve(),
        port=port,
        log_level=log_level,
        **settings,
    )
    folder = _make_folder()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    log_path, ready_file = folder / "server.log", folder / "ready.json"
    environment = os.environ.copy()
    environment.pop(API_KEY_VARIABLE, None)  # the reader's own, for another server
    if options.api_key is not None:
        environment[API_KEY_VARIABLE] = options.api_key
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [*command, *options.command_line(), "--ready-file", str(ready_file),
             "--stop-when-stdin-closes"],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # else interrupting a notebook cell would stop the server too
        )  # fmt: skip
    atexit.register(_end, process, 5.0)
    try:
        base_url = _wait_until_ready(process, ready_file, log_path, timeout)
    except BaseException:  # also KeyboardInterrupt: leave no server behind that nobody knows of
        _end(process, 0.0)
        raise
    return RunningServer(process, base_url, options.model_name, log_path)


def _make_folder() -> Path:
    """Make a folder for log and ready file; remove those whose owner was killed.

    A kernel that Jupyter kills runs nothing at its exit.
    """
    for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*-*"):
        owner = left.name.removeprefix(_PREFIX).partition("-")[0]
        if owner.isdecimal() and not psutil.pid_exists(int(owner)):
            shutil.rmtree(left, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))


def _wait_until_ready(
    process: subprocess.Popen[bytes], ready_file: Path, log_path: Path, timeout: float
) -> str:
    begin = time.monotonic()
    next_hint = _HINT_EVERY
    while not _answers(ready_file):
        waited = time.monotonic() - begin
        if (status := process.poll()) is not None:
            raise ServerStartError(
                f"the server ended with status {status} before it was ready. It printed:\n"
                f"{_tail(log_path, 20)}"
            )
        if waited > timeout:
            raise ServerStartError(
                f"the server was not ready after {timeout:g} s; raise timeout= if the machine is "
                f"busy. It printed:\n{_tail(log_path, 20)}"
            )
        if waited > next_hint:
            next_hint += _HINT_EVERY
            print(f"... the server is loading ({waited:.0f} s)", file=sys.stderr, flush=True)
        time.sleep(0.05)
    return str(json.loads(ready_file.read_text(encoding="utf-8"))["base_url"])


def _answers(ready_file: Path) -> bool:
    if not ready_file.is_file():
        return False
    base_url = json.loads(ready_file.read_text(encoding="utf-8"))["base_url"]
    try:
        # trust_env: a proxy of the environment must not get what is meant for this machine.
        return httpx.get(f"{base_url}/health", timeout=5.0, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def _end(process: subprocess.Popen[bytes], timeout: float) -> None:
    """End a process: its closed standard input asks it to stop, a kill makes it."""
    if process.stdin is not None and not process.stdin.closed:
        process.stdin.close()
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _tail(file: Path, num_lines: int) -> str:
    text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    return "\n".join(text.splitlines()[-num_lines:]) or "(nothing)"

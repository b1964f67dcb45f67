"""``k3lab lab``: open JupyterLab at the first lesson."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from kimik3_lab.commands._errors import CommandError

__all__ = ["READY_MESSAGE", "free_port", "lab", "reason_for_no_browser", "server_command"]

#: Environment variable with what the server prints as soon as it answers.
READY_MESSAGE = "K3LAB_LAB_READY_MESSAGE"
_NOTEBOOKS = "notebooks"
_FIRST = "00_start_here.ipynb"
_PAGE = f"/lab/tree/{_NOTEBOOKS}/{_FIRST}"
_HOST = "127.0.0.1"
_PORTS_TO_TRY = 50
# A single Ctrl-C asks, for it would take all kernels and what they hold along.
_HOW_TO_STOP = (
    "Stop it, and all kernels, with Ctrl-C twice; after one it asks."
    if os.name == "posix"
    else "Stop it, and all kernels, with Ctrl-C."
)
_SETTINGS = Path(__file__).parent / "jupyterlab_settings"


def lab(
    no_browser: Annotated[
        bool, typer.Option("--no-browser", help="Print the address, open no browser.")
    ] = False,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes any free one.")
    ] = 8888,
) -> None:
    """Open JupyterLab at the first lesson."""
    from importlib.util import find_spec

    from kimik3_lab.paths import repository_dir

    folder = repository_dir()
    if not (folder / _NOTEBOOKS / _FIRST).is_file():
        raise CommandError(
            f"no {_FIRST} in {folder / _NOTEBOOKS}: "
            "run from a checkout installed with 'make install'"
        )
    if find_spec("jupyterlab") is None:
        raise CommandError(f"JupyterLab is not installed for {sys.executable}: run 'make install'")
    chosen = free_port(port)
    if port and chosen != port:
        typer.echo(f"Port {port} is in use, taking {chosen}.")
    reason = "you asked for none" if no_browser else reason_for_no_browser(os.environ, sys.platform)
    token = os.environ.get("JUPYTER_TOKEN") or secrets.token_hex(24)
    if reason:
        message = f"JupyterLab runs, without a browser ({reason}). Open this address:\n"
    else:
        message = "JupyterLab opens in your browser. If it does not, open this address:\n"
    message += f"\n  http://{_HOST}:{chosen}{_PAGE}?token={token}\n"
    if "SSH_CONNECTION" in os.environ:
        message += (
            f"\nFrom your own machine first: ssh -L {chosen}:{_HOST}:{chosen} <this machine>\n"
        )
    message += f"\n{_HOW_TO_STOP}"
    # The token travels in the environment: command lines are public on a shared machine. This
    # environment's own kernels and extensions come before those of the user's account.
    environment = {
        "JUPYTER_PREFER_ENV_PATH": "1",
        **os.environ,
        "JUPYTER_TOKEN": token,
        READY_MESSAGE: message,
    }
    typer.echo("JupyterLab is starting. That takes some ten seconds; then its address stands here.")
    sys.stdout.flush()
    _run(server_command(folder, chosen, browser=not reason), environment)


def free_port(port: int) -> int:
    """Return ``port`` or the next one that is free; any free one for 0.

    Raises
    ------
    CommandError
        If none of the next 50 is free.
    """
    last = min(port + _PORTS_TO_TRY, 65536)
    for candidate in range(port, last):
        with socket.socket() as probe:
            if os.name == "posix":  # as the server does: a lingering connection does not count
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((_HOST, candidate))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise CommandError(f"no free port from {port} to {last - 1}: choose another with --port")


def reason_for_no_browser(environment: Mapping[str, str], system: str) -> str:
    """Say why a browser cannot be opened here; empty if it can.

    Examples
    --------
    >>> reason_for_no_browser({}, "linux")
    'no display'
    >>> reason_for_no_browser({"DISPLAY": ":0"}, "linux")
    ''
    """
    if environment.get("CI"):
        return "CI"
    if "SSH_CONNECTION" in environment:
        return "an SSH session"
    if system.startswith("linux") and not (
        environment.get("DISPLAY") or environment.get("WAYLAND_DISPLAY")
    ):
        return "no display"
    return ""


def server_command(folder: Path, port: int, *, browser: bool) -> list[str]:
    """Command line of the JupyterLab server for the checkout in ``folder``.

    The root is the checkout, not its notebooks: lessons link to code, data and tests beside them,
    and a server opens nothing above its root.
    """
    command = [
        sys.executable,
        "-m",
        "kimik3_lab.commands._jupyterlab",
        f"--ServerApp.root_dir={folder}",
        f"--FileContentsManager.preferred_dir={_NOTEBOOKS}",  # where the file browser opens
        f"--ServerApp.ip={_HOST}",
        f"--ServerApp.port={port}",
        "--ServerApp.port_retries=0",  # the printed address must stay true
        f"--LabApp.default_url={_PAGE}",
        f"--ServerApp.open_browser={browser}",
        f"--LabApp.open_browser={browser}",
        # The lab fetches nothing at run time, so it must not ask whether it may fetch news either.
        f"--LabApp.app_settings_dir={_SETTINGS}",
        "--Application.log_level=WARN",
    ]
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        command.append("--allow-root")
    return command


def _run(command: list[str], environment: Mapping[str, str]) -> None:
    """Become the server, so that signals and its exit status pass through untouched."""
    if os.name == "posix":
        os.execve(command[0], command, environment)
    # Windows has no exec: wait for the server, which gets Ctrl-C from the console itself.
    process = subprocess.Popen(command, env=dict(environment))
    while True:
        try:
            raise typer.Exit(process.wait())
        except KeyboardInterrupt:
            continue

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kimik3_lab.cli import app
from kimik3_lab.commands import CommandError
from kimik3_lab.commands import _jupyterlab as server_process
from kimik3_lab.commands import lab as _  # noqa: F401  (the function; the module is taken below)

command = sys.modules["kimik3_lab.commands.lab"]
run = CliRunner().invoke


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks" / "00_start_here.ipynb").write_text('{"cells": []}')
    monkeypatch.setattr("kimik3_lab.paths.repository_dir", lambda: tmp_path)
    return tmp_path


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], dict[str, str]]]:
    calls: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr(command, "_run", lambda argv, env: calls.append((argv, dict(env))))
    return calls


@pytest.mark.parametrize(
    ("environment", "system", "reason"),
    [
        ({}, "linux", "no display"),
        ({"DISPLAY": ":0"}, "linux", ""),
        ({"WAYLAND_DISPLAY": "wayland-0"}, "linux", ""),
        ({}, "darwin", ""),
        ({}, "win32", ""),
        ({"DISPLAY": ":0", "CI": "true"}, "linux", "CI"),
        ({"SSH_CONNECTION": "1 2 3 4"}, "darwin", "an SSH session"),
    ],
)
def test_when_no_browser_is_opened(environment: dict[str, str], system: str, reason: str) -> None:
    assert command.reason_for_no_browser(environment, system) == reason


def test_next_free_port() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        taken = server.getsockname()[1]
        assert taken < command.free_port(taken) <= taken + 50
    assert command.free_port(0) > 0


def test_no_port_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_PORTS_TO_TRY", 1)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        with pytest.raises(CommandError, match="choose another with --port"):
            command.free_port(server.getsockname()[1])


@pytest.mark.usefixtures("checkout")
def test_prints_an_address_with_the_token(
    started: list[tuple[list[str], dict[str, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "CI", "SSH_CONNECTION", "JUPYTER_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    result = run(app, ["lab", "--no-browser", "--port", "0"])
    assert result.exit_code == 0, result.output
    argv, env = started[0]
    path = r"lab/tree/notebooks/00_start_here\.ipynb\?token=(\w{48})"
    address = re.search(rf"http://127\.0\.0\.1:(\d+)/{path}", env[command.READY_MESSAGE])
    assert address is not None
    assert "is starting" in result.output
    assert "token" not in result.output  # the server itself prints the address, when it answers
    assert env["JUPYTER_TOKEN"] == address[2]
    assert not any(address[2] in part for part in argv)
    assert f"--ServerApp.port={address[1]}" in argv
    assert "--ServerApp.open_browser=False" in argv


@pytest.mark.usefixtures("checkout")
def test_says_which_port_it_took(started: list[tuple[list[str], dict[str, str]]]) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        taken = server.getsockname()[1]
        result = run(app, ["lab", "--no-browser", "--port", str(taken)])
    assert f"Port {taken} is in use, taking " in result.output


@pytest.mark.usefixtures("checkout")
def test_opens_a_browser_where_there_is_one(
    started: list[tuple[list[str], dict[str, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CI", "SSH_CONNECTION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DISPLAY", ":0")
    assert run(app, ["lab", "--port", "0"]).exit_code == 0
    assert "opens in your browser" in started[0][1][command.READY_MESSAGE]
    assert "--ServerApp.open_browser=True" in started[0][0]


@pytest.mark.usefixtures("checkout")
def test_a_tunnel_is_named_in_an_ssh_session(
    started: list[tuple[list[str], dict[str, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSH_CONNECTION", "10.0.0.1 50000 10.0.0.2 22")
    run(app, ["lab", "--port", "0"])
    message = started[0][1][command.READY_MESSAGE]
    assert re.search(r"ssh -L (\d+):127\.0\.0\.1:\1", message)


def test_root_needs_a_flag(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0, raising=False)
    assert "--allow-root" in command.server_command(tmp_path, 8888, browser=False)
    monkeypatch.setattr(os, "geteuid", lambda: 1000, raising=False)
    assert "--allow-root" not in command.server_command(tmp_path, 8888, browser=False)


def test_without_notebooks(checkout: Path) -> None:
    (checkout / "notebooks" / "00_start_here.ipynb").unlink()
    result = run(app, ["lab"])
    assert isinstance(result.exception, CommandError)
    assert "no 00_start_here.ipynb" in str(result.exception)


@contextlib.contextmanager
def running_lab(
    checkout: Path, tmp_path: Path, **settings: object
) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """The real command, from another folder, for ``checkout``; and the file with what it prints."""
    code = (
        "import kimik3_lab.paths, pathlib, sys\n"
        f"kimik3_lab.paths.repository_dir = lambda: pathlib.Path({str(checkout)!r})\n"
        "sys.argv = ['k3lab', 'lab', '--no-browser', '--port', '0']\n"
        "from kimik3_lab.cli import main; main()\n"
    )
    elsewhere, log = tmp_path / "elsewhere", tmp_path / "log"
    elsewhere.mkdir()
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            **{"cwd": elsewhere, "stdout": output, "stderr": subprocess.STDOUT, **settings},
        )
    try:
        yield process, log
    finally:
        process.kill()
        process.wait()


def printed(log: Path, pattern: str, process: subprocess.Popen[bytes]) -> re.Match[str]:
    """Wait until the log holds the pattern."""
    deadline = time.monotonic() + 60
    while not (found := re.search(pattern, log.read_text())):
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)
    return found


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals as a POSIX shell sends them")
def test_serves_the_first_lesson_and_stops_on_a_signal(checkout: Path, tmp_path: Path) -> None:
    """The real server: what it prints works at once, so do links out of the notebooks."""
    (checkout / "code").mkdir()
    (checkout / "code" / "linked.py").write_text("1\n")
    with running_lab(checkout, tmp_path) as (process, log):
        address, token = printed(
            log, r"(http://127\.0\.0\.1:\d+)/lab/tree/notebooks/\S+token=(\w+)\n", process
        ).groups()
        contents = f"{address}/api/contents"
        for path in ("notebooks/00_start_here.ipynb", "code/linked.py"):
            with urllib.request.urlopen(f"{contents}/{path}?token={token}", timeout=10) as answer:
                assert json.load(answer)["path"] == path
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(f"{contents}/code/linked.py", timeout=10)
        with urllib.request.urlopen(f"{address}/lab?token={token}", timeout=10) as page:
            assert '"preferredPath": "notebooks"' in page.read().decode()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) in (0, -signal.SIGTERM)


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals as a POSIX shell sends them")
def test_ctrl_c_twice_stops_it(checkout: Path, tmp_path: Path) -> None:
    keyboard, terminal = os.openpty()  # it asks only where somebody can answer
    with (
        os.fdopen(keyboard, "wb"),
        os.fdopen(terminal, "rb") as stdin,
        running_lab(checkout, tmp_path, stdin=stdin) as (process, log),
    ):
        printed(log, "Ctrl-C twice", process)
        process.send_signal(signal.SIGINT)
        printed(log, "Shut down this Jupyter server", process)
        assert process.poll() is None  # kernels hold work: it asks first
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 0, log.read_text()


@pytest.mark.parametrize("where", ["jupyterlab.labapp", "jupyter_server.serverapp"])
def test_ctrl_c_while_it_starts(
    where: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted:
        def find_spec(self, name: str, *ignored: object) -> None:
            if name == where:
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, where, raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    with pytest.raises(SystemExit) as stopped:
        server_process.main()
    assert stopped.value.code == 130
    assert "Stopped before JupyterLab was up" in capsys.readouterr().out


def test_kernels_do_not_inherit_the_message(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []
    monkeypatch.setenv(command.READY_MESSAGE, "an address with a token")
    labapp = pytest.importorskip("jupyterlab.labapp")
    monkeypatch.setattr(labapp.LabApp, "serverapp_class", None)
    monkeypatch.setattr(
        labapp.LabApp, "launch_instance", lambda: seen.append(os.environ.get(command.READY_MESSAGE))
    )
    server_process.main()
    assert seen == [None]


def test_the_server_is_told_not_to_ask_about_news(tmp_path: Path) -> None:
    (option,) = (
        word
        for word in command.server_command(tmp_path, 8888, browser=False)
        if "app_settings_dir" in word
    )
    overrides = json.loads((Path(option.partition("=")[2]) / "overrides.json").read_text())
    (settings,) = overrides.values()
    assert settings == {"fetchNews": "false", "checkForUpdates": False}

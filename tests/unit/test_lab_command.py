from __future__ import annotations

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
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kimik3_lab.cli import app
from kimik3_lab.commands import CommandError
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
    path = r"lab/tree/00_start_here\.ipynb\?token=(\w{48})"
    address = re.search(rf"http://127\.0\.0\.1:(\d+)/{path}", result.output)
    assert address is not None
    argv, env = started[0]
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
    assert "opens in your browser" in run(app, ["lab", "--port", "0"]).output
    assert "--ServerApp.open_browser=True" in started[0][0]


@pytest.mark.usefixtures("checkout")
def test_a_tunnel_is_named_in_an_ssh_session(
    started: list[tuple[list[str], dict[str, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSH_CONNECTION", "10.0.0.1 50000 10.0.0.2 22")
    output = run(app, ["lab", "--port", "0"]).output
    assert re.search(r"ssh -L (\d+):127\.0\.0\.1:\1", output)


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


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals as a POSIX shell sends them")
def test_serves_the_first_lesson_and_stops_on_a_signal(checkout: Path, tmp_path: Path) -> None:
    """The real server, from another folder: the printed address works, and a signal ends it."""
    code = (
        "import kimik3_lab.paths, pathlib, sys\n"
        f"kimik3_lab.paths.repository_dir = lambda: pathlib.Path({str(checkout)!r})\n"
        "sys.argv = ['k3lab', 'lab', '--no-browser', '--port', '0']\n"
        "from kimik3_lab.cli import main; main()\n"
    )
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    log = (tmp_path / "log").open("w+")
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=elsewhere, stdout=log, stderr=subprocess.STDOUT
    )
    try:
        address = token = ""
        deadline = time.monotonic() + 60
        while True:
            text = (tmp_path / "log").read_text()
            if found := re.search(r"(http://127\.0\.0\.1:\d+)/lab/tree/\S+token=(\w+)", text):
                address, token = found.groups()
                try:
                    url = f"{address}/api/contents/00_start_here.ipynb?content=0&token={token}"
                    with urllib.request.urlopen(url, timeout=10) as answer:
                        assert answer.status == 200
                    break
                except OSError:
                    pass
            assert process.poll() is None, text
            assert time.monotonic() < deadline, text
            time.sleep(0.2)
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(f"{address}/api/contents/00_start_here.ipynb", timeout=10)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) in (0, -signal.SIGTERM)
    finally:
        process.kill()
        process.wait()
        log.close()


def test_the_server_is_told_not_to_ask_about_news(tmp_path: Path) -> None:
    (option,) = (
        word
        for word in command.server_command(tmp_path, 8888, browser=False)
        if "app_settings_dir" in word
    )
    overrides = json.loads((Path(option.partition("=")[2]) / "overrides.json").read_text())
    (settings,) = overrides.values()
    assert settings == {"fetchNews": "false", "checkForUpdates": False}

"""Ctrl-C, once or more, while the engine is inside a step that takes long."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

#: A server whose every step takes ``argv[2]`` seconds; the bounds on a step that hangs are short.
SERVER = """
import sys, time
from server_support import EchoExecutor, byte_tokenizer, echo_engine
from kimik3_lab.serving.server import ServeOptions, app, launch
from kimik3_lab.serving.server.generation_config import GenerationConfig

class Slow(EchoExecutor):
    def execute_model(self, output):
        time.sleep(float(sys.argv[2]))
        return super().execute_model(output)

if float(sys.argv[2]) > 10:
    launch._STEP_TIMEOUT = app._STOP_TIMEOUT = launch._CLOSE_TIMEOUT = 0.3
served = launch.ServedModel(echo_engine(Slow()), byte_tokenizer(), GenerationConfig(), 256)
options = ServeOptions(model="echo", port=0, shutdown_timeout=60.0)
launch.run(options, build=lambda _: served, ready_file=sys.argv[1])
"""


@contextmanager
def serving(folder: Path, step_seconds: float) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start the server; yields its process and address."""
    ready = folder / "ready.json"
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, str(ready), str(step_seconds)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            deadline = time.monotonic() + 60
            while not ready.exists():
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.05)
            yield process, json.loads(ready.read_text())["base_url"] + "/v1/completions"
        finally:
            process.kill()


def interrupt(process: subprocess.Popen[str], *delays: float) -> tuple[int, str]:
    """Send SIGINT after each of the delays; returns status and log."""
    for delay in delays:
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
    log = process.communicate(timeout=30)[1]
    return process.returncode, log


def test_a_second_ctrl_c_ends_every_answer_in_the_apis_form(tmp_path: Path) -> None:
    body = {"prompt": "ab", "max_tokens": 200}
    lines: list[str] = []
    whole: list[httpx.Response] = []

    def read(url: str) -> None:
        with httpx.stream(
            "POST", url, json={**body, "stream": True}, timeout=60, trust_env=False
        ) as response:
            lines.extend(line for line in response.iter_lines() if line)

    def ask(url: str) -> None:
        whole.append(httpx.post(url, json=body, timeout=60, trust_env=False))

    with serving(tmp_path, 1.0) as (process, url):
        threads = [threading.Thread(target=target, args=(url,)) for target in (read, ask)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 30
        while not lines:  # then a step is in flight again
            assert time.monotonic() < deadline
            time.sleep(0.05)
        status, log = interrupt(process, 0.0, 0.3)
        for thread in threads:
            thread.join(30)
    assert status == 0 and "Traceback" not in log, log
    assert lines[-1] == "data: [DONE]"
    error = json.loads(lines[-2].removeprefix("data: "))["error"]
    assert error["code"] == "server_shutting_down"
    assert whole[0].status_code == 503
    assert whole[0].json()["error"]["code"] == "server_shutting_down"


def test_ctrl_c_twice_with_nothing_to_end(tmp_path: Path) -> None:
    with serving(tmp_path, 0.0) as (process, _):
        status, log = interrupt(process, 0.0, 0.02)
    assert status == 0 and "Traceback" not in log, log


def test_a_step_that_hangs_does_not_hold_the_process(tmp_path: Path) -> None:
    with serving(tmp_path, 600.0) as (process, url):
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(url, json={"prompt": "ab"}, timeout=0.5, trust_env=False)
        status, log = interrupt(process, 0.0, 0.2)
    assert status == 1 and "does not come back from its step" in log, log


def test_ctrl_c_while_the_command_is_imported() -> None:
    code = """
import sys
class Interrupted:
    def find_spec(self, name, *rest):
        if name == "typer":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupted())
from kimik3_lab.cli import main
main()
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (130, "k3lab: interrupted\n")

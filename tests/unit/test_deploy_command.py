"""``k3lab deploy``: what it prints can be pasted into a shell, and what it refuses says why."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from kimik3_lab.cli import app
from kimik3_lab.commands import CommandError
from kimik3_lab.commands.deploy import REFUSED
from kimik3_lab.deploy.plan import plan
from kimik3_lab.deploy.spec import DeploymentSpec


def run(*words: str) -> Result:
    return CliRunner().invoke(app, ["deploy", *words])


def commands(printed: str) -> list[list[str]]:
    """What bash would run: comments and exports left out, continued lines joined."""
    joined = printed.replace("\\\n", " ")
    return [shlex.split(line) for line in joined.splitlines() if line.startswith("vllm")]


@pytest.mark.parametrize(
    "words",
    [
        "--vllm 0.27.1 --spec dspark",
        "--hardware b200 --nodes 2 --workload chat",
        "--nodes 3 --strategy pd --spec dspark",
        "--hardware gb300 --nodes 4 --strategy dep --hosts a,b,c,d",
    ],
)
def test_what_is_printed_is_the_plan(words: str) -> None:
    given = dict(zip(*[iter(words.replace("--", "").split())] * 2, strict=True))
    if "hosts" in given:
        given["hosts"] = tuple(given["hosts"].split(","))
    found = plan(DeploymentSpec(**given))
    result = run(*words.split())
    assert result.exit_code == 0, result.output
    printed = commands(result.stdout)
    assert printed[: len(found.nodes)] == [node.argv for node in found.nodes]
    assert printed[len(found.nodes) :] == ([list(found.router)] if found.router else [])
    for node in found.nodes:
        for name, value in node.environment().items():
            assert f"export {name}={value}\n" in result.stdout


def test_everything_printed_is_shell() -> None:
    printed = run("--nodes", "2", "--strategy", "pd").stdout
    assert subprocess.run(["bash", "-n"], input=printed, text=True).returncode == 0
    for line in printed.replace("\\\n", " ").splitlines():
        assert not line or line.startswith(("# ", "export ", "vllm serve ", "vllm-router ")), line


def test_a_long_line_is_not_broken() -> None:
    """Rich would wrap at the width of the terminal, and half a JSON value would be pasted."""
    result = run("--spec", "dspark")
    assert any(len(line) > 150 for line in result.stdout.splitlines())


def test_reasons_are_given_for_everything() -> None:
    result = run("--spec", "dspark", "--explain")
    table = result.stdout.partition("Why: serve")[2]
    for option in plan(DeploymentSpec(spec="dspark")).nodes[0].options:
        assert option.name in table
    assert "VLLM_ALLREDUCE_USE_FLASHINFER=1" in table and "0.29.0" in table
    assert "Why:" not in run("--spec", "dspark").stdout


def test_json() -> None:
    body = json.loads(run("--json", "--hardware", "b200", "--nodes", "2").stdout)
    (group,) = body["groups"]
    assert group["layout"] == "TP16" and len(group["nodes"]) == 2
    node = group["nodes"][1]
    assert node["argv"][:2] == ["vllm", "serve"] and "--headless" in node["argv"]
    assert {"name", "value", "why", "source", "since"} == set(node["options"][0])
    assert body["spec"]["vllm"] == "0.33.0" and body["router"] is None


def test_a_refusal_names_a_command_that_works() -> None:
    result = run("--hardware", "h200")
    assert result.exit_code == REFUSED == 3
    assert result.stdout == "" and "206.0 GB of weights" in result.stderr
    (line,) = [line for line in result.stderr.splitlines() if "k3lab deploy" in line]
    again = run(*line.split()[2:])
    assert again.exit_code == 0 and len(commands(again.stdout)) == 2


@pytest.mark.parametrize("words", [("--nodes", "3"), ("--nodes", "3", "--strategy", "dep")])
def test_a_refusal_names_one_nearest_size(words: tuple[str, ...]) -> None:
    """Sizes in GPUs say another nearest than whole nodes do."""
    result = run("--hardware", "b200", *words)
    assert result.exit_code == REFUSED and "divide" in result.stderr
    assert result.stderr.count("nearest") == 1
    assert "--nodes 4" in result.stderr


def test_a_refusal_as_json() -> None:
    result = run("--hardware", "h200", "--json")
    body = json.loads(result.stdout)
    assert result.exit_code == REFUSED
    assert "206.0 GB" in body["refused"] and body["alternative"].startswith("k3lab deploy --vllm")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--vllm 0.26", "no options were recorded for vLLM '0.26'"),
        ("--hosts a,b", "2 hosts for 1 nodes"),
        ("--gpu-memory-utilization 2", "--gpu-memory-utilization: Input should be less than"),
        ("--manifest slurm", "--manifest KIND and --output DIR go together"),
        ("--output x", "--manifest KIND and --output DIR go together"),
        ("--prefill-nodes 1", "belongs to the strategy pd"),
    ],
)
def test_a_wrong_wish_is_one_sentence(words: str, said: str) -> None:
    result = run(*words.split())
    assert isinstance(result.exception, CommandError)
    assert said in str(result.exception)
    assert "pydantic" not in str(result.exception)


@pytest.mark.parametrize("words", ["--hardware a100", "--nodes 0", "--strategy ep", "--port x"])
def test_a_wrong_option_is_a_usage_error(words: str) -> None:
    assert run(*words.split()).exit_code == 2


@pytest.mark.parametrize("kind", ["shell", "ray", "slurm", "kubernetes", "compose"])
def test_manifests_are_written_once(kind: str, tmp_path: Path) -> None:
    words = ("--hardware", "b200", "--nodes", "2", "--manifest", kind, "--output", str(tmp_path))
    result = run(*words)
    assert result.exit_code == 0
    written = [Path(line) for line in result.stdout.splitlines()]
    assert written and all(path.read_text() for path in written)
    assert sorted(written) == sorted(tmp_path.iterdir())
    again = run(*words)
    assert isinstance(again.exception, CommandError) and "--force" in str(again.exception)
    assert run(*words, "--force").exit_code == 0


def test_help_shows_examples_that_work() -> None:
    shown = run("--help").stdout
    lines = [line.strip(" │") for line in shown.splitlines() if "k3lab deploy --" in line]
    assert len(lines) == 3
    for line in lines:
        words = line.split()[2:]
        if "--output" in words:
            words = words[: words.index("--manifest")]
        assert run(*words).exit_code == 0, line


def test_the_program_ends_with_the_status_of_a_refusal() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kimik3_lab.cli", "deploy", "--hardware", "b200"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == REFUSED and "Traceback" not in done.stderr

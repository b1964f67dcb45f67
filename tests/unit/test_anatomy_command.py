from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from kimik3_lab.cli import app
from kimik3_lab.commands import CommandError
from kimik3_lab.config import K3Config
from kimik3_lab.performance import anatomy


def run(*args: str):
    return CliRunner().invoke(app, ["anatomy", *args])


def test_json_of_the_release():
    result = run("--json")
    assert result.exit_code == 0
    body = json.loads(result.stdout)
    assert body["model"] == "released"
    assert body["total_parameters"] == 2_779_931_837_184
    assert body["tensors"] == 497_220
    assert body["checkpoint_bytes"] == 1_560_860_324_864
    assert body["active_parameters_per_token"] == 104_189_614_848
    assert {"component", "label", "tensors", "parameters", "bytes", "active_parameters",
            "evidence"} == set(body["components"][0])  # fmt: skip
    assert [row["component"] for row in body["components"]][-1] == "vision"
    assert body["flops_per_token"]["mla_per_cached_token"] == 5_013_504
    assert body["sequence_memory"]["mla_bytes_per_token"] == 27_648
    placement = {row["layout"]: row for row in body["placement"]}
    assert placement["TP8"]["bytes_per_gpu"] == 205_056_581_360
    assert placement["TP16"]["padding"] > 0 == placement["TP16 + EP16"]["padding"]


def test_table_shows_every_part_and_the_totals():
    result = run("--config", "micro")
    assert result.exit_code == 0
    report = anatomy(K3Config.micro())
    for row in report.components:
        assert row.label in result.stdout
    for total in (report.total_parameters, report.checkpoint_bytes):
        assert f"{total:,}" in result.stdout
    assert f"takes {report.flops_per_token.fixed:,} operations" in result.stdout
    assert "TP2 + EP2" in result.stdout


def test_model_folder(tmp_path):
    K3Config.tiny().save(tmp_path)
    body = json.loads(run("--json", "--model", str(tmp_path)).stdout)
    assert body["total_parameters"] == anatomy(K3Config.tiny()).total_parameters
    assert body["model"] == str(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "has no config.json"),
        ("{", "is not valid JSON"),
        ("[]", "expected a JSON object, got list"),
        ("{}", "linear_attn_config is missing"),
    ],
)
def test_a_bad_folder_is_an_expected_failure(tmp_path, content, message):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    result = run("--model", str(tmp_path))
    assert isinstance(result.exception, CommandError)
    assert message in str(result.exception)


def test_no_folder_and_two_answers():
    assert "no model folder at /nowhere" in str(run("--model", "/nowhere").exception)
    both = run("--model", "/nowhere", "--config", "tiny")
    assert isinstance(both.exception, CommandError)
    assert "not both" in str(both.exception)
    assert run("--config", "huge").exit_code == 2


def test_runs_as_a_program_without_torch():
    code = (
        "import sys; sys.argv = ['k3lab', 'anatomy', '--config', 'micro']\n"
        "from kimik3_lab.cli import main\n"
        "try:\n    main()\nfinally:\n    print('torch' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.strip() == "False"
    assert "total" in done.stdout

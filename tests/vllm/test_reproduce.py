"""``k3lab reproduce cpu``: the pack's own scripts, run for real against vLLM and our engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kimik3_lab.reproduce.pack import load_pack
from kimik3_lab.reproduce.report import COLUMNS, Report, read_report

K3LAB = Path(sys.executable).with_name("k3lab")
VENV = Path(sys.executable).parents[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reproduce") / "pack"
    environment = {n: v for n, v in os.environ.items() if n != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    environment["VLLM_LOGGING_LEVEL"] = "INFO"  # the backend is named at this level
    done = subprocess.run(
        [K3LAB, "reproduce", "cpu", "--output", folder, "--requests", "16", "--venv", VENV],
        capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Not to be quoted" not in done.stdout
    return folder


@pytest.fixture(scope="module")
def report(folder: Path) -> Report:
    return read_report(folder)


def test_every_cell_counts(folder: Path, report: Report, measured: list[str]) -> None:
    pack = load_pack(folder)
    assert report.problems == []
    assert [(row["arm"], row["cell"]) for row in report.rows] == [
        (cell.arm, cell.name) for cell in pack.cells
    ]
    for row in report.rows:
        assert row["completed"] == 16 and row["failed"] == 0
        assert row["completed_in_window"] >= pack.min_requests
        assert row["cached_tokens"] == 0
        # The server counts its chat template, too.
        assert row["prompt_tokens"] >= 64 and row["output_tokens"] == 8
        assert row["ttft_ms_median"] > 0 and row["ttft_ms_mean"] > 0
        measured.append(
            f"reproduce, {row['arm']} {row['cell']}: {row['output_tokens_per_s']:.0f} tokens/s, "
            f"TTFT {row['ttft_ms_median']:.0f} ms (median), {row['ttft_ms_mean']:.0f} (mean)"
        )


def test_the_log_says_who_computes_the_experts(report: Report) -> None:
    found = {row["arm"]: row["moe_backend"] for row in report.rows}
    assert found["vllm-k0"] is not None and "Unquantized" in found["vllm-k0"]
    assert found["k3lab-k0"] is None


def test_drafts_are_counted_where_there_are_some(report: Report) -> None:
    for row in report.rows:
        if row["drafts"]:
            assert 1 < row["tokens_a_step"] <= 1 + row["drafts"]
        else:
            assert row["tokens_a_step"] is None


def test_the_table_is_written_down(folder: Path, report: Report) -> None:
    lines = (folder / "report.md").read_text().splitlines()
    assert lines[0] == f"| {' | '.join(COLUMNS)} |"
    assert len(lines) == 2 + len(report.rows)
    assert json.loads((folder / "report.json").read_text())["problems"] == []


def test_nothing_is_left_running(folder: Path) -> None:
    done = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    assert str(folder) not in done.stdout
    # The engine's processes do not carry the folder in their names, but the session's.
    pack = load_pack(folder)
    logs = [folder / "results" / arm.name / "server.log" for arm in pack.arms]
    open_files = subprocess.run(
        ["sh", "-c", "ls -l /proc/[0-9]*/fd 2>/dev/null"],
        capture_output=True, text=True, check=False,
    ).stdout  # fmt: skip
    assert [log for log in logs if str(log) in open_files] == []

"""``k3lab compare``: rows of all tools side by side, remarks, and what is said of bad files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kimik3_lab.cli import app
from kimik3_lab.commands import CommandError
from kimik3_lab.paths import data_dir
from kimik3_lab.simulation.side_by_side import published_rows, simulated_rows

FOLDER = data_dir() / "golden" / "public_clients"
ALL = [str(FOLDER / name) for name in ("guidellm.json", "vllm_c4.json", "k3lab.json")]


def run(*args: str) -> str:
    result = CliRunner().invoke(app, ["compare", *args])
    if isinstance(result.exception, CommandError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def test_rows_of_all_sources() -> None:
    body = json.loads(run("--json", *ALL))
    rows = body["rows"]
    assert [(row["concurrency"], row["source"]) for row in rows] == [
        *((1, source) for source in ("guidellm 0.8.1", "k3lab bench")),
        (1, "published"), (1, "published"), (1, "simulated"), (1, "simulated"),
        *((4, source) for source in ("guidellm 0.8.1", "vllm bench serve", "k3lab bench")),
        (4, "published"), (4, "published"), (4, "simulated"), (4, "simulated"),
    ]  # fmt: skip
    measured: list[dict[str, Any]] = [row for row in rows if row["file"]]
    assert {len(row) for row in measured} == {len(measured[0])}
    assert sum("do not compare with them" in note for note in body["notes"]) == 3


def test_table_and_remarks() -> None:
    text = run("--no-simulated", *ALL)
    assert "published 0.27.1" in text and "10 in 120 s" in text
    assert "simulated" not in text.split("not 8,000")[0]
    assert "does not say whether its TTFT is a mean or a median" in text
    assert text.count("guidellm.json: tpot_ms is guidellm's") == 1


def test_only_files() -> None:
    text = run("--no-simulated", "--no-published", *ALL)
    assert "published" not in text.replace("published figures", "")
    assert "do not compare" not in text


def test_published_alone() -> None:
    rows = json.loads(run("--json", "--no-simulated"))["rows"]
    assert [row["completed_in_window"] for row in rows] == [10, 22, 20, 50, 31, 87]


def test_open_loops_come_last_and_infinity_is_a_word(tmp_path: Path) -> None:
    body = json.loads((FOLDER / "vllm_c4.json").read_text())
    body["max_concurrency"] = None
    path = tmp_path / "all_at_once.json"
    path.write_text(json.dumps(body))
    files = (str(path), str(FOLDER / "vllm_rate2_detailed.json"), ALL[0])
    rows = json.loads(run("--json", "--no-simulated", "--no-published", *files))["rows"]
    assert [row["concurrency"] for row in rows] == [1, 4, None, None]
    assert [row["request_rate"] for row in rows[2:]] == [2.0, "inf"]


def test_bad_files_and_nothing_to_show(tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text("{}")
    with pytest.raises(CommandError, match=r"bad\.json: unknown format"):
        run(ALL[0], str(bad))
    with pytest.raises(CommandError, match="nothing to show"):
        run("--no-simulated", "--no-published")


def test_published_rows_keep_the_columns_of_simulated_ones() -> None:
    published = published_rows([1], ttft_statistic="median")
    simulated = simulated_rows([1], versions=["main-2026-09-13"])
    assert [set(row) for row in published] == 2 * [set(simulated[0])]
    assert published[0]["ttft_ms_median"] == 2262.9 and published[0]["ttft_ms_mean"] is None
    assert simulated[0]["e2e_s_mean"] == pytest.approx(published[1]["e2e_s_mean"], rel=0.15)
    with pytest.raises(ValueError, match="no published version"):
        simulated_rows([1], versions=["0.28"])

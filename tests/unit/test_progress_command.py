from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kimik3_lab.cli import app
from kimik3_lab.commands import CommandError
from kimik3_lab.teaching.predictions import PredictionStore

run = CliRunner().invoke


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PredictionStore:
    monkeypatch.setenv("K3LAB_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "120")
    store = PredictionStore()
    store.predict("00", "tps", 50, unit="tokens/s")
    store.reveal("00", "tps", 100)
    store.predict("01", "kv_gib", 0)
    store.reveal("01", "kv_gib", 2)
    store.predict("01", "open", 7)
    return store


def test_table(store: PredictionStore) -> None:
    result = run(app, ["progress"])
    assert result.exit_code == 0
    for text in ("tps", "50 tokens/s", "100 tokens/s", "70", "not revealed yet"):
        assert text in result.output
    assert "2 of 3 revealed, 35 points on average" in result.output
    assert str(store.path) in result.output


def test_json_is_strict(store: PredictionStore) -> None:
    def no_constants(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    output = run(app, ["progress", "--json"]).output
    rows = json.loads(output, parse_constant=no_constants)["predictions"]
    assert [(row["name"], row["points"], row["ratio"]) for row in rows] == [
        ("tps", 70, 2.0),
        ("kv_gib", 0, None),
        ("open", None, None),
    ]


def test_nothing_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K3LAB_HOME", str(tmp_path))
    assert "no predictions yet" in run(app, ["progress"]).output
    assert json.loads(run(app, ["progress", "--json"]).output)["predictions"] == []


def test_reset_says_where_the_old_file_is(store: PredictionStore) -> None:
    assert "predictions.reset-" in run(app, ["progress", "--reset"]).output
    assert store.all() == []
    assert "nothing to reset" in run(app, ["progress", "--reset"]).output


def test_reset_that_fails_is_told(store: PredictionStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: PredictionStore) -> None:
        raise OSError("read-only file system")

    monkeypatch.setattr(PredictionStore, "reset", fail)
    result = run(app, ["progress", "--reset"])
    assert isinstance(result.exception, CommandError)
    assert "read-only file system" in str(result.exception)

"""The file of predictions: complete, in order, and made by the model as it is now."""

from __future__ import annotations

import json
from itertools import islice
from typing import Any

import pytest

from kimik3_lab.paths import data_dir
from kimik3_lab.performance.measurements import load_measurements
from kimik3_lab.simulation import predictions
from kimik3_lab.simulation.predictions import Cell, best_num_drafts

PATH = data_dir() / "results" / "predictions.json"
ROWS = json.loads(PATH.read_text(encoding="utf-8"))
IDS = [
    *(f"b300-nospec-tpot-c{c}" for c in (16, 32, 64)),
    *(f"b300-dspark7-tpot-c{c}" for c in (1, 16, 32, 64)),
    *(f"b300-ttft-isl{isl}" for isl in (129, 513, 2049, 8193, 16385)),
    *(f"b300-ttft-c{c}" for c in (16, 64)),
    *("gb300-dspark7-c1",) * 2,  # accepting 2.61 and 4.73 tokens
    "gb300-step-c1",
    *(f"h200-tp16-tpot-c{c}" for c in (1, 16, 64)),
    *(f"best-k-c{c}" for c in (1, 4, 16, 64)),
]
FIELDS = {
    "id", "hardware", "parallelism", "engine", "spec", "isl", "osl", "concurrency", "acceptance",
    "metric", "unit", "low", "value", "high",
}  # fmt: skip


def key(row: dict[str, Any]) -> str:
    """A row's id; one id has two rows, of two acceptance lengths."""
    return f"{row['id']} {row['acceptance']}" if row["id"] == "gb300-dspark7-c1" else row["id"]


def by_key() -> dict[str, dict[str, Any]]:
    return {key(row): row for row in ROWS}


def test_the_file_has_every_entry() -> None:
    assert [row["id"] for row in ROWS] == IDS
    for row in ROWS:
        assert row.keys() >= FIELDS, row["id"]
        assert 0 <= row["low"] <= row["value"] <= row["high"], row["id"]
    beside = json.loads(PATH.with_suffix(".provenance.json").read_text(encoding="utf-8"))
    assert "predictions" in beside["provenance"]["command"]


def test_the_order_of_magnitude_is_possible() -> None:
    rows = by_key()
    values = {name: float(str(row["value"])) for name, row in rows.items()}
    for kind in ("nospec-tpot-c", "dspark7-tpot-c", "ttft-isl", "ttft-c"):
        found = [values[name] for name in IDS if name.startswith(f"b300-{kind}")]
        assert found == sorted(found)
    for c in (16, 32, 64):
        assert values[f"b300-dspark7-tpot-c{c}"] < values[f"b300-nospec-tpot-c{c}"]
    assert values["gb300-dspark7-c1 4.73"] == pytest.approx(
        values["gb300-dspark7-c1 2.61"] * 4.73 / 2.61, rel=0.01
    )


def test_rows_of_single_steps_are_what_the_model_says_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of simulated runs take a minute: ``python -m kimik3_lab.simulation.predictions``."""
    for name in ("_tpot", "_ttft"):
        monkeypatch.setattr(predictions, name, lambda cell, name, *rest: {"id": name})
    rows = by_key()
    for row in islice(predictions.predict_all(), len(IDS)):
        if len(row) > 1:
            assert row == rows[key(row)], "run the command in the head of predictions.py again"


def test_single_requests_are_near_what_was_measured() -> None:
    measured = {row.id: row.value for row in load_measurements()}
    rows = by_key()
    for c in (1, 16, 64):
        expected = measured[f"h200-tp16-tpot-c{c}"]
        assert rows[f"h200-tp16-tpot-c{c}"]["value"] == pytest.approx(expected, rel=0.2)
    rate = measured["gb300-tp8-decode-c1"]
    assert rate is not None
    assert rows["gb300-step-c1"]["value"] == pytest.approx(1e3 / rate, rel=0.05)


def test_more_drafts_are_best_where_more_are_accepted() -> None:
    cell = Cell("B300", predictions.Parallelism(8), "any", 8000, 1000)
    nothing = dict.fromkeys(range(1, 9), 1.0)
    everything = {k: 1.0 + k for k in range(1, 9)}
    assert best_num_drafts(cell, 4, nothing) == [0]
    assert best_num_drafts(cell, 4, everything) == [8]
    near = best_num_drafts(cell, 4, everything, within=10.0)
    assert sorted(near) == list(range(9))

"""The hour of conversations: what its record says, and that a case runs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kimik3_lab.paths import data_dir
from kimik3_lab.performance.constants import CONSTANTS
from kimik3_lab.simulation import hour

PATH = data_dir() / "results" / "simulated" / "conversation_hour.json"
RECORD: dict[str, Any] = json.loads(PATH.read_text(encoding="utf-8"))
ROWS: dict[str, dict[str, Any]] = {row["name"]: row for row in RECORD["cases"]}


def test_the_record_holds_an_hour_of_each_case() -> None:
    assert RECORD["duration_s"] == 3600.0 and RECORD["workload"] == hour.WORKLOAD
    assert [row["name"] for row in RECORD["cases"]] == [case.name for case in hour.CASES]
    for case in hour.CASES:
        row = ROWS[case.name]
        assert row["completed"] == row["requests"] > 3000
        assert (row["preset"], row["rate_scale"]) == (case.preset, case.rate_scale)
        assert row["constants"] == case.constants
        assert all(name in CONSTANTS for name in case.constants)
        assert row["carried"] == (row["end_s"] <= 3600 + hour.SETTLED_S)


def test_an_hour_takes_less_than_a_minute_of_a_core() -> None:
    assert max(row["cpu_s"] for row in RECORD["cases"]) < 60


def test_memory_follows_the_requests_in_the_machine_not_the_hour() -> None:
    """Where the load is carried, nothing is added after the first quarter of an hour."""
    for row in RECORD["cases"]:
        if row["replicas"] == 1 and row["carried"]:
            first, *later = row["memory_mb"]
            assert max(later) < first + 15
    assert ROWS["one node"]["memory_mb"][-1] < 150  # a backlog of hundreds of long prompts


def test_what_decides_at_the_limit() -> None:
    """One node: not as it is, but with any one of three changes."""
    assert [row["carried"] for row in RECORD["cases"]] == [False, True, True, True, True]


@pytest.mark.parametrize("case", [hour.CASES[0], hour.CASES[-1]], ids=lambda case: case.name)
def test_a_case_runs(case: hour.HourCase) -> None:
    found = hour.simulate_hour(case, duration_s=12.0)
    assert found.completed == found.requests > 5
    assert found.end_s > 0 and 0 <= found.cached_share < 1
    assert found.ttft_p90_s >= found.ttft_median_s > 0 and found.tpot_ms > 0
    assert len(found.memory_mb) in ((4, 0) if case.replicas == 1 else (0,))

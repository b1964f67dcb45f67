"""The record of aiconfigurator's estimates, the tool that makes it, and the simulator beside it."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Any

import pytest

from kimik3_lab.paths import repository_dir
from kimik3_lab.performance.published import BASELINE, IMPROVED, load_points
from kimik3_lab.simulation.aiconfigurator import (
    KINDS,
    best_settings,
    default_path,
    recorded_version,
)

RECORD: dict[str, Any] = json.loads(default_path().read_text(encoding="utf-8"))
SIX_POINTS = default_path().with_name("six_points.json")


@pytest.fixture(scope="module")
def tool() -> Iterator[ModuleType]:
    path = repository_dir() / "tools" / "compare_aiconfigurator.py"
    found = importlib.util.spec_from_file_location("compare_aiconfigurator", path)
    assert found and found.loader
    module = importlib.util.module_from_spec(found)
    sys.modules[module.__name__] = module
    found.loader.exec_module(module)
    yield module
    del sys.modules[module.__name__]


def of_version(version: str) -> list[Any]:
    return [point for point in load_points() if point.version == version]


# -- the record -----------------------------------------------------------------------------------


def test_the_record_says_where_it_comes_from() -> None:
    assert RECORD["provenance"]["date_utc"] and recorded_version() == "0.12.0"
    assert RECORD["provenance"]["command"].startswith("python tools/compare_aiconfigurator.py ")
    assert "/tmp" not in json.dumps(RECORD) and "/work" not in json.dumps(RECORD)


def test_recorded_errors_follow_from_recorded_estimates(tool: ModuleType) -> None:
    rows = [(row["version"], row) for row in RECORD["named"]]
    rows += [(version, row) for version, kinds in RECORD["best"].items() for row in kinds.values()]
    assert len(rows) == 11 + 8
    for version, row in rows:
        found = tool.mean_errors(of_version(version), row["estimates"])
        assert found == pytest.approx(row["errors"]), row["setting"]


def test_the_known_settings_give_the_known_errors() -> None:
    """Errors that others had found, with the same program and settings."""
    known = {
        (BASELINE, 8000, 0, None): (22.9, 62.1, 26.8),
        (BASELINE, 1024, 7, 2.0): (12.6, 29.4, 8.9),
        (IMPROVED, 8000, 7, 2.5): (9.3, 45.0, 9.4),
    }
    found = {}
    for row in RECORD["named"]:
        chosen = row["setting"]
        if chosen["backend_version"] != "0.5.16":
            key = row["version"], chosen["ctx_tokens"], chosen["nextn"]
            found[*key, chosen.get("nextn_accepted")] = row["errors"]
    for key, errors in known.items():
        assert tuple(round(error, 1) for error in found[key].values()) == errors


def test_the_best_is_at_least_as_good_as_every_named_setting() -> None:
    best = best_settings()
    assert set(best) == {(version, kind) for version in (BASELINE, IMPROVED) for kind in KINDS}
    for row in RECORD["named"]:
        errors, version = row["errors"], row["version"]
        together = best[version, "together"]
        assert fmean((together.latency, together.ttft, together.throughput)) <= fmean(
            errors.values()
        )
        for kind, error in errors.items():
            assert getattr(best[version, kind], kind) <= error


def test_the_simulator_is_nearer_than_the_best_of_its_settings() -> None:
    """Version by version where one setting gives all three; over all six even one error alone."""
    ours, best = json.loads(SIX_POINTS.read_text(encoding="utf-8")), best_settings()
    statistic = f"ttft_{ours['ttft_statistic']}"
    names = {"latency": "latency", "ttft": statistic, "throughput": "throughput"}
    for theirs_name, ours_name in names.items():
        for version in (BASELINE, IMPROVED):
            for kind in ("tables", "together"):
                theirs = getattr(best[version, kind], theirs_name)
                assert ours["mean_errors_by_version"][version][ours_name] < theirs
        alone = fmean(getattr(best[v, theirs_name], theirs_name) for v in (BASELINE, IMPROVED))
        assert ours["mean_errors"][ours_name] < alone


# -- the tool -------------------------------------------------------------------------------------


def test_a_question_on_the_command_line(tool: ModuleType) -> None:
    chosen = tool.setting(("sglang", "0.5.14", "SILICON"), 8000, 7, 2.5)
    words = tool.command(chosen, 16)
    for option, value in (
        ("--batch-size", "16"), ("--tp-size", "8"), ("--isl", "8000"), ("--osl", "1000"),
        ("--backend", "sglang"), ("--perf-db-version", "0.5.14"), ("--nextn-accepted", "2.5"),
    ):  # fmt: skip
        assert words[words.index(option) + 1] == value
    assert "--nextn-accepted" not in tool.command(tool.setting(tool.LANES[0], 8000, 0, 0.0), 1)


def test_the_best_of_rows(tool: ModuleType) -> None:
    rows = [
        {"errors": {"throughput": t, "ttft": f, "latency": e}}
        for t, f, e in ((5.0, 90.0, 1.0), (10.0, 30.0, 9.0), (4.0, 60.0, 20.0))
    ]
    best = tool.best_of(rows)
    assert best["together"] is best["ttft"] is rows[1]
    assert best["latency"] is rows[0] and best["throughput"] is rows[2]


WORKER = """
import json, sys
print(json.dumps({"version": "9"}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if asked["nextn"] == 8:
        print(json.dumps({"error": "no table"}), flush=True)
    else:
        latency = 1000.0 * asked["batch_size"] + asked["ctx_tokens"]
        print(json.dumps({"ttft_ms": 400.0, "latency_ms": latency, "tokens_per_s": 50.0}),
              flush=True)
"""


def test_a_scan_keeps_the_best_and_names_refusals(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a worker of our own: the latency is nearest at the step size that suits it."""
    (tmp_path / "worker.py").write_text(WORKER)
    program = tmp_path / "aiconfigurator"
    (tmp_path / "python").symlink_to(sys.executable)
    monkeypatch.setattr(tool, "WORKER", tmp_path / "worker.py")
    monkeypatch.setattr(tool, "LANES", (("vllm", "1", "SILICON"),))
    monkeypatch.setattr(tool, "STEPS", (1000, 4000, 9000))
    monkeypatch.setattr(tool, "DRAFTS", ((0, 0.0), (8, 2.0)))
    points = {version: of_version(version) for version in (BASELINE, IMPROVED)}
    worker = tool.Worker(program)
    found = tool.scan(worker, points)
    worker.close()
    assert worker.version == "9" and found["settings"] == 6
    assert found["refused"] == {"vllm 1 SILICON": "no table"}
    assert found["best"][IMPROVED]["latency"]["setting"]["ctx_tokens"] == 4000
    assert "--ctx-tokens 4000" in found["best"][IMPROVED]["latency"]["command"]


def test_a_worker_that_dies_says_so(tool: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "python").symlink_to("/bin/true")
    with pytest.raises(RuntimeError, match=r"aiconfigurator_worker\.py ended with status 0"):
        tool.Worker(tmp_path / "aiconfigurator")

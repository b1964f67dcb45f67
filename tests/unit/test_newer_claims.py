"""What lessons 04, 06 and 10 say in words about the newest records is what these hold."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kimik3_lab.paths import data_dir, repository_dir


def record(name: str) -> Any:
    path = data_dir() / "results" / "h200" / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8"))


def prose(lesson: str) -> str:
    path = repository_dir() / "notebooks" / f"{lesson}.ipynb"
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")


@pytest.mark.parametrize("rank", ["ep8", "tp8"])
def test_bfloat16_experts_of_a_long_prompt(rank: str) -> None:
    (case,) = (r for r in record("tuning_second")["experts"] if r["case"] == ["bf16", rank, 8192])
    skewed = [entry["us"] for entry in case["whole"] if entry["load"] == "skewed"]
    assert f"from {skewed[0]:,.0f} to {min(skewed):,.0f}" in prose("04_moe_kernels")


def test_decode_steps_of_a_size_between() -> None:
    rows = [r for r in record("tuning_second")["rows"] if r["case"] == "H=12,B=32"]
    before = min(r["us"] for r in rows if r["before"])
    assert f"{before:.1f} µs became {min(r['us'] for r in rows):.1f}" in prose("06_kda_kernels")


def test_the_goal_at_256_requests_lies_below_a_kernel_that_never_stops() -> None:
    rows = {(r["operator"], r["case"]): r for r in record("kernels_newer")["rows"]}
    few, many = (rows["kda_decode", f"H={h},B=256"] for h in (12, 96))
    goal_us = few["peers"][few["best_peer"]] / few["goal"]
    assert goal_us < many["ours_us"] / 8 < few["ours_us"]
    assert f"goal of {goal_us:.1f} µs" in prose("06_kda_kernels")


def test_newer_rows_are_of_one_clean_commit() -> None:
    newer = record("kernels_newer")
    assert len(newer["rows"]) == 55 and all(row["ours_us"] for row in newer["rows"])
    assert not newer["provenance"]["git_commit"].endswith("-dirty")
    assert "55 of its 81 cells" in prose("04_moe_kernels")


def test_a_step_ahead_is_quicker_and_says_the_same() -> None:
    rows = {(r["seats"], r["drafts"]): r for r in record("async_steps")["rows"]}
    text = prose("10_serving_engine")
    for key in ((1, 0), (16, 0), (16, 7)):
        turn, ahead = (rows[key][way]["us_per_step"] for way in ("in_turn", "ahead"))
        assert f"{turn:,.0f}" in text and f"{ahead:,.0f}" in text
    assert all(row["equal_tokens"] and row["ratio"] < 0.9 for row in rows.values())
    assert all(row["ahead"]["host_waits"] == 1 for row in rows.values())
    (before,) = (
        r for r in record("async_steps")["before"]["rows"] if (r["seats"], r["drafts"]) == (1, 0)
    )
    assert f"{before['ahead_us']:,} µs instead of {before['in_turn_us']}" in text

"""What lesson 06 says in words about its recorded times is what they are."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest

from kimik3_lab.paths import data_dir, repository_dir

Row = dict[str, Any]
NOTEBOOK = repository_dir() / "notebooks" / "06_kda_kernels.ipynb"
DECODE = ("separate", "fused_rule", "in_place", "one_launch", "tuned")
PREFILL = ("tokens", "chunks", "split_values", "segments", "as_shipped")


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    path = data_dir() / "results" / "h200" / "kda_ladder.json"
    result = json.loads(path.read_text(encoding="utf-8"))
    for key in ("device", "torch", "triton", "date_utc", "command"):
        assert result["provenance"][key], f"{path.name} does not say its {key}"
    return list(result["rows"])


def us(rows: list[Row], part: str, **wanted: Any) -> float:
    found = [r for r in rows if {"part": part, **wanted}.items() <= r.items()]
    assert len(found) == 1, f"{part} {wanted}: {len(found)} rows"
    return float(found[0]["us"])


def test_every_time_comes_from_a_graph_and_a_right_result(rows: list[Row]) -> None:
    assert all(row["graph"] for row in rows)
    assert all(row["p10_us"] <= row["us"] <= row["p90_us"] for row in rows)
    assert max(row.get("error", 0.0) for row in rows) < 1e-2
    assert max(row.get("difference", 0.0) for row in rows) < 1e-2


@pytest.mark.parametrize("batch", [1, 16, 64, 256])
def test_every_decode_rung_is_nearer_to_the_floor(rows: list[Row], batch: int) -> None:
    times = [us(rows, "decode", rung=rung, batch=batch) for rung in DECODE]
    assert all(before > after for before, after in pairwise(times))
    floor = next(r["floor_us"] for r in rows if r["part"] == "decode" and r["batch"] == batch)
    # 256 requests almost touch it; one request ends some ten times away.
    assert times[-1] / floor < 1.2 if batch == 256 else times[-1] > floor
    assert batch > 1 or times[-1] / floor > 7


def test_at_256_requests_the_first_steps_are_the_large_ones(rows: list[Row]) -> None:
    times = [us(rows, "decode", rung=rung, batch=256) for rung in DECODE]
    saved = [before - after for before, after in pairwise(times)]
    assert saved == sorted(saved, reverse=True)
    few = [us(rows, "decode", rung=rung, batch=1) for rung in DECODE]
    assert few[2] / few[3] > max(few[0] / few[1], few[1] / few[2], few[3] / few[4])


@pytest.mark.parametrize("batch", [16, 256])
def test_small_programs_are_nearer_to_the_floor_than_whole_heads(
    rows: list[Row], batch: int
) -> None:
    mine = [r for r in rows if r["part"] == "programs" and r["batch"] == batch]
    small = [r["us"] for r in mine if r["block_v"] <= 16]
    whole = [r["us"] for r in mine if r["block_v"] == 128]
    assert max(small) < 0.9 * min(whole)


def test_verifying_is_a_chain(rows: list[Row]) -> None:
    for batch in (1, 16, 64):
        one, snapshots, records, commit = (
            us(rows, "verify", way=way, batch=batch)
            for way in ("one_token", "snapshots", "records", "commit")
        )
        assert records > 2 * one and snapshots > records + commit
    assert 1.4 < snapshots / (records + commit) < 3.1


def test_a_prompt_climbs_and_stays_far_from_the_floor(rows: list[Row]) -> None:
    times = [us(rows, "prefill", rung=rung) for rung in PREFILL]
    assert all(before > after for before, after in pairwise(times))
    floor = next(r["floor_us"] for r in rows if r["part"] == "prefill")
    assert times[0] / times[1] > times[1] / times[-1]
    assert times[-1] / floor > 4
    launches = {r["rung"]: r["launches_us"] for r in rows if r["part"] == "prefill"}
    walks = [launches[rung]["walk"] for rung in PREFILL[1:4]]
    assert walks == sorted(walks, reverse=True)
    assert launches["chunks"]["prepare"] > 3 * floor
    assert us(rows, "prefill", rung="tokens") / 8192 < 1.0  # microseconds a turn


def test_a_state_that_spills_takes_twice_as_long(rows: list[Row]) -> None:
    walks = {(r["block_v"], r["num_warps"]): r["us"] for r in rows if r["part"] == "walks"}
    assert walks[128, 4] > 2 * max(walks[128, 8], walks[64, 4])
    assert walks[128, 8] > walks[64, 4] > walks[32, 4] > walks[16, 4]


def test_four_segments_are_the_best(rows: list[Row]) -> None:
    times = {r["segments"]: r["us"] for r in rows if r["part"] == "segments"}
    assert min(times, key=times.__getitem__) == 4
    assert times[2] > 0.85 * times[1]


def test_an_export_costs_a_layer_what_a_second_call_costs(rows: list[Row]) -> None:
    none, export, split = (us(rows, "checkpoint", way=way) for way in ("none", "export", "split"))
    assert 1.1 * none < export < 1.3 * none
    assert 0.95 * export < split < 1.05 * export


def prose() -> str:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")


def test_what_chunks_leave_to_gain(rows: list[Row]) -> None:
    chunks, shipped = (us(rows, "prefill", rung=rung) for rung in ("chunks", "as_shipped"))
    assert f"further ideas together are worth a factor of {chunks / shipped:.1f}" in prose()


def test_derived_numbers_in_its_prose() -> None:
    state, record = 12 * 128 * 128 * 4, 12 * 128 * 8
    ratio = 10 * state / (3 * state + 13 * record)
    assert f"{ratio:.1f} times fewer bytes" in prose()
    assert f"{2 * (3 + 2 + 1) * 12 * 128 + 2 * 12:,} bytes for each row and layer" in prose()
    assert f"{9 * state / 1e6:.1f} MB in a layer" in prose()

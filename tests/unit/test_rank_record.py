"""The rank ladder's record: rungs in order, what is missing, worth, noise, and halves of a gain."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from kimik3_lab.rank import results
from kimik3_lab.rank.build import rank_presets
from kimik3_lab.teaching.rank_record import FIRST, NOT_MEASURED, SEPTEMBER, RankRecord


def row(rung: str, concurrency: int, rate: float, **more: Any) -> dict[str, Any]:
    return {
        "rung": rung, "concurrency": concurrency, "output_tokens_per_s": rate,
        "latency_s": 100 / rate, "ttft_ms": 200.0, "decode_step_ms": 10.0,
        "tokens_per_verify": 4.0, "output_tokens": 1000, "floor_s": 0.5, **more,
    }  # fmt: skip


def body() -> dict[str, Any]:
    curve = {"requests": 1, "context": 80, "target_ms": 6.0, "target_floor_ms": 4.0,
             "drafter_ms": 2.0, "drafter_floor_ms": 0.5}  # fmt: skip
    rows = [
        # Not in the ladder's order, and with gaps: the first rung stands last.
        row(SEPTEMBER, 1, 150.0, decode_step_ms=9.0, ttft_ms=100.0),
        row("adaptive budget", 1, 160.0, decode_step_ms=12.0, ttft_ms=80.0),
        row(FIRST, 1, 100.0, launches=880, forwards=88, drafter_forwards=81),
        row(FIRST, 4, 200.0),
    ]
    return {
        "label": ["Miniature", "Measured"], "what": "one rank", "rows": rows,
        "not_measured": {"skinny GEMM": "no time left", "look-ahead cap": "no time left"},
        "workload": {"prompt_tokens": 80, "layers": 24},
        "curves": {"rung": "look-ahead cap", "decode": [curve], "prefill": []},
        "provenance": {"device": "H200", "date_utc": "2026-11-30T05:46:07+00:00", "command": "x",
                       "packages": {"torch": "2.11.0"}},
    }  # fmt: skip


def test_rungs_come_in_the_ladders_order_and_gaps_are_named() -> None:
    record = RankRecord(body())
    assert [rung.name for rung in record.rungs] == [
        FIRST, "adaptive budget", "skinny GEMM", SEPTEMBER, "look-ahead cap",
    ]  # fmt: skip
    assert record.concurrencies == (1, 4)
    assert record.missing == {
        "adaptive budget": [4], "skinny GEMM": [1, 4], SEPTEMBER: [4], "look-ahead cap": [1, 4],
    }  # fmt: skip
    assert record.row(SEPTEMBER, 4) is None
    with pytest.raises(KeyError, match="'main 2026-09-13' at concurrency 4 was not measured"):
        record.need(SEPTEMBER, 4)


def test_a_file_says_what_it_is() -> None:
    told = RankRecord(body()).describe()
    assert "H200, 2026-11-30\n" in told and "4 of 10 cells measured" in told and "note" not in told
    dated = body() | {"note": "partial " * 40}
    dated["rows"][0]["date_utc"] = "2026-12-02T01:00:00+00:00"
    told = RankRecord(dated).describe()
    assert "2026-11-30 to 2026-12-02" in told and "note: partial" in told
    assert max(map(len, told.splitlines())) <= 100


def test_gains_are_above_one_when_something_became_better() -> None:
    record = RankRecord(body())
    assert record.gain(1) == 1.5
    assert record.gain(1, "ttft_ms") == 2.0
    assert record.gain(1, "latency_s") == pytest.approx(1.5)
    assert record.saved_before_first_token(1) == pytest.approx(0.1 / (1 - 100 / 150))
    assert record.floor_rate(1) == 2000.0
    assert record.own_ms(SEPTEMBER, 1) == 9.0 / 4
    assert record.launches_of_a_chunk(FIRST) == (880 - 80) / 8


def test_noise_is_taken_from_equal_steps_only() -> None:
    content = body()
    content["rows"] += [row("skinny GEMM", 1, 1.0, decode_step_ms=99.0),
                        row("look-ahead cap", 1, 1.0, decode_step_ms=99.0)]  # fmt: skip
    record = RankRecord(content)
    assert record.alike(1) == {FIRST: 10.0, "adaptive budget": 12.0}
    assert record.noise(1) == pytest.approx(0.2)


def twice() -> dict[str, Any]:
    """Return a file with a second run: one cell slower, one with a step that stalled."""
    content = body()
    for place, found in enumerate(content["rows"]):
        found |= {"longest_step_ms": 40.0, "prompt_step_ms": 30.0, "elapsed_s": 2.0 + place}
    rows = copy.deepcopy(content["rows"])
    rows[0]["longest_step_ms"] = 121.0
    rows[2] |= {"output_tokens_per_s": 75.0, "prompt_step_ms": 45.0}
    made = {"device": "H200", "date_utc": "2026-11-30T06:00:00+00:00"}
    content["again"] = {"what": "once more " * 20, "rows": rows[:3], "provenance": made}
    return content


def test_a_second_run_is_set_beside_the_first() -> None:
    record = RankRecord(twice())
    assert record.again is not None
    assert [record.gain(1), record.again.gain(1)] == [1.5, 2.0]
    assert record.apart(1) == {FIRST: -0.25, "adaptive budget": 0.0, SEPTEMBER: 0.0}
    assert record.apart(1, "prompt_step_ms")[FIRST] == 0.5
    assert record.apart(4) == {}  # only one of the two measured it
    assert record.stalls() == {(SEPTEMBER, 1): (40.0, 121.0)}
    assert list(record.worth()["1 concurrent"])[:2] == ["100 tok/s | 75 tok/s", "+60 % | +113 %"]
    assert record.worth()["4 concurrent"].iloc[0] == f"200 tok/s | {NOT_MEASURED}"
    told = record.describe()
    assert "again: once more" in told and max(map(len, told.splitlines())) <= 100
    alone = RankRecord(body())
    assert alone.again is None and alone.apart(1) == {} and alone.stalls() == {}


def test_steps_with_prompts_are_as_few_as_the_budget_allows() -> None:
    content = twice()
    content["workload"] |= {"prompt_tokens": 8000, "output_tokens": 1000}
    for found in content["rows"]:
        found["requests"] = found["concurrency"]
    record = RankRecord(content)
    assert record.prompt_seconds(FIRST, 1) == pytest.approx(8 * 0.030)  # 1,024 tokens a step
    assert record.prompt_seconds(FIRST, 4) == pytest.approx(32 * 0.030)
    assert record.prompt_seconds(SEPTEMBER, 1) == pytest.approx(0.030)  # 16,384


def test_parts_add_up_to_the_step() -> None:
    content = body()
    parts = RankRecord(content).step_parts(1)
    assert list(parts.values()) == [4.0, 2.0, 0.5, 1.5, 1.0]
    assert sum(parts.values()) == 9.0  # September's, for the curves' own rung was not measured
    content["rows"].append(row("look-ahead cap", 1, 1.0, decode_step_ms=8.5))
    assert sum(RankRecord(content).step_parts(1).values()) == 8.5


def test_tables_show_what_is_missing() -> None:
    record = RankRecord(body())
    worth = record.worth()
    assert worth["1 concurrent"].to_dict() == {
        FIRST: "100 tok/s", "adaptive budget": "+60 %", "skinny GEMM": NOT_MEASURED,
        SEPTEMBER: "-6 %, 2 rungs", "look-ahead cap": NOT_MEASURED,
    }  # fmt: skip
    assert list(worth["4 concurrent"]) == ["200 tok/s", *[NOT_MEASURED] * 4]
    table = record.table({"rate": lambda r: r["output_tokens_per_s"], "x": lambda r: 1}, 4)
    assert list(table["rate"]) == [200.0, *[NOT_MEASURED] * 4]
    assert list(table["x"]) == [1, "", "", "", ""]


def test_the_recorded_file_holds_together() -> None:
    record = RankRecord.read()
    content = record.body
    results.check_rows(content["rows"])
    ladder = [preset.name for preset in rank_presets()]
    names = [rung.name for rung in record.rungs]
    assert names == ladder, f"rungs that are neither measured nor named: {set(ladder) - set(names)}"
    assert record.concurrencies == (1, 4, 16)
    complete = content.get("complete", not record.missing)
    assert complete is not bool(record.missing), "complete does not say what is there"
    lacks = {name for name in record.missing} - set(content["not_measured"])
    assert not lacks, f"{lacks} are missing without a reason"
    assert content["september_over_first"] == {
        str(c): round(record.gain(c), 4) for c in record.concurrencies
    }
    for name in ("device", "date_utc", "command"):
        assert content["provenance"][name]


def test_a_record_that_hides_a_gap_is_found_out() -> None:
    content = copy.deepcopy(dict(RankRecord.read().body))
    gone = content["rows"].pop()
    assert RankRecord(content).row(gone["rung"], gone["concurrency"]) is None
    assert gone["concurrency"] in RankRecord(content).missing[gone["rung"]]

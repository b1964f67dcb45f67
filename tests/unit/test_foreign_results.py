"""Results of guidellm and ``vllm bench serve`` become rows like ours, or a clear error."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kimik3_lab.benchmark.foreign import load_any
from kimik3_lab.benchmark.foreign_rows import blank_row
from kimik3_lab.benchmark.report import ResultError, load_result, rows
from kimik3_lab.paths import data_dir

FOLDER = data_dir() / "golden" / "public_clients"
#: What the scripted server does: first tokens after 0.4, 0.6 and 0.8 s in turn, then 50 ms each.
TTFT_MS, TPOT_MS, LATENCY_S, TOKENS = 600.0, 50.0, 1.55, 20


def body_of(name: str) -> Any:
    return json.loads((FOLDER / name).read_text(encoding="utf-8"))


def written(path: Path, body: Any) -> Path:
    path.write_text(body if isinstance(body, str) else json.dumps(body), encoding="utf-8")
    return path


# -- real files ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "tool", "levels"),
    [
        ("guidellm.json", "guidellm 0.8.1", [1, 4]),
        ("vllm_c1.json", "vllm bench serve", [1]),
        ("vllm_c4.json", "vllm bench serve", [4]),
        ("k3lab.json", "k3lab bench", [1, 4]),
    ],
)
def test_every_tool_found_what_the_server_did(name: str, tool: str, levels: list[int]) -> None:
    loaded = load_any(FOLDER / name)
    assert loaded.tool == tool
    assert [row["concurrency"] for row in loaded.rows] == levels
    for row in loaded.rows:
        assert row["request_rate"] is None and row["failed"] == 0
        assert row["output_tokens"] == TOKENS
        # The machine was busy: what a client adds itself is some ten milliseconds.
        for statistic in ("mean", "median"):
            assert row[f"ttft_ms_{statistic}"] == pytest.approx(TTFT_MS, rel=0.08)
            assert row[f"tpot_ms_{statistic}"] == pytest.approx(TPOT_MS, rel=0.02)
            assert row[f"e2e_s_{statistic}"] == pytest.approx(LATENCY_S, rel=0.03)
        streams = row["concurrency"]
        assert row["output_tokens_per_s"] == pytest.approx(streams * TOKENS / LATENCY_S, rel=0.06)
        assert row["completed_in_window"] == round(row["requests_per_s"] * row["window_s"])


@pytest.mark.parametrize(("name", "schema"), [("0.6", 1), ("0.7", 2)])
def test_older_reports_of_guidellm(name: str, schema: int) -> None:
    """Recorded while the machine was too busy for exact times: 12 s, a tenth cut off each end."""
    body, loaded = body_of(f"guidellm_{name}.json"), load_any(FOLDER / f"guidellm_{name}.json")
    assert body["metadata"]["version"] == schema
    assert loaded.tool.startswith(f"guidellm {name}.")
    assert [row["concurrency"] for row in loaded.rows] == [1, 4]
    for row, benchmark in zip(loaded.rows, body["benchmarks"], strict=True):
        assert row["window_s"] == pytest.approx(9.6, abs=0.01)
        assert row["e2e_s_mean"] == pytest.approx(LATENCY_S, rel=0.06)
        assert row["requests_per_s"] == pytest.approx(row["concurrency"] / LATENCY_S, rel=0.06)
        ttft = benchmark["metrics"]["time_to_first_token_ms"]["successful"]
        assert row["ttft_ms_p90"] == ttft["percentiles"]["p90"]
        assert (row["ttft_ms_mean"], row["ttft_ms_median"]) == (ttft["mean"], ttft["median"])


def test_a_row_has_exactly_our_columns() -> None:
    own = set(rows(load_result(FOLDER / "k3lab.json"))[0])
    assert own | {"prompt_tokens", "output_tokens"} == set(blank_row())
    for path in FOLDER.glob("*.json"):
        if path.name != "PROVENANCE.json":
            assert all(set(row) == set(blank_row()) for row in load_any(path).rows), path.name


def test_guidellm_window_is_a_tenth_shorter_at_each_end() -> None:
    one, four = load_any(FOLDER / "guidellm.json").rows
    assert (one["window_s"], four["window_s"]) == pytest.approx((16, 16))
    assert (one["completed_in_window"], four["completed_in_window"]) == (10, 40)
    assert (one["completed"], one["attempted"]) == (12, 13)  # one was cut off
    # Its two throughputs differ: whole requests that ended, and tokens that arrived.
    assert one["output_tokens_per_s"] == pytest.approx(10 * TOKENS / 16)
    assert one["observed_tokens_per_s"] == pytest.approx(12.8, abs=0.1)


def test_vllm_latencies_come_from_its_list() -> None:
    body, row = body_of("vllm_c4.json"), load_any(FOLDER / "vllm_c4.json").rows[0]
    assert "mean_e2el_ms" not in body
    assert row["e2e_s_mean"] == pytest.approx(np.mean(body["latencies"]))
    assert row["e2e_s_p90"] == pytest.approx(np.quantile(body["latencies"], 0.9))
    assert row["window_s"] == body["duration"]
    assert row["ttft_ms_p90"] is None  # was not asked for, and is not made up


def test_an_open_loop_has_a_rate() -> None:
    row = load_any(FOLDER / "vllm_rate2_detailed.json").rows[0]
    assert (row["concurrency"], row["request_rate"]) == (None, 2.0)
    body = body_of("vllm_rate2_detailed.json")
    assert row["e2e_s_median"] == pytest.approx(body["median_e2el_ms"] / 1e3)


def test_results_appended_to_one_file(tmp_path: Path) -> None:
    lines = [json.dumps(body_of(f"vllm_c{c}.json")) for c in (1, 4)]
    loaded = load_any(written(tmp_path / "all.json", "\n".join(lines) + "\n"))
    assert [row["concurrency"] for row in loaded.rows] == [1, 4]


def test_notes_say_what_differs() -> None:
    guidellm, vllm = (
        " ".join(load_any(FOLDER / f"{n}.json").notes) for n in ("guidellm", "vllm_c1")
    )
    assert "time_per_output_token_ms has the time to the first token in it" in guidellm
    assert "c=1: 10 requests ended in the window" in guidellm
    assert "c=4" not in guidellm  # 40 are enough
    assert "no warm-up or cool-down cut off" in vllm


# -- made from real files --------------------------------------------------------------------------


def strategy(**fields: Any) -> Callable[[Any], None]:
    return lambda body: body["benchmarks"][0]["config"].update(strategy=fields)


@pytest.mark.parametrize(
    ("change", "concurrency", "rate"),
    [
        (strategy(type_="synchronous"), 1, None),
        (strategy(type_="poisson", rate=2.5), None, 2.5),
        (strategy(type_="constant", rate=2), None, 2.0),
        (strategy(type_="throughput", max_concurrency=9), None, math.inf),
    ],
)
def test_guidellm_strategies(
    tmp_path: Path, change: Callable[[Any], None], concurrency: int | None, rate: float | None
) -> None:
    body = body_of("guidellm.json")
    change(body)
    row = load_any(written(tmp_path / "g.json", body)).rows[0]
    assert (row["concurrency"], row["request_rate"]) == (concurrency, rate)


def test_vllm_without_failed_or_latencies(tmp_path: Path) -> None:
    body = body_of("vllm_c4.json")
    del body["failed"], body["latencies"]
    body["completed"] = 47
    loaded = load_any(written(tmp_path / "v.json", body))
    (row,) = loaded.rows
    assert (row["failed"], row["e2e_s_mean"]) == (1, None)
    assert "1 of 48 requests failed" in loaded.notes[0]
    assert "no end-to-end latency" in loaded.notes[1]


def test_vllm_list_is_not_used_when_requests_failed(tmp_path: Path) -> None:
    """A failed request stands in the list as 0 seconds."""
    body = body_of("vllm_c4.json")
    body |= {"failed": 1, "completed": 47}
    assert load_any(written(tmp_path / "v.json", body)).rows[0]["e2e_s_mean"] is None


def remove(*path: Any) -> Callable[[Any], None]:
    def change(body: Any) -> None:
        for name in path[:-1]:
            body = body[name]
        del body[path[-1]]

    return change


def put(*path: Any, value: Any) -> Callable[[Any], None]:
    def change(body: Any) -> None:
        for name in path[:-1]:
            body = body[name]
        body[path[-1]] = value

    return change


SUCCESSFUL = ("benchmarks", 1, "metrics", "time_to_first_token_ms", "successful")
MADE = ("benchmarks", 0, "scheduler_metrics", "requests_made")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("guidellm", put("metadata", "version", value=3), "metadata.version is 3"),
        ("guidellm", remove("metadata"), "metadata.version is None"),
        ("guidellm", put("benchmarks", value=[]), "no benchmarks"),
        ("guidellm", put("benchmarks", value=[3]), "benchmark 0 is a int"),
        ("guidellm", remove(*SUCCESSFUL, "median"), "benchmark 1 has no metrics.time_to_first_tok"),
        ("guidellm", put(*SUCCESSFUL, "mean", value=None), "must be a number, got None"),
        ("guidellm", put(*SUCCESSFUL, "mean", value=math.nan), "must be a number, got nan"),
        ("guidellm", put(*MADE, "successful", value=0), "none of 13 requests succeeded"),
        ("guidellm", strategy(type_="sweep"), "ran the strategy 'sweep'"),
        ("guidellm", strategy(type_="concurrent"), "has no streams"),
        ("guidellm", remove("benchmarks", 0, "duration"), "benchmark 0 has no duration"),
        ("vllm_c1", put("completed", value=0), "completed none of 12 requests"),
        ("vllm_c1", remove("mean_tpot_ms"), "no mean_tpot_ms: run with --percentile-metrics"),
        ("vllm_c1", remove("duration"), "the run has no duration"),
        ("vllm_c1", put("output_throughput", value="fast"), "must be a number, got 'fast'"),
        ("vllm_c1", put("max_concurrency", value=True), "must be a number, got True"),
    ],
)
def test_what_is_missing_is_named(
    tmp_path: Path, name: str, change: Callable[[Any], None], message: str
) -> None:
    body = body_of(f"{name}.json")
    change(body)
    path = written(tmp_path / "changed.json", body)
    with pytest.raises(ResultError, match=message) as caught:
        load_any(path)
    assert str(caught.value).startswith(str(path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("latency,ttft\n1,2\n", "is not JSON"),
        ("[1, 2]", "unknown format: a list"),
        ('{"a": 1, "b": 2}', "unknown format: an object with a, b"),
        ("{}", "nothing in it"),
        ('{"schema": "kimik3-lab/benchmark", "schema_version": 99}', "schema_version 99"),
    ],
)
def test_other_files(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ResultError, match=message):
        load_any(written(tmp_path / "other.json", text))


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ResultError, match="no result file at"):
        load_any(tmp_path / "nothing.json")
    with pytest.raises(ResultError, match="cannot be read"):
        load_any(tmp_path)

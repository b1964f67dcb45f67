"""``k3lab simulate``: rows, intervals, explanations, traces, and what is said of bad options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kimik3_lab.cli import app
from kimik3_lab.commands import CommandError

SHORT = ("--duration", "12", "--prompt-tokens", "2000", "--output-tokens", "60")


def run(*args: str) -> Any:
    result = CliRunner().invoke(app, ["simulate", *args])
    if isinstance(result.exception, CommandError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def test_json_rows() -> None:
    body = json.loads(run("--json", "--interval", "none", "--concurrency", "1,2", *SHORT))
    assert body["ttft_statistic"] in ("mean", "median")
    assert (body["hardware"], body["parallel"], body["duration_s"]) == ("B300", "TP8", 12.0)
    rows = body["rows"]
    assert [(row["preset"], row["concurrency"]) for row in rows] == [
        ("v0.27.1", 1), ("v0.27.1", 2), ("main-2026-09-13", 1), ("main-2026-09-13", 2)
    ]  # fmt: skip
    for row in rows:
        assert set(row) == {
            "preset", "concurrency", "latency_s", "ttft_ms", "tpot_ms", "output_tokens_per_s",
            "completed_requests", "interval", "interval_method", "ttft_statistic",
        }  # fmt: skip
        assert row["interval"] is None
        assert row["output_tokens_per_s"] == pytest.approx(row["completed_requests"] * 60 / 9.6)
        assert 0 < row["ttft_ms"] / 1e3 < row["latency_s"]
    assert rows[2]["latency_s"] < rows[0]["latency_s"]


@pytest.mark.parametrize("how", ["estimated", "simulated"])
def test_an_interval_holds_its_row(how: str) -> None:
    args = ("--json", "--preset", "v0.27.1", "--concurrency", "2", "--interval", how, *SHORT)
    (row,) = json.loads(run(*args))["rows"]
    assert row["interval_method"] == how
    for name, (low, high) in row["interval"].items():
        assert low <= row[name] <= high
    low, high = row["interval"]["latency_s"]
    assert low < high


def test_the_seed_repeats_a_run() -> None:
    args = ("--json", "--interval", "none", "--preset", "v0.27.1", "--concurrency", "2", *SHORT)
    assert run(*args, "--seed", "5") == run(*args, "--seed", "5") != run(*args, "--seed", "6")


def test_table_and_explanation() -> None:
    text = run(
        "--preset", "v0.27.1", "--concurrency", "2", "--explain", "--interval", "none", *SHORT
    )
    assert "TTFT" in text and "c=2" in text
    for kind in ("prefill", "decode", "mixed"):
        assert kind in text
    assert "routed experts" in text and "all-reduces" in text


def test_explanation_adds_up() -> None:
    args = ("--json", "--explain", "--interval", "none", "--concurrency", "2", *SHORT)
    for row in json.loads(run(*args))["rows"]:
        kinds = row["explain"]["kinds"]
        assert sum(kind["share"] for kind in kinds.values()) == pytest.approx(1.0)
        for kind in kinds.values():
            assert sum(kind["parts_ms"].values()) == pytest.approx(kind["ms_per_step"])


def test_switches_and_assumptions_change_the_outcome() -> None:
    args = ("--json", "--interval", "none", "--preset", "v0.27.1", "--concurrency", "1", *SHORT)

    def row(*more: str) -> dict[str, Any]:
        return json.loads(run(*args, *more))["rows"][0]

    plain = row()
    assert row("--set", "token_budget=adaptive")["ttft_ms"] < plain["ttft_ms"]
    assert row("--set", "skinny-gemm=true")["tpot_ms"] < plain["tpot_ms"]
    assert row("--set", "num_speculative_tokens=0")["tpot_ms"] > plain["tpot_ms"]
    assert row("--assume", "acceptance_length=4.73")["tpot_ms"] < plain["tpot_ms"]
    assert row("--hardware", "H200", "--tp", "16", "--ep", "16")["tpot_ms"] != plain["tpot_ms"]


def test_lists() -> None:
    presets = run("--preset", "?")
    assert "main-2026-09-13" in presets
    assert CliRunner().invoke(app, ["serve", "--preset", "?"]).stdout == presets
    assert "token_budget" in run("--set", "?")
    assert "acceptance_length" in run("--assume", "?")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    rows = [
        {"timestamp": 400 * i, "input_length": 1500, "output_length": 20, "hash_ids": [0, 1, 2 + i]}
        for i in range(30)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_trace(trace: Path) -> None:
    args = ("--json", "--preset", "sparse-retention", "--trace", str(trace))
    (row,) = json.loads(run(*args))["rows"]
    assert (row["attempted"], row["completed_requests"], row["refused"]) == (30, 30, 0)
    assert 11.6 < row["simulated_s"] < 20
    assert 0 < row["utilization"] <= 1
    assert row["ttft_ms_median"] <= row["ttft_ms_p90"] <= row["ttft_ms_p99"]
    (fast,) = json.loads(run(*args, "--rate-scale", "10"))["rows"]
    assert fast["simulated_s"] < row["simulated_s"]
    text = run(*args[1:])
    assert "30 requests in" in text and "open loop" in text


def test_replicas_share_a_trace(trace: Path) -> None:
    args = ("--json", "--preset", "sparse-retention", "--trace", str(trace), "--rate-scale", "20")
    one, two = (json.loads(run(*args, "--replicas", n))["rows"][0] for n in ("1", "2"))
    assert two["replicas"] == 2
    assert (two["attempted"], two["completed_requests"]) == (30, 30)
    assert two["latency_s"] < one["latency_s"]


def test_a_made_up_workload() -> None:
    args = ("--workload", "azure-conv", "--duration", "10", "--preset", "main-2026-09-13")
    (row,) = json.loads(run("--json", *args))["rows"]
    assert row["attempted"] == row["completed_requests"] > 10


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--preset", "v0.26"), "no preset 'v0.26'; there are: v0.27.1, batch-of-16384"),
        (("--concurrency", "one"), "--concurrency takes numbers such as 1,4,16, got 'one'"),
        (("--concurrency", "0"), "concurrency must be a whole number of at least 1, got 0"),
        (("--hardware", "B100"), "no accelerator 'B100'; expected one of B300"),
        (("--hardware", "B200"), "TP8 on B200: weights and .* take more or larger GPUs"),
        (("--tp", "7"), "TP7 does not divide"),
        (("--set", "token_budgt=static"), "no switch 'token_budgt'; did you mean token_budget?"),
        (("--set", "token_budget=big"), "token_budget takes static, adaptive or lookahead_cap"),
        (("--set", "token_budget"), "--set takes NAME=VALUE, got 'token_budget'"),
        (("--set", "max_num_batched_tokens=4"), "leaves -7164 tokens to schedule"),
        (("--assume", "luck=1"), "no choice 'luck'; there are: "),
        (("--assume", "acceptance_length=40"), "brings 1 to 9 tokens on average"),
        # One run: four would be shared out to processes, as they are for --duration below.
        (
            ("--preset", "v0.27.1", "--concurrency", "1", "--prompt-tokens", "3000000"),
            "no request of this size can run",
        ),
        (("--rate-scale", "2"), "need --trace or --workload"),
        (("--trace", "/nowhere.jsonl"), "no trace at /nowhere.jsonl"),
        (("--workload", "noise"), "no workload 'noise'"),
        (("--workload", "azure-code", "--trace", "x"), "give --trace or --workload, not both"),
        (("--duration", "-1"), "duration_s must be a positive number of seconds, got -1.0"),
    ],
)
def test_a_bad_option_is_explained(args: tuple[str, ...], message: str) -> None:
    with pytest.raises(CommandError, match=message):
        run("--interval", "none", *args)


def test_help() -> None:
    text = run("--help")
    for option in ("--preset", "--concurrency", "--set", "--trace", "--explain", "--json"):
        assert option in text

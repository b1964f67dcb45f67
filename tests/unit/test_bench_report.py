"""Result files and ``k3lab bench``."""

from __future__ import annotations

import io
import json

import pytest
from fake_openai import FakeOpenAI, Reply
from rich.console import Console
from typer.testing import CliRunner

from kimik3_lab import cli
from kimik3_lab.benchmark import (
    BenchmarkConfig,
    ResultError,
    Workload,
    load_result,
    print_table,
    rows,
    run_benchmark,
    save_result,
    summarise,
)


@pytest.fixture(scope="module")
def result():
    with FakeOpenAI(Reply(ttft=0.004, gap=0.001)) as server:
        config = BenchmarkConfig(
            server.url, Workload.synthetic(5, 4, seed=3), concurrency=(1, 4), max_requests=40,
            api_key="secret", device="a scripted server",
        )  # fmt: skip
        return run_benchmark(config, progress=False)


def table(result) -> str:
    console = Console(file=io.StringIO(), width=110, color_system=None)
    print_table(result, console)
    return console.file.getvalue()


def test_saved_result_comes_back_whole(result, tmp_path):
    path = save_result(result, tmp_path / "result.json")
    back = load_result(path)
    assert back.configuration["concurrency"] == [1, 4]
    for old, new in zip(result.cells, back.cells, strict=True):
        assert new.summary == old.summary and new.load == old.load and new.health == old.health
        # Token times are kept to the microsecond, so any statistic can be computed again.
        again = summarise(new.records, new.summary.window)
        assert again.attempted == 40
        assert again.ttft_ms.median == pytest.approx(old.summary.ttft_ms.median, abs=0.002)
    assert table(back) == table(result)
    assert list(tmp_path.iterdir()) == [path]  # no temporary file stays
    flat = rows(back)
    assert [row["concurrency"] for row in flat] == [1, 4]
    assert flat[0]["ttft_ms_median"] == result.cells[0].summary.ttft_ms.median


def test_file_names_its_schema_and_origin_but_no_key(result, tmp_path):
    text = save_result(result, tmp_path / "result.json").read_text()
    data = json.loads(text)
    assert (data["schema"], data["schema_version"]) == ("kimik3-lab/benchmark", 1)
    assert data["provenance"]["device"] == "a scripted server"
    assert data["configuration"]["workload"]["seed"] == 3
    assert "secret" not in text
    # one line a request
    assert sum(line.lstrip().startswith('{"index"') for line in text.splitlines()) == 80


def test_saving_never_overwrites_unasked(result, tmp_path):
    path = tmp_path / "result.json"
    path.write_text("mine")
    with pytest.raises(ResultError, match="exists"):
        save_result(result, path)
    assert path.read_text() == "mine"
    save_result(result, path, overwrite=True)
    assert load_result(path).model == "fake-model"
    with pytest.raises(ResultError, match="no folder"):
        save_result(result, tmp_path / "missing" / "result.json")
    with pytest.raises(ResultError, match="is a folder"):
        save_result(result, tmp_path)


def test_failed_save_leaves_nothing(result, tmp_path, monkeypatch):
    monkeypatch.setattr("os.replace", lambda *paths: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        save_result(result, tmp_path / "result.json")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda text: text[: len(text) // 2], "cannot be read as JSON"),
        (lambda text: "[]", "not a benchmark result"),
        (lambda text: text.replace("kimik3-lab/benchmark", "other"), "not a benchmark result"),
        (lambda text: text.replace('"schema_version": 1', '"schema_version": 2'), "schema_version"),
        (lambda text: text.replace('"cells"', '"sells"'), "is damaged .KeyError: 'cells'"),
        (lambda text: text.replace('"ttft_ms"', '"ttft"'), "is damaged"),
        (lambda text: text.replace('"start":', '"begin":'), "is damaged"),
    ],
)
def test_broken_files_are_refused_by_name(result, tmp_path, spoil, message):
    path = save_result(result, tmp_path / "result.json")
    path.write_text(spoil(path.read_text()))
    with pytest.raises(ResultError, match=message) as caught:
        load_result(path)
    assert "result.json" in str(caught.value)
    with pytest.raises(ResultError, match="no result file"):
        load_result(tmp_path / "other.json")


def test_table_marks_what_it_cannot_say(result):
    text = table(result)
    assert "c=1" in text and "c=4" in text and "fake-model" in text
    cell = result.cells[0]
    few = summarise(cell.records[:5], cell.summary.window)
    short = type(result)(
        result.configuration, result.url, result.model,
        [type(cell)(cell.load, cell.stream, 1.0, "max_requests", cell.health, [], few)], {},
    )  # fmt: skip
    assert "- / -" in table(short)
    assert "median needs 6 requests in the window" in table(short)


# The command line -----------------------------------------------------------------------------


def bench(capsys, monkeypatch, *arguments: str) -> tuple[int, str, str]:
    """Run ``k3lab bench`` as a user does; returns status, stdout, stderr."""
    monkeypatch.setattr("sys.argv", ["k3lab", "bench", *arguments])
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(SystemExit) as caught:
        cli.main()
        raise SystemExit(0)
    streams = capsys.readouterr()
    return int(caught.value.code or 0), streams.out, streams.err


def test_bench_command(capsys, monkeypatch, tmp_path):
    path = tmp_path / "result.json"
    arguments = ("--concurrency", "1,2", "--num-requests", "6", "--scale", "200", "--seed", "9",
                 "--output", str(path))  # fmt: skip
    with FakeOpenAI(Reply(ttft=0.001, gap=0.001)) as server:
        status, out, err = bench(capsys, monkeypatch, "--base-url", server.url + "/v1", *arguments)
        assert (status, err) == (0, "")
        assert "c=1" in out and "c=2" in out and "seed 9" in out and str(path.name) in out
        saved = load_result(path)
        assert saved.configuration["workload"]["prompt_tokens"] == 40
        assert [cell.summary.completed for cell in saved.cells] == [6, 6]
        # A second run does not overwrite, and says so before it sends any load.
        seen = len(server.seen)
        status, _, err = bench(capsys, monkeypatch, "--base-url", server.url, *arguments)
        assert status == 1 and "--force" in err and len(server.seen) == seen
        arguments = (*arguments, "--force")
        assert bench(capsys, monkeypatch, "--base-url", server.url, *arguments)[0] == 0


def test_bench_command_open_loop(capsys, monkeypatch):
    with FakeOpenAI(Reply(ttft=0.001, gap=0.001), api_key="k") as server:
        status, out, _ = bench(
            capsys, monkeypatch, "--base-url", server.url, "--request-rate", "100",
            "--num-requests", "10", "--output-tokens", "2", "--endpoint", "completions",
            "--api-key", "k", "--extra-body", '{"top_p": 0.9}',
        )  # fmt: skip
    assert status == 0 and "100 req/s" in out
    assert server.seen[0].path == "/v1/completions" and server.seen[0].body["top_p"] == 0.9


def test_bench_command_fails_when_requests_do(capsys, monkeypatch, tmp_path):
    path = tmp_path / "result.json"
    with FakeOpenAI(Reply(status=500)) as server:
        status, _, err = bench(
            capsys, monkeypatch, "--base-url", server.url, "--num-requests", "20",
            "--max-errors", "3", "--output", str(path),
        )  # fmt: skip
    assert status == 1 and "stopped after 3 failed requests" in err and "HTTP 500" in err
    assert not path.exists()  # nothing was measured


def test_bench_command_fails_when_nothing_completes(capsys, monkeypatch, tmp_path):
    path = tmp_path / "result.json"
    with FakeOpenAI(Reply(ttft=5)) as server:
        status, _, err = bench(
            capsys, monkeypatch, "--base-url", server.url, "--duration", "0.3",
            "--output", str(path),
        )  # fmt: skip
    assert status == 1 and "no request completed" in err and not path.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--base-url", "http://127.0.0.1:9"], "no answer from http://127.0.0.1:9/v1/models"),
        (["--base-url", "ftp://x"], "must look like http"),
        (["--concurrency", "1,two"], "--concurrency takes numbers such as 1,4,16, got '1,two'"),
        (["--concurrency", "0"], "at least 1"),
        (["--request-rate", "fast"], "--request-rate takes numbers"),
        (["--concurrency", "1", "--request-rate", "1"], "not both"),
        (["--scale", "10", "--prompt-tokens", "5"], "give --scale or the two lengths"),
        (["--scale", "0.5"], "scale must be between"),
        (["--prompt-tokens", "0"], "prompt_tokens must be a whole number of at least 1"),
        (["--warmup", "0.5", "--cooldown", "0.5"], "must leave a window"),
        (["--duration", "-1"], "max_duration must be a positive number"),
        (["--tokenizer", "/nowhere"], "no tokenizer at /nowhere"),
        (["--extra-body", "{"], "--extra-body is not JSON"),
        (["--extra-body", "[1]"], "must be a JSON object"),
        (["--output", "/nowhere/result.json"], "no folder /nowhere"),
    ],
)
def test_bench_command_explains_bad_values(capsys, monkeypatch, arguments, message):
    status, _, err = bench(capsys, monkeypatch, *arguments)
    assert status == 1
    assert message in err and len(err.splitlines()) == 1 and "Traceback" not in err


def test_bench_command_usage_errors_and_help():
    runner = CliRunner()
    for bad in (["--num-requests", "many"], ["--endpoint", "responses"], ["--arrival", "bursty"]):
        assert runner.invoke(cli.app, ["bench", *bad]).exit_code == 2
    helped = runner.invoke(cli.app, ["bench", "--help"], env={"COLUMNS": "120", "TERM": "dumb"})
    assert helped.exit_code == 0
    for option in ("--base-url", "--concurrency", "--request-rate", "--scale", "--output"):
        assert option in helped.output

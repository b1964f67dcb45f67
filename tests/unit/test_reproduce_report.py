"""The table of a pack's results, and the cells that it refuses to vouch for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kimik3_lab.benchmark.client import BenchmarkResult, CellResult
from kimik3_lab.benchmark.config import BenchmarkConfig, Load
from kimik3_lab.benchmark.load import ClientHealth
from kimik3_lab.benchmark.metrics import summarise
from kimik3_lab.benchmark.records import RequestRecord
from kimik3_lab.benchmark.report import save_result
from kimik3_lab.benchmark.window import Window
from kimik3_lab.benchmark.workloads import Workload
from kimik3_lab.cli import app
from kimik3_lab.commands import CommandError
from kimik3_lab.reproduce.b300 import b300_pack
from kimik3_lab.reproduce.pack import Arm, Cell, Pack, PackError
from kimik3_lab.reproduce.report import (
    COLUMNS,
    Report,
    counters,
    markdown,
    ratios,
    read_report,
)
from kimik3_lab.reproduce.scripts import write_pack

PROM = 'vllm:{name}{{engine="0",model_name="k3"}} {value}\n'


def pack_of_one(drafts: int = 4, min_requests: int = 8) -> Pack:
    arm = Arm(name="v0.30.0-k4", version="0.30.0", drafts=drafts, arguments=("K3",))
    cell = Cell(arm=arm.name, name="c1", concurrency=1, prompt_tokens=8, output_tokens=4,
                num_requests=12, seed=7)  # fmt: skip
    return Pack(kind="cpu", what="one cell", device="cpu", min_requests=min_requests,
                arms=(arm,), cells=(cell,))  # fmt: skip


def records(cached: int = 0, failed: int = 0) -> list[RequestRecord]:
    """Twelve requests of a second each, first token after 0.2 or 0.4 s."""
    made = []
    for number in range(12):
        first = number + (0.2 if number % 3 else 0.4)
        made.append(
            RequestRecord(
                number, start=float(number), status="failed" if number < failed else "completed",
                token_times=[first, number + 0.9], end=number + 0.9, prompt_tokens=9,
                output_tokens=4, output_tokens_from="usage", cached_tokens=cached,
                requested_prompt_tokens=8, requested_output_tokens=4,
                error="refused" if number < failed else None,
            )
        )  # fmt: skip
    return made


def measured(folder: Path, pack: Pack, *, seed: int = 7, accepted: float = 30, drafts: float = 10,
             hits: float = 0, backend: str = "Using 'MARLIN' Mxfp4 MoE backend\n",
             **what: int) -> Path:  # fmt: skip
    """A pack's folder as ``run.sh`` would leave it."""
    write_pack(pack, folder)
    place = folder / "results" / pack.arms[0].name
    place.mkdir(parents=True)
    (place / "moe_backend.txt").write_text(backend)
    for when, factor in (("before", 1), ("after", 2)):
        names = {"spec_decode_num_drafts_total": drafts, "prefix_cache_hits_total": hits,
                 "spec_decode_num_accepted_tokens_total": accepted}  # fmt: skip
        text = "".join(PROM.format(name=n, value=v * factor) for n, v in names.items())
        (place / f"c1.{when}.prom").write_text(f"# HELP something\n{text}")
    config = BenchmarkConfig("http://127.0.0.1:1", Workload.synthetic(8, 4, seed=seed),
                             concurrency=(1,), max_requests=12)  # fmt: skip
    made = records(**what)
    window = Window.of_duration(12.0)
    cell = CellResult(Load(concurrency=1), "0", 12.0, "max_requests", ClientHealth(0.1, 1.0, None),
                      made, summarise(made, window))  # fmt: skip
    result = BenchmarkResult(config.as_dict(), "http://127.0.0.1:1", "k3", [cell], {})
    save_result(result, place / "c1.json")
    return folder


def test_a_row_has_what_lesson_12_shows_and_what_the_post_lacks(tmp_path: Path) -> None:
    report = read_report(measured(tmp_path / "p", pack_of_one()))
    assert report.problems == []
    (row,) = report.rows
    assert row["tokens_a_step"] == 1 + 30 / 10
    assert row["moe_backend"] == "MARLIN Mxfp4"
    assert row["completed_in_window"] == 9
    assert (row["ttft_ms_median"], row["cached_tokens"]) == (pytest.approx(200), 0)
    assert 200 < row["ttft_ms_mean"] < 300
    table = markdown(report)
    assert table.splitlines()[0] == f"| {' | '.join(COLUMNS)} |"
    assert "| 1 | vllm 0.30.0, K=4 | 9 | 4 | 9 |" in table


Change = Callable[[Path, Pack], Path]


@pytest.mark.parametrize(
    ("pack", "change", "message"),
    [
        (pack_of_one(min_requests=10), {}, "9 requests ended in the window, 10 are needed"),
        (pack_of_one(), {"cached": 3}, "36 prompt tokens came from the prefix cache"),
        (pack_of_one(), {"hits": 16}, "16 prompt tokens came from the prefix cache"),
        (pack_of_one(), {"failed": 1}, "1 requests failed"),
        (pack_of_one(), {"drafts": 0}, "the server counted no draft"),
        (pack_of_one(drafts=0), {}, "the server drafted, and was not to"),
        (pack_of_one(), {"seed": 8}, "ran with seed 8, not 7"),
        (pack_of_one(), {"backend": ""}, "its log names no MoE backend"),
    ],
)
def test_a_cell_that_must_not_be_quoted(
    tmp_path: Path, pack: Pack, change: dict[str, object], message: str
) -> None:
    folder = measured(tmp_path / "p", pack, **change)  # type: ignore[arg-type]
    report = read_report(folder)
    assert any(message in problem for problem in report.problems), report.problems
    assert message in markdown(report)
    with pytest.raises(CommandError, match="must be mended first"):
        CliRunner().invoke(app, ["reproduce", "report", str(folder)], catch_exceptions=False)


def test_the_command_writes_the_table(tmp_path: Path) -> None:
    folder = measured(tmp_path / "p", pack_of_one())
    done = CliRunner().invoke(app, ["reproduce", "report", str(folder)])
    assert done.exit_code == 0, done.output
    assert (folder / "report.md").read_text() in done.output
    body = json.loads((folder / "report.json").read_text())
    assert body["problems"] == [] and body["rows"][0]["tokens_a_step"] == 4


def test_two_backends_are_both_named(tmp_path: Path) -> None:
    lines = "Using 'A' Mxfp4 MoE backend\nUsing 'B' Mxfp4 MoE backend\n"
    (row,) = read_report(measured(tmp_path / "p", pack_of_one(), backend=lines)).rows
    assert row["moe_backend"] == "A Mxfp4; B Mxfp4"


def test_cells_that_are_missing_are_named_and_published_ones_stand_beside(tmp_path: Path) -> None:
    pack = b300_pack(seed=1)
    folder = write_pack(pack, tmp_path / "p")
    with pytest.raises(PackError, match=r"no cell .* has a result: run .*run\.sh"):
        read_report(folder)
    other = measured(tmp_path / "one", pack_of_one())
    place = folder / "results" / "v0.27.1-k8"
    place.parent.mkdir()
    (other / "results" / "v0.30.0-k4").rename(place)
    report = read_report(folder)
    assert sum("no result" in problem for problem in report.problems) == len(pack.cells) - 1
    published = [row for row in report.rows if row["source"].startswith("published")]
    assert [row["completed_in_window"] for row in published] == [10, 20, 31, 22, 50, 87]


def test_the_same_cells_of_two_releases_are_laid_side_by_side(tmp_path: Path) -> None:
    rows = [
        {"version": version, "drafts": drafts, "cell": "c4", "output_tokens_per_s": tokens,
         "e2e_s_mean": latency, "ttft_ms_mean": 900.0 * latency, "ttft_ms_median": None}
        for version, drafts, tokens, latency in (
            ("0.27.1", 8, 150.0, 24.0), ("0.30.0", 8, 450.0, 8.0), ("0.30.0", 0, 99.0, 40.0),
        )
    ]  # fmt: skip
    (pair,) = ratios(Report(b300_pack(seed=1), rows, []))
    assert pair == {"cell": "c4", "drafts": 8, "by_throughput": 3.0, "by_latency": 3.0,
                    "by_ttft_mean": 3.0, "by_ttft_median": None}  # fmt: skip
    # One release against two engines is no such pair.
    assert ratios(read_report(measured(tmp_path / "p", pack_of_one()))) == []


def test_counters_of_several_engines_add_up() -> None:
    text = PROM.format(name="a_total", value=2) + PROM.format(name="a_total", value="1e1")
    assert counters(text + "# TYPE vllm:b counter\nhttp_requests 3\n") == {"vllm:a_total": 12}


def test_the_command_writes_a_pack(tmp_path: Path) -> None:
    words = ["reproduce", "b300", "--output", str(tmp_path / "p"), "--improved", "0.33"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "24 cells" in done.output and "pinned --max-num-batched-tokens = 16384" in done.output
    page = (tmp_path / "p" / "README.md").read_text()
    assert (
        "VLLM_COMMAND_0_33_0" in page and "| `VLLM_ALLREDUCE_USE_FLASHINFER` | 0 | 1 | 1 |" in page
    )
    with pytest.raises(CommandError, match="is there already"):
        CliRunner().invoke(app, words, catch_exceptions=False)

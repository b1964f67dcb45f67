"""``python -m kimik3_lab.parallel.measure``: what it refuses, what it writes, and who reads that.

One rank measures in this process, in Triton's interpreter: the least that goes through everything.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from kimik3_lab.json_file import write_json
from kimik3_lab.parallel import measure, measure_cases, measure_file
from kimik3_lab.parallel.groups import Ranks
from kimik3_lab.parallel.measure_cases import COLLECTIVES, Plan, layer_cases, measure_collectives
from kimik3_lab.paths import data_dir
from kimik3_lab.performance.layer_record import TwoGpus

RECORD = data_dir() / "results" / "h200x2" / "collectives.json"


# -- arguments -------------------------------------------------------------------------------------


@pytest.fixture
def no_rank_starts(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Without GPUs, whatever this machine has; what would have been measured is kept."""
    kept: dict[str, Any] = {}

    def run_ranks(function: Any, size: int, plan: Plan, *rest: Any, backend: str) -> list[Any]:
        kept.update(size=size, plan=plan, compiled=rest[0], made=rest[1], output=rest[2])
        kept["backend"] = backend
        return [{"collectives": [], "layers": [], "seconds": 0.0}] * size

    monkeypatch.setattr(measure, "run_ranks", run_ranks)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setenv("TRITON_INTERPRET", os.environ.get("TRITON_INTERPRET", "0"))
    return kept


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "0"], "--ranks 0: expected at least 1"),
        (["--ranks", "-1"], "--ranks -1: expected at least 1"),
        (["--ranks", "two"], "--ranks: invalid int value: 'two'"),
        (["--warm", "foo"], "--warm: got 'foo', expected tp or ep, a colon"),
        (["--warm", "tp:x"], "--warm: got 'tp:x'"),
        (["--warm", "tp:²"], "--warm: got 'tp:²'"),
        (["--warm", "xx:3"], "--warm: got 'xx:3'"),
        (["--warm", "tp:0"], "--warm: got 'tp:0'"),
        (["--warm", "tp:64"], "--warm compiles on a GPU, and there is none here"),
        (["--first", "ep"], "--first: got 'ep'"),
        (
            ["--first", "ep:99"],
            "--first ep:99: tokens that are timed here are 1, 16, 64, 256, 4096",
        ),
        (["--first", "ep:4096", "--quick"], "tokens that are timed here are 1, 64"),
    ],
)
def test_an_argument_that_makes_no_sense_ends_it_before_anything_starts(
    arguments: list[str], message: str, no_rank_starts: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    with pytest.raises(SystemExit) as ended:
        measure.main(arguments)
    assert ended.value.code == 2
    assert not no_rank_starts
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("python -m kimik3_lab.parallel.measure: error: ")
    assert message in last


def test_three_gpus_do_not_divide_the_experts(
    monkeypatch: pytest.MonkeyPatch,
    no_rank_starts: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    with pytest.raises(SystemExit):
        measure.main(["--ranks", "3"])
    assert "--ranks 3: 3 ranks do not divide 896 experts" in capsys.readouterr().err
    assert not no_rank_starts


def test_a_case_is_compiled_on_one_gpu(
    monkeypatch: pytest.MonkeyPatch, no_rank_starts: dict[str, Any]
) -> None:
    warmed: list[tuple[Any, ...]] = []
    monkeypatch.setattr(measure, "warm", lambda *case, compiled: warmed.append((*case, compiled)))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for case in ("tp:64", "ep:4096", "check:0"):
        assert measure.main(["--warm", case, "--no-compile"]) == 0
    assert warmed == [("tp", 64, 2, False), ("ep", 4096, 2, False), ("check", 0, 2, False)]
    assert not no_rank_starts


def test_what_is_asked_is_what_is_measured(
    tmp_path: Path, no_rank_starts: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "new" / "result.json"
    arguments = ["--ranks", "3", "--first", "ep:4096", "--output", str(output)]
    assert measure.main(arguments) == 0
    kept = no_rank_starts
    assert (kept["size"], kept["backend"], kept["compiled"]) == (3, "gloo", False)
    assert kept["output"] == output.resolve()
    assert kept["made"]["command"].endswith("measure " + " ".join(arguments))
    assert kept["made"]["device"] == "cpu"
    assert next(layer_cases(kept["plan"])) == ("ep", 2, "uniform")  # a dry run has its own tokens
    assert os.environ["TRITON_INTERPRET"] == "1"
    assert "0 GPUs for 3 ranks: dry run on the CPU" in capsys.readouterr().out
    assert list(output.parent.iterdir()) == []  # looked at, and nothing left


def test_help_says_what_it_does_and_what_ranks_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        measure.main(["--help"])
    assert ended.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Time collectives, and layers of K3, on several GPUs of one host." in text
    assert "--ranks N GPUs that share a layer out" in text


# -- the file --------------------------------------------------------------------------------------


def test_a_place_that_cannot_be_written_is_seen_first(
    tmp_path: Path, no_rank_starts: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("[]")
    for place, message in (
        (tmp_path, "is a folder: name a file"),
        (tmp_path / "file" / "result.json", "cannot be written"),
        (RECORD, "a dry run would replace it: name another file"),
        (tmp_path / "file", "is no dry run's"),
    ):
        with pytest.raises(SystemExit):
            measure.main(["--output", str(place)])
        assert message in capsys.readouterr().err
    assert not no_rank_starts
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_dry_run_may_replace_a_dry_run_and_a_measurement_anything(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_json(path, {"dry_run": True})
    measure_file.check_output(path, dry_run=True)
    measure_file.check_output(RECORD, dry_run=False)
    write_json(path, {"dry_run": False})
    with pytest.raises(measure_file.OutputError, match="is no dry run's"):
        measure_file.check_output(path, dry_run=True)


def test_a_file_that_cannot_be_finished_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "result.json"
    write_json(path, {"layers": [1]})

    def fails(*names: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(OSError, match="no space left"):
        write_json(path, {"layers": [1, 2]})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, {"us": float("nan")})
    assert json.loads(path.read_text()) == {"layers": [1]}
    assert [found.name for found in tmp_path.iterdir()] == ["result.json"]


def timed_once(ranks: Ranks, call: Any, calls: int, *, rounds: int = 1) -> float:
    """Time one call: the first, which the command leaves out."""
    start = time.perf_counter()
    call(0)
    return 1e6 * (time.perf_counter() - start)


# -- a fresh result --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one rank writes, of one token, and timed once."""
    pytest.importorskip("triton", reason="running kernels needs Triton")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("tensors on the CPU want the interpreter")
    path = tmp_path_factory.mktemp("measured") / "result.json"
    plan = Plan.make(on_gpu=False, quick=True, ranks=1)
    plan = dataclasses.replace(plan, kinds=("ep",), tokens=(1,))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure_cases, "eager_us", timed_once)
        measure.measure(Ranks(), plan, False, {"device": "cpu"}, path)
    return path


def test_a_fresh_result_is_read_like_the_record(fresh: Path) -> None:
    """It is of one run, and has neither an earlier one nor what was written down after that."""
    body = json.loads(fresh.read_text(encoding="utf-8"))
    assert body["dry_run"]
    assert body["complete"]
    assert max(body["check_relative_error"].values()) < 1e-5
    assert max(body["check_layer_relative_error"].values()) < 1e-5
    assert not {"earlier_run", "predicted_before_measured"} & set(body)
    found = TwoGpus.load(fresh)
    assert (found.device, found.ranks, found.foretold) == ("cpu", 1, ())
    assert {row.parallel for row in found.layers} == {"ep"}
    assert {row.earlier_us for row in found.layers} == {None}
    assert len(found.rows(layer="moe")) == 3
    assert all(row.us_overlap for row in found.rows(layer="moe"))
    (whole,) = found.rows(layer="whole", routing="uniform")
    assert whole.summed_us > 0
    assert found.rows(layer="whole", routing="placed") == []  # not timed, and no slip
    assert set(found.sizes("all_reduce", "eager")) == {4096, 65536}
    assert set(found.table("eager").names) == set(COLLECTIVES)
    with pytest.raises(ValueError, match="of one run, with no earlier one"):
        found.earlier_run  # noqa: B018
    with pytest.raises(ValueError, match=r"'graph'; recorded modes: 'eager'"):
        found.table()


def test_the_record_without_what_the_command_does_not_write() -> None:
    """Running the recorded command again, with the recorded --output, leaves such a file."""
    body = json.loads(RECORD.read_text(encoding="utf-8"))
    for name in ("note", "earlier_run", "predicted_before_measured"):
        del body[name]
    found, shipped = TwoGpus(body), TwoGpus.load()
    assert [(row.us, row.tiles_us) for row in found.layers] == [
        (row.us, row.tiles_us) for row in shipped.layers
    ]
    assert found.sizes("all_reduce") == shipped.sizes("all_reduce")


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda two: two.sizes("allreduce"), r"allreduce \(graph\) was not timed; recorded: all_"),
        (lambda two: two.sizes("all_reduce", "host"), r"all_reduce \(host\) was not timed"),
        (lambda two: two.rows(parallel="ep2"), "no case has parallel 'ep2'; recorded: 'ep', 'tp'"),
        (lambda two: two.rows(tokens=2), "recorded: 1, 16, 64, 256, 4096"),
        (lambda two: two.rows(load="skewed"), "a case has no 'load'; it has layer, parallel"),
    ],
)
def test_a_slip_is_not_an_empty_answer(ask: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ask(TwoGpus.load())


def test_sizes_are_those_that_ranks_divide(monkeypatch: pytest.MonkeyPatch) -> None:
    """A power of two is not shared out over three; two leave the recorded sizes as they are."""
    plan = Plan.make(on_gpu=False, quick=True, ranks=3)

    class Three(Ranks):
        """Counts what would be sent, as the real ones do before they send it."""

        def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
            return x

        def reduce_scatter(self, x: torch.Tensor, counts: Any, dim: int = 0) -> torch.Tensor:
            assert sum(counts) == len(x)
            return x[: counts[0]]

        def all_gather(self, x: torch.Tensor, counts: Any, dim: int = 0) -> torch.Tensor:
            assert len(x) == counts[self.rank]
            return x

        def all_to_all(self, x: torch.Tensor, send: Any, receive: Any) -> torch.Tensor:
            assert sum(send) == len(x)
            return x

    monkeypatch.setattr(measure_cases, "eager_us", timed_once)
    for size, expected in ((2, {4096, 65536}), (3, {4098, 65538})):
        rows = measure_collectives(Three(0, size), plan)
        assert {row["bytes"] for row in rows} == expected
        assert {row["collective"] for row in rows} == set(COLLECTIVES)

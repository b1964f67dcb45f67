"""Several short calls make one ladder: rows are kept, and nothing of other sources."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from k3_kernels.few_rows import CONFIGS

from kimik3_lab.drafter_config import DSparkConfig
from kimik3_lab.rank import __main__ as command
from kimik3_lab.rank import curves, ladder, resume
from kimik3_lab.rank.build import rank_presets
from kimik3_lab.rank.ladder import Bench
from kimik3_lab.rank.weights import micro_rank
from kimik3_lab.serving.presets import MAIN_2026_09_13, V0_27_1

torch.set_num_threads(1)


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Call the command with the smallest model on the reference backend; return the file."""
    config = micro_rank()
    drafter = DSparkConfig.for_target(config)
    presets = {p.name: p for p in rank_presets()}

    def bench(args) -> Bench:
        plan = command.micro_plan(args.concurrency)
        names = args.rungs or [V0_27_1.name, MAIN_2026_09_13.name]
        plan = dataclasses.replace(
            plan,
            presets=tuple(presets[name] for name in names),
            sizes=dataclasses.replace(plan.sizes, prompt_tokens=20, output_tokens=4),
        )
        made = Bench(plan, config, drafter, device="cpu", dtype=torch.float64, backend="reference")
        return made

    monkeypatch.setattr(command, "_bench", bench)
    monkeypatch.setattr(
        command, "rank_presets", lambda: (V0_27_1, MAIN_2026_09_13)
    )  # what a whole ladder is here
    # Curves and the rehearsal have tests in test_rank_ladder.py.
    monkeypatch.setattr(command, "rehearse", lambda bench, rung: None)
    monkeypatch.setattr(
        command, "_curves", lambda bench, preset, micro: ((name, [name]) for name in resume.CURVES)
    )
    path = tmp_path / "ladder.json"

    def run(*arguments: str) -> dict:
        common = ["--micro", "--output", str(path), "--concurrency", "1,2"]
        assert command.main([*common, *arguments]) == 0
        return json.loads(path.read_text(encoding="utf-8"))

    run.path = path
    return run


def cells(body: dict) -> list[tuple[str, int]]:
    return [(row["rung"], row["concurrency"]) for row in body["rows"]]


def test_calls_go_on_where_the_last_one_stopped(
    call, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    none = call("--time-limit", "0")
    assert none["rows"] == [] and not none["complete"]
    assert set(none["not_measured"]) == {V0_27_1.name, MAIN_2026_09_13.name}

    measured, plain = [], ladder.measure_cell

    def measure(bench, rung, concurrency, number):
        if len(measured) == 2:
            raise KeyboardInterrupt  # the call's time is over
        measured.append((rung.preset.name, concurrency))
        return plain(bench, rung, concurrency, number)

    monkeypatch.setattr(ladder, "measure_cell", measure)
    with pytest.raises(KeyboardInterrupt):
        call()
    partial = json.loads(call.path.read_text(encoding="utf-8"))
    assert cells(partial) == [(V0_27_1.name, 1), (V0_27_1.name, 2)]
    assert not partial["complete"] and "september_over_first" not in partial
    assert partial["not_measured"] == {MAIN_2026_09_13.name: "not yet at concurrency 1, 2"}

    measured.clear()
    monkeypatch.setattr(ladder, "measure_cell", lambda *a: measured.append(a[2]) or plain(*a))
    rows = call("--no-curves")
    assert measured == [1, 2] and len(cells(rows)) == 4 and not rows["complete"]
    assert rows["not_measured"] == {} and set(rows["september_over_first"]) == {"1", "2"}
    whole = call()
    assert measured == [1, 2] and whole["complete"]
    assert whole["rows"] == rows["rows"]
    assert whole["rows"][:2] == partial["rows"]
    assert all(row["date_utc"].endswith("+00:00") for row in whole["rows"])
    again = call()
    assert again["curves"] == whole["curves"] and again["complete"]
    assert "4 rows were measured before" in capsys.readouterr().out


def test_rows_of_other_sources_or_devices_are_put_aside(
    call, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = call("--no-curves", "--rungs", V0_27_1.name)
    assert cells(first) == [(V0_27_1.name, 1), (V0_27_1.name, 2)]
    assert first["not_measured"] == {MAIN_2026_09_13.name: "not asked for"}
    monkeypatch.setattr(resume, "sources", lambda: "another program")
    other = call("--time-limit", "0")
    assert other["rows"] == []
    aside = json.loads(call.path.with_suffix(".before-1.json").read_text(encoding="utf-8"))
    assert aside["rows"] == first["rows"]

    body = {**first, "provenance": {**first["provenance"], "device": "another"}}
    call.path.write_text(json.dumps(first), encoding="utf-8")
    parts, why = resume.kept(call.path, body)
    assert parts == {} and "of other device" in why


def test_sources_are_all_that_a_row_depends_on() -> None:
    assert resume.sources() == resume.sources() and len(resume.sources()) == 64


def test_an_earlier_choice_of_products_is_taken_over() -> None:
    rows = [
        {"n": 64, "k": 32, "rows": 9, "chosen": str(CONFIGS[1])},
        {"n": 64, "k": 32, "rows": 18, "chosen": "library"},
    ]
    assert curves.choices_of(rows) == {(64, 32, 16): CONFIGS[1], (64, 32, 32): None}


def test_no_record_is_written_over_when_it_is_put_aside(
    call, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = call("--no-curves", "--rungs", V0_27_1.name)
    for program in ("another", "a third"):
        monkeypatch.setattr(resume, "sources", lambda program=program: program)
        call("--time-limit", "0")
    aside = json.loads(call.path.with_suffix(".before-1.json").read_text(encoding="utf-8"))
    assert aside["rows"] == first["rows"]
    assert call.path.with_suffix(".before-2.json").is_file()


def test_curves_of_another_rung_are_measured_anew(call) -> None:
    body = call("--no-curves", "--rungs", V0_27_1.name)
    call.path.write_text(
        json.dumps({**body, "curves": {"rung": V0_27_1.name}, "plain_decode": []}), encoding="utf-8"
    )
    parts, _ = resume.kept(call.path, body, curves_of=MAIN_2026_09_13.name)
    assert "curves" not in parts and "plain_decode" not in parts and parts["rows"]
    parts, _ = resume.kept(call.path, body, curves_of=V0_27_1.name)
    assert parts["curves"] == {"rung": V0_27_1.name}


def test_curves_that_fail_leave_the_rows(
    call, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(bench, preset, micro):
        raise RuntimeError("no kernel for it")
        yield

    monkeypatch.setattr(command, "_curves", fail)
    body = call("--rungs", V0_27_1.name)
    assert cells(body) == [(V0_27_1.name, 1), (V0_27_1.name, 2)] and not body["complete"]
    assert "no curves of v0.27.1: RuntimeError: no kernel for it" in capsys.readouterr().out


def test_the_command_is_written_down_without_folders_of_the_machine(call) -> None:
    body = call("--time-limit", "0")
    assert body["provenance"]["command"] == (
        "python -m kimik3_lab.rank --micro --output ladder.json --concurrency 1,2 --time-limit 0"
    )
    assert "operators" not in body  # those of an H200 say nothing of a processor

"""The command that measures steps ahead: its rows, its file, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from executor_world import micro_drafter, micro_model

from kimik3_lab.serving.executors.pinned import OnItsWay
from tools import measure_async_steps

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def micro(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands for the trained model, which takes seconds."""
    model = micro_model()
    drafter = micro_drafter(model)
    monkeypatch.setattr(measure_async_steps.checkpoint, "load", lambda *_, **__: model)
    monkeypatch.setattr(measure_async_steps.drafter_checkpoint, "load", lambda *_, **__: drafter)


ON_CPU = ("--device", "cpu", "--backend", "reference", "--tokens", "4", "--rounds", "1")


@pytest.mark.usefixtures("micro")
def test_rows_and_their_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "async_steps.json"
    wait = OnItsWay.wait
    assert measure_async_steps.main([*ON_CPU, "--seats", "1", "2", "--output", str(file)]) == 0
    assert OnItsWay.wait is wait
    body = json.loads(file.read_text(encoding="utf-8"))
    assert body["provenance"]["device"] == "cpu" and not body["cuda_graphs"]
    assert [(row["seats"], row["drafts"] > 0) for row in body["rows"]] == [
        (1, False), (1, True), (2, False), (2, True),
    ]  # fmt: skip
    for row in body["rows"]:
        in_turn, ahead = row["in_turn"], row["ahead"]
        assert row["equal_tokens"]
        assert in_turn["host_waits"] > ahead["host_waits"] == 1
        assert row["ratio"] == pytest.approx(
            ahead["us_per_step"] / in_turn["us_per_step"], abs=2e-3
        )
        assert 0 < ahead["us_waiting"] < ahead["us_per_step"]
    assert capsys.readouterr().out.count("tokens equal") == 4


@pytest.mark.usefixtures("micro")
def test_other_tokens_are_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measure = measure_async_steps.measure
    calls = iter(range(10))

    def other(*arguments: object) -> object:
        row, said = measure(*arguments)
        return row, [[*ids, next(calls)] for ids in said]

    monkeypatch.setattr(measure_async_steps, "measure", other)
    assert measure_async_steps.main([*ON_CPU, "--seats", "1", "--drafts", "0"]) == 1
    assert "DIFFER" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--seats", "0"), "from 1"),
        (("--rounds", "0"), "from 1"),
        (("--tokens", "1"), "--tokens from 2 to 224"),
        (("--tokens", "225"), "--tokens from 2 to 224"),
        (("--output", "."), "is a folder"),
    ],
)
def test_refusals(
    options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        measure_async_steps.main([*ON_CPU, *options])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_what_to_add(capsys: pytest.CaptureFixture[str]) -> None:
    assert measure_async_steps.main([]) == 2
    assert "--device cpu --backend reference" in capsys.readouterr().err

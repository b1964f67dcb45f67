from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kimik3_lab.teaching import predictions
from kimik3_lab.teaching.predictions import PredictionStore, PredictionsWarning, home_dir
from kimik3_lab.teaching.scoring import format_number, score


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "home" / "predictions.json"


@pytest.mark.parametrize(
    ("predicted", "actual", "ratio", "points", "verdict"),
    [
        (100, 100, 1.0, 100, "spot on"),
        (0, 0, 1.0, 100, "spot on"),
        (110, 100, 1.1, 96, "spot on"),
        (150, 100, 1.5, 82, "close"),
        (50, 100, 2.0, 70, "right size, wrong detail"),
        (500, 100, 5.0, 30, "wrong by a factor"),
        (1000, 100, 10.0, 0, "wrong by a factor"),
        (1, 100, 100.0, 0, "wrong by more than a factor of ten"),
        (-50, -100, 2.0, 70, "right size, wrong detail"),
        (-100, 100, math.inf, 0, "wrong sign"),
        (0, 100, math.inf, 0, "wrong by more than a factor of ten"),
        (5, 0, math.inf, 0, "wrong by more than a factor of ten"),
        (1e300, 1e-300, math.inf, 0, "wrong by more than a factor of ten"),
        (1e-200, 1e-200 * 2, 2.0, 70, "right size, wrong detail"),
    ],
)
def test_score(predicted: float, actual: float, ratio: float, points: int, verdict: str) -> None:
    result = score(predicted, actual)
    assert result.ratio == pytest.approx(ratio)
    assert (result.points, result.verdict) == (points, verdict)
    if predicted and actual:
        swapped = score(actual, predicted)
        assert (swapped.points, swapped.verdict) == (points, verdict)


def test_format_number() -> None:
    assert format_number(0) == "0"
    assert format_number(2.78e12) == "2,780,000,000,000"
    assert format_number(1e18) == "1e+18"
    assert format_number(-1234.5) == "-1,234"
    assert format_number(1 / 3) == "0.3333"


def test_answers_last_beyond_the_process(file: Path) -> None:
    PredictionStore(file).predict("00", "tps", 50, unit="tokens/s", question="how fast?")
    revealed = PredictionStore(file).reveal("00", "tps", 100)
    again = PredictionStore(file).get("00", "tps")
    assert again == revealed
    assert again is not None
    assert (again.value, again.actual, again.unit, again.question) == (
        50,
        100,
        "tokens/s",
        "how fast?",
    )
    assert again.score is not None
    assert again.score.points == 70


def test_a_cell_that_runs_again_changes_nothing(file: Path) -> None:
    store = PredictionStore(file)
    first = store.predict("00", "tps", 50)
    store.reveal("00", "tps", 100)
    assert store.predict("00", "tps", 50).actual == 100
    assert store.get("00", "tps").predicted_at == first.predicted_at  # type: ignore[union-attr]


def test_a_change_before_the_answer_is_free_after_it_counts(file: Path) -> None:
    store = PredictionStore(file)
    store.predict("00", "tps", 50)
    assert store.predict("00", "tps", 60).attempt == 1
    store.reveal("00", "tps", 100)
    changed = store.predict("00", "tps", 99)
    assert (changed.attempt, changed.actual) == (2, None)


def test_reveal_without_prediction_keeps_nothing(file: Path) -> None:
    store = PredictionStore(file)
    assert store.reveal("00", "never_asked", 3) is None
    assert store.all() == []


@pytest.mark.parametrize("value", [math.nan, math.inf, "12"])
def test_only_numbers_are_predictions(file: Path, value: object) -> None:
    with pytest.raises(ValueError, match="expected a finite number"):
        PredictionStore(file).predict("00", "tps", value)  # type: ignore[arg-type]
    assert not file.exists()


def test_lessons_are_listed_in_order(file: Path) -> None:
    store = PredictionStore(file)
    for lesson, name in (("08", "b"), ("00", "z"), ("00", "a")):
        store.predict(lesson, name, 1)
    assert [(p.lesson, p.name) for p in store.all()] == [("00", "z"), ("00", "a"), ("08", "b")]
    assert [p.name for p in store.all("08")] == ["b"]


@pytest.mark.parametrize(
    "content",
    [
        b"{not json",
        b"\xff\xfe",
        b"[]",
        b'{"version": 2, "predictions": []}',
        b'{"version": 1}',
        b'{"version": 1, "predictions": [{"lesson": "00"}]}',
        b'{"version": 1, "predictions": [{"lesson": 0, "name": "a", "value": 1}]}',
        b'{"version": 1, "predictions": [{"lesson": "00", "name": "a", "value": NaN}]}',
    ],
)
def test_a_broken_file_is_set_aside_whole(file: Path, content: bytes) -> None:
    file.parent.mkdir()
    file.write_bytes(content)
    store = PredictionStore(file)
    assert store.all() == []
    with pytest.warns(PredictionsWarning, match="kept as"):
        store.predict("00", "tps", 50)
    kept = list(file.parent.glob("predictions.broken-*.json"))
    assert [path.read_bytes() for path in kept] == [content]
    assert [p.name for p in PredictionStore(file).all()] == ["tps"]


def test_a_disk_that_cannot_be_written_costs_a_warning(tmp_path: Path) -> None:
    obstacle = tmp_path / "file"
    obstacle.write_text("a file where a folder should be")
    store = PredictionStore(obstacle / "predictions.json")
    with pytest.warns(PredictionsWarning, match="this session only"):
        store.predict("00", "tps", 50)
    with pytest.warns(PredictionsWarning):
        revealed = store.reveal("00", "tps", 100)
    assert revealed is not None
    assert revealed.actual == 100
    assert [p.value for p in store.all()] == [50]


def test_what_could_not_be_saved_is_saved_later(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = PredictionStore(file)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(predictions, "_write", full)
        with pytest.warns(PredictionsWarning, match="No space left"):
            store.predict("00", "first", 1)
    store.predict("00", "second", 2)
    assert [p.name for p in PredictionStore(file).all()] == ["first", "second"]


def test_a_failed_write_leaves_the_old_file_whole(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = PredictionStore(file)
    store.predict("00", "tps", 50)
    before = file.read_bytes()

    def fail(*_: object) -> None:
        raise OSError("torn off")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        with pytest.warns(PredictionsWarning):
            store.predict("00", "tps", 60)
    assert file.read_bytes() == before
    assert not list(file.parent.glob("*.tmp"))


def test_notebooks_at_the_same_time_lose_nothing(file: Path) -> None:
    count, processes = 12, 4
    code = (
        "import sys; from pathlib import Path\n"
        "from kimik3_lab.teaching.predictions import PredictionStore\n"
        "store = PredictionStore(Path(sys.argv[1]))\n"
        f"for n in range({count}): store.predict(sys.argv[2], f'q{{n}}', n + 1)\n"
    )
    running = [
        subprocess.Popen([sys.executable, "-W", "error", "-c", code, str(file), f"{lesson:02}"])
        for lesson in range(processes)
    ]
    assert [process.wait(timeout=60) for process in running] == [0] * processes
    assert len(PredictionStore(file).all()) == count * processes


def test_reset_keeps_the_old_file(file: Path) -> None:
    store = PredictionStore(file)
    assert store.reset() is None
    store.predict("00", "tps", 50)
    place = store.reset()
    assert place is not None
    assert json.loads(place.read_text())["predictions"][0]["name"] == "tps"
    assert store.all() == []
    assert not file.exists()


def test_home_is_chosen_by_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(predictions.HOME_ENV, str(tmp_path))
    assert PredictionStore().path == tmp_path / "predictions.json"
    monkeypatch.delenv(predictions.HOME_ENV)
    assert home_dir().name == "k3lab"

"""Two runs of one ladder make one file, and two different ladders do not."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from kimik3_lab.rank import repeat
from kimik3_lab.teaching.rank_record import RankRecord, default_path


@pytest.fixture
def recorded() -> dict[str, Any]:
    return json.loads(default_path().read_text(encoding="utf-8"))


@pytest.fixture
def pair(recorded: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Take the recorded file apart again, into the two files that it was made of."""
    again = recorded.pop("again")
    second = {**recorded, **{key: again[key] for key in again if key != "what"}}
    for part in ("curves", "plain_decode"):
        del second[part]
    return recorded, second


def test_the_recorded_file_is_two_runs_put_together(
    pair: tuple[dict[str, Any], dict[str, Any]], tmp_path: Path
) -> None:
    paths = [tmp_path / name for name in ("first.json", "second.json", "both.json")]
    for path, body in zip(paths, pair, strict=False):
        path.write_text(json.dumps(body), encoding="utf-8")
    what = json.loads(default_path().read_text(encoding="utf-8"))["again"]["what"]
    command = [str(paths[0]), str(paths[1]), "--what", what, "--output", str(paths[2])]
    assert repeat.main(command) == 0
    assert paths[2].read_bytes() == default_path().read_bytes()


def test_the_reader_finds_both(recorded: dict[str, Any]) -> None:
    record = RankRecord(recorded)
    assert record.again is not None and record.again.again is None
    assert record.again.concurrencies == record.concurrencies
    assert [rung.name for rung in record.again.rungs] == [rung.name for rung in record.rungs]
    assert recorded["again"]["september_over_first"] == {
        str(c): round(record.again.gain(c), 4) for c in record.concurrencies
    }
    for made in (recorded["provenance"], recorded["again"]["provenance"]):
        assert "/" not in made["command"].replace("data/results/h200/ladder.json", "")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda body: body["workload"].update(prompt_tokens=4000), "one workload"),
        (
            lambda body: body["rows"].pop(),
            "same cells in both runs, only one has ...look-ahead cap', 16",
        ),
        (lambda body: body["rows"][3].update(launches=1), r"counts other \['launches'\]"),
        (lambda body: body["rows"][0].update(latency_s=None), "lacks .'latency_s'"),
        (lambda body: body["provenance"].update(device="another"), "one kind of device"),
    ],
)
def test_what_is_not_the_same_ladder_is_refused(
    pair: tuple[dict[str, Any], dict[str, Any]], change: Any, message: str
) -> None:
    first, second = pair[0], copy.deepcopy(pair[1])
    change(second)
    with pytest.raises(ValueError, match=message):
        repeat.beside(first, second, "again")


@pytest.mark.parametrize(
    "content", ["{", "[]", "{}", '{"rows": [], "workload": {}, "provenance": {}}']
)
def test_a_file_that_is_no_ladder_is_refused_in_one_line(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, output = tmp_path / "broken.json", tmp_path / "out.json"
    path.write_text(content, encoding="utf-8")
    command = [str(default_path()), str(path), "--what", "it", "--output", str(output)]
    assert repeat.main(command) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "broken.json" in said
    assert not output.exists()


def test_a_missing_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [str(default_path()), str(tmp_path / "none.json"), "--what", "it", "--output", "x"]
    assert repeat.main(command) == 2
    assert "none.json" in capsys.readouterr().err


def test_one_run_is_not_two(pair: tuple[dict[str, Any], dict[str, Any]]) -> None:
    first, _ = pair
    with pytest.raises(ValueError, match="the same run"):
        repeat.beside(first, copy.deepcopy(first), "again")


def test_other_packages_are_another_ladder(pair: tuple[dict[str, Any], dict[str, Any]]) -> None:
    first, second = copy.deepcopy(pair)
    second["provenance"]["packages"]["torch"] = "2.12.0"
    with pytest.raises(ValueError, match="the same packages"):
        repeat.beside(first, second, "again")

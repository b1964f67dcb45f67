"""What may be asked of the rank ladder's command, and what it says to the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from kimik3_lab.rank import options
from kimik3_lab.rank.build import rank_presets

NAMES = [preset.name for preset in rank_presets()]


def test_every_rung_can_be_asked_for_alone_and_with_others() -> None:
    for name in NAMES:
        assert options.read(["--rungs", name]).rungs == [name]
    assert options.read(["--rungs", ",".join(NAMES)]).rungs == NAMES
    assert options.read(["--rungs", f"{NAMES[1]}, {NAMES[0]},{NAMES[1]}"]).rungs == NAMES[1::-1]


def test_defaults() -> None:
    args = options.read([])
    assert args.concurrency == [1, 4, 16] and args.rungs is None and args.output is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rungs", "batch of 16"], "unknown rung 'batch of 16'"),
        (["--rungs", ""], "unknown rung ''"),
        (["--concurrency", "a,b"], "numbers above 0"),
        (["--concurrency", "1,0"], "numbers above 0"),
        (["--concurrency", ""], "numbers above 0"),
    ],
)
def test_a_wrong_word_is_refused_at_once(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        options.read(words)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "is a folder"), ("{", "no JSON"), ("[]", "no file of this command"),
     ('{"rows": 3}', "no file of this command")],
)  # fmt: skip
def test_an_output_that_cannot_be_is_refused_before_anything_is_measured(
    tmp_path: Path, content: str | None, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ladder.json"
    path.mkdir() if content is None else path.write_text(content, encoding="utf-8")
    with pytest.raises(SystemExit):
        options.read(["--output", str(path)])
    assert message in capsys.readouterr().err
    assert [found.name for found in tmp_path.iterdir()] == ["ladder.json"]
    assert content is None or path.read_text(encoding="utf-8") == content


def test_an_output_below_a_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit):
        options.read(["--output", str(tmp_path / "file" / "ladder.json")])
    assert "--output" in capsys.readouterr().err


def test_a_good_output_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "new" / "ladder.json"
    assert options.read(["--output", str(path)]).output == path
    assert list(path.parent.iterdir()) == []

"""The text that the tiny K3 is trained on: manifest, split, held-out files, tokenizer."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

from tools.train_tiny_k3 import corpus
from tools.train_tiny_k3.__main__ import COMMANDS, main
from tools.train_tiny_k3.corpus import CorpusError, Document
from tools.train_tiny_k3.shape import target_config
from tools.train_tiny_k3.tokenizer import encode_documents, train_tokenizer


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A small library with everything that must be left out."""
    root = tmp_path / "Lib"
    files = {
        "json/decoder.py": b"def decode(text):\n    return text\n",
        "traceback.py": "# not ASCII: é\r\n".encode(),
        "json/tests/test_decoder.py": b"import unittest\n",
        "test/support.py": b"x = 1\n",
        "encodings/cp437.py": b"table = ()\n",
        "pydoc_data/topics.py": b"topics = {}\n",
        "site-packages/pip.py": b"x = 1\n",
        "_sysconfigdata__linux.py": b"x = 1\n",
        "empty.py": b"",
        "latin.py": b"# \xe9\n",
        "readme.txt": b"no code\n",
    }
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return root


def write_manifest(library: Path) -> Path:
    path = library.parent / "corpus.json"
    path.write_text(json.dumps(corpus.describe(library)), encoding="utf-8")
    return path


def test_the_manifest_names_text_only_and_splits_by_path(library: Path) -> None:
    manifest = corpus.describe(library)
    splits = {entry["path"]: entry["split"] for entry in manifest["files"]}
    assert splits == {"json/decoder.py": "train", "traceback.py": "held_out"}
    assert manifest["train_bytes"] == 34 and manifest["held_out_bytes"] == 17
    with pytest.raises(CorpusError, match=r"holds no \.py file"):
        corpus.describe(library / "site-packages" / "nothing")


@pytest.mark.parametrize("packed", [False, True])
def test_the_text_is_read_byte_for_byte(library: Path, packed: bool) -> None:
    manifest = write_manifest(library)
    place = library
    if packed:
        place = library.parent / "corpus.tar.xz"
        with tarfile.open(place, "w:xz") as archive:
            for name in ("json/decoder.py", "traceback.py"):
                archive.add(library / name, name)
    text = corpus.open_corpus(place, manifest)
    assert [document.path for document in text.train] == ["json/decoder.py"]
    assert text.held_out == [Document("traceback.py", "# not ASCII: é\r\n")]
    assert corpus.held_out_documents(library, manifest) == text.held_out


def test_another_file_than_the_manifest_says_is_refused(library: Path) -> None:
    manifest = write_manifest(library)
    (library / "json" / "decoder.py").write_bytes(b"def decode(text):\n    return TEXT\n")
    with pytest.raises(CorpusError, match=r"decoder\.py has SHA-256"):
        corpus.load_corpus(library, manifest)
    assert corpus.held_out_documents(library, manifest), "which is still as it was"
    (library / "json" / "decoder.py").unlink()
    with pytest.raises(CorpusError, match="is missing"):
        corpus.load_corpus(library, manifest)


def test_the_shipped_held_out_files_are_those_of_the_manifest() -> None:
    manifest = json.loads(corpus.MANIFEST.read_text(encoding="utf-8"))
    documents = corpus.held_out_documents()
    sizes = {document.path: len(document.text.encode()) for document in documents}
    assert sum(sizes.values()) == manifest["held_out_bytes"]
    assert 0.04 < manifest["held_out_bytes"] / (
        manifest["held_out_bytes"] + manifest["train_bytes"]
    ) < 0.06  # fmt: skip
    on_disk = {
        path.relative_to(corpus.HELD_OUT_FOLDER).as_posix()
        for path in corpus.HELD_OUT_FOLDER.rglob("*")
        if path.is_file()
    }
    assert on_disk == {*sizes, "LICENSE.txt"}
    for entry in manifest["files"]:
        assert corpus.split_of(entry["path"]) == entry["split"]
        assert not corpus.NOT_TEXT & set(entry["path"].split("/"))
    licence = (corpus.HELD_OUT_FOLDER / "LICENSE.txt").read_text(encoding="utf-8")
    assert "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2" in licence


def test_a_tokenizer_needs_enough_text() -> None:
    documents = [Document("a.py", "def f(x):\n    return x\n")]
    with pytest.raises(ValueError, match="is the text too small"):
        train_tokenizer(target_config(), documents)


def test_the_tokenizer_learns_the_words_of_its_text() -> None:
    text = "\n".join(f"def name_{i}(self, value{i * 7}):\n    return {i * 31}" for i in range(3000))
    documents = [Document("a.py", text)]
    trained = train_tokenizer(target_config(), documents)
    ids = encode_documents(trained, documents)[0]
    assert trained.decode(ids) == text and min(ids) > 2
    assert len(trained.encode(" return").ids) == 1
    assert len(ids) < len(text) / 2.5


def test_a_missing_file_is_said_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    missing = tmp_path / "corpus.tar.xz"
    words = ["tokenizer", "--corpus", str(missing), "--out", str(tmp_path / "out")]
    monkeypatch.setattr("sys.argv", ["tools.train_tiny_k3", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert str(missing) in error and error.count("\n") == 1


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    monkeypatch.setattr("sys.argv", ["tools.train_tiny_k3", command, "--help"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert command in capsys.readouterr().out

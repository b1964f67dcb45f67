"""The text: Python's standard library, split into files to train on and files held out.

Needs the standard library only. ``data/tiny-k3/corpus.json`` is the manifest: every file's path,
size, SHA-256 and split. Whoever has CPython 3.11.7 has the text; the held-out files also lie in
``data/held_out/``, so that a lesson can score the model without a second Python.
"""

from __future__ import annotations

import hashlib
import json
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from kimik3_lab.paths import repository_dir

__all__ = [
    "HELD_OUT_FOLDER",
    "MANIFEST",
    "PYTHON_VERSION",
    "Corpus",
    "CorpusError",
    "Document",
    "describe",
    "held_out_documents",
    "load_corpus",
    "open_corpus",
    "split_of",
]

PYTHON_VERSION = "3.11.7"
MANIFEST = repository_dir() / "data" / "tiny-k3" / "corpus.json"
HELD_OUT_FOLDER = repository_dir() / "data" / "held_out"
#: Folders left out: tests, what pip installs, character tables, and a generated copy of the manual.
NOT_TEXT = {
    "test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "pydoc_data",
}  # fmt: skip
#: Made when Python is built, so different on every machine.
BUILT = ("_sysconfigdata", "config-")
#: Share of the paths, by hash, that is held out.
HELD_OUT_SHARE = 0.065


class CorpusError(ValueError):
    """Text that is not the text of the manifest; the message names the file."""


@dataclass(frozen=True)
class Document:
    """One file: its path below ``Lib/`` with forward slashes, and its text."""

    path: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """All files, in the order of their paths."""

    train: list[Document]
    held_out: list[Document]


def split_of(path: str) -> str:
    """Tell whether a path is trained on (``"train"``) or held out (``"held_out"``).

    A hash of the path decides, so that a file keeps its place whatever else is added.

    Examples
    --------
    >>> split_of("json/decoder.py"), split_of("traceback.py")
    ('train', 'held_out')
    """
    digest = hashlib.sha256(path.encode()).digest()
    share = int.from_bytes(digest[:8], "big") / 2**64
    return "held_out" if share < HELD_OUT_SHARE else "train"


def describe(folder: Path) -> dict[str, Any]:
    """Make the manifest of the standard library in ``folder``.

    Raises
    ------
    CorpusError
        If the folder holds no library, or a file is not UTF-8.
    """
    files = []
    for path in sorted(folder.rglob("*.py"), key=lambda path: path.relative_to(folder).as_posix()):
        name = path.relative_to(folder).as_posix()
        parts = PurePosixPath(name).parts
        if NOT_TEXT & set(parts) or any(parts[0].startswith(prefix) for prefix in BUILT):
            continue
        data = path.read_bytes()
        if not data:
            continue  # an empty __init__.py has nothing to predict
        try:
            data.decode("utf-8")
        except UnicodeDecodeError:
            continue  # two files declare another encoding
        files.append(
            {
                "path": name,
                "bytes": len(data),
                "sha256": hashlib.sha256(data).hexdigest(),
                "split": split_of(name),
            }
        )
    if not files:
        raise CorpusError(f"{folder} holds no .py file: give the Lib folder of CPython")
    sizes = {
        split: sum(entry["bytes"] for entry in files if entry["split"] == split)
        for split in ("train", "held_out")
    }
    return {
        "what": f"standard library of CPython {PYTHON_VERSION}, its own Python files",
        "licence": "PSF-2.0, © Python Software Foundation; data/held_out/LICENSE.txt",
        "source": f"https://www.python.org/ftp/python/{PYTHON_VERSION}/Python-{PYTHON_VERSION}.tgz",
        "left_out": {
            "folders": sorted(NOT_TEXT),
            "built": [prefix + "*" for prefix in BUILT],
            "also": "empty files, and files that are not UTF-8",
        },
        "split": f"held out: first 8 bytes of SHA-256 of the path, over 2**64, < {HELD_OUT_SHARE}",
        "files_in_all": len(files),
        "train_bytes": sizes["train"],
        "held_out_bytes": sizes["held_out"],
        "files": files,
    }


def load_corpus(folder: Path, manifest: Path = MANIFEST) -> Corpus:
    """Read the files of the manifest below ``folder`` and check each.

    Raises
    ------
    CorpusError
        If a file is missing or is not byte for byte the one in the manifest.
    """
    entries = _entries(manifest)
    splits: dict[str, list[Document]] = {"train": [], "held_out": []}
    for entry in entries:
        splits[entry["split"]].append(_read(folder, entry))
    return Corpus(**splits)


def held_out_documents(folder: Path = HELD_OUT_FOLDER, manifest: Path = MANIFEST) -> list[Document]:
    """Read the held-out files that come with the lab, and check each.

    Raises
    ------
    CorpusError
        If one is missing or is not the one in the manifest.
    """
    entries = _entries(manifest)
    return [_read(folder, entry) for entry in entries if entry["split"] == "held_out"]


def open_corpus(path: Path, manifest: Path = MANIFEST) -> Corpus:
    """Read a corpus from a ``Lib`` folder or from a tar file of one.

    Raises
    ------
    CorpusError
        As :func:`load_corpus`.
    """
    if path.is_dir():
        return load_corpus(path, manifest)
    with tempfile.TemporaryDirectory() as scratch, tarfile.open(path) as archive:
        archive.extractall(scratch, filter="data")
        return load_corpus(Path(scratch), manifest)


def _entries(manifest: Path) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = json.loads(manifest.read_text(encoding="utf-8"))["files"]
    return entries


def _read(folder: Path, entry: dict[str, Any]) -> Document:
    path = folder / entry["path"]
    if not path.is_file():
        raise CorpusError(f"{path} is missing: the manifest wants CPython {PYTHON_VERSION}")
    data = path.read_bytes()
    found = hashlib.sha256(data).hexdigest()
    if found != entry["sha256"]:
        raise CorpusError(
            f"{path} has SHA-256 {found[:12]}..., the manifest says {entry['sha256'][:12]}...: "
            f"it is not the file of CPython {PYTHON_VERSION}"
        )
    return Document(entry["path"], data.decode("utf-8"))

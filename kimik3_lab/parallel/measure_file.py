"""The file that a measurement leaves: looked at before ranks start, written whole each time.

Needs the standard library. :mod:`kimik3_lab.parallel.measure` is the command.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["OutputError", "check_output", "write_result"]


class OutputError(ValueError):
    """A file that cannot, or must not, be written; the message says why and what to do."""


def check_output(path: Path, *, dry_run: bool) -> None:
    """Refuse a name that could not be written after minutes, or whose file is worth more.

    A missing folder is made. Nothing else stays of the attempt.

    Raises
    ------
    OutputError
        If ``path`` is a folder or its folder cannot be written, or a dry run would replace a file
        that is no dry run's.
    """
    if path.is_dir():
        raise OutputError(f"{path} is a folder: name a file, such as {path / 'collectives.json'}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise OutputError(
            f"{path} cannot be written ({error.strerror}): name a file in a folder of yours"
        ) from error
    os.close(handle)
    os.unlink(name)
    if dry_run and path.exists() and not _is_dry_run(path):
        raise OutputError(
            f"{path} is no dry run's, and a dry run would replace it: name another file, or delete "
            "this one first"
        )


def write_result(path: Path, body: Mapping[str, Any]) -> None:
    """Write a result; a file of that name stays as it was until all is written.

    Examples
    --------
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_result(Path(folder, "result.json"), {"layers": []})
    ...     os.listdir(folder)
    ['result.json']
    """
    text = json.dumps(body, indent=1, allow_nan=False) + "\n"
    handle, unfinished = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(unfinished, 0o644)
        os.replace(unfinished, path)
    except BaseException:
        os.unlink(unfinished)
        raise


def _is_dry_run(path: Path) -> bool:
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False  # whatever it is, this command did not write it
    return isinstance(body, dict) and body.get("dry_run") is True

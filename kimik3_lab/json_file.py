"""Write a result as JSON: whole or not at all, to a place that was looked at before.

Needs the standard library only. Commands that keep simulated or measured results use it.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["OutputError", "check_output", "write_json"]


class OutputError(ValueError):
    """A file that cannot, or must not, be written; the message says why and what to do."""


def check_output(path: Path) -> None:
    """Refuse a name that could not be written: minutes of work are lost if that is seen at the end.

    A missing folder is made. Nothing else stays of the attempt.

    Raises
    ------
    OutputError
        If ``path`` is a folder, or its folder cannot be written.
    """
    if path.is_dir():
        raise OutputError(f"{path} is a folder: name a file, such as {path / 'result.json'}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise OutputError(
            f"{path} cannot be written ({error.strerror}): name a file in a folder of yours"
        ) from error
    os.close(handle)
    os.unlink(name)


def write_json(path: Path, body: Mapping[str, Any] | Sequence[Any]) -> None:
    """Write ``body`` to ``path``; a file of that name stays as it was until all is written.

    Raises
    ------
    ValueError
        If a number is infinite or none at all, which JSON does not know.

    Examples
    --------
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_json(Path(folder, "result.json"), {"layers": []})
    ...     os.listdir(folder)
    ['result.json']
    """
    text = json.dumps(body, indent=1, allow_nan=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise

"""Whether a run may write where it is told to: a measurement is not replaced by a dry run.

Needs the standard library. :mod:`kimik3_lab.parallel.measure` is the command.
"""

from __future__ import annotations

import json
from pathlib import Path

from kimik3_lab import json_file
from kimik3_lab.json_file import OutputError

__all__ = ["OutputError", "check_output"]


def check_output(path: Path, *, dry_run: bool) -> None:
    """Refuse a name that could not be written after minutes, or whose file is worth more.

    Raises
    ------
    OutputError
        If ``path`` is a folder or its folder cannot be written, or a dry run would replace a file
        that is no dry run's.
    """
    json_file.check_output(path)
    if dry_run and path.exists() and not _is_dry_run(path):
        raise OutputError(
            f"{path} is no dry run's, and a dry run would replace it: name another file, or delete "
            "this one first"
        )


def _is_dry_run(path: Path) -> bool:
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False  # whatever it is, this command did not write it
    return isinstance(body, dict) and body.get("dry_run") is True

"""Write a result as JSON: whole or not at all.

Needs the standard library only. The commands that keep simulated results use it.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["write_json"]


def write_json(path: Path, body: Mapping[str, Any] | Sequence[Any]) -> None:
    """Write ``body`` to ``path``; a file of that name stays as it was until all is written.

    Raises
    ------
    ValueError
        If a number is infinite or none at all, which JSON does not know.
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

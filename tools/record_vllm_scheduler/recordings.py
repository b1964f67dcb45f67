"""Files of recordings, and where each comes from.

Needs the standard library only. A file is ``{"vllm", "family", "seed", "scenarios"}`` in gzipped
JSON, written so that the same recordings are the same bytes; ``PROVENANCE.json`` beside it says who
made it, with what.
"""

from __future__ import annotations

import datetime
import gzip
import hashlib
import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["note", "read", "write", "write_json"]


def read(path: Path) -> dict[str, Any]:
    """Read a file of recordings, gzipped or not."""
    data = path.read_bytes()
    return json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write ``content`` to ``path``, gzipped, in one go."""
    text = json.dumps(content, separators=(",", ":"))
    # No name and no time inside: the bytes depend on the content only.
    _replace(path, gzip.compress(text.encode(), compresslevel=9, mtime=0))


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write ``content`` to ``path`` as JSON for people to read, in one go."""
    _replace(path, (json.dumps(content, indent=1) + "\n").encode())


def note(path: Path, **facts: Any) -> None:
    """Record in ``PROVENANCE.json`` beside ``path`` how ``path`` was made."""
    ledger = path.parent / "PROVENANCE.json"
    entries = json.loads(ledger.read_text(encoding="utf-8")) if ledger.exists() else {}
    data = path.read_bytes()
    entries[path.name] = {
        **facts,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "python": platform.python_version(),
        "bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
    }
    write_json(ledger, dict(sorted(entries.items())))


def _replace(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(path.name + ".partial")
    scratch.write_bytes(data)
    scratch.replace(path)

"""What an earlier call has measured and a later one may keep.

Needs the standard library only. ``python -m kimik3_lab.rank`` takes longer than one call may on a
lent machine, so it goes on where the last call stopped.

A row is kept if it was measured with the same sources, on a device and with packages of the same
name, and of the same workload. Anything else would put two programs into one table.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import k3_kernels

__all__ = ["CURVES", "kept", "missing_cells", "sources"]

#: Parts of the file that are no rows.
CURVES = ("distinct_experts", "curves", "plain_decode")
#: Folders and modules of the package whose code a measurement runs through.
_PARTS = ("rank", "reference", "serving", "performance", "config.py", "drafter_config.py")
#: Entries of a provenance that must be the same.
_SAME = ("device", "cpu_count", "python", "packages")


@cache
def sources() -> str:
    """SHA-256 over all code that a measurement runs through, and over the kernels' constants.

    Examples
    --------
    >>> len(sources())
    64
    """
    home = Path(__file__).parents[1]
    roots = [home / part for part in _PARTS] + [Path(k3_kernels.__file__).parent]
    files = [f for root in roots for f in (root.rglob("*") if root.is_dir() else [root])]
    digest = hashlib.sha256()
    for path in sorted(f for f in files if f.suffix in (".py", ".json")):
        digest.update(f"{path.parent.name}/{path.name}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def kept(
    path: Path | None, body: Mapping[str, Any], *, curves_of: str | None = None
) -> tuple[dict[str, Any], str]:
    """Take what can be kept out of the file of an earlier call.

    Parameters
    ----------
    path
        The file, if there is to be one.
    body
        Of this call: ``sources``, ``provenance`` and ``workload`` say what must be the same.
    curves_of
        Rung whose cost curves are wanted: those of another are measured anew.

    Returns
    -------
    parts, why
        ``rows`` and whatever else is there; and a sentence for the reader.
    """
    if path is None or not path.is_file():
        return {}, "nothing was measured before"
    before = json.loads(path.read_text(encoding="utf-8"))
    differs = [
        name for name in ("sources", "workload") if _plain(before.get(name)) != _plain(body[name])
    ]
    ours, theirs = body["provenance"], before.get("provenance", {})
    differs += [name for name in _SAME if ours.get(name) != theirs.get(name)]
    if differs:
        aside = _free(path)
        os.replace(path, aside)
        return {}, f"{path} is of other {', '.join(differs)}: moved to {aside}, measured anew"
    parts = {name: before[name] for name in ("rows", "products", *CURVES) if name in before}
    of = parts.get("curves", {})
    if curves_of is not None and isinstance(of, dict) and of.get("rung", curves_of) != curves_of:
        for name in CURVES:
            parts.pop(name, None)
    return parts, f"{len(parts['rows'])} rows were measured before"


def missing_cells(
    rows: Iterable[Mapping[str, Any]], rungs: Sequence[str], concurrencies: Sequence[int]
) -> dict[str, list[int]]:
    """Concurrencies that each rung lacks, for those that lack any.

    Examples
    --------
    >>> missing_cells([{"rung": "old", "concurrency": 1}], ["old", "new"], [1, 4])
    {'old': [4], 'new': [1, 4]}
    """
    there = {(row["rung"], row["concurrency"]) for row in rows}
    lacks = {rung: [c for c in concurrencies if (rung, c) not in there] for rung in rungs}
    return {rung: found for rung, found in lacks.items() if found}


def _free(path: Path) -> Path:
    """Return a name beside ``path`` that nothing has yet: no record is written over."""
    number = 1
    while (aside := path.with_suffix(f".before-{number}.json")).exists():
        number += 1
    return aside


def _plain(value: Any) -> Any:
    """As JSON would give it back, without the concurrencies of this call."""
    plain = json.loads(json.dumps(value))
    if isinstance(plain, dict):
        plain.pop("requests", None)
    return plain

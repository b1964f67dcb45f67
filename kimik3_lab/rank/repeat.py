"""``python -m kimik3_lab.rank.repeat``: put a second run of the ladder beside the first.

Needs the standard library only. A ladder is measured once a cell, so one run cannot say how exact
it is: the same ladder on another machine can. Lesson 10 shows both. A new run of
``python -m kimik3_lab.rank`` does not keep the second one: join them again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kimik3_lab.rank import results

__all__ = ["COUNTED", "beside", "main"]

#: What a run counts instead of timing: the same in every run of a cell.
COUNTED = (
    "forwards", "drafter_forwards", "launches", "gather_bytes", "output_tokens", "bytes",
    "kda_state_bytes_copied", "kda_state_writes",
)  # fmt: skip
#: Parts of the second file that are kept.
_KEPT = ("provenance", "sources", "rows", "september_over_first")


def beside(first: Mapping[str, Any], second: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Return the first file with the second one's rows under ``again``.

    Parameters
    ----------
    first, second
        Files of ``python -m kimik3_lab.rank`` with the same cells. The second may lack the curves.
    what
        How the second run differs from the first, in words.

    Raises
    ------
    ValueError
        If the two are not runs of the same ladder: another workload, other cells, other counts,
        another device or other packages; or if they are one and the same run.

    Examples
    --------
    >>> row = {"rung": "old", "concurrency": 1, **dict.fromkeys(results.ROW_KEYS[2:], 1)}
    >>> file = {"workload": {}, "rows": [row], "provenance": {"device": "H200"}}
    >>> other = {**file, "rows": [{**row, "latency_s": 2}]}
    >>> list(beside(file, other, "on another machine")["again"])
    ['what', 'provenance', 'rows']
    """
    for body in (first, second):
        results.check_rows(body["rows"])
    if first["workload"] != second["workload"]:
        raise ValueError(
            f"expected two runs of one workload, got {first['workload']} and {second['workload']}"
        )
    ones, others = (_by_cell(body["rows"]) for body in (first, second))
    if ones.keys() != others.keys():
        raise ValueError(
            f"expected the same cells in both runs, only one has {sorted(ones.keys() ^ others)}: "
            "call python -m kimik3_lab.rank again to go on"
        )
    for cell, one in ones.items():
        differ = [key for key in COUNTED if one.get(key) != others[cell].get(key)]
        if differ:
            raise ValueError(
                f"cell {cell} counts other {differ} in the second run: not the same ladder"
            )
    if first["rows"] == second["rows"]:
        raise ValueError("both files hold the same run: expected two")
    for name, kind in (("device", "one kind of device"), ("packages", "the same packages")):
        found = [body["provenance"].get(name) for body in (first, second)]
        if found[0] != found[1]:
            raise ValueError(f"expected two runs with {kind}, got {found[0]} and {found[1]}")
    again = {"what": what, **{key: second[key] for key in _KEPT if key in second}}
    return {**first, "again": again}


def _by_cell(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, int], Mapping[str, Any]]:
    return {(row["rung"], row["concurrency"]): row for row in rows}


def _load(path: Path) -> dict[str, Any]:
    """Read a file of the ladder, or say why it is none."""
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    lacks = {"rows", "workload", "provenance"} - set(body if isinstance(body, dict) else ())
    if lacks:
        raise ValueError(f"{path} is no file of python -m kimik3_lab.rank: no {sorted(lacks)}")
    if not body["rows"]:
        raise ValueError(f"{path} has no rows: call python -m kimik3_lab.rank again to go on")
    return body


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m kimik3_lab.rank.repeat",
        description="Put the rows of a second run of the ladder into the file of the first.",
    )
    parser.add_argument("first", type=Path, help="file of the run that is the record")
    parser.add_argument("second", type=Path, help="file of the run beside it")
    parser.add_argument("--what", required=True, help="how the second run differs, in words")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args(argv)
    try:
        first, second = (_load(path) for path in (args.first, args.second))
        body = beside(first, second, args.what)
        results.save(body, args.output)
    except (OSError, ValueError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    print(f"{len(body['rows'])} cells twice, written to {args.output}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""The command line of ``python -m kimik3_lab.rank``: what may be asked for, checked at once.

Needs the presets. What is wrong is said before anything is built, since building takes a minute.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from kimik3_lab.json_file import check_output
from kimik3_lab.rank.build import rank_presets

__all__ = ["parser", "probe", "read", "rung_names"]


def parser() -> argparse.ArgumentParser:
    """Return the parser; :func:`read` also checks what it finds."""
    made = argparse.ArgumentParser(
        prog="python -m kimik3_lab.rank",
        description="Climb the ladder from vLLM 0.27.1 to main of 2026-09-13 and beyond, with one "
        "tensor-parallel rank of Kimi K3 on one GPU: true widths, random weights, no collectives.",
        epilog="A call with --output goes on where the last one stopped. A file of another program "
        "version, machine or workload is not mixed with new rows: it is moved aside, under a "
        "number, and the ladder begins anew.",
    )
    made.add_argument("--output", type=Path, help="write the rows to this JSON file")
    made.add_argument("--concurrency", default="1,4,16", help="cells of each rung")
    made.add_argument("--rungs", help="only these rungs, by name, separated by commas")
    made.add_argument("--layers", type=int, default=24, help="layers of the slice")
    made.add_argument(
        "--quick", action="store_true", help="first and September rung only, no curves"
    )
    made.add_argument("--warm", action="store_true", help="compile only, in several processes")
    made.add_argument("--warm-part", help=argparse.SUPPRESS)
    made.add_argument("--warm-timeout", type=float, default=150, help="seconds for --warm")
    made.add_argument(
        "--micro", action="store_true", help="a tiny model, for the interpreter: minutes a rung"
    )
    made.add_argument("--no-curves", action="store_true", help="leave the cost curves out")
    made.add_argument("--profile", action="store_true", help="list the kernels of one step")
    made.add_argument("--time-limit", type=float, default=1e9, help="begin no cell after this")
    made.add_argument("--seed", type=int, default=0)
    return made


def read(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse and check; ``concurrency`` is a list of int, ``rungs`` a list of names or None."""
    made = parser()
    args = made.parse_args(argv)
    words = args.concurrency.split(",")
    if not all(word.strip().isdigit() and int(word) for word in words):
        made.error(
            f"--concurrency {args.concurrency!r}: expected numbers above 0 and commas, as 1,4,16"
        )
    args.concurrency = sorted({int(word) for word in words})
    if args.rungs is not None:
        try:
            args.rungs = rung_names(args.rungs, [preset.name for preset in rank_presets()])
        except ValueError as error:
            made.error(f"--rungs: {error}")
    if args.output is not None:
        try:
            probe(args.output)
        except ValueError as error:
            made.error(f"--output: {error}")
    return args


def rung_names(text: str, known: Sequence[str]) -> list[str]:
    """Take a list of names apart; a name may have a comma itself.

    Raises
    ------
    ValueError
        Naming what is unknown, and all names.

    Examples
    --------
    >>> rung_names("old,batch of 16,384", ["old", "batch of 16,384", "new"])
    ['old', 'batch of 16,384']
    """
    found: list[str] = []
    words = text.split(",")
    while words:
        joined = (",".join(words[:n]) for n in range(len(words), 0, -1))
        name = next((name.strip() for name in joined if name.strip() in known), None)
        if name is None:
            raise ValueError(f"unknown rung {words[0].strip()!r}; there are {list(known)}")
        if name not in found:
            found.append(name)
        words = words[name.count(",") + 1 :]
    return found


def probe(path: Path) -> None:
    """Refuse a file that could not be written, or whose content could not be gone on with.

    Raises
    ------
    ValueError
        Saying what is wrong with ``path``.
    """
    check_output(path)
    if path.is_file():
        try:
            body = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is there and no JSON ({error}): move it away") from error
        if not isinstance(body, dict) or not isinstance(body.get("rows", []), list):
            raise ValueError(f"{path} is there and no file of this command: move it away")

"""``python -m benchmarks``, run in the ``kernels`` folder: our kernels and their peers, one run.

Peers are found where Python finds them: an installed vllm, fla or humming, or a folder with them on
PYTHONPATH. Those that are missing are named and left out. Without a CUDA device the recorded table
is printed instead; asked for what only a measurement gives, the command ends with code 1.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.cases import Case, cases
from benchmarks.provenance import source_hash
from benchmarks.registry import OURS, PEERS
from benchmarks.rows import NOT_MEASURED

__all__ = ["main"]

#: Options that a recorded table has no use for.
_MEASURING = ("peers", "without", "quick", "warm", "output", "resume", "load", "seed")


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, measure or show, return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--operators", type=_words, default=(), metavar="A,B", help="default: all")
    parser.add_argument(
        "--cases", type=str.split, default=(), metavar="'T=1 T=4'", help="by name, blanks between"
    )
    parser.add_argument("--peers", type=_words, default=(), metavar="A,B", help="default: all here")
    parser.add_argument("--without", type=_words, default=(), metavar="A,B", help="also: ours")
    parser.add_argument("--quick", action="store_true", help="a fifth of the time for each case")
    parser.add_argument("--warm", action="store_true", help="compile everything, time nothing")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write or extend a result")
    parser.add_argument(
        "--resume", action="store_true", help="leave out the cases that --output has"
    )
    parser.add_argument("--load", type=Path, metavar="FILE", help="JSON list of expert loads")
    parser.add_argument("--seed", type=int, help="of the random inputs; default: another each run")
    parser.add_argument("--list", action="store_true", help="cases, goals and peers; run nothing")
    options = parser.parse_args(arguments)
    try:
        chosen = cases(tuple(options.operators), tuple(options.cases))
        _check(options)
    except ValueError as error:
        parser.error(str(error))
    if options.list:
        return _list(chosen)

    import torch

    if not torch.cuda.is_available():
        print("Timing the kernels needs a CUDA device, and PyTorch finds none on this machine.")
        given = vars(options)
        asked = [f"--{n}" for n in _MEASURING if given[n] or (n == "seed" and given[n] is not None)]
        if asked:
            print(
                f"So nothing was measured, and {', '.join(asked)} had no effect. Leave that out to "
                "see the recorded table."
            )
            return 1
        return _show_recorded(chosen)
    if os.environ.get("TRITON_INTERPRET", "0").lower() not in ("", "0", "false", "no", "off"):
        print("TRITON_INTERPRET is set: unset it, the interpreter's times mean nothing.")
        return 1
    return _run(chosen, options)


def _words(text: str) -> tuple[str, ...]:
    return tuple(word for part in text.split(",") if (word := part.strip()))


def _check(options: argparse.Namespace) -> None:
    """Refuse options that cannot be meant, on every machine and before anything is measured."""
    known = tuple(dict.fromkeys(name for names in PEERS.values() for name in names))
    for option, names, there in (
        ("peers", options.peers, known),
        ("without", options.without, (OURS, *known)),
    ):
        unknown = [name for name in names if name not in there]
        if unknown:
            raise ValueError(
                f"--{option}: no implementation {', '.join(unknown)}; there are {', '.join(there)}"
            )
    if options.load and not options.load.is_file():
        raise ValueError(
            f"--load: no file {options.load}; it holds a JSON list, a number an expert"
        )
    if options.resume and not options.output:
        raise ValueError("--resume goes on with a file: name it with --output FILE")


def _run(chosen: list[Case], options: argparse.Namespace) -> int:
    import torch

    from benchmarks.inputs.problems import problems
    from benchmarks.measure import DeviceLost, measure, warm
    from benchmarks.provenance import provenance
    from benchmarks.registry import look_for

    torch.backends.cuda.matmul.allow_tf32 = False  # the references are float32
    found = look_for(options.peers, options.without)
    versions = _say_what_is_here(found, {case.operator for case in chosen})
    versions.pop(OURS, None)
    seed = options.seed if options.seed is not None else int.from_bytes(os.urandom(4), "little")
    made = provenance(versions, seed=seed)
    result = _earlier(options.output, made)
    if options.resume:
        done = {(row["operator"], row["case"]) for row in result["rows"]}
        chosen = [case for case in chosen if (case.operator, case.name) not in done]
    print(f"{made['device']}, PyTorch {made['torch']}, Triton {made['triton']}, seed {seed}")
    rows: list[dict[str, Any]] = []
    lost = None
    operator = ""
    try:
        for case, problem in problems(chosen, seed=seed, load_file=options.load):
            if case.operator != operator:
                operator = case.operator
                print(f"\n{operator}\n{report.header()}", flush=True)
            if options.warm:
                failed = warm(case, problem, found[operator])
                print(f"{case.name:>15} compiled" + (f"; not: {failed}" if failed else ""))
                continue
            seconds = 0.04 if options.quick else 0.15
            rows.append(measure(case, problem, found[operator], seconds=seconds))
            print(report.line(rows[-1]), flush=True)
            if options.output:  # after every case: a run may be cut short
                new = {**result, "provenance": made, "rows": rows}
                report.save(options.output, report.merge(result, new))
    except DeviceLost as error:
        lost = error
        print(f"The GPU stopped answering in {error}. To go on: --resume --without NAME.")
    if not options.warm:
        print(f"\n{report.summary(rows)}" + (f", in {options.output}" if options.output else ""))
    return 3 if lost else 0


def _say_what_is_here(found: dict[str, list[Any]], operators: set[str]) -> dict[str, str]:
    """Print once which implementations are here; return their versions."""
    versions: dict[str, str] = {}
    for operator, implementations in found.items():
        if operator not in operators:
            continue
        for one in implementations:
            if one.version is None:
                print(f"absent for {operator}: {one.adapter.name} ({one.reason})")
            else:
                versions[one.adapter.name] = one.version
    print("here: " + ", ".join(f"{name} ({version})" for name, version in versions.items()))
    return versions


def _earlier(path: Path | None, made: dict[str, Any]) -> dict[str, Any]:
    """Return what this run adds to: the file's measured rows, or nothing yet.

    Raises
    ------
    SystemExit
        If the file is of another session; said before anything is measured.
    """
    empty = {"schema_version": report.SCHEMA_VERSION, "provenance": made, "rows": []}
    if path is None or not path.exists():
        return empty
    old: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    try:
        report.merge(old, empty)
    except ValueError as error:
        raise SystemExit(f"{path}: {error}") from error
    return {**old, "rows": [row for row in old["rows"] if row.get("reason") != NOT_MEASURED]}


def _list(chosen: list[Case]) -> int:
    for case in chosen:
        goal = case.goal
        wanted = "no goal" if goal is None else f"{goal.kind.replace('_', ' ')} >= {goal.value}"
        if goal and goal.against:
            wanted += f" over {', '.join(goal.against)}"
        if goal and goal.or_below_us:
            wanted += f" or below {goal.or_below_us} us"
        peers = ", ".join(PEERS[case.operator]) or "no peer"
        print(f"{case.operator:<14} {case.name:<16} {wanted:<28} {peers}")
    return 0


def _show_recorded(chosen: list[Case]) -> int:
    """Print every recorded row of the chosen cases under the machine that made it."""
    wanted = {(case.operator, case.name) for case in chosen}
    shown = False
    for result in report.recorded():
        rows = [row for row in result["rows"] if (row["operator"], row["case"]) in wanted]
        made = result["provenance"]
        print(f"\nRecorded on {made['device']}, {made['date_utc']}: {made['command']}")
        if made["sources_sha256"] != (here := source_hash()):
            print(
                f"Recorded on other sources ({made['sources_sha256'][:8]}) than those here "
                f"({here[:8]}): today's kernels may be quicker or slower."
            )
        operator = ""
        for row in rows:
            if row["operator"] != operator:
                operator = row["operator"]
                print(f"\n{operator}\n{report.header()}")
            print(report.line(row))
        print(f"\n{report.summary(rows)}")
        shown = True
    if not shown:
        print(f"Nothing is recorded in {report.RECORDED}.")
    print(
        "\nOn a machine with an NVIDIA GPU: cd kernels && python -m benchmarks\n"
        "Peers are measured beside ours if Python finds them: pip install vllm fla-core "
        "humming-kernels,\nor PYTHONPATH=<folder with their sources>."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

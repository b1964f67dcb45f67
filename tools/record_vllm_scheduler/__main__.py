"""Record what vLLM's own scheduler decides, for the lab's scheduler to be compared with.

    python tools/record_vllm_scheduler random FAMILY... --seed 1 --count 40
    python tools/record_vllm_scheduler demos               # those to read by eye
    python tools/record_vllm_scheduler again FILE          # the scenarios of FILE, recorded anew
    python tools/record_vllm_scheduler check FILE...       # does this vLLM still decide so?
    python tools/record_vllm_scheduler budget              # what decodes leave a prefill
    python tools/record_vllm_scheduler speed               # a step of vLLM's, and of ours

Runs in an environment with vLLM, without a GPU: see README.md beside this file.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from random import Random
from typing import Any

import recordings
from scenarios import FAMILIES, FIRST_VERSION
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "data" / "golden" / "vllm_scheduler"
SPEED = ROOT / "data" / "results" / "cpu" / "scheduler_speed.json"


def _draw(family: str, seed: int, count: int) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Draw scenarios until vLLM has played ``count``; count what it refused, by kind of error."""
    from drive import record

    rng, done, refused = Random(f"{family}-{seed}"), [], {}
    with tqdm(total=count, desc=family, unit="scenario", disable=None) as bar:
        for _ in range(20 * count):
            if len(done) == count:
                break
            scenario = FAMILIES[family](rng)
            try:
                scenario["trace"] = record(scenario)
            except Exception as error:  # a configuration that this release refuses, or a crash
                what = f"{type(error).__name__}: {str(error).strip().splitlines()[-1:]}"[:160]
                refused[what] = refused.get(what, 0) + 1
                continue
            done.append(scenario)
            bar.update()
    return done, refused


def random_scenarios(options: argparse.Namespace) -> int:
    from vllm_versions import VERSION

    missing = 0
    for family in options.families:
        if _too_old(VERSION, family):
            print(f"{family}: passed over, it needs vLLM {FIRST_VERSION[family]}")
            continue
        done, refused = _draw(family, options.seed, options.count)
        path = options.folder / f"{family}_{VERSION}.json.gz"
        content = {"vllm": VERSION, "family": family, "seed": options.seed, "scenarios": done}
        recordings.write(path, content)
        command = f"random {family} --seed {options.seed} --count {options.count}"
        _report(path, content, refused, command)
        missing += options.count - len(done)
    return 1 if missing else 0


def _too_old(version: str, family: str) -> bool:
    first = FIRST_VERSION.get(family, "0")
    return tuple(map(int, version.split("."))) < tuple(map(int, first.split(".")))


def demo_scenarios(options: argparse.Namespace) -> int:
    from demo_scenarios import demos, known_bugs
    from drive import record
    from vllm_versions import VERSION

    bugs = known_bugs(with_checkpoints=not _too_old(VERSION, "checkpoints"))
    for family, scenarios in (("demos", demos()), ("known_bugs", bugs)):
        done = [{**scenario, "trace": record(scenario)} for scenario in scenarios]
        content = {"vllm": VERSION, "family": family, "scenarios": done}
        path = options.folder / f"{family}_{VERSION}.json.gz"
        recordings.write(path, content)
        _report(path, content, {}, "demos")
    return 0


def again(options: argparse.Namespace) -> int:
    from drive import record
    from vllm_versions import VERSION

    content = recordings.read(options.file)
    for scenario in tqdm(content["scenarios"], unit="scenario", disable=None):
        scenario["trace"] = record(scenario)
    content["vllm"] = VERSION
    path = options.output or FOLDER / f"{options.name}_{VERSION}.json.gz"
    recordings.write(path, content)
    _report(path, content, {}, f"again {options.file.name}")
    return 0


def check(options: argparse.Namespace) -> int:
    from drive import record
    from vllm_versions import VERSION

    differ = 0
    for path in options.files:
        content = recordings.read(path)
        if content["vllm"] != VERSION:
            print(f"{path.name} is of vLLM {content['vllm']}, this is {VERSION}: passed over")
            continue
        same = [record(s) == s["trace"] for s in tqdm(content["scenarios"], disable=None)]
        print(f"{path.name}: {sum(same)}/{len(same)} as recorded")
        differ += not all(same)
    return 1 if differ else 0


def token_budget(options: argparse.Namespace) -> int:
    from budget_table import budget_table
    from vllm_versions import VERSION

    path = FOLDER / "token_budget.json"
    tables = recordings.read(path) if path.exists() else {}
    tables[VERSION] = budget_table()
    recordings.write_json(path, dict(sorted(tables.items())))
    recordings.note(path, vllm=sorted(tables), command="python tools/record_vllm_scheduler budget")
    print(f"{path.name}: {len(tables[VERSION])} rows for {VERSION}")
    return 0


def speed(options: argparse.Namespace) -> int:
    from speed import SCENARIOS, compare, scaling
    from vllm_versions import VERSION

    from kimik3_lab.provenance import provenance

    rows = [compare(name, rounds=options.rounds) for name in SCENARIOS]
    result = {
        "schema_version": 1,
        "provenance": {
            **provenance(command="python tools/record_vllm_scheduler speed"),
            "vllm": VERSION,
            "timed": "schedule() + update_from_output(), median of 16 steps, rounds alternate",
        },
        "rows": rows,
        "scaling": scaling(),
    }
    recordings.write_json(options.output, result)
    for row in rows:
        print(f"{row['scenario']}: {row['median_ratio']:.2f} of vLLM's time")
    return 0


def _report(path: Path, content: dict[str, Any], refused: dict[str, int], command: str) -> None:
    scenarios = content["scenarios"]
    rows = [row for scenario in scenarios for row in scenario["trace"]]
    counts = {
        "scenarios": len(scenarios),
        "steps": len(rows),
        "steps with a preemption": sum(bool(row["preempted"]) for row in rows),
        "prefix hits": sum(len(row["prefix_hit"]) for row in rows),
    }
    recordings.note(
        path,
        vllm=content["vllm"],
        command=f"python tools/record_vllm_scheduler {command}",
        refused=refused,
        **counts,
    )
    print(path.name, counts, "refused", refused)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    parser = argparse.ArgumentParser(
        prog="record_vllm_scheduler", description=__doc__.partition("\n")[0]
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser("random", help="draw scenarios and record them")
    command.add_argument("families", nargs="+", choices=FAMILIES, help="what they stress")
    command.add_argument(
        "--seed", type=int, default=1, help="same seed, same scenarios (default 1)"
    )
    command.add_argument("--count", type=int, default=40, help="scenarios (default 40)")
    command.add_argument("--folder", type=Path, default=FOLDER, help="where to write the files")
    command.set_defaults(run=random_scenarios)
    command = commands.add_parser("demos", help="record scenarios to read by eye")
    command.add_argument("--folder", type=Path, default=FOLDER, help="where to write the files")
    command.set_defaults(run=demo_scenarios)
    command = commands.add_parser("again", help="record the scenarios of a file with this vLLM")
    command.add_argument("file", type=Path)
    command.add_argument("--name", default="again", help="stem of the file to write")
    command.add_argument("--output", type=Path, help="file (default: by name and version)")
    command.set_defaults(run=again)
    command = commands.add_parser("check", help="compare recordings with this vLLM")
    command.add_argument("files", type=Path, nargs="+")
    command.set_defaults(run=check)
    command = commands.add_parser("budget", help="record the table of draft budgets")
    command.set_defaults(run=token_budget)
    command = commands.add_parser("speed", help="time vLLM's scheduler and the lab's")
    command.add_argument("--rounds", type=int, default=5, help="how often (default 5)")
    command.add_argument("--output", type=Path, default=SPEED, help="file to write")
    command.set_defaults(run=speed)
    options = parser.parse_args(arguments)
    return int(options.run(options))


if __name__ == "__main__":
    sys.exit(main())

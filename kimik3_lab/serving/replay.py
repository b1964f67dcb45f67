"""Replay recorded decisions of vLLM's scheduler on ours, and show the first difference.

Needs the standard library only. Lessons 07 to 09 end with it::

    python -m kimik3_lab.serving.replay data/golden/vllm_scheduler/base_0.33.0.json.gz

A recording is JSON, gzipped or not: ``vllm`` names the version, ``scenarios`` has for each run what
was set up and a row per step (or ``demos``, rows only, of five runs that are known by name), and
``budget`` a table of token budgets. For every step the same requests must be scheduled with the
same token and draft counts, the same ones preempted and finished, with the same prefix hits, tables
and free blocks.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kimik3_lab.serving.recording_format import check_budget_row, check_scenario, check_trace
from kimik3_lab.serving.replay_budget import budget_row
from kimik3_lab.serving.replay_demos import DEMOS
from kimik3_lab.serving.replay_scenario import Scenario, ScenarioRun, same_decision
from kimik3_lab.serving.vllm_rules import VllmRules, vllm_rules

__all__ = ["Difference", "Recording", "RecordingError", "load", "main", "replay"]


class RecordingError(ValueError):
    """A file that is no recording; the message says what it lacks."""


@dataclass(frozen=True)
class Recording:
    """What a file holds: the rules of its version, its scenarios, and its table of budgets.

    ``num_refused`` counts scenarios that vLLM itself did not run, which have no trace.
    """

    rules: VllmRules
    scenarios: Sequence[Scenario]
    budget: Sequence[Mapping[str, Any]]
    num_refused: int

    @property
    def num_steps(self) -> int:
        """Recorded steps of all scenarios."""
        return sum(len(scenario.trace) for scenario in self.scenarios)


@dataclass(frozen=True)
class Difference:
    """Where a replay first departs from its recording.

    Attributes
    ----------
    step : int
        Of the scenario.
    field : str
        Of the row: ``scheduled``, ``spec``, ``preempted``, ``prefix_hit``, ``free_blocks`` ...
    recorded, replayed
        What vLLM has decided, and what we do.
    """

    step: int
    field: str
    recorded: object
    replayed: object

    def __str__(self) -> str:
        return f"step {self.step}, {self.field}: vLLM {self.recorded}, here {self.replayed}"


def load(path: str | Path) -> Recording:
    """Read a recording.

    Raises
    ------
    RecordingError
        If the file cannot be read, is no recording, or is one of a version without rules.
    """
    try:
        data = Path(path).read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        content = json.loads(data)
    except (OSError, EOFError, ValueError, RecursionError, zlib.error) as error:
        raise RecordingError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("vllm"), str):
        raise RecordingError(
            f"{path} is no recording: expected a JSON object with 'vllm', the recorded version"
        )
    try:
        rules = vllm_rules(content["vllm"])
    except ValueError as error:
        raise RecordingError(f"{path}: {error}") from error
    try:
        known = list(_scenarios(content))
        budget = list(_budget(content))
    except ValueError as error:
        raise RecordingError(f"{path}: {error}") from error
    if not known and not budget:
        raise RecordingError(f"{path} has neither 'scenarios' nor 'demos' nor 'budget'")
    with_trace = [scenario for scenario in known if "error" not in scenario.spec]
    return Recording(rules, with_trace, budget, len(known) - len(with_trace))


def _section(content: Mapping[str, Any], name: str, empty: list[Any] | dict[str, Any]) -> Any:
    value = content.get(name, empty)
    if not isinstance(value, type(empty)):
        wanted = "an object" if isinstance(empty, dict) else "a list"
        raise ValueError(f"{name!r} is a {type(value).__name__}, expected {wanted}")
    return value


def _scenarios(content: Mapping[str, Any]) -> Iterator[Scenario]:
    for name, trace in _section(content, "demos", {}).items():
        if name not in DEMOS:
            raise ValueError(f"no demo is called {name!r}: {', '.join(DEMOS)}")
        yield _scenario(name, DEMOS[name], trace)
    for index, spec in enumerate(_section(content, "scenarios", [])):
        try:
            check_scenario(spec)
        except ValueError as error:
            raise ValueError(f"scenario {index} {error}") from error
        yield _scenario(str(spec.get("name", index)), spec, spec.get("trace", []))


def _scenario(name: str, spec: Mapping[str, Any], trace: Any) -> Scenario:
    if "error" not in spec:
        try:
            check_trace(trace, arrivals=any(spec["arrivals"].values()))
        except ValueError as error:
            raise ValueError(f"scenario {name} {error}") from error
    return Scenario(name, spec, trace)


def _budget(content: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for row in _section(content, "budget", []):
        if isinstance(row, dict) and "error" in row:
            continue
        check_budget_row(row)
        yield row


def replay(scenario: Scenario, rules: VllmRules) -> Difference | None:
    """Run a scenario. Returns the first difference to its trace, None if there is none.

    Raises
    ------
    RecordingError
        If the scenario has settings that are not known here.

    Examples
    --------
    >>> row = {"step": 0, "scheduled": {"a": 3}, "free_blocks": 8}
    >>> spec = {"config": {"max_num_seqs": 1, "max_num_batched_tokens": 8, "num_blocks": 9},
    ...         "arrivals": {"0": [{"id": "a", "prompt": [["range", 5, 3]], "max_tokens": 2}]}}
    >>> print(replay(Scenario("example", spec, [row]), vllm_rules("0.33.0")))
    step 0, free_blocks: vLLM 8, here 7
    """
    try:
        run = ScenarioRun(scenario.spec, rules)
    except (KeyError, TypeError, ValueError) as error:
        raise RecordingError(f"scenario {scenario.name}: {error}") from error
    for recorded, replayed in zip(scenario.trace, run.rows(len(scenario.trace)), strict=True):
        for field, value in replayed.items():
            if field in recorded and not same_decision(field, recorded[field], replayed):
                return Difference(replayed["step"], field, recorded[field], value)
    return None


def _replay_scenarios(recording: Recording, *, progress: bool) -> int:
    """Print ``matched/total`` and the first difference. Returns how many differ."""
    total, matched, first = len(recording.scenarios), 0, None
    for index, scenario in enumerate(recording.scenarios):
        if progress:
            print(f"\r{index}/{total}", end="", file=sys.stderr, flush=True)
        difference = replay(scenario, recording.rules)
        matched += difference is None
        if difference is not None and first is None:
            first = scenario, difference
    if progress:
        print("\r", end="", file=sys.stderr)
    version = recording.rules.version
    print(f"{matched}/{total} scenarios match vLLM {version} ({recording.num_steps:,} steps)")
    if recording.num_refused:
        print(f"{recording.num_refused} more were refused by vLLM and have no trace")
    if first is not None:
        scenario, difference = first
        print(f"first difference: scenario {scenario.name}, {difference}")
        print(f"  set-up: {json.dumps(scenario.spec['config'])}")
    return total - matched


def _replay_budget(recording: Recording) -> int:
    """Print how many rows of the table match, and the first that does not."""
    wrong: list[str] = []
    for row in recording.budget:
        method, running = row.get("method"), row.get("running", 1)
        try:
            ours = budget_row(recording.rules, method, running)
        except ValueError as error:
            raise RecordingError(f"budget of {method}, {running} running: {error}") from error
        differing = [name for name in ours if name in row and row[name] != ours[name]]
        if differing:
            name = differing[0]
            wrong.append(
                f"{method}, {running} running, {name}: vLLM {row[name]}, here {ours[name]}"
            )
    total = len(recording.budget)
    if total:
        print(f"{total - len(wrong)}/{total} rows of the token budget table match")
    if wrong:
        print(f"first difference: {wrong[0]}")
    return len(wrong)


def main(arguments: Sequence[str] | None = None) -> int:
    """Replay files.

    Returns 0 if all decisions are the same, 1 if not, 2 if a file is no recording.
    """
    parser = argparse.ArgumentParser(
        prog="python -m kimik3_lab.serving.replay",
        description="Replay recorded decisions of vLLM's scheduler and show the first difference.",
        epilog="Exit status: 0 the same decisions, 1 a difference, 2 no recording.",
    )
    parser.add_argument("files", nargs="+", metavar="FILE.json[.gz]", help="recordings")
    options = parser.parse_args(arguments)
    status = 0
    for path in options.files:
        if len(options.files) > 1:
            print(f"{path}:")
        try:
            recording = load(path)
            differing = 0
            if recording.scenarios or recording.num_refused:
                differing += _replay_scenarios(recording, progress=sys.stderr.isatty())
            differing += _replay_budget(recording)
        except RecordingError as error:
            print(f"error: {error}", file=sys.stderr)
            status = 2
        else:
            status = max(status, 1 if differing else 0)
    return status


if __name__ == "__main__":
    sys.exit(main())

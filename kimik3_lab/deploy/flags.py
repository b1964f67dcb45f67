"""What a release of vLLM accepts on its command line, as its own parser said.

Needs the standard library only. Lesson 13 uses it, and ``k3lab deploy`` shows no command that has
not passed through :func:`check_command`.

The lists were recorded from the releases' wheels by ``tools/record_vllm_flags.py``, see
``data/deploy/vllm_flags``. An option that exists is not thereby right for a model: what it is good
for is said where it is chosen, in :mod:`kimik3_lab.deploy.options`.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from kimik3_lab.paths import data_dir

__all__ = ["Flag", "Problem", "Release", "check_command", "load_release", "releases"]

_FOLDER = ("deploy", "vllm_flags")
#: Kinds of an option: with one value, with several, with a ``--no-`` twin, or all by itself.
_KINDS = ("value", "list", "boolean", "switch")


@dataclass(frozen=True, slots=True)
class Flag:
    """One option of ``vllm serve``.

    Attributes
    ----------
    names
        All spellings, such as ``--tensor-parallel-size`` and ``-tp``.
    kind
        ``value``: one value follows; ``list``: one or more; ``boolean``: none, and a ``--no-`` twin
        says the opposite; ``switch``: none.
    choices
        What the value may be; None if the parser leaves it open.
    default
        None also where the release works its default out when it starts.
    """

    names: tuple[str, ...]
    kind: str
    choices: tuple[str, ...] | None
    default: bool | int | float | str | None
    deprecated: bool


@dataclass(frozen=True)
class Release:
    """Options, JSON fields and environment variables of one release."""

    version: str
    flags: Mapping[str, Flag]
    json_fields: Mapping[str, frozenset[str]]
    environment: frozenset[str]

    def __contains__(self, name: str) -> bool:
        return name in self.flags


@dataclass(frozen=True, slots=True)
class Problem:
    """Something about a command that the release would refuse, or warn of.

    ``fatal`` problems keep the server from starting as meant.
    """

    where: str
    what: str
    fatal: bool = True

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


def _folder() -> Path:
    return data_dir().joinpath(*_FOLDER)


def releases() -> tuple[str, ...]:
    """Releases that were recorded, oldest first.

    >>> releases()[0], releases()[-1]
    ('0.27.1', '0.33.0')
    """
    found = [path.stem for path in _folder().glob("*.json")]
    return tuple(sorted(found, key=lambda version: [int(part) for part in version.split(".")]))


@lru_cache
def load_release(version: str) -> Release:
    """Read what was recorded of a release; ``0.29`` is short for ``0.29.0``.

    Raises
    ------
    ValueError
        If the release was not recorded; the message lists those that were.

    Examples
    --------
    >>> ["--kda-decode-backend" in load_release(version) for version in ("0.29", "0.30")]
    [False, True]
    """
    known = releases()
    wanted = version if version in known else f"{version}.0"
    if wanted not in known:
        raise ValueError(
            f"no options were recorded for vLLM {version!r}; known: {', '.join(known)}. "
            "tools/record_vllm_flags.py records another release from its wheel"
        )
    body = json.loads((_folder() / f"{wanted}.json").read_text(encoding="utf-8"))
    flags: dict[str, Flag] = {}
    for row in body["flags"]:
        if row["kind"] not in _KINDS:
            raise ValueError(f"{wanted}.json: {row['names'][0]} has the kind {row['kind']!r}")
        choices = None if row["choices"] is None else tuple(row["choices"])
        flag = Flag(tuple(row["names"]), row["kind"], choices, row["default"], row["deprecated"])
        flags |= dict.fromkeys(flag.names, flag)
    return Release(
        version=wanted,
        flags=flags,
        json_fields={name: frozenset(fields) for name, fields in body["json_fields"].items()},
        environment=frozenset(body["environment"]),
    )


def check_command(
    version: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None
) -> list[Problem]:
    """Compare the arguments of ``vllm serve`` with what a release accepts.

    Parameters
    ----------
    version
        A recorded release.
    arguments
        What follows ``vllm serve``: the model, then options.
    environment
        Variables that are set for the server. Only those of vLLM's own are looked at.

    Returns
    -------
    list of Problem
        Empty if the release accepts everything. Values without choices are not judged: that takes
        the release itself.

    Examples
    --------
    >>> arguments = ["moonshotai/Kimi-K3", "--max-num-active-seqs", "64"]
    >>> print(*check_command("0.28.0", arguments))
    --max-num-active-seqs: vLLM 0.28.0 has no such option (0.31.0 and later have it)
    >>> check_command("0.31.0", arguments)
    []
    """
    release = load_release(version)
    problems: list[Problem] = []
    position = 0
    words = list(arguments)
    while position < len(words):
        word = words[position]
        position += 1
        if not word.startswith("-"):
            continue  # the model; a value was consumed with its option
        spelling, equals, attached = word.partition("=")
        # vLLM takes --max_num_seqs for --max-num-seqs, and --x-config.field for a field of JSON.
        name, dot, path = spelling.partition(".")
        name = name.replace("_", "-")
        values = [attached] if equals else []
        flag = release.flags.get(name)
        if flag is None:
            problems.append(Problem(name, _unknown(release, name)))
            position += not equals and _is_value(words, position)
            continue
        if not equals and flag.kind in ("value", "list"):
            while _is_value(words, position) and (flag.kind == "list" or not values):
                values.append(words[position])
                position += 1
        problems += _judge(release, name, flag, values, path.split(".")[0] if dot else None)
    for variable in environment or ():
        if variable.startswith("VLLM_") and variable not in release.environment:
            problems.append(Problem(variable, _unknown_variable(release, variable)))
    return problems


def _is_value(words: Sequence[str], position: int) -> bool:
    """Whether a value stands at ``position``; a negative number is one."""
    if position >= len(words):
        return False
    word = words[position]
    return not word.startswith("-") or word[1:].replace(".", "", 1).isdigit()


def _judge(
    release: Release, name: str, flag: Flag, values: list[str], field: str | None
) -> list[Problem]:
    problems = []
    if flag.kind in ("boolean", "switch"):
        if values:
            problems.append(Problem(name, f"takes no value, got {values[0]!r}"))
    elif not values:
        problems.append(Problem(name, "needs a value"))
    if flag.choices is not None:
        for value in values:
            if value not in flag.choices:
                listed = ", ".join(flag.choices)
                problems.append(Problem(name, f"must be one of {listed}; got {value!r}"))
    full = next((n for n in flag.names if n in release.json_fields), None)
    if full is not None and field is not None:
        problems += _judge_fields(name, [field.rstrip("+")], release.json_fields[full])
    elif full is not None and values:
        problems += _judge_json(name, values[0], release.json_fields[full])
    if flag.deprecated:
        problems.append(Problem(name, f"is deprecated in vLLM {release.version}", fatal=False))
    return problems


def _judge_json(name: str, text: str, fields: frozenset[str]) -> list[Problem]:
    try:
        body: Any = json.loads(text)
    except ValueError as error:
        return [Problem(name, f"is no JSON: {error}")]
    if not isinstance(body, dict):
        return [Problem(name, f"must be a JSON object, got {text!r}")]
    return _judge_fields(name, body, fields)


def _judge_fields(name: str, named: Iterable[str], fields: frozenset[str]) -> list[Problem]:
    return [
        Problem(name, f"has no field {field!r}{_did_you_mean(field, fields)}")
        for field in named
        if field not in fields
    ]


def _unknown(release: Release, name: str) -> str:
    others = [version for version in releases() if name in load_release(version).flags]
    return f"vLLM {release.version} has no such option{_elsewhere(release, others)}" + (
        "" if others else _did_you_mean(name, release.flags)
    )


def _unknown_variable(release: Release, name: str) -> str:
    others = [version for version in releases() if name in load_release(version).environment]
    return f"vLLM {release.version} does not read this variable{_elsewhere(release, others)}" + (
        "" if others else _did_you_mean(name, release.environment)
    )


def _elsewhere(release: Release, others: list[str]) -> str:
    """Say which other releases know a name."""
    if not others:
        return ""
    known = releases()
    at = known.index(release.version)
    if others == list(known[known.index(others[0]) :]) and known.index(others[0]) > at:
        return f" ({others[0]} and later have it)"
    if known.index(others[-1]) < at:
        return f" ({others[-1]} was the last to have it)"
    return f" (known to {', '.join(others)})"


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""

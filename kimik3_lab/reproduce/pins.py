"""Defaults that moved between two releases of vLLM, and how to hold both to one value.

Needs the standard library only. Two runs of different releases compare code only if everything
that a release decides by itself is written down. What moved is read from the recordings in
``data/deploy``: options (their parsers), environment variables, and what an API server on a B300
works out.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from kimik3_lab.deploy.flags import Flag, load_release
from kimik3_lab.paths import data_dir

__all__ = ["Moved", "moved_defaults", "new_options", "pinned_value"]

#: What a parser says when it leaves an attribute out altogether: no value to write down.
_NOTHING = "==SUPPRESS=="


@dataclass(frozen=True, slots=True)
class Moved:
    """One default of two releases.

    ``kind`` is ``option``, or ``variable`` of the environment. ``pin`` is the value for both: the
    older release's, unless that has none or the newer one's is what is compared.
    """

    kind: Literal["option", "variable"]
    name: str
    before: object
    after: object
    pin: object

    @property
    def words(self) -> tuple[str, ...]:
        """The option as it stands on a command line."""
        if isinstance(self.pin, bool):
            return (self.name if self.pin else f"--no-{self.name.removeprefix('--')}",)
        return (self.name, str(self.pin))


def moved_defaults(old: str, new: str, device: str = "B300") -> list[Moved]:
    """List what two releases decide differently when nothing is said.

    Examples
    --------
    >>> [(m.name, m.before, m.after) for m in moved_defaults("0.27.1", "0.28.0")]
    [('--enable-prefix-caching', False, True), ('--max-num-batched-tokens', 8192, 16384)]
    """
    before, after = load_release(old), load_release(new)
    recorded = json.loads((data_dir() / "deploy" / "vllm_defaults.json").read_text("utf-8"))
    one, two = (recorded["releases"][release.version] for release in (before, after))
    found = []
    for flag in dict.fromkeys(before.flags.values()):
        other = after.flags.get(flag.names[0])
        if other is None or flag.default == other.default:
            continue
        if _NOTHING in (flag.default, other.default):
            continue
        pin = _pin(flag, other)
        found.append(Moved("option", flag.names[0], flag.default, other.default, pin))
    cached = one["hybrid_prefix_caching"], two["hybrid_prefix_caching"]
    tokens = (body["api_server"][device]["max_num_batched_tokens"] for body in (one, two))
    sequences = (body["api_server"][device]["max_num_seqs"] for body in (one, two))
    for name, (was, is_), pin in (
        ("--enable-prefix-caching", cached, False),  # random prompts share nothing
        ("--max-num-batched-tokens", tokens, None),
        ("--max-num-seqs", sequences, None),
    ):
        if was != is_:
            found.append(Moved("option", name, was, is_, is_ if pin is None else pin))
    for name, was in one["environment"].items():
        is_ = two["environment"].get(name, was)
        if was != is_:
            values = _value(was), _value(is_)
            found.append(Moved("variable", name, *values, values[1]))
    return sorted(found, key=lambda moved: (moved.kind, moved.name))


def _pin(before: Flag, after: Flag) -> object:
    """Return the older default, or the newer one where the older is worked out."""
    return after.default if before.default is None else before.default


def _value(recorded: str) -> object:
    """Defaults of variables are recorded as Python wrote them."""
    try:
        return ast.literal_eval(recorded)
    except (ValueError, SyntaxError):
        return recorded


def new_options(old: str, new: str) -> list[str]:
    """Options of the newer release only that do something by default: nothing to pin there.

    Examples
    --------
    >>> "--dp-sync-interval" in new_options("0.27.1", "0.30.0")
    True
    """
    before, after = load_release(old), load_release(new)
    return [
        flag.names[0]
        for flag in dict.fromkeys(after.flags.values())
        if flag.names[0] not in before.flags
        and flag.default not in (None, False, "", "none", _NOTHING)
    ]


def pinned_value(name: str, arguments: Sequence[str], environment: Mapping[str, str]) -> str | None:
    """Return what a command says about an option or a variable; None if nothing.

    Examples
    --------
    >>> pinned_value("--max-num-seqs", ["K3", "--max-num-seqs", "8"], {})
    '8'
    >>> pinned_value("--enable-prefix-caching", ["K3", "--no-enable-prefix-caching"], {})
    'off'
    """
    if not name.startswith("--"):
        return environment.get(name)
    if f"--no-{name.removeprefix('--')}" in arguments:
        return "off"
    if name not in arguments:
        return None
    follows = arguments[list(arguments).index(name) + 1 :]
    return follows[0] if follows and not follows[0].startswith("--") else "on"

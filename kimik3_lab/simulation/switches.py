"""Change one switch of a simulated machine by its name, as text from a command line or as a value.

Needs the standard library and the scheduler. Lessons 11 and 12 and ``k3lab simulate --set`` use it.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import fields, replace
from difflib import get_close_matches
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from kimik3_lab.performance.scenarios import Scenario
from kimik3_lab.serving.config import CacheConfig, SchedulerConfig
from kimik3_lab.serving.presets import LADDER, Preset
from kimik3_lab.simulation.spec import SimulationSpec

__all__ = ["find_preset", "preset_id", "set_scenario", "set_switches", "switch_names"]

_SPEC = {"num_blocks": int | None, "max_model_len": int | None, "kv_dtype": str,
         "utilization": float}  # fmt: skip


def preset_id(preset: Preset) -> str:
    """Name of a rung as a command line takes it.

    >>> preset_id(LADDER[1])
    'batch-of-16384'
    """
    return preset.name.lower().replace(",", "").replace(" ", "-")


def find_preset(name: str) -> Preset:
    """Look up a rung of the ladder by its name.

    Raises
    ------
    ValueError
        If there is none; the message names those there are.

    Examples
    --------
    >>> find_preset("main-2026-09-13").name
    'main 2026-09-13'
    """
    by_name = {preset_id(preset): preset for preset in LADDER}
    found = by_name.get(name.strip().lower().replace(",", "").replace(" ", "-"))
    if found is None:
        raise ValueError(f"no preset {name!r}; there are: {', '.join(by_name)}")
    return found


def _kinds() -> dict[str, tuple[str, Any]]:
    """Where each switch belongs, and what it may be."""
    kinds: dict[str, tuple[str, Any]] = {}
    for place, config, made in (
        ("scheduler", SchedulerConfig, "max_model_len"),
        ("cache", CacheConfig, "num_blocks"),
    ):
        hints = get_type_hints(config)
        for item in fields(config):
            if item.name != made:
                kinds[item.name] = place, hints[item.name]
    for name, kind in _SPEC.items():
        kinds[name] = "spec", kind
    for preset in LADDER:
        for name in preset.execution:
            kinds[name] = "execution", bool
    return kinds


def switch_names() -> list[str]:
    """Everything that :func:`set_switches` knows.

    >>> "token_budget" in switch_names(), "skinny_gemm" in switch_names()
    (True, True)
    """
    return sorted(_kinds())


def set_switches(spec: SimulationSpec, switches: Mapping[str, Any]) -> SimulationSpec:
    """Return ``spec`` with other switches.

    Parameters
    ----------
    spec
        What to change.
    switches
        By name: a field of :class:`SchedulerConfig` or :class:`CacheConfig`, one of ``num_blocks``,
        ``max_model_len``, ``kv_dtype`` and ``utilization``, or the name of a faster way to compute
        a step (``execution`` of a preset) with True or False. Values may be text.
        ``num_speculative_tokens=0`` takes the drafter away.

    Raises
    ------
    ValueError
        For an unknown name or a value that it cannot have.

    Examples
    --------
    >>> from kimik3_lab.serving.presets import V0_27_1
    >>> spec = set_switches(SimulationSpec(V0_27_1), {"token_budget": "adaptive"})
    >>> spec.scheduler_config.scheduled_token_limit
    8192
    """
    kinds = _kinds()
    changed: dict[str, dict[str, Any]] = {"scheduler": {}, "cache": {}, "spec": {}}
    execution = set(spec.preset.execution)
    for name, given in switches.items():
        if name not in kinds:
            raise ValueError(_unknown("switch", name, kinds))
        place, kind = kinds[name]
        value = _parse(name, given, kind)
        if place == "execution":
            (execution.add if value else execution.discard)(name)
        else:
            changed[place][name] = value
    if changed["scheduler"].get("num_speculative_tokens") == 0:
        changed["scheduler"].setdefault("speculative_method", None)
    return replace(
        spec,
        preset=replace(spec.preset, execution=frozenset(execution)),
        scheduler={**spec.scheduler, **changed["scheduler"]},
        cache={**spec.cache, **changed["cache"]},
        **changed["spec"],
    )


def set_scenario(scenario: Scenario, choices: Mapping[str, Any]) -> Scenario:
    """Return ``scenario`` with other choices; values may be text.

    Raises
    ------
    ValueError
        For an unknown name or a value that it cannot have.

    Examples
    --------
    >>> set_scenario(Scenario.default(), {"acceptance_length": "2.61"}).acceptance_length
    2.61
    """
    hints = get_type_hints(Scenario)
    kinds = {item.name: ("scenario", hints[item.name]) for item in fields(Scenario)}
    values = {}
    for name, given in choices.items():
        if name not in kinds:
            raise ValueError(_unknown("choice", name, kinds))
        values[name] = _parse(name, given, kinds[name][1])
    return replace(scenario, **values)


def _unknown(what: str, name: str, kinds: Mapping[str, Any]) -> str:
    near = get_close_matches(name, kinds, n=3)
    hint = (
        f"did you mean {' or '.join(near)}?" if near else "there are: " + ", ".join(sorted(kinds))
    )
    return f"no {what} {name!r}; {hint}"


def _parse(name: str, given: Any, kind: Any) -> Any:
    """Turn text into a value of a kind, and check one that is no text."""
    options = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    for option in options:
        choices = get_args(option) if get_origin(option) is Literal else ()
        if given in choices:
            return given
        if option is type(None) and given in (None, "none", "None"):
            return None
        if option is bool and given in (True, False, "true", "false", "True", "False"):
            return given in (True, "true", "True")
        if option in (int, float, str) and not isinstance(given, bool):
            try:
                value = option(given)
            except (TypeError, ValueError):
                continue
            if isinstance(given, str) or value == given:
                return value
    raise ValueError(f"{name} takes {_expected(options)}, got {given!r}")


def _expected(options: tuple[Any, ...]) -> str:
    names = {int: "a whole number", float: "a number", str: "text"}
    words: list[str] = []
    for option in options:
        if get_origin(option) is Literal:
            words += map(str, get_args(option))
        elif option is bool:
            words += ["true", "false"]
        else:
            words.append(names.get(option, "none"))
    return ", ".join(words[:-1]) + (" or " if words[:-1] else "") + words[-1]

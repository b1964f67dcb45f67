"""Refusals of bad settings: what was set, what would work, and why.

Needs the standard library only; the two configuration classes use it.
"""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any, get_args

__all__ = ["require_at_least", "require_booleans", "require_number", "require_one_of"]


def require_at_least(least: int, name: str, value: object, why: str) -> None:
    """Refuse a knob that is no integer or too small, naming the knob."""
    if type(value) is not int:
        raise ValueError(f"{name} must be an integer, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}: {why}")


def require_number(name: str, value: object) -> None:
    """Refuse what is no finite number, naming it."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{name} must be a number, got {value!r}")


def require_booleans(config: Any) -> None:
    """Refuse a field of a dataclass that says ``bool`` and holds something else."""
    for field in fields(config):
        value = getattr(config, field.name)
        if field.type == "bool" and type(value) is not bool:
            raise ValueError(f"{field.name} must be True or False, got {value!r}")


def require_one_of(name: str, value: object, choices: Any) -> None:
    """Refuse a value that the ``Literal`` type ``choices`` does not list."""
    allowed = get_args(choices)
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")

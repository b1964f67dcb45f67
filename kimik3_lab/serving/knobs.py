"""Refusals of bad settings: what was set, what would work, and why.

Needs the standard library only; the two configuration classes use it.
"""

from __future__ import annotations

from typing import Any, get_args

__all__ = ["require_at_least", "require_one_of"]


def require_at_least(least: int, name: str, value: object, why: str) -> None:
    """Refuse a knob that is no integer or too small, naming the knob."""
    if type(value) is not int:
        raise ValueError(f"{name} must be an integer, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}: {why}")


def require_one_of(name: str, value: object, choices: Any) -> None:
    """Refuse a value that the ``Literal`` type ``choices`` does not list."""
    allowed = get_args(choices)
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")

"""Code that is wrong on purpose: how it is listed, and how a method is replaced by a wrong one.

Without such mutants nobody would know whether a test can fail. Needs pytest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

__all__ = ["Mutants", "Patch", "wrap"]

Patch = Callable[[pytest.MonkeyPatch], None]


class Mutants(dict[str, tuple[str, Patch]]):
    """By what is wrong: the scenario that must find it out, and what makes it wrong."""

    def add(self, scenario: str, text: str) -> Callable[[Patch], Patch]:
        """List the decorated function."""

        def register(patch: Patch) -> Patch:
            self[text] = scenario, patch
            return patch

        return register


def wrap(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, replacement: Callable[..., Any]
) -> None:
    """Replace a method; the replacement gets the original first."""
    original = getattr(owner, name)

    def method(self: Any, *arguments: Any, **keywords: Any) -> Any:
        return replacement(original, self, *arguments, **keywords)

    monkeypatch.setattr(owner, name, method)

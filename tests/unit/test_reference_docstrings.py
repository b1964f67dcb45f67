"""Every public function of the reference says its shapes and shows a runnable example."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import pytest

import kimik3_lab.reference as reference


def _functions() -> Iterator[tuple[str, Any]]:
    for name in reference.__all__:
        module = importlib.import_module(f"kimik3_lab.reference.{name}")
        for public in module.__all__:
            value = getattr(module, public)
            if inspect.isfunction(value) and value.__module__ == module.__name__:
                yield f"{name}.{public}", value


FUNCTIONS = dict(_functions())


def test_the_list_is_not_empty() -> None:
    assert len(FUNCTIONS) > 25


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_a_public_function_shows_an_example(name: str) -> None:
    text = inspect.getdoc(FUNCTIONS[name]) or ""
    assert "Examples\n--------" in text and ">>> " in text, f"{name} has no runnable example"

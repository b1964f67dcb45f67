"""The error that a command raises for an expected failure."""

from __future__ import annotations

__all__ = ["CommandError"]


class CommandError(Exception):
    """An expected failure (bad input, an endpoint that is down); its text is all the user sees."""

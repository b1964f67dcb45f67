"""One request of a trace, and what is wrong with a row that is none.

Needs the standard library only. Used by the loaders of :mod:`kimik3_lab.benchmark.traces`, by
lesson 12 and by the simulator.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

__all__ = [
    "BLOCK_TOKENS",
    "BadRow",
    "Row",
    "TraceError",
    "TraceRequest",
    "check_blocks",
    "timestamp",
    "whole_number",
]

#: Tokens that one of the ``hash_ids`` stands for in Mooncake's traces.
BLOCK_TOKENS = 512


class TraceError(ValueError):
    """A trace that cannot be read; the message names file and line and says how to mend it."""


class BadRow(ValueError):
    """A row that is no request. Loaders turn it into a :class:`TraceError`, or skip and count."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    Attributes
    ----------
    timestamp
        Arrival, in seconds since the first request of the trace.
    input_tokens, output_tokens
        Length of prompt and answer, at least 1 each.
    hash_ids
        Names for the blocks of the prompt, in order: two requests whose first ``n`` names agree
        share that many blocks from the start. None where the trace says nothing of its prompts.
    session
        Conversation that the request belongs to, None if unknown.

    Examples
    --------
    >>> TraceRequest(0.5, 700, 20, hash_ids=(0, 1)).hash_ids
    (0, 1)
    """

    timestamp: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] | None = None
    session: str | None = None


class Row(NamedTuple):
    """What a loader made of one row: its place in the file, and a request or what is wrong."""

    place: str
    content: TraceRequest | BadRow


def whole_number(value: Any, name: str, *, least: int = 1, hint: str = "") -> int:
    """Return ``value``, a number or its text, as an integer of at least ``least``.

    Raises
    ------
    BadRow
        If it is none; ``hint`` is added to the message.

    Examples
    --------
    >>> whole_number("12", "Request tokens")
    12
    """
    try:
        number = int(value) if isinstance(value, str) else value
    except ValueError:
        number = None
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    if isinstance(number, bool) or not isinstance(number, int) or number < least:
        raise BadRow(f"{name} must be a whole number of at least {least}, got {value!r}{hint}")
    return number


def timestamp(value: Any, name: str) -> float:
    """Return ``value``, a number or its text, as a finite float of at least 0.

    Raises
    ------
    BadRow
        If it is none.
    """
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 <= number < math.inf:
        raise BadRow(f"{name} must be a number of at least 0, got {value!r}")
    return number


def check_blocks(input_tokens: int, num_blocks: int, block_tokens: int) -> None:
    """Check that there is one name for each block of a prompt, or for each *full* block.

    Raises
    ------
    BadRow
        If neither holds. Then the trace hashes blocks of another size, and every hit ratio
        computed with ``block_tokens`` would be wrong.
    """
    full, rest = divmod(input_tokens, block_tokens)
    if num_blocks not in (full, full + bool(rest)):
        raise BadRow(
            f"{num_blocks} hash_ids for {input_tokens:,} input tokens, expected "
            f"{full + bool(rest)}, one for each block of {block_tokens}: pass the block size of "
            "this trace as block_tokens (--block-tokens)"
        )

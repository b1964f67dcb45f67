"""BurstGPT and Azure traces: CSV files with a time and two lengths a row.

Needs the standard library only. Used by lesson 12 and by ``k3lab trace`` and ``k3lab simulate``.

BurstGPT (https://github.com/HPMLL/BurstGPT) counts seconds; its files of version 1 have no session.
Azure (https://github.com/Azure/AzurePublicDataset) writes the time of day: in 2023 with seven
digits behind the second, in 2024 with six and an offset from UTC. Columns are found by their
names, so files with further ones can be read too. Neither says anything of what prompts share.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import TextIO

from kimik3_lab.benchmark.trace_request import (
    BadRow,
    Row,
    TraceError,
    TraceRequest,
    timestamp,
    whole_number,
)

__all__ = ["azure_rows", "burstgpt_rows"]

_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_BURSTGPT = ("Timestamp", "Request tokens", "Response tokens")
_FAILED = (
    " (a request that failed: read the file without failures, BurstGPT_without_fails_*.csv, or "
    "skip bad rows)"
)


def azure_rows(file: TextIO) -> Iterator[Row]:
    """Read an Azure trace; times count from 1970."""

    def request(time: str, given: str, generated: str, _session: str | None) -> TraceRequest:
        try:
            moment = datetime.fromisoformat(time)
        except ValueError:
            raise BadRow(
                f"TIMESTAMP must be a time such as 2023-11-16 18:17:03.9799600, got {time!r}"
            ) from None
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        return TraceRequest(
            moment.timestamp(),
            whole_number(given, "ContextTokens"),
            whole_number(generated, "GeneratedTokens"),
        )

    return _rows(file, "Azure", _AZURE, request)


def burstgpt_rows(file: TextIO) -> Iterator[Row]:
    """Read a BurstGPT trace; times count from the beginning of its recording."""

    def request(time: str, given: str, answered: str, session: str | None) -> TraceRequest:
        failed = _FAILED if answered.strip() == "0" else ""
        return TraceRequest(
            timestamp(time, "Timestamp"),
            whole_number(given, "Request tokens"),
            whole_number(answered, "Response tokens", hint=failed),
            session=session or None,
        )

    return _rows(file, "BurstGPT", _BURSTGPT, request, session="Session ID")


def _rows(
    file: TextIO,
    name: str,
    columns: Sequence[str],
    request: Callable[[str, str, str, str | None], TraceRequest],
    session: str | None = None,
) -> Iterator[Row]:
    reader = csv.reader(file)
    header = [field.strip() for field in next(reader, [])]
    missing = [column for column in columns if column not in header]
    if missing:
        raise TraceError(
            f"line 1: no column {' and '.join(missing)}, got {', '.join(header) or 'nothing'}: "
            f"{name} traces begin with a line that names their columns ({', '.join(columns)})"
        )
    time, given, answered = (header.index(column) for column in columns)
    place = header.index(session) if session in header else None
    while True:
        try:
            fields = next(reader, None)
            if fields is None:
                return
            if not fields:
                continue
            if len(fields) != len(header):
                raise BadRow(f"{len(fields)} fields, expected {len(header)} as in the first line")
            content: TraceRequest | BadRow = request(
                fields[time],
                fields[given],
                fields[answered],
                None if place is None else fields[place],
            )
        except BadRow as problem:
            content = problem
        except csv.Error as error:
            content = BadRow(f"no row of a CSV file ({error})")
        yield Row(f"line {reader.line_num}", content)

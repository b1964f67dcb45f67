"""Mooncake traces: one JSON object a line, with names for the blocks of each prompt.

Needs the standard library only. Used by lesson 12 and by ``k3lab trace`` and ``k3lab simulate``.

The format is that of ``FAST25-release/traces`` in https://github.com/kvcache-ai/Mooncake:
``{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, ...]}``, with
milliseconds since the start and a name for every 512 tokens. Others write it too, some with a
``session_id``. Names are chained: the same name stands for the same *prefix*.
"""

from __future__ import annotations

import gzip
import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

from kimik3_lab.benchmark.trace_request import (
    BadRow,
    Row,
    TraceError,
    TraceRequest,
    check_blocks,
    timestamp,
    whole_number,
)

__all__ = ["mooncake_rows", "write_trace"]


def mooncake_rows(file: TextIO, block_tokens: int) -> Iterator[Row]:
    """Read a Mooncake trace line by line; empty lines are passed over."""
    for number, line in enumerate(file, 1):
        if line.strip():
            try:
                content: TraceRequest | BadRow = _request(line, block_tokens)
            except BadRow as problem:
                content = problem
            yield Row(f"line {number}", content)


def _request(line: str, block_tokens: int) -> TraceRequest:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise BadRow(f"no JSON ({error}): expected one object a line") from error
    if not isinstance(row, dict):
        raise BadRow(f"expected a JSON object, got {type(row).__name__}")
    missing = [k for k in ("timestamp", "input_length", "output_length") if k not in row]
    if missing:
        raise BadRow(f"{' and '.join(missing)} missing, got only {', '.join(row) or 'nothing'}")
    input_tokens = whole_number(row["input_length"], "input_length")
    session = row.get("session_id")
    return TraceRequest(
        timestamp(row["timestamp"], "timestamp (milliseconds)") / 1e3,
        input_tokens,
        whole_number(row["output_length"], "output_length"),
        _hash_ids(row.get("hash_ids"), input_tokens, block_tokens),
        None if session is None else str(session),
    )


def _hash_ids(ids: Any, input_tokens: int, block_tokens: int) -> tuple[int, ...] | None:
    if ids is None:
        return None
    if not isinstance(ids, list):
        raise BadRow(f"hash_ids must be a list of whole numbers, got {type(ids).__name__}")
    for name in ids:
        if type(name) is not int:
            raise BadRow(f"hash_ids must be whole numbers, got {name!r} among them")
    check_blocks(input_tokens, len(ids), block_tokens)
    return tuple(ids)


def write_trace(requests: Iterable[TraceRequest], path: str | Path) -> int:
    """Write requests as a Mooncake trace, compressed if the name ends in ``.gz``.

    The file appears whole or not at all. Times keep whole microseconds.

    Returns
    -------
    int
        Requests written.

    Raises
    ------
    TraceError
        If the folder is missing.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise TraceError(f"no folder {path.parent} to write {path.name} into; make it first")
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    written = 0
    try:
        os.close(handle)
        opener = gzip.open if path.suffix == ".gz" else open
        with opener(temporary, "wt", encoding="utf-8", newline="\n") as file:
            for request in requests:
                file.write(json.dumps(_row(request), separators=(", ", ": ")) + "\n")
                written += 1
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return written


def _row(request: TraceRequest) -> dict[str, Any]:
    milliseconds = round(request.timestamp * 1e3, 3)
    row: dict[str, Any] = {
        "timestamp": int(milliseconds) if milliseconds.is_integer() else milliseconds,
        "input_length": request.input_tokens,
        "output_length": request.output_tokens,
    }
    if request.hash_ids is not None:
        row["hash_ids"] = list(request.hash_ids)
    if request.session is not None:
        row["session_id"] = request.session
    return row

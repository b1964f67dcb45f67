"""Traces of what people asked real services: one reader for the public formats.

Needs the standard library; ``tokenizers`` for ShareGPT files read with a tokenizer. Used by lesson
12, ``k3lab trace`` and ``k3lab simulate``. No trace comes with the lab and none is downloaded:
name a file of yours. Formats are described in :mod:`~kimik3_lab.benchmark.trace_mooncake`,
:mod:`~kimik3_lab.benchmark.trace_csv` and :mod:`~kimik3_lab.benchmark.trace_sharegpt`.
"""

from __future__ import annotations

import gzip
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import groupby
from pathlib import Path
from typing import Literal, TextIO, get_args

from kimik3_lab.benchmark.trace_csv import azure_rows, burstgpt_rows
from kimik3_lab.benchmark.trace_mooncake import mooncake_rows, write_trace
from kimik3_lab.benchmark.trace_request import BLOCK_TOKENS, BadRow, Row, TraceError, TraceRequest
from kimik3_lab.benchmark.trace_sharegpt import sharegpt_rows, token_counter

__all__ = [
    "TraceError",
    "TraceFile",
    "TraceFormat",
    "TraceRequest",
    "cut_window",
    "poisson_arrivals",
    "read_trace",
    "scale_rate",
    "thin_sessions",
    "write_trace",
]

TraceFormat = Literal["mooncake", "burstgpt", "azure", "sharegpt"]
_REMEMBERED = 5


@dataclass
class TraceFile:
    """A trace file: iterate over it to read it, as often as you like, row by row.

    Build one with :func:`read_trace`.

    Attributes
    ----------
    bad_rows
        Rows skipped while it was last read.
    first_bad_rows
        What was wrong with the first few of them.
    """

    path: Path
    format: TraceFormat
    block_tokens: int = BLOCK_TOKENS
    tokenizer: str | Path | None = None
    skip_bad_rows: bool = False
    in_order: bool = True
    bad_rows: int = 0
    first_bad_rows: list[str] = field(default_factory=list)

    def __iter__(self) -> Iterator[TraceRequest]:
        """Read the file; times count from its first request."""
        self.bad_rows, self.first_bad_rows = 0, []
        start: float | None = None
        latest = 0.0
        for place, content in self._rows():
            problem = content if isinstance(content, BadRow) else None
            if isinstance(content, TraceRequest):
                if self.in_order and start is not None and content.timestamp < start + latest:
                    problem = BadRow(
                        f"arrives {start + latest - content.timestamp:.6g} s before the row above "
                        "it: sort the file by time, or read it with in_order=False"
                    )
                else:
                    start = content.timestamp if start is None else start
                    latest = content.timestamp - start
                    yield replace(content, timestamp=latest)
            if problem is not None:
                told = f"{self.path}, {place}: {problem}"
                if not self.skip_bad_rows:
                    raise TraceError(
                        f"{told}. Mend the row, or leave such rows out: "
                        "k3lab trace FILE --skip-bad-rows --output CLEAN.jsonl"
                    )
                self.bad_rows += 1
                if len(self.first_bad_rows) < _REMEMBERED:
                    self.first_bad_rows.append(told)
        if start is None:
            raise TraceError(
                f"{self.path} holds no request"
                + (f": all {self.bad_rows} rows are bad, the first: " if self.bad_rows else "")
                + "".join(self.first_bad_rows[:1])
            )

    def _rows(self) -> Iterator[Row]:
        try:
            with _open(self.path) as file:
                if self.format == "mooncake":
                    yield from mooncake_rows(file, self.block_tokens)
                elif self.format == "azure":
                    yield from azure_rows(file)
                elif self.format == "burstgpt":
                    yield from burstgpt_rows(file)
                else:
                    counter = token_counter(self.tokenizer)
                    yield from sharegpt_rows(file, self.block_tokens, counter)
        except TraceError as error:
            raise TraceError(f"{self.path}, {error}") from error
        except (OSError, EOFError, UnicodeDecodeError) as error:
            raise TraceError(f"{self.path} cannot be read to its end: {error}") from error


def read_trace(
    path: str | Path,
    format: TraceFormat | None = None,
    *,
    block_tokens: int = BLOCK_TOKENS,
    tokenizer: str | Path | None = None,
    skip_bad_rows: bool = False,
    in_order: bool = True,
) -> TraceFile:
    """Open a trace, plain or compressed with gzip.

    Parameters
    ----------
    path
        The file.
    format
        Its format; found out from its beginning if left out.
    block_tokens
        Tokens that one of the ``hash_ids`` stands for.
    tokenizer
        Folder with ``tokenizer.json``, to count the tokens of a ShareGPT file; without it a token
        is four characters.
    skip_bad_rows
        Pass over rows that are no request and count them, instead of raising at the first.
    in_order
        Whether a row that arrives before the one above it is bad.

    Returns
    -------
    TraceFile
        Reads a row at a time when iterated over.

    Raises
    ------
    TraceError
        If there is no such file or its format is not known; while iterating, at a bad row.

    Examples
    --------
    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "trace.jsonl"
    >>> write_trace([TraceRequest(7.0, 700, 20, (0, 1)), TraceRequest(7.5, 600, 9, (0, 2))], file)
    2
    >>> [(request.timestamp, request.hash_ids) for request in read_trace(file)]
    [(0.0, (0, 1)), (0.5, (0, 2))]
    """
    path = Path(path)
    if not path.is_file():
        raise TraceError(f"no trace at {path}")
    if format is not None and format not in get_args(TraceFormat):
        raise TraceError(f"format must be one of {', '.join(get_args(TraceFormat))}, got {format}")
    if block_tokens < 1:
        raise TraceError(f"block_tokens must be at least 1, got {block_tokens}")
    return TraceFile(
        path, format or _detect(path), block_tokens, tokenizer, skip_bad_rows, in_order
    )


def _open(path: Path) -> TextIO:
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    if packed:
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def _detect(path: Path) -> TraceFormat:
    try:
        with _open(path) as file:
            start = file.read(4096).lstrip()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise TraceError(f"{path} cannot be read: {error}") from error
    header = start.partition("\n")[0]
    if "ContextTokens" in header:
        return "azure"
    if "Request tokens" in header:
        return "burstgpt"
    if start.startswith("{") and '"input_length"' in start:
        return "mooncake"
    if start.startswith(("[", "{")) and '"conversations"' in start:
        return "sharegpt"
    raise TraceError(
        f"{path} has no format known here; it begins {header[:60]!r}. Known are Mooncake JSONL "
        '(with "input_length"), BurstGPT CSV (with a column "Request tokens"), Azure CSV (with '
        '"ContextTokens") and ShareGPT JSON (with "conversations"): name one with format '
        "(--format) if it is one of them"
    )


def scale_rate(requests: Iterable[TraceRequest], factor: float) -> Iterator[TraceRequest]:
    """Let the same requests arrive ``factor`` times as fast; think times shrink with the gaps.

    Examples
    --------
    >>> [r.timestamp for r in scale_rate([TraceRequest(3.0, 1, 1)], 0.5)]
    [6.0]
    """
    if not 0 < factor < float("inf"):
        raise TraceError(f"the rate is multiplied by a number above 0, got {factor!r}")
    return (replace(request, timestamp=request.timestamp / factor) for request in requests)


def cut_window(
    requests: Iterable[TraceRequest], start: float = 0.0, stop: float = float("inf")
) -> Iterator[TraceRequest]:
    """Keep requests that arrive in ``start <= t < stop`` seconds; times then count from ``start``.

    Stops reading at the first one behind, so ``requests`` must be in order.
    """
    if not 0 <= start < stop:
        raise TraceError(f"a window needs 0 <= start < stop, got {start!r} and {stop!r}")

    def kept() -> Iterator[TraceRequest]:
        for request in requests:
            if request.timestamp >= stop:
                return
            if request.timestamp >= start:
                yield replace(request, timestamp=request.timestamp - start)

    return kept()


def thin_sessions(
    requests: Iterable[TraceRequest], share: float, seed: int = 0
) -> Iterator[TraceRequest]:
    """Keep that share of the sessions, whole; a request without a session counts as one.

    Unlike :func:`scale_rate` this leaves think times alone. The share of requests kept comes close
    to ``share`` when sessions are many.
    """
    if not 0 < share <= 1:
        raise TraceError(f"share must be above 0 and at most 1, got {share!r}")
    for number, request in enumerate(requests):
        name = number if request.session is None else request.session
        if share == 1 or random.Random(f"{seed}/{name}").random() < share:
            yield request


def poisson_arrivals(
    requests: Iterable[TraceRequest],
    rate: float,
    *,
    think_time: float = 30.0,
    seed: int = 0,
) -> Iterator[TraceRequest]:
    """Give times to requests that have none, such as those of a ShareGPT file.

    Parameters
    ----------
    requests
        The turns of a session must follow each other.
    rate
        Sessions that begin in a second (Poisson process).
    think_time
        Mean seconds from one turn of a session to the next (exponential).
    seed
        Same seed, same times.
    """
    if not (rate > 0 and think_time > 0):
        raise TraceError(f"rate and think_time must be above 0, got {rate!r} and {think_time!r}")
    rng, start, number = random.Random(seed), 0.0, 0
    waiting: list[tuple[float, int, TraceRequest]] = []
    numbered = enumerate(requests)
    for _, turns in groupby(numbered, lambda pair: pair[1].session or f"/{pair[0]}"):
        start += rng.expovariate(rate)
        moment = start
        while waiting and waiting[0][0] <= start:
            yield heappop(waiting)[2]
        for _, request in turns:
            heappush(waiting, (moment, number, replace(request, timestamp=moment)))
            moment += rng.expovariate(1 / think_time)
            number += 1
    while waiting:
        yield heappop(waiting)[2]

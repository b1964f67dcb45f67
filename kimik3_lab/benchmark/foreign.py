"""Results of public benchmark tools, read into the same rows as our own.

Needs what :mod:`kimik3_lab.benchmark.report` needs. Lesson 12 and ``k3lab compare`` use it.

Three formats are known: ours, guidellm's JSON (0.6 to 0.8) and what ``vllm bench serve
--save-result`` writes. A row has the columns of :func:`kimik3_lab.benchmark.report.rows`, and None
where a tool did not say. Where a tool means something else by a word, a note says so.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kimik3_lab.benchmark.foreign_guidellm import guidellm_rows
from kimik3_lab.benchmark.foreign_rows import ForeignFormatError
from kimik3_lab.benchmark.foreign_vllm import vllm_rows
from kimik3_lab.benchmark.report import SCHEMA, ResultError, load_result, rows

__all__ = ["LoadedResult", "load_any"]


@dataclass(frozen=True)
class LoadedResult:
    """One result file.

    Attributes
    ----------
    tool
        Who measured: ``k3lab bench``, ``guidellm 0.8.1`` or ``vllm bench serve``.
    path
        The file.
    rows
        One a load level, with the columns of :func:`kimik3_lab.benchmark.report.rows` and the mean
        lengths ``prompt_tokens`` and ``output_tokens``.
    notes
        What a reader must know before laying these figures beside others.
    """

    tool: str
    path: Path
    rows: list[dict[str, Any]]
    notes: tuple[str, ...] = field(default=())


def load_any(path: str | Path) -> LoadedResult:
    """Read a result file, whichever of the three tools wrote it.

    Raises
    ------
    ResultError
        If there is no such file, it is not JSON, its format is unknown, or figures that every
        result must have are missing; the message names them.

    Examples
    --------
    >>> from kimik3_lab.paths import data_dir
    >>> folder = data_dir() / "golden" / "public_clients"
    >>> [load_any(folder / name).tool for name in ("guidellm.json", "vllm_c4.json")]
    ['guidellm 0.8.1', 'vllm bench serve']
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ResultError(f"no result file at {path}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ResultError(f"{path} cannot be read: {error}") from error
    bodies = _parse(path, text)
    try:
        if isinstance(bodies[0], dict) and bodies[0].get("schema") == SCHEMA:
            return _own(path)
        if _is_guidellm(bodies[0]):
            tool, table, notes = guidellm_rows(bodies[0])
        elif _is_vllm(bodies[0]):
            # Runs that --append-result put into one file are rows of one table.
            tool, table, notes = vllm_rows(bodies)
        else:
            raise ForeignFormatError(_unknown(bodies[0]))
    except ForeignFormatError as error:
        raise ResultError(f"{path}: {error}") from error
    return LoadedResult(tool, path, table, tuple(notes))


def _parse(path: Path, text: str) -> list[Any]:
    """Read one JSON document, or several with one on each line."""
    try:
        return [json.loads(text)]
    except ValueError as error:
        lines = [line for line in text.splitlines() if line.strip()]
        try:
            bodies = [json.loads(line) for line in lines]
        except ValueError:
            raise ResultError(
                f"{path} is not JSON ({error}). Of guidellm take the file that "
                "--output kind=json,path=... wrote, of vLLM that of --save-result"
            ) from error
        if not bodies:
            raise ResultError(f"{path} is empty: did the benchmark end?") from error
        return bodies


def _own(path: Path) -> LoadedResult:
    result = load_result(path)
    table = rows(result)
    for row, cell in zip(table, result.cells, strict=True):
        row["prompt_tokens"] = cell.summary.prompt_tokens
        row["output_tokens"] = cell.summary.output_tokens
    notes = [f"{cell.load.label}: {warning}" for cell in result.cells for warning in cell.warnings]
    return LoadedResult("k3lab bench", path, table, tuple(notes))


def _is_guidellm(body: Any) -> bool:
    return isinstance(body, dict) and "benchmarks" in body


def _is_vllm(body: Any) -> bool:
    return isinstance(body, dict) and "request_throughput" in body


def _unknown(body: Any) -> str:
    found = (
        f"an object with {', '.join(list(body)[:6]) or 'nothing in it'}"
        if isinstance(body, dict)
        else f"a {type(body).__name__}"
    )
    return (
        f"unknown format: {found}. Expected one of ours ('schema'), guidellm's ('benchmarks') or "
        "vllm bench serve's ('request_throughput'). A guidellm CSV or HTML report does not do"
    )

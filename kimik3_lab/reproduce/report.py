"""Read what a pack's runs left, say which cells count, and lay them out as lesson 12 does.

Needs numpy through the client's results. Lesson 13 and ``k3lab reproduce report`` use it.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kimik3_lab.benchmark.client import BenchmarkResult
from kimik3_lab.benchmark.report import ResultError, load_result
from kimik3_lab.benchmark.report import rows as result_rows
from kimik3_lab.performance.published import load_points
from kimik3_lab.provenance import provenance
from kimik3_lab.reproduce.pack import Arm, Cell, Pack, PackError, load_pack

__all__ = ["COLUMNS", "Report", "counters", "markdown", "ratios", "read_report", "save_report"]

#: Columns of lesson 12's table, then what the published one lacks.
COLUMNS = (
    "concurrency", "source", "prompt_tokens", "output_tokens", "completed_in_window",
    "output_tokens_per_s", "ttft_ms_mean", "ttft_ms_median", "tpot_ms_mean", "e2e_s_mean",
    "tokens_a_step", "cached_tokens", "moe_backend",
)  # fmt: skip
_DRAFTS = "vllm:spec_decode_num_drafts_total"
_ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
_HITS = "vllm:prefix_cache_hits_total"
_SAMPLE = re.compile(r"^(vllm:\w+)(?:\{.*\})?\s+(\S+)")


@dataclass(frozen=True)
class Report:
    """What a pack's runs say.

    Attributes
    ----------
    rows
        One a cell, with the columns :data:`COLUMNS` and ``arm``, ``cell``, ``version``, ``drafts``;
        those of the published comparison follow, if the pack is for its machine.
    problems
        Why a cell must not be quoted; empty if all may.
    """

    pack: Pack
    rows: list[dict[str, Any]]
    problems: list[str]


def counters(text: str) -> dict[str, float]:
    r"""Sum each of vLLM's metrics over its labels.

    Examples
    --------
    >>> counters('vllm:a_total{engine="0"} 2.0\nvllm:a_total{engine="1"} 3.0\n# HELP\n')
    {'vllm:a_total': 5.0}
    """
    found: dict[str, float] = {}
    for line in text.splitlines():
        if match := _SAMPLE.match(line):
            found[match[1]] = found.get(match[1], 0.0) + float(match[2])
    return found


def read_report(folder: Path) -> Report:
    """Read a pack's folder with its results.

    Raises
    ------
    PackError
        If there is no pack, or no result at all.
    """
    pack = load_pack(folder)
    rows: list[dict[str, Any]] = []
    problems: list[str] = []
    for arm in pack.arms:
        backend = _backend(folder, arm)
        if arm.server == "vllm" and backend is None:
            problems.append(f"{arm.name}: its log names no MoE backend")
        for cell in pack.cells_of(arm):
            where = f"{arm.name} {cell.name}"
            try:
                row, found = _row(folder, pack, arm, cell)
            except (ResultError, FileNotFoundError, UnicodeDecodeError) as error:
                problems.append(f"{where}: no result ({error})")
                continue
            rows.append(row | {"moe_backend": backend})
            problems += [f"{where}: {what}" for what in found]
    if not rows:
        raise PackError(f"no cell in {folder} has a result: run {folder / 'run.sh'} first")
    if pack.kind == "b300":
        rows += _published()
    return Report(pack, rows, problems)


def _backend(folder: Path, arm: Arm) -> str | None:
    path = folder / "results" / arm.name / "moe_backend.txt"
    lines = path.read_text(encoding="utf-8").split("\n") if path.is_file() else []
    names = [line.removeprefix("Using ").removesuffix(" MoE backend") for line in lines if line]
    return "; ".join(names).replace("'", "") or None


def _row(folder: Path, pack: Pack, arm: Arm, cell: Cell) -> tuple[dict[str, Any], list[str]]:
    base = folder / "results" / arm.name / cell.name
    result = load_result(base.with_name(f"{cell.name}.json"))
    before, after = (
        counters(base.with_name(f"{cell.name}.{when}.prom").read_text(encoding="utf-8"))
        for when in ("before", "after")
    )
    grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
    (measured,) = result_rows(result)
    summary = result.cells[0].summary
    drafts = grown.get(_DRAFTS, 0.0)
    hits = int(grown.get(_HITS, 0.0))
    row = {
        **measured,
        "arm": arm.name,
        "cell": cell.name,
        "version": arm.version,
        "drafts": arm.drafts,
        "source": f"{arm.server} {arm.version}, K={arm.drafts}",
        "prompt_tokens": summary.prompt_tokens,
        "output_tokens": summary.output_tokens,
        "cached_tokens": max(summary.cached_tokens or 0, hits),
        # The bonus token counts, as in the golden acceptance lengths.
        "tokens_a_step": 1 + grown.get(_ACCEPTED, 0.0) / drafts if drafts else None,
    }
    return row, list(_problems(pack, arm, cell, result, row))


def _problems(
    pack: Pack, arm: Arm, cell: Cell, result: BenchmarkResult, row: dict[str, Any]
) -> Iterable[str]:
    in_window = row["completed_in_window"]
    if in_window < pack.min_requests:
        yield f"{in_window} requests ended in the window, {pack.min_requests} are needed"
    if row["failed"]:
        yield f"{row['failed']} requests failed"
    if row["cached_tokens"]:
        yield f"{row['cached_tokens']:,} prompt tokens came from the prefix cache"
    if arm.drafts and row["tokens_a_step"] is None:
        yield f"{arm.drafts} draft tokens were asked for, and the server counted no draft"
    if not arm.drafts and row["tokens_a_step"] is not None:
        yield "the server drafted, and was not to"
    workload = result.configuration["workload"]
    for name in ("seed", "prompt_tokens", "output_tokens"):
        if workload[name] != getattr(cell, name):
            yield f"ran with {name} {workload[name]}, not {getattr(cell, name)} as in the pack"


def _published() -> list[dict[str, Any]]:
    return [
        {
            "source": f"published {point.version}",
            "concurrency": point.concurrency,
            "prompt_tokens": 8000.0,
            "output_tokens": 1000.0,
            "completed_in_window": point.completed_requests,
            "output_tokens_per_s": point.exact_throughput_tok_s,
            # The post does not say which statistic it is: lesson 12.
            "ttft_ms_mean": point.ttft_ms,
            "tpot_ms_mean": point.ms_per_token,
            "e2e_s_mean": point.latency_s,
        }
        for point in load_points()
    ]


def ratios(report: Report) -> list[dict[str, Any]]:
    """Lay each cell of the first release beside the same cell of the last: lesson 12's other table.

    A ratio above 1 is an improvement. Cells of one release are in no pair.
    """
    cells = {(r["version"], r["drafts"], r["cell"]): r for r in report.rows if "cell" in r}
    versions = list(dict.fromkeys(arm.version for arm in report.pack.arms))
    paired = report.pack.kind == "b300" and len(versions) > 1
    found = []
    for (version, drafts, cell), before in cells.items():
        after = cells.get((versions[-1], drafts, cell))
        if not paired or version != versions[0] or after is None:
            continue
        found.append(
            {
                "cell": cell,
                "drafts": drafts,
                "by_throughput": _ratio(after, before, "output_tokens_per_s"),
                "by_latency": _ratio(before, after, "e2e_s_mean"),
                "by_ttft_mean": _ratio(before, after, "ttft_ms_mean"),
                "by_ttft_median": _ratio(before, after, "ttft_ms_median"),
            }
        )
    return found


def _ratio(over: dict[str, Any], under: dict[str, Any], name: str) -> float | None:
    return over[name] / under[name] if over[name] and under[name] else None


def markdown(report: Report) -> str:
    """Return lesson 12's tables, and what must be said beside them."""
    ordered = sorted(
        report.rows,
        key=lambda row: (-round((row["prompt_tokens"] or 0) / 100), row["concurrency"]),
    )
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    lines += [f"| {' | '.join(_shown(row.get(name)) for name in COLUMNS)} |" for row in ordered]
    if pairs := ratios(report):
        lines += ["", f"| {' | '.join(pairs[0])} |", f"|{'---|' * len(pairs[0])}"]
        lines += [f"| {' | '.join(map(_shown, pair.values()))} |" for pair in pairs]
    if report.problems:
        lines += ["", "Not to be quoted until mended:", ""]
        lines += [f"- {problem}" for problem in report.problems]
    return "\n".join(lines) + "\n"


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"
    return str(value)


def save_report(report: Report, folder: Path) -> tuple[Path, Path]:
    """Write ``report.md`` and ``report.json`` into the pack's folder, and return their paths."""
    body = {
        "schema": "kimik3-lab/reproduction-report",
        "schema_version": 1,
        "what": report.pack.what,
        "provenance": provenance(device=report.pack.device),
        "rows": report.rows,
        "ratios": ratios(report),
        "problems": report.problems,
    }
    texts = {"report.md": markdown(report), "report.json": json.dumps(body, indent=1) + "\n"}
    for name, text in texts.items():
        handle, temporary = tempfile.mkstemp(dir=folder, prefix=f".{name}.")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, folder / name)
    return folder / "report.md", folder / "report.json"

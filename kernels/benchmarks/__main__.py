"""``python -m benchmarks``, run in the ``kernels`` folder: time the operators on this GPU.

Without a CUDA device it says so and shows what has been recorded.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

OPERATORS = ("attn_res",)
RECORDED = Path(__file__).resolve().parents[2] / "data" / "results"
SCHEMA_VERSION = 1


def main() -> int:
    """Parse the command line, measure or show, return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("operator", nargs="?", choices=OPERATORS, help="default: all")
    parser.add_argument("--sweep", action="store_true", help="also time other constants")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the result as JSON")
    arguments = parser.parse_args()
    operators = [arguments.operator] if arguments.operator else list(OPERATORS)

    import torch

    if not torch.cuda.is_available():
        print("Timing the kernels needs a CUDA device, and PyTorch finds none on this machine.")
        for operator in operators:
            _show_recorded(operator)
        return 0
    if os.environ.get("TRITON_INTERPRET", "0").lower() not in ("", "0", "false", "no", "off"):
        print("TRITON_INTERPRET is set: unset it, the interpreter's times mean nothing.")
        return 1
    rows: list[dict[str, Any]] = []
    for operator in operators:
        _print_header(operator, torch.cuda.get_device_name())
        for row in importlib.import_module(f"benchmarks.{operator}").run(sweep=arguments.sweep):
            rows.append(row)
            _print_row(row)
    if arguments.output:
        _save(arguments.output, rows)
        print(f"wrote {arguments.output}")
    return 0


def _print_header(operator: str, device: str) -> None:
    print(f"\n{operator} on {device}: cold L2, CUDA graph, floor at 4.3 TB/s")
    titles = {"T": 6, "blocks": 6, "us": 9, "p10-p90": 17, "MB": 9, "floor us": 9, "of floor": 8}
    print(" ".join(title.rjust(width) for title, width in titles.items()))


def _print_row(row: dict[str, Any]) -> None:
    note = "" if row["chosen"] else " " + " ".join(f"{k}={v}" for k, v in row["config"].items())
    spread = f"{row['p10_us']:.2f}-{row['p90_us']:.2f}"
    print(
        f"{row['tokens']:>6} {row['n_blocks']:>6} {row['median_us']:>9.2f} {spread:>17} "
        f"{row['bytes'] / 1e6:>9.2f} {row['floor_us']:>9.2f} "
        f"{row['fraction_of_floor']:>8.0%}{note}",
        flush=True,
    )


def _provenance() -> dict[str, Any]:
    import torch
    import triton

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "device": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "date_utc": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python -m benchmarks", *sys.argv[1:]]),
    }


def _save(path: Path, rows: list[dict[str, Any]]) -> None:
    result = {"schema_version": SCHEMA_VERSION, "provenance": _provenance(), "rows": rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(path)


def _show_recorded(operator: str) -> None:
    """Print every recorded row of an operator under the machine that made it."""
    shown = False
    for path in sorted(RECORDED.glob("*/kernels.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        rows = [row for row in result["rows"] if row["operator"] == operator]
        if rows:
            made = result["provenance"]
            _print_header(operator, f"{made['device']}, recorded {made['date_utc']}")
            for row in rows:
                _print_row(row)
            shown = True
    if not shown:
        print(f"Nothing is recorded for {operator} in {RECORDED}.")


if __name__ == "__main__":
    sys.exit(main())

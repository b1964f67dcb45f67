"""The command line that all tuners share, and what they write beside the table.

Needs PyTorch to look for a GPU.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import torch

from benchmarks.provenance import provenance

__all__ = ["made", "need_gpu", "old_names", "parser", "share", "write_json"]


def parser(module: str, about: str | None, *, seconds: float) -> argparse.ArgumentParser:
    """Return a parser with the options of every tuner.

    Parameters
    ----------
    module
        Such as ``tune_moe``.
    about
        What ``--help`` says first.
    seconds
        The usual GPU time of a candidate.
    """
    options = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{module}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_argument(
        "--warm", nargs="?", const=(0, 1), type=share, metavar="I/N",
        help="compile into Triton's cache, time nothing; with I/N every N-th candidate from the "
        "I-th on",
    )  # fmt: skip
    options.add_argument("--write", action="store_true", help="store winners in k3_kernels/tuned")
    options.add_argument("--output", type=Path, metavar="FILE", help="write all times as JSON")
    options.add_argument("--seconds", type=float, default=seconds, help="GPU time of a candidate")
    return options


def old_names(options: argparse.ArgumentParser) -> None:
    """Let a tuner understand the names that commands recorded in stored tables have."""
    hidden: dict[str, Any] = {"help": argparse.SUPPRESS, "default": argparse.SUPPRESS}
    options.add_argument(
        "--compile-only", dest="warm", action="store_const", const=(0, 1), **hidden
    )
    options.add_argument("--store", dest="write", action="store_true", **hidden)
    options.add_argument("--report", dest="output", type=Path, **hidden)


def share(text: str) -> tuple[int, int]:
    """Read the share of ``--warm``.

    Examples
    --------
    >>> share("3/16")
    (3, 16)
    """
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if not found or int(found[1]) >= int(found[2]):
        raise argparse.ArgumentTypeError(f"{text!r}: expected I/N with I < N, such as 0/4")
    return int(found[1]), int(found[2])


def need_gpu() -> None:
    """End the program, with code 1, on a machine without a CUDA device."""
    if not torch.cuda.is_available():
        raise SystemExit("Tuning needs a CUDA device, and PyTorch finds none on this machine.")


def made() -> dict[str, Any]:
    """Return what a table keeps of a run: versions, date, sources, command."""
    whole = provenance({}, seed=0)
    kept = ("torch", "triton", "driver", "date_utc", "sources_sha256", "command")
    return {name: whole[name] for name in kept}


def write_json(path: Path, result: Any) -> None:
    """Write a result; the old file stays until the new one is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(path)

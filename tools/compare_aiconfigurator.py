"""NVIDIA's aiconfigurator on the six published points, beside the simulator's errors.

Needs the standard library here, and aiconfigurator in an environment of its own:

    python -m venv ~/aiconfigurator && ~/aiconfigurator/bin/pip install aiconfigurator==0.12.0
    python tools/compare_aiconfigurator.py ~/aiconfigurator/bin/aiconfigurator

It prints, for each version and setting, the estimates and the mean absolute errors. Settings are
the best that a scan over lanes, accepted drafts and tokens a step found for each version, so the
comparison favours aiconfigurator. Its accepted length counts drafts only.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from kimik3_lab.performance.published import (
    BASELINE,
    IMPROVED,
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    PublishedPoint,
    load_points,
)


@dataclass(frozen=True)
class Setting:
    """One way to ask, and the version that it is compared with."""

    version: str
    name: str
    options: tuple[str, ...]


_VLLM = ("--backend", "vllm")
_SGLANG = ("--backend", "sglang", "--perf-db-version", "0.5.14")
SETTINGS = (
    Setting(BASELINE, "vLLM lane, no drafts", (*_VLLM, "--ctx-tokens", "8000")),
    Setting(
        BASELINE,
        "vLLM lane, 7 drafts, 2.0 accepted, 1,024 tokens a step",
        (*_VLLM, "--ctx-tokens", "1024", "--nextn", "7", "--nextn-accepted", "2.0"),
    ),
    Setting(
        IMPROVED,
        "vLLM lane, 7 drafts, 3.0 accepted",
        (*_VLLM, "--ctx-tokens", "8000", "--nextn", "7", "--nextn-accepted", "3.0"),
    ),
    Setting(
        IMPROVED,
        "SGLang lane, W4A8, 7 drafts, 2.5 accepted",
        (
            *(*_SGLANG, "--moe-quant-mode", "w4a8_mxfp4_mxfp8"),
            *("--ctx-tokens", "8000", "--nextn", "7", "--nextn-accepted", "2.5"),
        ),
    ),
)
_FIGURES = {
    "ttft_ms": r"TTFT:\s+([\d.]+) ms",
    "latency_ms": r"Request Latency:\s+([\d.]+) ms",
    "tokens_per_s": r"tokens/s:\s+([\d.]+)",
}


def estimate(program: Path, setting: Setting, concurrency: int) -> dict[str, float]:
    """Ask for one point.

    Raises
    ------
    RuntimeError
        If the program fails or prints no figure; the message ends with what it printed.
    """
    command = [
        *(str(program), "cli", "estimate", "--no-color", "--log-level", "ERROR"),
        *("--model", "moonshotai/Kimi-K3", "--system", "b300_sxm"),
        *("--isl", str(PROMPT_TOKENS), "--osl", str(OUTPUT_TOKENS)),
        *("--batch-size", str(concurrency), "--tp-size", "8"),
        *("--moe-tp-size", "8", "--moe-ep-size", "1"),
        *setting.options,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    found = {name: re.search(pattern, done.stdout) for name, pattern in _FIGURES.items()}
    if done.returncode or not all(found.values()):
        text = (done.stdout + done.stderr)[-1500:]
        raise RuntimeError(f"{' '.join(command)} gave no estimate; it printed: {text}")
    return {name: float(match[1]) for name, match in found.items() if match}


def errors(point: PublishedPoint, found: dict[str, float]) -> dict[str, float]:
    """Signed errors in percent."""
    return {
        "throughput": 100 * (found["tokens_per_s"] / point.throughput_tok_s - 1),
        "ttft": 100 * (found["ttft_ms"] / point.ttft_ms - 1),
        "latency": 100 * (found["latency_ms"] / 1000 / point.latency_s - 1),
    }


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("program", type=Path, help="aiconfigurator in its own environment")
    program = parser.parse_args().program
    if not program.exists():
        print(f"{program} does not exist; install it as the head of this file says")
        return 2
    for setting in SETTINGS:
        rows = []
        print(f"{setting.version}: {setting.name}")
        for point in (p for p in load_points() if p.version == setting.version):
            found = estimate(program, setting, point.concurrency)
            rows.append(errors(point, found))
            shown = ", ".join(f"{name} {value:.1f}" for name, value in found.items())
            print(f"  c={point.concurrency:<3} {shown}", flush=True)
        means = {name: fmean(abs(row[name]) for row in rows) for name in rows[0]}
        print("  mean errors %: " + ", ".join(f"{k} {v:.1f}" for k, v in means.items()), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""NVIDIA's aiconfigurator on the six published points: each of its settings, and the best of them.

Needs the standard library and the lab here, and aiconfigurator in an environment of its own:

    python -m venv ~/aiconfigurator && ~/aiconfigurator/bin/pip install aiconfigurator==0.12.0
    python tools/compare_aiconfigurator.py ~/aiconfigurator/bin/aiconfigurator

It prints the mean absolute errors of named settings, then scans all settings that the published
command leaves free and prints the best, each with a command that repeats one of its points;
``--output`` writes ``data/results/simulated/aiconfigurator.json``, which lesson 11 shows beside the
simulator. Which settings are best is decided by the published figures themselves, so the comparison
favours aiconfigurator. Minutes; its accepted length counts drafts only.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from kimik3_lab.json_file import write_json
from kimik3_lab.performance.published import (
    BASELINE,
    IMPROVED,
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    PublishedPoint,
    load_points,
)
from kimik3_lab.provenance import provenance

WORKER = Path(__file__).with_name("aiconfigurator_worker.py")
#: Where its estimates come from: engine and version whose tables it reads, and how it fills gaps.
#: TensorRT-LLM has no table of K3's experts: that lane needs HYBRID. SOL is a floor, no estimate.
LANES = (
    ("vllm", "0.24.0", "SILICON"),
    ("sglang", "0.5.14", "SILICON"),
    ("sglang", "0.5.16", "SILICON"),
    ("trtllm", "1.3.0rc20", "HYBRID"),
    ("vllm", "0.24.0", "EMPIRICAL"),
    ("sglang", "0.5.14", "EMPIRICAL"),
    ("vllm", "0.24.0", "SOL"),
    ("sglang", "0.5.14", "SOL"),
)
#: Prompt tokens of a step, drafts, and accepted drafts.
STEPS = (512, 1024, 2048, 4096, 8000, 16_000)
DRAFTS = ((0, 0.0), *((k, quarters / 4) for k in (7, 8) for quarters in range(2, 19)))
#: Settings with a reason: the defaults, what an earlier scan by hand had found, and last the best
#: ones of a scan that rest on measured kernels alone (SILICON).
NAMED = (
    (BASELINE, "vllm", "0.24.0", 8000, 0, 0.0),
    (BASELINE, "vllm", "0.24.0", 1024, 0, 0.0),
    (BASELINE, "vllm", "0.24.0", 8000, 7, 1.5),
    (BASELINE, "vllm", "0.24.0", 1024, 7, 2.0),
    (BASELINE, "vllm", "0.24.0", 8000, 7, 2.5),
    (IMPROVED, "vllm", "0.24.0", 8000, 0, 0.0),
    (IMPROVED, "vllm", "0.24.0", 8000, 7, 3.0),
    (IMPROVED, "sglang", "0.5.16", 8000, 7, 2.5),
    (IMPROVED, "sglang", "0.5.14", 8000, 7, 2.5),
    (BASELINE, "vllm", "0.24.0", 1024, 7, 1.75),
    (IMPROVED, "sglang", "0.5.14", 8000, 8, 3.0),
)
#: Keyword of ``cli_estimate`` and the option of its command line.
OPTIONS = {
    "backend_name": "--backend",
    "backend_version": "--perf-db-version",
    "database_mode": "--database-mode",
    "ctx_tokens": "--ctx-tokens",
    "nextn": "--nextn",
    "nextn_accepted": "--nextn-accepted",
}
_FIGURES = {
    "ttft_ms": r"TTFT:\s+([\d.]+) ms",
    "latency_ms": r"Request Latency:\s+([\d.]+) ms",
    "tokens_per_s": r"tokens/s:\s+([\d.]+)",
}

Setting = dict[str, Any]


def setting(lane: Sequence[str], ctx_tokens: int, drafts: int, accepted: float) -> Setting:
    """Say what differs from one way to ask to another."""
    backend, version, mode = lane
    chosen: Setting = {
        "backend_name": backend,
        "backend_version": version,
        "database_mode": mode,
        "ctx_tokens": ctx_tokens,
        "nextn": drafts,
    }
    return chosen | ({"nextn_accepted": accepted} if drafts else {})


class Worker:
    """aiconfigurator in a process of its own."""

    def __init__(self, program: Path) -> None:
        self._process = subprocess.Popen(
            [str(program.with_name("python")), str(WORKER)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.version = str(self._read()["version"])

    def estimate(self, chosen: Setting, concurrency: int) -> dict[str, Any]:
        """One point: figures, or why there are none under ``error``."""
        asked = {
            **{"model_path": "moonshotai/Kimi-K3", "system_name": "b300_sxm"},
            **{"isl": PROMPT_TOKENS, "osl": OUTPUT_TOKENS, "batch_size": concurrency},
            **{"tp_size": 8, "moe_tp_size": 8, "moe_ep_size": 1},
            **chosen,
        }
        assert self._process.stdin
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{WORKER.name} ended with status {self._process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found


def command(chosen: Setting, concurrency: int) -> list[str]:
    """Return the same question on its command line."""
    words = [
        *("aiconfigurator", "cli", "estimate", "--no-color", "--log-level", "ERROR"),
        *("--model", "moonshotai/Kimi-K3", "--system", "b300_sxm"),
        *("--isl", str(PROMPT_TOKENS), "--osl", str(OUTPUT_TOKENS)),
        *("--batch-size", str(concurrency), "--tp-size", "8"),
        *("--moe-tp-size", "8", "--moe-ep-size", "1"),
    ]
    for name, value in chosen.items():
        words += [OPTIONS[name], str(value)]
    return words


def ask_by_command(program: Path, chosen: Setting, concurrency: int) -> dict[str, float]:
    """Ask for one point as a reader would.

    Raises
    ------
    RuntimeError
        If the program fails or prints no figure; the message ends with what it printed.
    """
    words = command(chosen, concurrency)
    done = subprocess.run([str(program), *words[1:]], capture_output=True, text=True)
    found = {name: re.search(pattern, done.stdout) for name, pattern in _FIGURES.items()}
    if done.returncode or not all(found.values()):
        text = (done.stdout + done.stderr)[-1500:]
        raise RuntimeError(f"{shlex.join(words)} gave no estimate; it printed: {text}")
    return {name: float(match[1]) for name, match in found.items() if match}


def mean_errors(
    points: Sequence[PublishedPoint], estimates: Sequence[Mapping[str, float]]
) -> dict[str, float]:
    """Mean absolute errors in percent."""
    pairs = list(zip(points, estimates, strict=True))
    return {
        "throughput": _off((e["tokens_per_s"], p.throughput_tok_s) for p, e in pairs),
        "ttft": _off((e["ttft_ms"], p.ttft_ms) for p, e in pairs),
        "latency": _off((e["latency_ms"] / 1000, p.latency_s) for p, e in pairs),
    }


def _off(pairs: Iterator[tuple[float, float]]) -> float:
    return fmean(100 * abs(found / published - 1) for found, published in pairs)


def best_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Find the row with the least mean of its three errors, and those with the least of one."""
    found = {"together": min(rows, key=lambda row: fmean(row["errors"].values()))}
    for name in ("latency", "ttft", "throughput"):
        found[name] = min(rows, key=lambda row, name=name: row["errors"][name])  # type: ignore[misc]
    return found


def _print(title: str, row: Mapping[str, Any]) -> None:
    errors = ", ".join(f"{name} {value:.1f}" for name, value in row["errors"].items())
    chosen = " ".join(str(value) for value in row["setting"].values())
    print(f"  {title:22} {chosen:42} mean errors %: {errors}", flush=True)


def main() -> int:
    """Print the tables, and write them."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("program", type=Path, help="aiconfigurator in its own environment")
    parser.add_argument("--no-scan", action="store_true", help="named settings only")
    parser.add_argument("--output", type=Path, help="write all of it as JSON")
    arguments = parser.parse_args()
    program = arguments.program
    if not program.exists():
        print(f"{program} does not exist; install it as the head of this file says")
        return 2
    worker = Worker(program)
    print(f"aiconfigurator {worker.version}")
    points = {v: [p for p in load_points() if p.version == v] for v in (BASELINE, IMPROVED)}
    named = []
    for version, backend, tables, *numbers in NAMED:
        chosen = setting((backend, tables, "SILICON"), *numbers)  # type: ignore[arg-type]
        asked = [worker.estimate(chosen, p.concurrency) for p in points[version]]
        errors = mean_errors(points[version], asked)
        again = shlex.join(command(chosen, 16))
        named.append(
            {"version": version, "setting": chosen, "estimates": asked, "errors": errors,
             "command": again}
        )  # fmt: skip
        _print(version, named[-1])
    body: dict[str, Any] = {"version": worker.version, "named": named}
    if not arguments.no_scan:
        body |= scan(worker, points)
    worker.close()
    if not arguments.no_scan:
        for row in body["best"][BASELINE]["together"], body["best"][IMPROVED]["together"]:
            check(program, row)
    if arguments.output is not None:
        again = f"python tools/{Path(__file__).name} ~/aiconfigurator/bin/aiconfigurator --output "
        again += f"data/results/simulated/{arguments.output.name}"
        origin = provenance(device="none: another simulator's estimates", command=again)
        write_json(arguments.output, {"provenance": origin, **body})
    return 0


def scan(worker: Worker, points: Mapping[str, Sequence[PublishedPoint]]) -> dict[str, Any]:
    """Ask for all free settings and keep the best for each version."""
    rows: dict[str, list[dict[str, Any]]] = {version: [] for version in points}
    refused: dict[str, str] = {}
    asked = 0
    for lane in LANES:
        for ctx_tokens in STEPS:
            for drafts, accepted in DRAFTS:
                chosen = setting(lane, ctx_tokens, drafts, accepted)
                found = [worker.estimate(chosen, c) for c in (1, 4, 16)]
                asked += 1
                if error := next((e["error"] for e in found if "error" in e), None):
                    refused[" ".join(lane)] = error
                    continue
                for version, of_version in points.items():
                    errors = mean_errors(of_version, found)
                    rows[version].append(
                        {"setting": chosen, "estimates": found, "errors": errors}
                    )  # fmt: skip
        print(f"  scanned {' '.join(lane)}", file=sys.stderr, flush=True)
    best = {version: best_of(of_version) for version, of_version in rows.items()}
    print(f"the best of {asked} settings, {len(refused)} lanes with refusals")
    for version, found_best in best.items():
        for name, row in found_best.items():
            _print(f"{version}, {name}", row)
    grid = {"lanes": LANES, "ctx_tokens": STEPS, "drafts_and_accepted": DRAFTS}
    for of_version in best.values():
        for row in of_version.values():
            row["command"] = shlex.join(command(row["setting"], 16))  # type: ignore[index]
    return {"grid": grid, "settings": asked, "refused": refused, "best": best}


def check(program: Path, row: Mapping[str, Any]) -> None:
    """Ask the command line for a row and compare.

    Raises
    ------
    RuntimeError
        If it prints other figures than the worker gave.
    """
    print(shlex.join(command(row["setting"], 16)))
    for concurrency, expected in zip((1, 4, 16), row["estimates"], strict=True):
        found = ask_by_command(program, row["setting"], concurrency)
        shown = ", ".join(f"{name} {value:.1f}" for name, value in found.items())
        print(f"  c={concurrency:<3} {shown}", flush=True)
        if any(abs(found[name] - expected[name]) > 0.006 for name in found):
            raise RuntimeError(f"the worker had {expected}, the command line prints {found}")


if __name__ == "__main__":
    sys.exit(main())

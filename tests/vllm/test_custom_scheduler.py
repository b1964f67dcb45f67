"""A scheduler class of the lab in real vLLM: another order, the same tokens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "data" / "tiny-k3"
NAME = "kimik3_lab.vllm_cpu.shortest_first.ShortestPromptFirst"
LENGTHS = (120, 8, 60, 30)
#: Run in a process of its own: vLLM expects one engine in each.
PROGRAM = """
import json, sys
from vllm import LLM, SamplingParams

scheduler = sys.argv[3] if len(sys.argv) > 3 else None
llm = LLM(sys.argv[1], skip_tokenizer_init=True, dtype="float32", enforce_eager=True,
          enable_prefix_caching=False, attention_backend="CPU_MLA", max_model_len=256,
          max_num_seqs=1, num_gpu_blocks_override=16, scheduler_cls=scheduler)
engine = llm.llm_engine
params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
for length in json.loads(sys.argv[2]):
    prompt = {"prompt_token_ids": [3 + (7 * i + length) % 500 for i in range(length)]}
    engine.add_request(str(length), prompt, params)
done = []
while engine.has_unfinished_requests():
    done += [[o.request_id, list(o.outputs[0].token_ids)] for o in engine.step() if o.finished]
queue = engine.engine_core.engine_core.scheduler
print("ANSWER" + json.dumps({"done": done, "scheduler": type(queue).__name__}))
"""


def run(*scheduler: str) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(FOLDER), json.dumps(LENGTHS), *scheduler],
        capture_output=True, text=True, check=False, env=os.environ,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("ANSWER")]
    return json.loads(line.removeprefix("ANSWER"))


@pytest.fixture(scope="module")
def both() -> tuple[dict[str, object], dict[str, object]]:
    return run(), run(NAME)


def test_the_order_changes(both: tuple[dict[str, object], dict[str, object]]) -> None:
    theirs, ours = both
    assert (theirs["scheduler"], ours["scheduler"]) == ("Scheduler", "ShortestPromptFirst")
    assert [name for name, _ in theirs["done"]] == [str(n) for n in LENGTHS]
    assert [name for name, _ in ours["done"]] == [str(n) for n in sorted(LENGTHS)]


def test_the_tokens_do_not(both: tuple[dict[str, object], dict[str, object]]) -> None:
    theirs, ours = both
    assert dict(theirs["done"]) == dict(ours["done"])
    assert len({tuple(tokens) for _, tokens in ours["done"]}) > 1


def test_the_queue_has_all_that_vllm_asks_of_one() -> None:
    from vllm.v1.core.sched.request_queue import RequestQueue

    from kimik3_lab.vllm_cpu.shortest_first import ShortestFirstQueue

    assert set(vars(ShortestFirstQueue)) >= RequestQueue.__abstractmethods__


def test_the_one_for_gpus_plans_ahead() -> None:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    from kimik3_lab.vllm_cpu import shortest_first

    assert issubclass(shortest_first.AsyncShortestPromptFirst, AsyncScheduler)
    with pytest.raises(AttributeError, match="LongestPromptFirst"):
        _ = shortest_first.LongestPromptFirst

"""The time of one step of vLLM's scheduler and of ours, side by side on the same scenario.

Needs vLLM and the lab. A step is ``schedule()`` and ``update_from_output()``; what the fake model
runner and the drafter do in between is not counted. Rounds alternate between the two, so that a
machine that slows down slows both.
"""

from __future__ import annotations

import gc
import statistics
import time
from typing import Any

from oracle import make_request, make_scheduler
from tqdm import tqdm
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.outputs import ModelRunnerOutput as VllmOutput
from vllm_versions import VERSION

from kimik3_lab.serving import ModelRunnerOutput, Request, SamplingParams
from kimik3_lab.serving.async_scheduler import make_scheduler as make_ours
from kimik3_lab.serving.vllm_rules import vllm_rules

__all__ = ["SCENARIOS", "compare", "scaling"]

_PLAIN = {
    "max_num_seqs": 1024,
    "max_num_batched_tokens": 8192,
    "block_size": 16,
    "num_blocks": 200_000,
    "prefix_caching": False,
    "kda": False,
    "spec": None,
    "k": 0,
    "long_prefill_token_threshold": 0,
}
#: 1,024 requests decode in each of them.
SCENARIOS: dict[str, dict[str, Any]] = {
    "decode": _PLAIN,
    "decode, prefix caching": _PLAIN | {"prefix_caching": True},
    "decode, K3's groups, prefix caching": _PLAIN
    | {"prefix_caching": True, "kda": True, "num_kda_groups": 3, "block_size": 128},
    "speculation, K=4, two accepted": _PLAIN
    | {"spec": "ngram", "k": 4, "max_num_batched_tokens": 16384},
}
_ACCEPTED = 2
_PROMPT_TOKENS = 60


class _Side:
    """A scheduler whose requests all decode."""

    def __init__(self, config: dict[str, Any], running: int, waiting: int) -> None:
        self.k = config["k"]
        config = config | {"max_num_seqs": running}
        self.scheduler = self.make(config)
        for number in range(running + waiting):
            prompt = [100 + number % 800] * _PROMPT_TOKENS
            self.scheduler.add_request(self.request(f"r{number}", prompt))
        while not self._all_decode(running):
            self.step()

    def _all_decode(self, count: int) -> bool:
        running = self.scheduler.running
        return len(running) == count and all(r.num_output_tokens > 1 for r in running)

    def step(self) -> float:
        """Run a step; return the seconds of the scheduler's part."""
        begin = time.perf_counter()
        output = self.scheduler.schedule()
        planned = time.perf_counter()
        drafts = output.scheduled_spec_decode_tokens
        ids, tokens = list(output.num_scheduled_tokens), []
        for i in ids:
            done = not self.scheduler.requests[i].is_prefill_chunk
            tokens.append([7] * (1 + min(_ACCEPTED, len(drafts.get(i, ())))) if done else [])
        result = self.result(ids, tokens)
        answered = time.perf_counter()
        self.scheduler.update_from_output(output, result)
        seconds = time.perf_counter() - answered + planned - begin
        if self.k:
            self.draft(ids)
        return seconds


class _Vllm(_Side):
    make = staticmethod(make_scheduler)

    def request(self, name: str, prompt: list[int]) -> Any:
        return make_request(self.scheduler, {"id": name, "max_tokens": 10_000}, prompt)

    def result(self, ids: list[str], tokens: list[list[int]]) -> Any:
        return VllmOutput(
            req_ids=ids,
            req_id_to_index={i: index for index, i in enumerate(ids)},
            sampled_token_ids=tokens,
        )

    def draft(self, ids: list[str]) -> None:
        self.scheduler.update_draft_token_ids(DraftTokenIds(ids, [[7] * self.k for _ in ids]))


class _Ours(_Side):
    @staticmethod
    def make(config: dict[str, Any]) -> Any:
        return make_ours(*vllm_rules(VERSION).configs(config))

    def request(self, name: str, prompt: list[int]) -> Request:
        return Request(name, prompt, SamplingParams(max_tokens=10_000, ignore_eos=True))

    def result(self, ids: list[str], tokens: list[list[int]]) -> ModelRunnerOutput:
        return ModelRunnerOutput(ids, tokens)

    def draft(self, ids: list[str]) -> None:
        self.scheduler.update_draft_token_ids({i: [7] * self.k for i in ids})


def compare(name: str, *, rounds: int = 5, steps: int = 16) -> dict[str, Any]:
    """Time a scenario of :data:`SCENARIOS`; times are medians of a round, in milliseconds."""
    sides = {"vllm": _Vllm(SCENARIOS[name], 1024, 0), "ours": _Ours(SCENARIOS[name], 1024, 0)}
    times: dict[str, list[float]] = {side: [] for side in sides}
    for _ in tqdm(range(rounds), desc=name, unit="round", disable=None):
        for side, scheduler in sides.items():
            gc.collect()
            median = statistics.median(scheduler.step() for _ in range(steps))
            times[side].append(1e3 * median)
    ratios = [ours / theirs for ours, theirs in zip(times["ours"], times["vllm"], strict=True)]
    return {
        "scenario": name,
        "running": 1024,
        "vllm_ms": [round(t, 4) for t in times["vllm"]],
        "ours_ms": [round(t, 4) for t in times["ours"]],
        "median_ratio": round(statistics.median(ratios), 4),
    }


def scaling(*, steps: int = 60) -> list[dict[str, Any]]:
    """Time our scheduler alone, by running and by waiting requests: the fastest of some steps.

    There is no second time beside it that would be slowed down alike, so medians would compare
    the load of the machine at two moments.
    """
    rows = []
    for running, waiting in ((128, 0), (256, 0), (512, 0), (1024, 0), (256, 1_000), (256, 10_000)):
        side = _Ours(_PLAIN, running, waiting)
        gc.collect()
        fastest = min(side.step() for _ in range(steps))
        rows.append({"running": running, "waiting": waiting, "ours_ms": round(1e3 * fastest, 4)})
    return rows

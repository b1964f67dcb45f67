"""Random scenarios: a configuration, requests that arrive at steps, accepted drafts.

Needs the standard library only. A family stresses one feature; ``FAMILIES`` names them. The same
seed draws the same scenarios everywhere, whichever vLLM then plays them.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from base_scenarios import base, hybrid

__all__ = ["FAMILIES", "FIRST_VERSION", "expand"]

Scenario = dict[str, Any]


def expand(pieces: list[list[Any]]) -> list[int]:
    """Return the tokens of a prompt: ["range", start, n] counts up, ["const", token, n] repeats."""
    tokens: list[int] = []
    for kind, value, count in pieces:
        if kind not in ("range", "const"):
            raise ValueError(f"a piece of a prompt is a range or a const, got {kind!r}")
        tokens += range(value, value + count) if kind == "range" else [value] * count
    return tokens


def _requests(scenario: Scenario) -> list[dict[str, Any]]:
    return [r for step in scenario["arrivals"].values() for r in step]


def priority(rng: Random) -> Scenario:
    """Priorities and arrival times, with few blocks: who is preempted, who goes first."""
    scenario = base(rng, tight=rng.random() < 0.85)
    scenario["config"]["policy"] = "priority"
    scenario["config"]["max_num_seqs"] = rng.choice([2, 4, 8, 16])
    for request in _requests(scenario):
        request["priority"] = rng.randint(0, 3)
        request["arrival_time"] = float(rng.randint(0, 5))
    return scenario


def partial_hits(rng: Random) -> Scenario:
    """Draw a hash unit finer than the block: hits inside a block, copied before they grow."""
    scenario = hybrid(rng, repeats=True)
    config = scenario["config"]
    config["prefix_match_unit"] = rng.choice([16, config["block_size"] // 2])
    return scenario


def retention(rng: Random) -> Scenario:
    """KDA states kept everywhere, only where they are replayed, or at an interval."""
    scenario = hybrid(rng, repeats=True)
    config = scenario["config"]
    config["retention_interval"] = rng.choice(
        [None, 0, *(config["block_size"] * n for n in (1, 2, 4))]
    )
    if rng.random() < 0.4:
        config["prefix_match_unit"] = 16
    return scenario


def junction(rng: Random) -> Scenario:
    """Draw the flag that keeps a KDA state where requests part, which needs an EAGLE drafter."""
    scenario = hybrid(rng, repeats=True, specs=("eagle3", "mtp"))
    config = scenario["config"]
    config["prefix_match_unit"] = rng.choice([16, config["block_size"] // 2])
    config["enable_mamba_shared_prefix_checkpoint"] = rng.random() < 0.75
    if rng.random() < 0.5:
        config["retention_interval"] = rng.choice([None, 0, 2 * config["block_size"]])
    return scenario


def checkpoints(rng: Random) -> Scenario:
    """States saved inside a prefill chunk, where the kernel can, instead of splitting it."""
    scenario = hybrid(rng, repeats=True, specs=(None, None, "ngram", "dspark", "dflash", "eagle3"))
    config = scenario["config"]
    config["prefill_checkpoint_alignment"] = rng.choice([16, 16, 16, 64])
    if rng.random() < 0.6:
        config["prefix_match_unit"] = rng.choice([16, config["block_size"] // 2])
    if rng.random() < 0.5:
        config["retention_interval"] = rng.choice([None, 0, 2 * config["block_size"]])
    return scenario


def asynchronous(rng: Random) -> Scenario:
    """Step t+1 is planned before the tokens of step t are known."""
    scenario = base(rng) if rng.random() < 0.6 else hybrid(rng, repeats=True)
    scenario["config"]["async_scheduling"] = True
    if rng.random() < 0.3:
        _end_early(rng, scenario)
    return scenario


def context_parallel(rng: Random) -> Scenario:
    """Attention pages spread over several GPUs, KDA states kept whole on each."""
    scenario = (
        hybrid(rng, repeats=True) if rng.random() < 0.7 else base(rng, caching=True, kda=False)
    )
    config = scenario["config"]
    config["decode_context_parallel_size"] = rng.choice([2, 4, 8])
    if config["kda"] and rng.random() < 0.6:
        config["prefix_match_unit"] = rng.choice([16, config["block_size"]])
    return scenario


def endings(rng: Random) -> Scenario:
    """Aborts before and during a step, stop tokens among accepted drafts, changing acceptance."""
    scenario = (
        base(rng, tight=rng.random() < 0.5) if rng.random() < 0.6 else hybrid(rng, repeats=True)
    )
    _end_early(rng, scenario)
    return scenario


def _end_early(rng: Random, scenario: Scenario) -> None:
    k = scenario["config"]["k"]
    if k:
        scenario["accepts"] = [rng.randint(0, k) for _ in range(rng.randint(2, 7))]
    for request in _requests(scenario):
        if rng.random() < 0.4:
            request["stop_after"] = rng.randint(1, request["max_tokens"])
        if rng.random() < 0.35:
            key = rng.choice(["aborts", "aborts_in_flight"])
            steps = scenario.setdefault(key, {})
            steps.setdefault(str(rng.randint(0, 30)), []).append(request["id"])


def admission(rng: Random) -> Scenario:
    """Who is let in: fewer active seats, watermark, no whole-prompt reserve, a short context."""
    scenario = base(rng, tight=True)
    config = scenario["config"]
    longest = max(sum(piece[2] for piece in request["prompt"]) for request in _requests(scenario))
    if rng.random() < 0.4:
        config["watermark"] = rng.choice([0.05, 0.1, 0.25])
    if rng.random() < 0.4:
        config["scheduler_reserve_full_isl"] = False
    if rng.random() < 0.4:
        config["max_model_len"] = longest + rng.randint(2, 40)
    if rng.random() < 0.3:
        config["max_num_scheduled_tokens"] = max(
            config["max_num_batched_tokens"] // 2, config["block_size"] if config["kda"] else 1
        )
    return scenario


def admission_new(rng: Random) -> Scenario:
    """Draw controls that came after 0.27.1: active seats, adaptive threshold, prefill cadence."""
    scenario = admission(rng)
    config = scenario["config"]
    if rng.random() < 0.5:
        config["max_num_active_seqs"] = rng.randint(1, config["max_num_seqs"])
    if rng.random() < 0.5 and not config["kda"]:
        # vLLM refuses one that no prompt can reach.
        longest = config.get("max_model_len", 100)
        config["long_prefill_token_threshold"] = min(rng.choice([16, 48, 100]), longest)
        config["long_prefill_token_threshold_adaptive"] = True
    if rng.random() < 0.4:
        config["prefill_schedule_interval"] = rng.choice([2, 3, 5])
    return scenario


def mixed(rng: Random) -> Scenario:
    """Several of these features at once."""
    scenario = rng.choice([partial_hits, retention, checkpoints, junction])(rng)
    config = scenario["config"]
    if rng.random() < 0.4:
        config["policy"] = "priority"
        for request in _requests(scenario):
            request["priority"] = rng.randint(0, 2)
            request["arrival_time"] = float(rng.randint(0, 5))
    if rng.random() < 0.4:
        config["async_scheduling"] = True
    if rng.random() < 0.4:
        _end_early(rng, scenario)
    config["num_kda_groups"] = rng.choice([1, 2, 3])
    extra = config["num_kda_groups"] - 1
    config["num_blocks"] += extra * (6 + (config["k"] if config["spec"] else 0))
    return scenario


FAMILIES: dict[str, Callable[[Random], Scenario]] = {
    "base": base,
    "hybrid": hybrid,
    "priority": priority,
    "partial_hits": partial_hits,
    "retention": retention,
    "junction": junction,
    "checkpoints": checkpoints,
    "async": asynchronous,
    "context_parallel": context_parallel,
    "endings": endings,
    "admission": admission,
    "admission_new": admission_new,
    "mixed": mixed,
}
#: Families whose feature 0.27.1 does not have.
FIRST_VERSION = dict.fromkeys(
    ("junction", "checkpoints", "context_parallel", "admission_new", "mixed"), "0.32.0"
)

"""A dozen requests in three waves, under a few configurations that between them use everything.

For tests that turn one switch, or break one rule, and look at what changes. Two prompts share 16
tokens, one is said again, and one goes on behind the answer to another; there is time for states to
be kept, found, copied, left behind and overwritten.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from random import Random
from typing import Any

import pytest
from executor_world import (
    GuessingDrafter,
    WrongToken,
    micro_model,
    poison,
    quiet,
    raised_by,
)

from kimik3_lab.reference.model import K3ForCausalLM
from kimik3_lab.serving import CacheConfig, Engine, Request, SchedulerConfig
from kimik3_lab.serving.async_scheduler import make_scheduler
from kimik3_lab.serving.executors.execution import ExecutionConfig
from kimik3_lab.serving.executors.step_counters import StepCounters
from kimik3_lab.serving.executors.torch_executor import TorchExecutor

__all__ = ["SCENARIOS", "Outcome", "Scenario", "assert_found_out", "play"]

MAX_TOKENS = 11


@dataclass(frozen=True)
class Scenario:
    """Fields of the three configurations that differ from their defaults."""

    cache: dict[str, Any] = field(default_factory=dict)
    scheduler: dict[str, Any] = field(default_factory=dict)
    execution: dict[str, Any] = field(default_factory=dict)

    def changed(
        self,
        *,
        cache: dict[str, Any] | None = None,
        scheduler: dict[str, Any] | None = None,
        execution: dict[str, Any] | None = None,
    ) -> Scenario:
        """Turn switches."""
        return Scenario(
            {**self.cache, **(cache or {})},
            {**self.scheduler, **(scheduler or {})},
            {**self.execution, **(execution or {})},
        )


_CACHING = {"num_blocks": 90, "block_size": 8, "num_kda_groups": 2, "enable_prefix_caching": True}
_DRAFTS = {"speculative_method": "dspark", "num_speculative_tokens": 3}

SCENARIOS: dict[str, Scenario] = {
    "seats": Scenario({"num_blocks": 60, "block_size": 4}, _DRAFTS),
    "seats, records": Scenario(
        {"num_blocks": 60, "block_size": 4, "speculative_states": "records"}, _DRAFTS
    ),
    "groups": Scenario({"num_blocks": 60, "block_size": 4, "num_kda_groups": 3}, _DRAFTS),
    "caching": Scenario(_CACHING, {}, {"mixed_batch": "gather"}),
    "checkpoints": Scenario(
        _CACHING
        | {"prefix_match_unit": 4, "prefill_checkpoints": "internal", "checkpoint_alignment": 4}
    ),
    "caching, slots": Scenario(_CACHING, _DRAFTS),
    "caching, records": Scenario(_CACHING | {"speculative_states": "records"}, _DRAFTS),
    "preemption": Scenario(_CACHING | {"num_blocks": 26}, _DRAFTS, {"mixed_batch": "gather"}),
}


@dataclass(frozen=True)
class Outcome:
    """What a run said, what it cost, and what happened to it."""

    tokens: list[list[int]]
    counters: StepCounters
    hits: int
    preemptions: int
    steps: int
    host_waits: int
    wasted_tokens: int

    def count(self, name: str) -> int:
        """One of the counters, or of the fields above."""
        owner = self.counters if hasattr(self.counters, name) else self
        return int(getattr(owner, name))


@cache
def model() -> K3ForCausalLM:
    """The micro K3 in float64."""
    return micro_model()


@cache
def waves() -> tuple[tuple[tuple[tuple[int, ...], tuple[int, ...]], ...], ...]:
    """Prompts with their answers, in waves; a wave begins when the one before has ended."""
    rng = Random(1)

    def some(count: int) -> list[int]:
        return [rng.randrange(3, 64) for _ in range(count)]

    def answered(prompt: list[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return tuple(prompt), tuple(model().generate(prompt, MAX_TOKENS, stop_token_ids=()))

    base, short, long = answered(some(21)), answered(some(5)), answered(some(30))
    follow_up = answered([*base[0], *base[1], *some(3)])
    branch = answered([*base[0][:16], *some(7)])
    one = answered(some(1))
    return (base, short, long), (base, branch, one), (follow_up, base, long, short)


def play(scenario: Scenario, *, seed: int = 0, budget: int = 40, seats: int = 4) -> Outcome:
    """Run the waves; raise :class:`WrongToken` if a request says another thing than alone."""
    drafts = scenario.scheduler.get("num_speculative_tokens", 0)
    cache_config = CacheConfig(**scenario.cache)
    config = SchedulerConfig(seats, budget, 64, **scenario.scheduler)
    drafter = GuessingDrafter(drafts, Random(seed), model().config.vocab_size) if drafts else None
    executor = TorchExecutor(
        model(),
        cache_config,
        seats,
        drafter=drafter,  # type: ignore[arg-type]
        execution=ExecutionConfig(**scenario.execution),
    )
    poison(executor.cache)
    failures = raised_by(executor)
    engine = Engine(make_scheduler(config, cache_config), executor)
    said = []
    for number, wave in enumerate(waves()):
        got: dict[str, list[int]] = {}
        for index, (prompt, answer) in enumerate(wave):
            name = f"{number}.{index}"
            engine.add_request(Request(name, prompt, max_tokens=MAX_TOKENS))
            got[name] = []
            if drafter is not None:
                drafter.texts[name] = [*prompt, *answer]
        while engine.has_unfinished_requests():
            with quiet():
                for news in engine.step():
                    got[news.request_id] += news.new_token_ids
            if failures:
                raise failures[0]
        for (_, answer), (name, tokens) in zip(wave, got.items(), strict=True):
            if tokens != list(answer):
                raise WrongToken(f"{name} got {tokens}, alone {list(answer)}")
        said += got.values()
    stats = engine.stats()
    return Outcome(
        said,
        executor.counters,
        stats.scheduler.prefix_cache_hits,
        stats.scheduler.num_preemptions,
        stats.num_steps,
        executor.num_host_waits,
        stats.num_wasted_tokens,
    )


def assert_found_out(scenario: Scenario) -> None:
    """Play with an executor that is wrong, and see that somebody notices."""
    with pytest.raises((WrongToken, ValueError)) as caught:
        play(scenario)
    # What was never written is NaN, and has no most probable token.
    assert caught.type is WrongToken or "not finite" in str(caught.value)

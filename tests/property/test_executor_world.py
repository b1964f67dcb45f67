"""Random worlds around the real executor: whatever happens, nobody's tokens change.

Each run draws a configuration as the proof of the scheduler does (any combination of switches, one
version of vLLM, or a rung of the ladder), how mixed batches are computed, and clients that come,
share prompts, leave and meet failing steps. In float64 every token must be the one that the model
says alone: through chunks of any size, hits on pages and states, preemption at any point, states
kept by splitting chunks or exported from inside them, drafts that are right for a while, with their
states in slots or led back to by records, and steps that begin before the last one has answered.
"""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from executor_world import ExecutorWorld, micro_model
from world_configs import draw_configs

from kimik3_lab.reference.model import K3ForCausalLM
from kimik3_lab.serving import CacheConfig, SchedulerConfig

pytestmark = pytest.mark.usefixtures("one_thread")

#: Worlds of the slow test.
WORLDS = 50


@pytest.fixture(scope="module")
def model() -> K3ForCausalLM:
    return micro_model()


def draw_executable(rng: Random) -> tuple[SchedulerConfig, CacheConfig]:
    """Draw configurations that the executor does not refuse."""
    while True:
        config, cache = draw_configs(rng)
        if cache.enable_prefix_caching and not cache.num_kda_groups:
            continue
        return config, cache


def run(model: K3ForCausalLM, rng: Random, rounds: int = 15) -> ExecutorWorld:
    return ExecutorWorld(model, draw_executable(rng), rng).run(rounds)


@pytest.mark.parametrize("seed", range(8))
def test_no_token_changes(model: K3ForCausalLM, seed: int) -> None:
    # A wrong token raises on the way; a world in which nothing happened would prove nothing.
    assert sum(run(model, Random(seed), rounds=5).counts.values()) > 0


def test_steps_in_flight_change_no_token(model: K3ForCausalLM) -> None:
    counts: Counter[str] = Counter()
    for seed in range(102, 106):
        rng = Random(seed)
        while True:
            config, cache = draw_executable(rng)
            if config.async_scheduling and config.num_speculative_tokens:
                break
        counts += ExecutorWorld(model, (config, cache), rng).run(rounds=5).counts
    assert counts["wasted"] > 0
    assert counts["host_waits"] < counts["forwards"] / 2


@pytest.mark.slow
def test_no_token_changes_in_many_worlds(model: K3ForCausalLM) -> None:
    counts: Counter[str] = Counter()
    for seed in range(WORLDS):
        try:
            world = run(model, Random(seed))
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        counts += world.counts
    # That all this held would mean little if little had happened.
    least = {
        "hits": 50, "preemptions": 2, "aborts": 8, "failed": 6,
        "checkpoint_exports": 8, "recovery_commits": 80, "block_copies": 30,
        "kda_state_bytes_copied": 200_000, "gather_bytes": 200_000, "wasted": 50,
    }  # fmt: skip
    assert {name: counts[name] for name in least if counts[name] < least[name]} == {}

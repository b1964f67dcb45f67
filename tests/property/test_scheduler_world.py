"""100,000 random steps under random switches: whatever happens, nobody's tokens change.

Each run draws a configuration (any combination of switches, or one version of vLLM), clients that
come, share prompts, leave and meet failing steps, and an executor whose memory is made of digests
(:mod:`memory_executor`). What is proved in every step: no block is lost, held twice or free and
held; no token is computed twice or never; budgets and seats hold; nobody is overtaken or starves;
whatever is found by hash was computed and is what its hash says, a KDA state at its very position;
and a request that was preempted, cut, drafted for or resumed ends with the tokens that it would
have got alone.
"""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from serving_mutants import MUTANTS
from serving_world import World, run
from world_configs import draw_configs

STEPS = 100_000
#: Tests that share them, so that they can run side by side.
PARTS = 4
#: Runs within which a wrong rule must be found out.
PATIENCE = 600


def play(seed: int) -> World:
    rng = Random(seed)
    return run(World(draw_configs(rng), rng))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_random_steps(part: int) -> None:
    counts: Counter[str] = Counter()
    seed = part * 1_000_000
    while counts["steps"] < STEPS // PARTS:
        try:
            world = play(seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        counts += world.counts
        counts["hits"] += world.executor.hits
        counts["requests"] += len(world.wanted)
        seed += 1
    # That all this held would mean little if little had happened.
    assert counts["hits"] > 400
    assert counts["preemptions"] > 200
    assert counts["aborts"] > 400
    assert counts["failed"] > 30
    assert counts["requests"] > 3_000


class SchedulerMachine(RuleBasedStateMachine):
    """The same world, driven by hypothesis, which shrinks what it finds."""

    @initialize(rng=st.randoms(use_true_random=False))
    def begin(self, rng: Random) -> None:
        self.world = World(draw_configs(rng), rng)

    @rule()
    def arrive(self) -> None:
        self.world.arrive()

    @rule()
    def leave(self) -> None:
        self.world.leave()

    @rule(steps=st.integers(1, 6), abort_in_flight=st.booleans())
    def step(self, steps: int, abort_in_flight: bool) -> None:
        for _ in range(steps):
            self.world.step(abort_in_flight=abort_in_flight)

    @rule(when=st.sampled_from(["before", "after"]))
    def fail(self, when: str) -> None:
        self.world.step(fails=when)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.drain()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=60,
    stateful_step_count=20,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_rule_is_found_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this nobody would know whether the proofs above can fail at all."""
    MUTANTS[name](monkeypatch)
    for seed in range(PATIENCE):
        try:
            play(seed)
        except Exception:
            return
    pytest.fail(f"{PATIENCE} runs, and nobody noticed: {name}")

"""Every switch of the executor changes what a step costs, and not one token.

``play`` compares each token with what the model says alone, in float64; here is counted what the
switch saves. Costs are counted where they arise, so a switch that does nothing is found out.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import pytest
from executor_scenarios import SCENARIOS, Outcome, Scenario, play

from kimik3_lab.serving.executors.execution import ExecutionConfig
from kimik3_lab.serving.executors.step_counters import StepCounters
from kimik3_lab.serving.presets import LADDER, MAIN_2026_09_13, V0_27_1, Preset

pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass(frozen=True)
class Switch:
    """A scenario, what to turn off and on in it, and counters that must then be less or more."""

    scenario: str
    off: dict[str, Any]
    on: dict[str, Any]
    less: tuple[str, ...] = ()
    more: tuple[str, ...] = ()
    same: tuple[str, ...] = ()
    size: dict[str, int] = field(default_factory=dict)


SWITCHES = {
    "prefix caching": Switch(
        "caching",
        {"cache": {"enable_prefix_caching": False}},
        {},
        less=("tokens", "gather_bytes"),
        more=("kda_state_bytes_copied", "conv_bytes_copied"),
    ),
    "a finer unit for prefixes": Switch(
        "caching", {}, {"cache": {"prefix_match_unit": 4}}, less=("tokens",), more=("block_copies",)
    ),
    "internal checkpoints": Switch(
        "checkpoints",
        {"cache": {"prefill_checkpoints": "split"}},
        {},
        less=("forwards", "launches", "kda_state_bytes_copied"),
        more=("checkpoint_exports",),
    ),
    "sparse retention": Switch(
        "checkpoints", {}, {"cache": {"retention_interval": 0}}, less=("checkpoint_exports",)
    ),
    "speculation": Switch(
        "caching, slots",
        {"scheduler": {"speculative_method": None, "num_speculative_tokens": 0}},
        {},
        less=("forwards", "launches"),
        more=("tokens", "kda_state_writes", "drafter_forwards"),
    ),
    "recovery records": Switch(
        "caching, slots",
        {},
        {"cache": {"speculative_states": "records"}},
        less=("kda_state_writes", "kda_state_bytes_copied"),
        more=("recovery_commits", "conv_bytes_copied"),
        same=("forwards", "tokens"),
    ),
    "zero-copy mixed batches": Switch(
        "caching, slots",
        {"execution": {"mixed_batch": "gather"}},
        {},
        less=("gather_bytes",),
        same=("forwards", "tokens", "launches", "kda_state_writes"),
    ),
    "continuous batching": Switch(
        "seats", {"scheduler": {"batching": "static"}}, {}, less=("forwards",), size={"seats": 2}
    ),
    "adaptive budget": Switch(
        "groups",
        {"scheduler": {"token_budget": "static"}},
        {"scheduler": {"token_budget": "adaptive"}},
        less=("forwards", "launches"),
        size={"budget": 14},
    ),
    "look-ahead cap": Switch(
        "groups",
        {"scheduler": {"token_budget": "adaptive"}},
        {},
        less=("forwards", "launches"),
        size={"budget": 14},
    ),
    # Nobody waits before the last step of a wave, and who ended is computed once more.
    "asynchronous scheduling": Switch(
        "seats",
        {},
        {"scheduler": {"async_scheduling": True}},
        less=("host_waits",),
        more=("tokens", "wasted_tokens"),
    ),
}


def compared(off: Outcome, on: Outcome, switch: Switch) -> list[str]:
    """Counters that did not go the way they should."""
    wrong = []
    for names, sign in ((switch.less, -1), (switch.more, 1), (switch.same, 0)):
        for name in names:
            before, after = off.count(name), on.count(name)
            if (after > before) - (after < before) != sign:
                wrong.append(f"{name}: {before} -> {after}")
    return wrong


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_changes_costs_and_no_token(name: str) -> None:
    switch = SWITCHES[name]
    scenario = SCENARIOS[switch.scenario]
    off = play(scenario.changed(**switch.off), **switch.size)
    on = play(scenario.changed(**switch.on), **switch.size)
    assert off.tokens == on.tokens
    assert compared(off, on, switch) == []


def test_without_a_gather_nothing_is_gathered() -> None:
    assert play(SCENARIOS["seats"]).counters.gather_bytes == 0


def test_a_step_is_one_forward_pass() -> None:
    outcome = play(SCENARIOS["caching, slots"])
    assert outcome.counters.forwards == outcome.steps


def in_miniature(preset: Preset) -> Scenario:
    """A rung of the ladder with a block of 16 tokens."""
    sizes = ("max_num_seqs", "max_num_batched_tokens")
    scheduler = {name: value for name, value in preset.scheduler.items() if name not in sizes}
    execution = asdict(ExecutionConfig.from_preset(preset))
    cache = {**preset.cache, "num_blocks": 120, "block_size": 16}
    return Scenario(cache, scheduler, execution)


@pytest.mark.parametrize("preset", [LADDER[0], *LADDER[6:]], ids=lambda preset: preset.name)
def test_no_rung_of_the_ladder_changes_a_token(preset: Preset) -> None:
    assert play(in_miniature(preset), budget=60).counters.forwards > 0


def test_presets_choose_how_mixed_batches_are_computed() -> None:
    assert ExecutionConfig.from_preset(V0_27_1).mixed_batch == "gather"
    main = ExecutionConfig.from_preset(MAIN_2026_09_13)
    assert (main.mixed_batch, main.deferred_finalize) == ("zero_copy", True)
    with pytest.raises(ValueError, match="mixed_batch must be one of gather, zero_copy"):
        ExecutionConfig(mixed_batch="copy")  # type: ignore[arg-type]


def test_counters_can_be_compared() -> None:
    counters = StepCounters(forwards=3, gather_bytes=5)
    before = counters.snapshot()
    counters.forwards += 1
    assert (counters - before, before.forwards) == (StepCounters(forwards=1), 3)

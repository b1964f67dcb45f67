"""Our scheduler decides what vLLM's own has decided, step by step, in every recorded scenario."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from kimik3_lab.serving import replay
from kimik3_lab.serving.replay_scenario import Scenario
from kimik3_lab.serving.vllm_rules import VLLM_RULES

FOLDER = Path(__file__).resolve().parents[2] / "data" / "golden" / "vllm_scheduler"
FILES = sorted(FOLDER.glob("*.json.gz"))


def recording(name: str) -> replay.Recording:
    return replay.load(FOLDER / name)


def test_every_recorded_version_is_there() -> None:
    versions = {path.name.removesuffix(".json.gz").rpartition("_")[2] for path in FILES}
    assert versions == set(VLLM_RULES)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name.removesuffix(".json.gz"))
def test_decisions_of_vllm(path: Path) -> None:
    recorded = replay.load(path)
    assert recorded.num_steps > 0
    differences = {
        scenario.name: str(difference)
        for scenario in recorded.scenarios
        if (difference := replay.replay(scenario, recorded.rules)) is not None
    }
    assert differences == {}


@pytest.mark.parametrize("version", ["0.32.0", "0.33.0"])
def test_the_rules_of_another_version_are_told_apart(version: str) -> None:
    # Most scenarios do not reach a rule that has changed; enough of them do.
    recorded = recording("base_0.27.1.json.gz")
    differing = [
        scenario.name
        for scenario in recorded.scenarios
        if replay.replay(scenario, VLLM_RULES[version]) is not None
    ]
    assert 5 <= len(differing) < len(recorded.scenarios)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("scheduled", lambda value: {name: n + 1 for name, n in value.items()}),
        ("free_blocks", lambda value: value - 1),
        ("running", lambda value: value[::-1] or ["nobody"]),
        ("preempted", lambda value: [*value, "somebody"]),
        ("prefix_hit", lambda value: {**value, "somebody": 16}),
        ("new_req_blocks", lambda value: {**value, "somebody": [1]}),
        ("finished", lambda value: [*value, "somebody"]),
        ("spec", lambda value: {**value, "somebody": 1}),
    ],
)
def test_a_changed_recording_is_noticed(field: str, change: object) -> None:
    recorded = recording("demos_0.33.0.json.gz")
    scenario = recorded.scenarios[0]
    trace = copy.deepcopy(list(scenario.trace))
    trace[1][field] = change(trace[1][field])
    found = replay.replay(Scenario("changed", scenario.spec, trace), recorded.rules)
    assert found is not None
    assert (found.step, found.field) == (1, field)

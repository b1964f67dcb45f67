"""vLLM's own scheduler, live: fresh random scenarios, and the time of a step.

Each run draws another seed, so that the lab's scheduler is not only right about what was recorded.
``K3LAB_SCHEDULER_SEED`` draws a seed again that a failure has named.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from types import ModuleType, SimpleNamespace

import pytest

from kimik3_lab.serving.replay import Difference, replay
from kimik3_lab.serving.replay_scenario import Scenario
from kimik3_lab.serving.vllm_rules import vllm_rules

ROOT = Path(__file__).resolve().parents[2]
RECORDER = ROOT / "tools" / "record_vllm_scheduler"
GOLDEN = ROOT / "data" / "golden" / "vllm_scheduler"
SEED = int(os.environ.get("K3LAB_SCHEDULER_SEED") or random.randrange(1 << 32))
#: Scenarios of each family.
COUNT = 6
#: Ours over vLLM's; the goal is 0.5.
MOST_TIME = 0.8

FAMILIES = (
    "base", "hybrid", "priority", "partial_hits", "retention", "junction", "checkpoints", "async",
    "context_parallel", "endings", "admission", "admission_new", "mixed",
)  # fmt: skip


@pytest.fixture(scope="module")
def recorder() -> Iterator[SimpleNamespace]:
    """The recorder's modules, which import each other as scripts do."""
    sys.path.insert(0, str(RECORDER))
    try:
        import drive
        import recordings
        import scenarios
        import speed
        import vllm_versions

        yield SimpleNamespace(
            drive=drive,
            recordings=recordings,
            scenarios=scenarios,
            speed=speed,
            version=vllm_versions.VERSION,
        )
    finally:
        sys.path.remove(str(RECORDER))


def first_difference(recorder: SimpleNamespace, scenario: dict[str, object]) -> Difference | None:
    rules = vllm_rules(recorder.version)
    # What a recording goes through: JSON has no tuples and no integer keys.
    spec = json.loads(json.dumps(scenario))
    return replay(Scenario("live", spec, recorder.drive.record(scenario)), rules)


def test_every_family_is_played(recorder: SimpleNamespace) -> None:
    assert set(recorder.scenarios.FAMILIES) == set(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_decisions(recorder: SimpleNamespace, measured: list[str], family: str) -> None:
    rng = Random(f"{family}-{SEED}")
    for number in range(COUNT):
        scenario = recorder.scenarios.FAMILIES[family](rng)
        difference = first_difference(recorder, scenario)
        assert difference is None, (
            f"K3LAB_SCHEDULER_SEED={SEED}, {family} {number}: {difference}\n{json.dumps(scenario)}"
        )
    measured.append(f"scheduler, {family}: {COUNT}/{COUNT} scenarios as vLLM (seed {SEED})")


def test_recordings_are_what_this_vllm_decides(recorder: SimpleNamespace) -> None:
    content = recorder.recordings.read(GOLDEN / f"demos_{recorder.version}.json.gz")
    for scenario in content["scenarios"]:
        assert recorder.drive.record(scenario) == scenario["trace"], scenario["name"]


def test_a_difference_is_seen(recorder: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail: one wrong rule of ours, and the demos differ."""
    from kimik3_lab.serving.chunking import Chunking

    original = Chunking.waiting

    def one_less(self: Chunking, request: object, computed: int, budget: int, **rest: object):
        return original(self, request, computed, budget - 1, **rest)

    demos = recorder.recordings.read(GOLDEN / f"demos_{recorder.version}.json.gz")["scenarios"]
    assert first_difference(recorder, demos[0]) is None
    monkeypatch.setattr(Chunking, "waiting", one_less)
    assert first_difference(recorder, demos[0]) is not None


@pytest.mark.slow
def test_a_step_takes_less_time_than_vllms(recorder: SimpleNamespace, measured: list[str]) -> None:
    speed: ModuleType = recorder.speed
    for name in speed.SCENARIOS:
        row = speed.compare(name)
        measured.append(
            f"scheduler, {name}: {row['median_ratio']:.2f} of vLLM's time at 1,024 running "
            f"({row['ours_ms']} against {row['vllm_ms']} ms)"
        )
        assert row["median_ratio"] <= MOST_TIME, row

"""What a step costs: linear in running requests, the same however many wait.

Counted in function calls, which are the same on every machine; times are in
``data/results/cpu/scheduler_speed.json``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from known_bugs_support import finish, prefix, request, step

from kimik3_lab.serving import CacheConfig, Scheduler, SchedulerConfig

SPEED = Path(__file__).resolve().parents[2] / "data" / "results" / "cpu" / "scheduler_speed.json"
CACHES: dict[str, dict[str, Any]] = {
    "attention": {},
    "prefix cache": {"enable_prefix_caching": True},
    "K3's groups": {"enable_prefix_caching": True, "num_kda_groups": 3, "block_size": 32},
}


def decoding(running: int, waiting: int, cache: dict[str, Any], **options: Any) -> Scheduler:
    config = SchedulerConfig(running, 4096, 4096, **options)
    one = Scheduler(config, CacheConfig(**{"num_blocks": 20_000} | cache))
    for number in range(running + waiting):
        one.add_request(request(str(number), prefix(0, 9, 100 + number), max_tokens=500))
    for _ in range(3):
        step(one)
    assert (one.num_running, one.num_waiting) == (running, waiting)
    return one


def calls(scheduler: Scheduler) -> int:
    """Count the calls, of Python and of C functions, of one step."""
    count = 0

    def profile(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        step(scheduler)
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("name", CACHES)
def test_a_step_is_linear_in_running_requests(name: str) -> None:
    small, middle, large = (calls(decoding(n, 0, CACHES[name])) for n in (50, 100, 200))
    each = (middle - small) / 50
    assert each > 1
    assert (large - middle) / 100 == pytest.approx(each, rel=0.02)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_step_does_not_look_at_those_who_wait(policy: str) -> None:
    few, many = (calls(decoding(20, n, {}, policy=policy)) for n in (10, 10_000))
    assert few == many


def test_one_is_admitted_out_of_ten_thousand() -> None:
    one = decoding(20, 10_000, {"enable_prefix_caching": True})
    before = calls(one)
    one.abort("3")
    assert calls(one) < before + 300
    assert one.num_running == 20


def test_a_prompt_of_a_million_tokens() -> None:
    config = SchedulerConfig(2, 16_384, 1 << 20)
    cache = CacheConfig(1500, 768, num_kda_groups=3, enable_prefix_caching=True)
    one = Scheduler(config, cache)
    one.add_request(request("long", prefix(0, 1_000_000), max_tokens=2))
    outputs = finish(one, limit=100)
    assert sum(o.num_scheduled_tokens["long"] for o in outputs) == 1_000_001
    one.add_request(request("again", prefix(0, 1_000_000), max_tokens=2))
    assert one.schedule().scheduled_new_reqs[0].num_computed_tokens == 1_000_000 // 768 * 768


def test_the_measured_times_say_the_same() -> None:
    result = json.loads(SPEED.read_text(encoding="utf-8"))
    assert result["provenance"]["vllm"] == "0.32.0"
    for row in result["rows"]:
        assert row["running"] == 1024
        assert row["median_ratio"] <= 0.5, row
    times = {(row["running"], row["waiting"]): row["ours_ms"] for row in result["scaling"]}
    assert times[1024, 0] / times[128, 0] < 12
    assert times[256, 10_000] < 1.5 * times[256, 1_000]

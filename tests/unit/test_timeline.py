"""The timeline keeps what the real scheduler decided; the figures show that and nothing else."""

from __future__ import annotations

import pytest

from kimik3_lab.serving import CacheConfig, Request, SamplingParams, Scheduler, SchedulerConfig
from kimik3_lab.serving.presets import MAIN_2026_09_13, V0_27_1
from kimik3_lab.teaching import plots_schedule, timeline
from kimik3_lab.teaching.timeline import Row


def scheduler(seqs: int = 4, budget: int = 64, blocks: int = 100, **more: object) -> Scheduler:
    return Scheduler(SchedulerConfig(seqs, budget, 512, **more), CacheConfig(num_blocks=blocks))


def request(name: str, prompt: int, output: int, **more: object) -> Request:
    return Request(name, [5] * prompt, SamplingParams(max_tokens=output), **more)


def test_rows_add_up_to_every_prompt_and_every_output_token() -> None:
    wanted = {f"r{i}": (40 + 20 * i, 5 + i) for i in range(6)}
    made = timeline.run(scheduler(), [request(n, p, o) for n, (p, o) in wanted.items()])
    for name, (prompt, output) in wanted.items():
        rows = [step.rows[name] for step in made.steps if name in step.rows]
        assert sum(row.prefill for row in rows) == prompt - 1
        assert sum(row.decode for row in rows) == output
        assert len(made.token_times[name]) == output
    assert all(step.tokens <= 64 for step in made.steps)
    assert made.steps[-1].running == made.steps[-1].waiting == 0


def test_drafts_shorten_a_request_by_what_is_accepted() -> None:
    dspark = {"speculative_method": "dspark", "num_speculative_tokens": 4}
    plain = timeline.run(scheduler(), [request("a", 10, 31)])
    made = timeline.run(scheduler(**dspark), [request("a", 10, 31)], accepted=2)
    assert len(plain.steps) == 31 and len(made.steps) == 11  # 1 + 30 / 3
    assert made.steps[5].rows["a"] == Row(prefill=0, decode=1, drafts=4, accepted=2)
    assert made.time_per_output_token("a") == pytest.approx(plain.time_per_output_token("a") / 3)


def test_preemption_is_kept_and_computed_anew() -> None:
    made = timeline.run(scheduler(blocks=9), [request("a", 40, 40), request("b", 40, 40)])
    (lost,) = [step for step in made.steps if step.preempted]
    assert lost.preempted == {"b"} and "b" not in lost.rows
    computed = sum(s.rows["b"].tokens for s in made.steps if "b" in s.rows)
    assert computed > 40 + 40 - 1
    assert len(made.token_times["b"]) == 40


def test_a_virtual_clock_gives_latencies_and_waits_for_arrivals() -> None:
    late = request("b", 8, 2, arrival_time=100.0)
    made = timeline.run(
        scheduler(), [request("a", 64, 3), late], seconds_per_step=lambda step: 0.5 * step.tokens
    )
    assert made.time_to_first_token("a") == 32.0
    assert made.time_per_output_token("a") == 0.5
    assert made.steps[3].start == 100.0 and made.time_to_first_token("b") == 4.0
    assert made.output_tokens_per_second == pytest.approx(5 / 104.5)


def test_the_published_presets_need_eight_passes_and_one() -> None:
    passes = {}
    for preset in (V0_27_1, MAIN_2026_09_13):
        engine = Scheduler(preset.scheduler_config(9216), preset.cache_config(num_blocks=200))
        made = timeline.run(engine, [request("a", 8000, 20)], accepted=2)
        passes[preset.name] = made.steps_to_first_token("a")
    assert passes == {"v0.27.1": 8, "main 2026-09-13": 1}


def test_asynchronous_scheduling_is_refused() -> None:
    with pytest.raises(ValueError, match="async_scheduling=False"):
        timeline.run(scheduler(async_scheduling=True), [])


def test_a_guard_ends_runs_that_are_too_long() -> None:
    with pytest.raises(RuntimeError, match="1 requests are left after 5 steps"):
        timeline.run(scheduler(), [request("a", 8, 30)], max_steps=5)


def test_the_figure_splits_a_verified_step_by_what_became_output() -> None:
    dspark = {"speculative_method": "dspark", "num_speculative_tokens": 4}
    made = timeline.run(scheduler(**dspark), [request("a", 10, 7)], accepted=2)
    figure = plots_schedule.schedule(made, budget=64)
    upper = {bar.name: bar for bar in figure.data if bar.orientation == "h"}
    assert list(upper["prefill"].base) == [0.0] and list(upper["decode"].base) == [0.5, 1.0, 2.0]
    assert list(upper["accepted"].x) == [pytest.approx(0.4)] * 2
    assert list(upper["rejected draft"].x) == [pytest.approx(0.4)] * 2
    assert upper["rejected draft"].marker.pattern.shape == "/"
    lower = [bar for bar in figure.data if bar.orientation != "h"]
    assert [sum(y) for y in zip(*(bar.y for bar in lower), strict=True)] == [10, 5, 5]


def test_the_figure_marks_preemptions_and_hides_requests_not_asked_for() -> None:
    made = timeline.run(scheduler(blocks=9), [request("a", 40, 40), request("b", 40, 40)])
    whole = plots_schedule.schedule(made)
    assert [list(t.y) for t in whole.data if t.name == "preempted"] == [["b"]]
    assert whole.layout.yaxis2.nticks == 3  # more would be written over each other
    part = plots_schedule.schedule(made, requests=["a"])
    assert {y for t in part.data if t.orientation == "h" for y in t.y} == {"a"}

"""A simulated closed loop counts as guidellm does; small ones are worked out by hand."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest
from simulation_support import Priced, Prices, drafting, plain, record

from kimik3_lab.benchmark.metrics import summarise
from kimik3_lab.benchmark.window import Window
from kimik3_lab.serving.presets import MAIN_2026_09_13, V0_27_1
from kimik3_lab.simulation import SimulationResult, closed_loop, run_log, simulate_closed_loop
from kimik3_lab.simulation.closed_loop import Streams
from kimik3_lab.simulation.run_log import RunLog


def run(spec: Priced, concurrency: int, duration: float, **lengths: Any) -> SimulationResult:
    sizes = {"prompt_tokens": 10, "output_tokens": 5, **lengths}
    return simulate_closed_loop(spec, concurrency, duration, **sizes)


# -- worked by hand -----------------------------------------------------------------------------


def test_one_stream() -> None:
    """A request takes five steps of 0.7 s; ends at 3.5, 7, ...; the window is 15 to 135 s.

    17.5 is the fifth end and 133 the 38th, so 34 requests end inside.
    """
    result = run(plain(Prices(0.7)), 1, 150.0)
    assert (result.window.open, result.window.close) == (15.0, 135.0)
    assert result.completed_in_window == 34
    assert result.output_tokens_per_s == pytest.approx(34 * 5 / 120)
    # Touching it: number 5 began at 14, number 39 at 133 and ends at 136.5.
    assert result.in_window == 35
    assert (result.attempted, result.completed, result.cancelled) == (43, 42, 1)
    assert result.latency("e2e_s") == pytest.approx(3.5)
    assert result.latency("ttft_ms") == pytest.approx(700)
    assert result.latency("tpot_ms") == pytest.approx(700)


def test_streams_start_together_and_stay_in_step() -> None:
    """Four prompts in one step: then nobody waits for anybody, and counts come in fours."""
    result = run(plain(Prices(0.7)), 4, 150.0)
    assert result.completed_in_window == 4 * 34
    assert result.latency("e2e_s") == pytest.approx(3.5)
    assert result.totals.kinds["mixed"].steps == 0


def test_a_budget_makes_the_second_prompt_wait() -> None:
    """Eight tokens a step, two prompts of eight: the second one's step is the second."""
    spec = plain(Prices(1.0), scheduler={"max_num_batched_tokens": 8, "max_num_seqs": 4})
    result = run(spec, 2, 10.5, prompt_tokens=8, output_tokens=3, warmup=0.0, cooldown=0.0)
    first, second = result.records[:2]
    assert (first.start, first.token_times) == (0.0, [1.0, 2.0, 3.0])
    # Step 2: one row of the first, seven of the second; step 3: one and one.
    assert (second.start, second.token_times) == (0.0, [3.0, 4.0, 5.0])


def test_the_next_request_comes_when_the_last_has_ended() -> None:
    result = run(plain(Prices(0.7)), 1, 150.0)
    for earlier, later in zip(result.records, result.records[1:], strict=False):
        assert later.start == earlier.end


def test_ttft_is_the_sum_of_its_steps() -> None:
    spec = plain(Prices(0.25, 1e-3, 2e-3), scheduler={"max_num_batched_tokens": 512})
    made = record(spec, Streams(1, 2000, 3), stop_s=9.0)
    first = made.log.records[0]
    own = [step for step in made.steps if step.end <= first.first_token]
    assert [step.work.num_tokens for step in own] == [512, 512, 512, 464]
    assert first.ttft == pytest.approx(sum(0.25 + 1e-3 * step.work.num_tokens for step in own))


def test_the_way_to_the_scheduler_counts_for_the_client() -> None:
    slow = drafting(Prices(0.5), choices={"turnaround_s": 0.1})
    fast = drafting(Prices(0.5))
    ttfts = [run(spec, 1, 60.0).latency("ttft_ms") for spec in (slow, fast)]
    assert ttfts == pytest.approx([600.0, 500.0])


def test_what_comes_after_the_end_is_not_seen() -> None:
    """A step ends at 10.5, the run at 10: its tokens reach nobody."""
    result = run(plain(Prices(1.5)), 1, 10.0)
    assert result.records[-1].status == "cancelled"
    assert result.records[-1].token_times == [9.0]
    assert (result.records[-1].end, result.duration_s) == (10.0, 10.0)


def test_a_number_of_requests_ends_it() -> None:
    result = run(plain(Prices(0.7)), 2, 150.0, max_requests=6)
    assert (result.attempted, result.completed, result.cancelled) == (6, 6, 0)


# -- the published settings ---------------------------------------------------------------------


def test_v0_27_1_cuts_a_prompt_into_eight_chunks() -> None:
    made = record(drafting(Prices(0.3)), Streams(1, 8000, 20), stop_s=5.0)
    chunks = [step.work.num_prefill_tokens for step in made.steps][:8]
    assert chunks == [1024] * 7 + [832]
    assert made.steps[8].work.num_decode_tokens == 9
    assert made.log.records[0].ttft == pytest.approx(8 * 0.3)


def test_september_computes_a_prompt_in_one_step() -> None:
    made = record(drafting(Prices(0.3), preset=MAIN_2026_09_13), Streams(1, 8000, 20), stop_s=5.0)
    assert made.steps[0].work.num_prefill_tokens == 8000
    assert made.log.records[0].ttft == pytest.approx(0.3)


def test_sixteen_prompts_together_on_both() -> None:
    firsts = [
        record(drafting(preset=preset), Streams(16, 8000, 20), stop_s=3.5).steps[0].scheduled
        for preset in (V0_27_1, MAIN_2026_09_13)
    ]
    assert [list(counts.values()) for counts in firsts] == [[1024], [8000, 8000, 363]]


# -- one set of metrics -------------------------------------------------------------------------


@pytest.mark.parametrize("preset", [V0_27_1, MAIN_2026_09_13], ids=lambda preset: preset.name)
def test_metrics_are_those_of_the_client(preset: Any) -> None:
    spec = drafting(Prices(0.02, 4e-5, 1e-4), preset=preset)
    result = simulate_closed_loop(spec, 4, 60.0, prompt_tokens=3000, output_tokens=200)
    summary = summarise(result.records, result.window)
    assert result.summary == summary
    for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_s"):
        stats = getattr(summary, name)
        assert result.latency(name) == pytest.approx(stats.mean)
        exact = result.latencies[name].is_exact  # gaps are too many for that
        precision = 1e-9 if exact else 0.006
        assert result.latency(name, "median") == pytest.approx(stats.median, rel=precision)
    assert result.completed_in_window == summary.throughput.completed
    assert result.output_tokens_per_s == pytest.approx(summary.throughput.output_tokens_per_s)
    assert (result.attempted, result.completed, result.cancelled, result.in_window) == (
        summary.attempted, summary.completed, summary.cancelled, summary.in_window
    )  # fmt: skip
    assert summary.tokens_per_chunk > 2
    assert result.row() == {
        "latency_s": pytest.approx(summary.e2e_s.mean),
        "ttft_ms": pytest.approx(summary.ttft_ms.mean),
        "tpot_ms": pytest.approx(summary.tpot_ms.mean),
        "output_tokens_per_s": pytest.approx(summary.throughput.output_tokens_per_s),
        "completed_requests": summary.throughput.completed,
    }


def test_without_records_the_figures_are_the_same() -> None:
    spec = drafting(Prices(0.02, 4e-5, 1e-4))
    lengths = {"prompt_tokens": 3000, "output_tokens": 200}
    full, flat = (
        simulate_closed_loop(spec, 4, 60.0, keep_records=keep, **lengths) for keep in (True, False)
    )
    assert flat.records is None
    assert flat.row() == full.row()
    for name in ("ttft_ms", "tpot_ms", "e2e_s"):
        assert flat.latency(name, "p90") == full.latency(name, "p90")
    with pytest.raises(ValueError, match="kept no records"):
        _ = flat.summary


def test_gaps_between_chunks_without_records_are_those_inside_the_window() -> None:
    flat = run(plain(Prices(0.7)), 2, 150.0, keep_records=False)
    itl = flat.latencies["itl_ms"]
    assert (itl.minimum, itl.maximum) == (pytest.approx(700), pytest.approx(700))
    # Chunks at 0.7 * i for 15 <= t <= 135 are i = 22 to 192; each fifth + 1 is a first token.
    assert itl.count == 2 * sum(i % 5 != 1 for i in range(22, 193))


# -- repeatable ---------------------------------------------------------------------------------


def test_the_seed_decides() -> None:
    spec = drafting(Prices(0.02, 4e-5, 1e-4))
    one, again, other = (
        simulate_closed_loop(spec, 4, 60.0, seed=seed, prompt_tokens=500, output_tokens=200)
        for seed in (1, 1, 2)
    )
    assert one.records == again.records
    assert one.records != other.records
    assert one.latency("e2e_s") == pytest.approx(other.latency("e2e_s"), rel=0.05)


def test_a_specification_and_a_result_travel() -> None:
    spec = drafting(Prices(0.02, 4e-5, 1e-4))
    copy = pickle.loads(pickle.dumps(spec))
    here, there = (
        simulate_closed_loop(s, 2, 30.0, prompt_tokens=50, output_tokens=20) for s in (spec, copy)
    )
    assert pickle.loads(pickle.dumps(here)).records == there.records


# -- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"concurrency": 0}, "concurrency must be a whole number of at least 1, got 0"),
        ({"duration_s": -1.0}, "duration_s must be a positive number of seconds, got -1.0"),
        ({"warmup": 0.5, "cooldown": 0.5}, "must leave a window between them, got 0.5 and 0.5"),
        ({"prompt_tokens": 2_000_000}, "no request of this size can run: request request-1"),
    ],
)
def test_a_bad_number_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulate_closed_loop(plain(), **{"concurrency": 1, **changes})


# -- wrong clients are found out ----------------------------------------------------------------


def _mutate(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    if name == "counts what touches the window":
        monkeypatch.setattr(Window, "contains", lambda self, moment: True)
    elif name == "latencies of what ends inside only":
        monkeypatch.setattr(Window, "touches", lambda self, record: self.contains(record.end))
    elif name == "the next request is late":
        ended = Streams.ended
        monkeypatch.setattr(Streams, "ended", lambda s, r, moment: ended(s, r, moment + 0.2))
    elif name == "streams start one by one":
        made = Streams.__init__

        def init(self: Streams, concurrency: int, *args: Any, **more: Any) -> None:
            made(self, concurrency, *args, **more)
            self._due = [1.0 * i for i in range(concurrency)]

        monkeypatch.setattr(Streams, "__init__", init)
    elif name == "tokens after the end":
        monkeypatch.setattr(closed_loop, "drive", lambda *args, stop_s, **more: _late(args, stop_s))
    elif name == "ttft from the first chunk's end":
        chunk = RunLog.chunk

        def late(self: RunLog, request_id: str, moment: float, tokens: int) -> None:
            first = not self._open[request_id].token_times
            chunk(self, request_id, moment + 0.1 * first, tokens)

        monkeypatch.setattr(run_log.RunLog, "chunk", late)
    else:
        raise AssertionError(name)


def _late(args: Any, stop_s: float) -> float:
    from kimik3_lab.simulation.drive import drive

    drive(*args, stop_s=stop_s + 3.0)
    return stop_s


CHECKS = (
    test_one_stream,
    test_streams_start_together_and_stay_in_step,
    test_the_next_request_comes_when_the_last_has_ended,
    test_what_comes_after_the_end_is_not_seen,
)


@pytest.mark.parametrize(
    "name",
    [
        "counts what touches the window",
        "latencies of what ends inside only",
        "the next request is late",
        "streams start one by one",
        "tokens after the end",
        "ttft from the first chunk's end",
    ],
)
def test_a_wrong_client_is_found_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _mutate(monkeypatch, name)
    failed = []
    for check in CHECKS:
        try:
            check()
        except AssertionError:
            failed.append(check.__name__)
    assert failed


def test_a_result_names_what_it_is_asked_for() -> None:
    result = run(plain(Prices(0.7)), 1, 20.0)
    with pytest.raises(ValueError, match="latency must be one of ttft_ms"):
        result.latency("ttft")
    with pytest.raises(ValueError, match="statistic must be mean, median or p<percent>"):
        result.latency("ttft_ms", "average")
    assert dataclasses.is_dataclass(result)

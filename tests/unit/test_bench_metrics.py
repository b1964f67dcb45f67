"""Window rule, percentiles, throughput and intervals on records made by hand."""

from __future__ import annotations

import math
from itertools import islice

import numpy as np
import pytest
from scipy import stats

from kimik3_lab.benchmark import RequestRecord, Window, poisson_interval, samples_needed, summarise
from kimik3_lab.benchmark.intervals import bootstrap_interval
from kimik3_lab.benchmark.load import arrival_times


def record(index: int, start: float, end: float, tokens: int = 2, **fields) -> RequestRecord:
    """A request whose tokens come evenly, the first at the middle of its time."""
    times = list(np.linspace((start + end) / 2, end, tokens)) if tokens > 1 else [end] * tokens
    defaults = {"status": "completed", "output_tokens": tokens, "output_tokens_from": "usage"}
    return RequestRecord(index, start, token_times=times, end=end, **{**defaults, **fields})


def test_window_by_time_keeps_what_ends_after_it_opens_and_starts_before_it_closes():
    window = Window.of_duration(100)
    assert (window.open, window.close) == (10, 90)
    records = [
        record(0, 0, 9.9),      # ends in the warm-up: out
        record(1, 0, 10.1),     # starts in the warm-up, ends inside: latency and rate
        record(2, 50, 60),      # inside: both
        record(3, 89, 99),      # starts inside, ends in the cool-down: latency only
        record(4, 90.1, 95),    # starts in the cool-down: out
        record(5, 5, 95),       # spans the window: latency only
        record(6, 60, 100, status="cancelled"),
        record(7, 20, 30, status="failed"),
    ]  # fmt: skip
    assert [window.touches(r) for r in records[:6]] == [False, True, True, True, False, True]
    summary = summarise(records, window)
    assert (summary.attempted, summary.completed, summary.failed, summary.cancelled) == (8, 6, 1, 1)
    assert summary.in_window == summary.e2e_s.count == 4
    assert summary.throughput.completed == 2
    assert summary.throughput.requests_per_s == 2 / 80


def test_window_by_requests():
    # One stream of 20 requests, a second each: 2 warm up, 2 cool down.
    records = [record(i, float(i), i + 1.0) for i in range(20)]
    window = Window.of_requests(records)
    assert (window.open, window.close) == (2.0, 18.0)
    # The second request ends exactly where the window opens, and guidellm counts both edges.
    assert summarise(records, window).throughput.completed == 17
    assert Window.of_requests(records, warmup=0, cooldown=0) == Window(0.0, 20.0)
    assert Window.of_requests(list(reversed(records))) == window
    assert Window.of_requests([]).duration == 0


def test_published_count_method():
    """A cell like the published one at concurrency 1: 150 s, and 12.37 s a request."""
    records = [record(i, i * 12.37, (i + 1) * 12.37, tokens=1000) for i in range(12)]
    rate = summarise(records, Window.of_duration(150)).throughput
    # Ends at 24.74, 37.11, ... 123.7: nine of them, though 120 s hold 9.7 requests.
    assert rate.completed == 9
    assert rate.completed_by_littles_law == pytest.approx(120 / 12.37)
    assert rate.mean_concurrency == pytest.approx(1)
    assert rate.output_tokens_per_s == pytest.approx(9 * 1000 / 120)
    assert rate.requests_per_s_ci == pytest.approx([x / 120 for x in rate.completed_ci])
    assert rate.output_tokens_per_s_ci == pytest.approx([x * 1000 / 120 for x in rate.completed_ci])


def test_observed_tokens_count_those_of_unfinished_requests():
    window = Window(0.0, 10.0)
    done = RequestRecord(
        0, 0.0, status="completed", token_times=[2.0, 4.0, 6.0, 8.0], end=8.0, output_tokens=8
    )
    cut = RequestRecord(
        1, 8.0, status="cancelled", token_times=[9.0, 9.5, 11.0], end=11.0, output_tokens=3
    )
    summary = summarise([done, cut], window)
    # Two tokens a chunk: 8 of the first request, 2 chunks = 4 tokens of the second.
    assert summary.tokens_per_chunk == 2
    assert summary.throughput.observed_tokens_per_s == pytest.approx((8 + 4) / 10)
    assert summary.throughput.output_tokens_per_s == pytest.approx(8 / 10)


def test_latencies_are_those_of_the_records():
    rng = np.random.default_rng(1)
    ends = rng.uniform(1, 3, size=400)
    records = [record(i, 0.0, float(end), tokens=5) for i, end in enumerate(ends)]
    summary = summarise(records, Window(0.0, 10.0))
    for name, value in (("median", 0.5), ("p90", 0.9), ("p99", 0.99)):
        assert getattr(summary.e2e_s, name) == pytest.approx(np.quantile(ends, value))
        assert getattr(summary.ttft_ms, name) == pytest.approx(np.quantile(ends, value) * 500)
        assert getattr(summary.tpot_ms, name) == pytest.approx(np.quantile(ends, value) * 125)
        low, high = getattr(summary.e2e_s, f"{name}_ci")
        assert low < getattr(summary.e2e_s, name) < high
    assert summary.itl_ms.count == 1600
    assert summary.itl_ms.mean == pytest.approx(ends.mean() * 125)
    assert summary.e2e_s.notes == ()


@pytest.mark.parametrize(
    ("count", "given"),
    [(5, ()), (6, ("median",)), (28, ("median",)), (29, ("median", "p90")),
     (298, ("median", "p90")), (299, ("median", "p90", "p99"))],
)  # fmt: skip
def test_percentiles_of_too_few_samples_are_refused(count, given):
    records = [record(i, 0.0, 1.0 + i / count) for i in range(count)]
    latency = summarise(records, Window(0.0, 10.0)).e2e_s
    assert latency.mean is not None and latency.mean_ci is not None
    for name, needed in (("median", 6), ("p90", 29), ("p99", 299)):
        assert (getattr(latency, name) is not None) == (name in given)
        told = f"{name} needs {needed} requests in the window, got {count}" in latency.notes
        assert told == (name not in given)


def test_gaps_of_few_requests_are_refused_though_they_are_many():
    records = [record(i, 0.0, 1.0, tokens=1000) for i in range(3)]
    itl = summarise(records, Window(0.0, 10.0)).itl_ms
    assert itl.count == 3 * 999 and itl.p99 is None
    assert "median needs 6 requests in the window, got 3" in itl.notes


def test_empty_and_single_token_windows():
    empty = summarise([], Window.of_requests([]))
    assert empty.ttft_ms.mean is None and empty.throughput.requests_per_s is None
    assert any("no request completed in the window" in note for note in empty.notes)
    single = summarise([record(i, 0.0, 1.0, tokens=1) for i in range(8)], Window(0.0, 2.0))
    assert single.ttft_ms.median == 1000 and single.tpot_ms.count == single.itl_ms.count == 0
    failed = summarise([record(0, 0.0, 1.0, tokens=0, status="failed")], Window(0.0, 2.0))
    assert failed.throughput.completed == 0
    assert failed.throughput.requests_per_s_ci[1] == pytest.approx(3.689 / 2, abs=1e-3)


@pytest.mark.parametrize(
    ("count", "low", "high"),
    # Garwood's exact limits, as tabulated (for example Ulm 1990)
    [(0, 0, 3.689), (1, 0.0253, 5.572), (10, 4.795, 18.390), (22, 13.787, 33.308)],
)
def test_poisson_interval(count, low, high):
    assert poisson_interval(count) == pytest.approx((low, high), abs=2e-3)


def test_poisson_interval_covers():
    truth = 7.3
    counts = np.arange(60)
    covered = [low <= truth <= high for low, high in map(poisson_interval, counts)]
    assert stats.poisson.pmf(counts, truth)[covered].sum() >= 0.95


@pytest.mark.parametrize("quantile", [0.5, 0.75, 0.9, 0.95, 0.99])
def test_samples_needed_is_the_smallest(quantile):
    def bracketed(n: int) -> float:
        return 1 - quantile**n - (1 - quantile) ** n

    n = samples_needed(quantile)
    assert bracketed(n) >= 0.95 > bracketed(n - 1)
    assert samples_needed(1 - quantile) == n


def test_bootstrap_interval_agrees_with_theory_and_repeats():
    data = np.random.default_rng(2).normal(10, 2, size=400)
    low, high = bootstrap_interval([data], np.mean)
    half = 1.96 * data.std(ddof=1) / math.sqrt(400)
    assert (low, high) == pytest.approx((data.mean() - half, data.mean() + half), abs=0.03)
    assert bootstrap_interval([data], np.mean) == (low, high)
    assert bootstrap_interval([data[:1]], np.mean) is None


def test_mean_gap_resamples_whole_requests():
    # Two kinds of request, 1 ms and 9 ms between tokens: 100,000 gaps, yet only 40 requests.
    records = []
    for i in range(40):
        gap = 0.001 if i % 2 else 0.009
        times = [gap * n for n in range(1, 251)]
        records.append(
            RequestRecord(i, 0.0, status="completed", token_times=times, end=times[-1],
                          output_tokens=250)
        )  # fmt: skip
    low, high = summarise(records, Window(0.0, 10.0)).itl_ms.mean_ci
    half = 1.96 * 4 / math.sqrt(40)
    assert (low, high) == pytest.approx((5 - half, 5 + half), abs=0.25)


def test_poisson_arrivals():
    times = np.array(list(islice(arrival_times(4.0, "poisson", 11), 4000)))
    gaps = np.diff(times, prepend=0.0)
    assert gaps.mean() == pytest.approx(0.25, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(1, abs=0.06)
    assert stats.kstest(gaps, "expon", args=(0, 0.25)).pvalue > 0.01
    assert list(islice(arrival_times(4.0, "poisson", 11), 4000)) == times.tolist()
    assert list(islice(arrival_times(4.0, "poisson", 12), 5)) != times[:5].tolist()


def test_record_survives_its_compact_form():
    record = RequestRecord(
        3, 1.25, scheduled=1.2, status="completed", token_times=[1.5, 1.500007, 1.75], end=1.75,
        prompt_tokens=9, output_tokens=3, output_tokens_from="usage", cached_tokens=0,
        finish_reason="length",
    )  # fmt: skip
    row = record.as_dict()
    assert row["token_gaps_us"] == [250000, 7, 249993]
    assert RequestRecord.from_dict(row) == record
    cut = RequestRecord(0, 0.1, status="failed", end=0.2, error="HTTP 500")
    assert RequestRecord.from_dict(cut.as_dict()) == cut

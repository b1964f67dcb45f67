from __future__ import annotations

import csv
import math

import pytest
from scipy.stats import binom

from kimik3_lab.performance.published import (
    BASELINE,
    Comparison,
    PublishedDataError,
    PublishedPoint,
    compare,
    count_ratio_interval,
    default_path,
    load_points,
)
from kimik3_lab.teaching import checks_benchmarks, plots_benchmarks


@pytest.fixture(scope="module")
def points():
    return load_points()


def make(**changes) -> PublishedPoint:
    values = dict(
        engine="vLLM", version="x", date="2026-09-13", concurrency=1, latency_s=12.0,
        throughput_tok_s=83.3, ttft_ms=2000.0, source_url="https://example.org",
    )  # fmt: skip
    return PublishedPoint(**values | changes)


def test_the_file_holds_the_eighteen_figures(points):
    got = {(p.version, p.concurrency): (p.latency_s, p.throughput_tok_s, p.ttft_ms) for p in points}
    assert got == {
        ("0.27.1", 1): (12.37, 83.3, 2262.9),
        ("0.27.1", 4): (23.67, 166.7, 2314.9),
        ("0.27.1", 16): (55.90, 258.3, 7601.1),
        ("main-2026-09-13", 1): (5.30, 183.3, 376.3),
        ("main-2026-09-13", 4): (10.50, 416.7, 640.5),
        ("main-2026-09-13", 16): (22.17, 725.0, 1121.0),
    }
    assert {p.evidence for p in points} == {"Published"}
    assert all("2026-09-13" in p.source_url for p in points)


def test_throughputs_are_whole_numbers_of_requests(points):
    counts = [(c.before.completed_requests, c.after.completed_requests) for c in compare(points)]
    assert counts == [(10, 22), (20, 50), (31, 87)]
    for p in points:
        assert round(p.exact_throughput_tok_s, 1) == p.throughput_tok_s


def test_ratios_agree_with_the_percentages_of_the_post(points):
    pairs = compare(points)
    # The post prints +120.0, +150.0 and +180.6 %; rounded throughputs would give +180.7.
    assert [f"{c.throughput_ratio - 1:.1%}" for c in pairs] == ["120.0%", "150.0%", "180.6%"]
    assert f"{725.0 / 258.3 - 1:.1%}" == "180.7%"
    # ... and -57.2, -55.6, -60.3 % of latency, -83.4, -72.3, -85.3 % of TTFT.
    assert [f"{1 - 1 / c.latency_ratio:.1%}" for c in pairs] == ["57.2%", "55.6%", "60.3%"]
    assert [f"{1 - 1 / c.ttft_ratio:.1%}" for c in pairs] == ["83.4%", "72.3%", "85.3%"]
    assert [round(c.latency_ratio, 2) for c in pairs] == [2.33, 2.25, 2.52]


def test_time_splits_into_first_token_and_the_rest(points):
    for p in points:
        assert p.ttft_ms + 999 * p.ms_per_token == pytest.approx(1000 * p.latency_s)
    assert [round(c.before.ms_per_token, 2) for c in compare(points)] == [10.12, 21.38, 48.35]
    assert [round(c.after.ms_per_token, 2) for c in compare(points)] == [4.93, 9.87, 21.07]
    assert [f"{c.ttft_share:.0%}" for c in compare(points)] == ["27%", "13%", "19%"]


def test_littles_law(points):
    expected = {(p.version, p.concurrency): round(p.littles_law_requests, 1) for p in points}
    assert [expected[BASELINE, c] for c in (1, 4, 16)] == [9.7, 20.3, 34.3]
    assert [expected["main-2026-09-13", c] for c in (1, 4, 16)] == [22.6, 45.7, 86.6]
    assert make(concurrency=3, latency_s=50.0).window_count_range == (6, 9)


def test_a_throughput_that_is_no_count_is_refused():
    with pytest.raises(PublishedDataError, match="not a whole number of 1000-token answers"):
        _ = make(throughput_tok_s=86.0).completed_requests
    assert make(throughput_tok_s=83.3).completed_requests == 10


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"latency_s": -1.0}, "latency_s must be a positive number"),
        ({"ttft_ms": math.nan}, "ttft_ms must be a positive number"),
        ({"latency_s": 1.0}, "check the units"),
        ({"concurrency": 0}, "concurrency must be 1 or more"),
        ({"source_url": "a blog"}, "must be the https address"),
    ],
)
def test_impossible_points_are_refused(changes, message):
    with pytest.raises(PublishedDataError, match=message):
        make(**changes)


def broken(tmp_path, change):
    with default_path().open(newline="") as file:
        rows = list(csv.reader(file))
    change(rows)
    path = tmp_path / "points.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows[0].__setitem__(4, "seconds"), "no column latency_s"),
        (lambda rows: rows[2].__setitem__(4, "fast"), "line 3: could not convert"),
        (lambda rows: rows[2].__setitem__(4, ""), "line 3: latency_s must be a positive"),
        (lambda rows: rows.append(rows[1]), "appear twice"),
        (lambda rows: rows.__delitem__(slice(1, None)), "no points"),
    ],
)
def test_a_broken_file_is_refused(tmp_path, change, message):
    with pytest.raises(PublishedDataError, match=message):
        load_points(broken(tmp_path, change))


def test_comparisons_need_partners(points):
    with pytest.raises(ValueError, match="at the same concurrencies"):
        compare(points[:-1])
    with pytest.raises(ValueError, match="compare points of one concurrency"):
        Comparison(points[0], points[4])


def test_interval_inverts_two_binomial_tests():
    low, high = count_ratio_interval(10, 22)
    # At either end, a count this extreme has a chance of 2.5 %.
    assert binom.sf(21, 32, low / (1 + low)) == pytest.approx(0.025, abs=1e-6)
    assert binom.cdf(22, 32, high / (1 + high)) == pytest.approx(0.025, abs=1e-6)
    assert low < 1 < 2.2 < high


def test_interval_shrinks_with_counts_and_flips_with_order():
    low, high = count_ratio_interval(1000, 2200)
    assert 2.0 < low < 2.2 < high < 2.4
    back = count_ratio_interval(2200, 1000)
    assert back == pytest.approx((1 / high, 1 / low))
    assert count_ratio_interval(0, 3)[1] == math.inf
    assert count_ratio_interval(3, 0)[0] == 0.0


@pytest.mark.parametrize(
    ("args", "message"),
    [((0, 0), "not both zero"), ((-1, 2), "not both zero"), ((1, 2, 95), "between 0 and 1")],
)
def test_interval_refuses_nonsense(args, message):
    with pytest.raises(ValueError, match=message):
        count_ratio_interval(*args)


def test_exercise_check_tells_right_from_wrong():
    answers = {(2.0, 1.5): 73, (2.0, 1.6): 121, (3.0, 1.0): 5}

    def right(ratio, at_least):
        before = answers[ratio, at_least] - 3
        while count_ratio_interval(before, round(ratio * before))[0] <= at_least:
            before += 1
        return before

    checks_benchmarks.check_1(right)
    with pytest.raises(AssertionError, match="its interval begins at"):
        checks_benchmarks.check_1(lambda ratio, at_least: right(ratio, at_least) - 1)
    with pytest.raises(AssertionError, match="is already enough"):
        checks_benchmarks.check_1(lambda ratio, at_least: right(ratio, at_least) + 1)


def test_figures_show_the_points(points):
    pairs = compare(points)
    counts, latencies = plots_benchmarks.ratio_intervals(pairs).data
    assert list(counts.x) == [c.throughput_ratio for c in pairs]
    low = [x - minus for x, minus in zip(counts.x, counts.error_x.arrayminus, strict=True)]
    assert low == pytest.approx([c.throughput_interval()[0] for c in pairs])
    assert list(latencies.x) == [c.latency_ratio for c in pairs]
    first, rest = plots_benchmarks.time_split(pairs).data
    total = [a + b for a, b in zip(first.x, rest.x, strict=True)]
    assert total == pytest.approx([p.latency_s for c in pairs for p in (c.before, c.after)])

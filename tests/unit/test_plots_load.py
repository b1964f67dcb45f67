"""Figures and sliders of lesson 12: what they draw is what they were given."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from kimik3_lab.benchmark import RequestRecord, Window, summarise
from kimik3_lab.teaching import plots_benchmarks, plots_load, widgets_benchmarks
from kimik3_lab.teaching.widgets_benchmarks import LoadLevel, good_rate, view_window


def record(start: float, ttft: float, tpot: float, n: int = 5, **fields: Any) -> RequestRecord:
    times = [start + ttft + i * tpot for i in range(n)]
    return RequestRecord(
        0, start, status="completed", token_times=times, end=times[-1], output_tokens=n, **fields
    )


RUN = [record(2.0 * i, 0.5, 0.3) for i in range(50)]  # one stream, 1.7 s each, then 0.3 s of pause


def test_a_view_is_what_the_client_makes_of_a_window() -> None:
    window = Window(10.9, 60.2)
    view, summary = view_window(RUN, window), summarise(RUN, window)
    assert view.touching == summary.in_window
    assert view.ended == summary.throughput.completed
    assert view.mean_latency_s == pytest.approx(summary.e2e_s.mean)
    assert view.tokens_per_s == pytest.approx(summary.throughput.output_tokens_per_s)
    assert view.arrived_tokens_per_s == pytest.approx(summary.throughput.observed_tokens_per_s)


def test_an_empty_window() -> None:
    view = view_window(RUN, Window(500, 510))
    assert (view.ended, view.touching, view.tokens_per_s) == (0, 0, 0.0)
    assert np.isnan(view.mean_latency_s)
    with pytest.raises(ValueError, match="needs a length"):
        view_window(RUN, Window(5, 5))


def test_sliding_counts_count_ends() -> None:
    found = widgets_benchmarks.sliding_counts(RUN, 9.0, begin_s=10, until_s=80)
    assert len(found) == 62
    by_hand = [sum(o <= r.end <= o + 9 for r in RUN) for o in range(10, 72)]
    assert found.tolist() == by_hand
    with pytest.raises(ValueError, match="no window of 90 s fits"):
        widgets_benchmarks.sliding_counts(RUN, 90, begin_s=20, until_s=80)


def test_window_edges_sorts_requests_by_how_they_count() -> None:
    requests = [(0, 4, True), (4, 12, True), (12, 25, True), (25, 30, False), (22, 24, True)]
    figure = plots_load.window_edges(requests, (10, 20), title="t")
    names = [trace.name for trace in figure.data]
    assert [name.rpartition(" ")[2] for name in names] == ["(1)", "(1)", "(2)", "(1)"]
    ended, touching, *_ = figure.data
    assert (ended.base[0], ended.x[0]) == (4, 8)
    assert (touching.base[0], touching.x[0]) == (12, 13)
    assert figure.data[2].y == (1, 2)  # the fifth overlaps with the third: a second row
    patterns = {(trace.marker.color, trace.marker.pattern.shape) for trace in figure.data}
    assert len(patterns) == 4


def test_window_figure_says_what_the_window_found() -> None:
    figure = widgets_benchmarks.window_figure(RUN, 10.9, 49.3, name="a run")
    view = view_window(RUN, Window(10.9, 60.2))
    assert figure.layout.title.text.startswith(f"a run: {view.ended} ended, ")
    assert sum(len(trace.x) for trace in figure.data) == sum(r.start < 60.2 * 1.12 for r in RUN)


def test_good_requests_keep_both_limits() -> None:
    level = LoadLevel(2.0, 10.0, [record(0, 0.5, 0.1), record(1, 2.0, 0.1), record(2, 0.5, 0.4)])
    assert good_rate(level, 1000, 200) == pytest.approx(0.1)
    assert good_rate(level, 3000, 200) == pytest.approx(0.2)
    assert good_rate(level, 3000, 500) == pytest.approx(0.3)
    cut_off = RequestRecord(3, 0.0, status="cancelled", token_times=[0.1], end=10.0)
    assert good_rate(LoadLevel(1.0, 10.0, [cut_off]), 1000, 200) == 0.0
    late = LoadLevel(1.0, 2.0, [record(0, 0.5, 0.1), record(1.5, 0.5, 0.1)])
    assert late.served == 0.5  # the second ended when none came any more
    assert late.ttft_s == pytest.approx([0.5, 0.5])


def test_goodput_figure_draws_both_rates() -> None:
    levels = [LoadLevel(1.0, 10.0, RUN[:5]), LoadLevel(2.0, 10.0, RUN[:4])]
    served, good = widgets_benchmarks.goodput_figure(levels, 400, 500).data
    assert list(served.x) == [1.0, 2.0] and list(served.y) == [0.5, 0.4]
    assert list(good.y) == [0.0, 0.0]
    assert served.marker.symbol != good.marker.symbol


def test_load_curve_has_both_loops_in_both_panels() -> None:
    figure = plots_load.load_curve([0.5, 1], [0.5, 0.7], [1, 9], [(1, 0.2, 0.4), (4, 0.5, 0.5)])
    _, served, left, waits, right = figure.data
    assert list(served.y) == [0.5, 0.7] and list(waits.y) == [1, 9]
    assert list(left.y) == [0.2, 0.5] and list(right.y) == [0.4, 0.5]
    assert list(left.text) == ["c=1", "c=4"]
    assert figure.layout.yaxis2.type == "log"


def test_stall_and_distribution() -> None:
    closed, opened = plots_load.stall([(0, 9)], [(0, 9), (1, 8)], 9.0).data
    assert (closed.name, opened.name) == ("closed loop (1 requests)", "open loop (2 requests)")
    assert closed.marker.symbol != opened.marker.symbol
    figure = plots_load.ttft_distribution([3, 1, 2, 10], {"mean": 4, "median": 2.5}, title="t")
    assert list(figure.data[0].x) == [1, 2, 3, 10] and list(figure.data[0].y)[-1] == 1
    assert [shape.x0 for shape in figure.layout.shapes] == [4, 2.5]


def test_counts_and_ratios() -> None:
    figure = plots_benchmarks.count_spread(["a", "b"], [10, 22], [(5, 18), (14, 33)], [(9, 10)] * 2)
    assert list(figure.data[-1].x) == [10, 22]
    assert [list(t.x) for t in figure.data[:-1]] == [[5, 18], [14, 33], [9, 10], [9, 10]]
    assert sum(bool(t.showlegend) for t in figure.data[:-1]) == 2
    figure = plots_benchmarks.relative_to_published(["a", "b"], {"x": [1, 2], "y": [0.9, 1.1]})
    assert [list(t.x) for t in figure.data] == [[1, 2], [0.9, 1.1]]
    assert len({t.marker.symbol for t in figure.data}) == 2


def test_sliders_redraw_without_simulating() -> None:
    box = widgets_benchmarks.window_explorer({"one": RUN, "two": RUN[:30]}, opens_s=5, length_s=40)
    pick, sliders, view = box.children
    before = view.outputs[0]["data"]["text/plain"]
    assert before.startswith("one: ")
    sliders.children[0].value = 20
    after = view.outputs[0]["data"]["text/plain"]
    assert after != before or view.outputs[0]["data"] != before
    pick.value = "two"
    assert view.outputs[0]["data"]["text/plain"].startswith("two: ")
    sliders.children[0].value = 78  # behind the end of the second run: pushed back
    assert view.outputs[0]["data"]["text/plain"].startswith("two: ")
    json.dumps(view.outputs[0]["data"])

    levels = [LoadLevel(1.0, 10.0, RUN[:5]), LoadLevel(2.0, 10.0, RUN[:4])]
    box = widgets_benchmarks.goodput_explorer(levels)
    sliders, view = box.children
    sliders.children[0].value = 500
    assert "within 0.5 s" in view.outputs[0]["data"]["text/plain"]


def test_without_widgets_a_figure_comes_back() -> None:
    assert widgets_benchmarks.window_explorer({"one": RUN}, widgets=False).data
    levels = [LoadLevel(1.0, 10.0, RUN[:5])]
    assert widgets_benchmarks.goodput_explorer(levels, widgets=False).data

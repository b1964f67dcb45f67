"""Figures of lesson 06 show the numbers they were given, readable without colour."""

from __future__ import annotations

from math import log10

import pytest

from kimik3_lab.teaching import plots_kda_kernels as plots

RUNGS = ["separate", "in_place", "tuned"]
RATIOS = {"B = 1": [150.0, 60.0, 10.0], "B = 256": [6.5, 1.2, 1.1]}
PROGRAMS = {"B = 16": [(8, 1, 1.5), (32, 1, 1.4), (32, 4, 1.6)], "B = 256": [(8, 1, 1.1)]}
LAUNCHES = {
    "chunks": {"prepare": 90.0, "walk": 400.0},
    "segments": {"prepare": 90.0, "survey": 80.0, "walk": 19.0},
}


def test_rung_lines_draw_what_they_are_given_from_the_ground_up() -> None:
    figure = plots.rung_lines(RUNGS, RATIOS, title="Decode")
    assert [list(trace.x) for trace in figure.data] == list(RATIOS.values())
    assert all(list(trace.y) == RUNGS for trace in figure.data)
    assert list(figure.layout.yaxis.categoryarray) == RUNGS
    assert figure.layout.title.text == "Decode" and figure.layout.showlegend
    low, high = figure.layout.xaxis.range
    assert all(low < log10(v) < high for values in RATIOS.values() for v in [1, *values])
    assert len({(t.line.dash, t.marker.symbol) for t in figure.data}) == len(figure.data)


def test_rung_lines_refuse_a_time_too_few() -> None:
    with pytest.raises(ValueError, match="B = 1: got 2 times, expected one for each of 3 rungs"):
        plots.rung_lines(RUNGS, {"B = 1": [2.0, 1.0]}, title="")


def test_program_sizes_join_the_fastest_and_show_all() -> None:
    figure = plots.program_sizes(PROGRAMS)
    line, marks = figure.data[:2]
    assert (list(line.x), list(line.y)) == ([8, 32], [1.5, 1.4])
    assert list(marks.y) == [1.5, 1.4, 1.6] and list(marks.customdata) == [1, 1, 4]
    assert {a.text for a in figure.layout.annotations} == set(PROGRAMS)
    assert figure.layout.shapes[0].y0 == 1


def test_bars_are_stacked_in_the_given_order_with_totals() -> None:
    figure = plots.launch_bars(LAUNCHES, 30.0, title="Prefill")
    assert [trace.name for trace in figure.data] == ["prepare", "survey", "walk"]
    assert [list(trace.x) for trace in figure.data] == [[90, 90], [0, 80], [400, 19]]
    assert figure.layout.barmode == "stack" and figure.layout.shapes[0].x0 == 30.0
    texts = [annotation.text for annotation in figure.layout.annotations]
    assert texts == ["490 µs", "189 µs"]
    assert "floor, 30 µs" in figure.layout.xaxis.title.text
    # A pattern without a background of its own hides the bar.
    assert all(t.marker.pattern.bgcolor == t.marker.color for t in figure.data)
    patterns = [trace.marker.pattern.shape for trace in figure.data]
    assert len(set(patterns)) == len(patterns)


def test_traffic_bars_are_in_kilobytes() -> None:
    figure = plots.traffic_bars({"records": {"read": 64.0, "written": 9.0}}, title="Verify")
    assert figure.layout.xaxis.title.text == "kB"
    assert figure.layout.annotations[0].text == "73 kB"


def test_too_many_parts_are_refused() -> None:
    with pytest.raises(ValueError, match="got 6 parts, expected at most 5"):
        plots.traffic_bars({"a": {str(i): 1.0 for i in range(6)}}, title="")

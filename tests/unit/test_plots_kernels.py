"""Figures of lesson 04 show the numbers they were given, readable without colour."""

from __future__ import annotations

from itertools import pairwise
from math import log10

import plotly.graph_objects as go
import pytest

from kimik3_lab.teaching import plots_kernels

RUNGS = ["loop", "grouped", "tuned"]
TIMES = {1: [1350.0, 6.8, 3.0], 16: [1888.0, 3.9, 1.3]}
CALLS = {
    "MXFP4": [(1, 3.8, 6e12), (64, 6.3, 24e12), (8192, 520.0, 380e12)],
    "bfloat16": [(1, 1.0, 3e12), (64, 1.7, 7e12), (8192, 144.0, 317e12)],
}
RATIOS = {"MXFP4, TP8": [1.8, 1.5, 1.33], "bf16, TP8": [1.0, 1.06, 1.27], "EP8": [0.9, 1.0, 1.3]}


def texts(figure: go.Figure) -> list[str]:
    return [annotation.text for annotation in figure.layout.annotations]


def assert_told_apart_without_colour(traces: list[go.Scatter]) -> None:
    assert len({(trace.line.dash, trace.marker.symbol) for trace in traces}) == len(traces)


def test_ladder_draws_what_it_is_given_from_the_ground_up() -> None:
    figure = plots_kernels.ladder(RUNGS, TIMES)
    assert [list(trace.x) for trace in figure.data] == list(TIMES.values())
    assert all(list(trace.y) == RUNGS for trace in figure.data)
    assert list(figure.layout.yaxis.categoryarray) == RUNGS
    assert [trace.name for trace in figure.data] == ["1 token", "16 tokens"]
    assert_told_apart_without_colour(list(figure.data))


def test_ladder_shows_the_floor_and_all_points() -> None:
    figure = plots_kernels.ladder(RUNGS, TIMES)
    assert figure.layout.xaxis.type == "log"
    assert figure.layout.shapes[0].x0 == figure.layout.shapes[0].x1 == 1
    low, high = figure.layout.xaxis.range
    assert all(low < log10(value) < high for values in TIMES.values() for value in values)


def test_ladder_refuses_a_time_too_few() -> None:
    with pytest.raises(ValueError, match="16 tokens: got 2 times, expected one for each of 3"):
        plots_kernels.ladder(RUNGS, {16: [2.0, 1.0]})


def test_roofline_has_the_ridge_where_both_limits_meet() -> None:
    figure = plots_kernels.roofline(CALLS, 4e12, 800e12)
    roof = figure.data[0]
    assert roof.x[1] == pytest.approx(200)
    assert list(roof.y) == pytest.approx([2.0, 800.0, 800.0])
    assert {"4 TB/s", "800 TFLOP/s"} <= set(texts(figure))


def test_roofline_draws_calls_in_tflops_and_names_the_ends() -> None:
    figure = plots_kernels.roofline(CALLS, 4.3e12, 790e12)
    for trace, calls in zip(figure.data[1:], CALLS.values(), strict=True):
        assert list(trace.x) == [call[1] for call in calls]
        assert list(trace.y) == pytest.approx([call[2] / 1e12 for call in calls])
        assert list(trace.customdata) == [call[0] for call in calls]
    assert texts(figure).count("T=1") == texts(figure).count("T=8192") == 2
    assert texts(figure).count("T=64") == 1
    assert_told_apart_without_colour(list(figure.data[1:]))
    assert (figure.layout.xaxis.type, figure.layout.yaxis.type) == ("log", "log")


def test_against_peers_draws_the_ratios_and_the_line_at_one() -> None:
    figure = plots_kernels.against_peers([1, 64, 8192], RATIOS)
    assert [list(trace.y) for trace in figure.data] == list(RATIOS.values())
    assert all(list(trace.x) == [1, 64, 8192] for trace in figure.data)
    assert figure.layout.shapes[0].y0 == figure.layout.shapes[0].y1 == 1
    assert set(texts(figure)) == set(RATIOS)
    assert_told_apart_without_colour(list(figure.data))


def test_against_peers_keeps_names_apart() -> None:
    figure = plots_kernels.against_peers([1, 64, 8192], RATIOS)
    heights = sorted(annotation.y for annotation in figure.layout.annotations)
    assert all(b - a >= 0.11 - 1e-9 for a, b in pairwise(heights))
    assert heights[0] == 1.27


def test_against_peers_refuses_a_ratio_too_few() -> None:
    with pytest.raises(ValueError, match="EP8: got 1 ratios for 2 sizes"):
        plots_kernels.against_peers([1, 2], {"EP8": [1.0]})

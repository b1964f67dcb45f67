"""Figures of lesson 05 show the numbers they were given, readable without colour."""

from __future__ import annotations

import itertools
import math
from math import log10

import numpy as np
import plotly.graph_objects as go
import pytest
from test_plots import luminance

from kimik3_lab.teaching import plots, plots_kda

STATE, TOKEN_BYTES = 449_372_160, 27_648


def texts(figure: go.Figure) -> list[str]:
    """Everything that is written into the plot itself."""
    written = [note.text for note in figure.layout.annotations]
    return written + [
        text for trace in figure.data for text in (getattr(trace, "text", None) or ())
    ]


def step(keys: int = 3, values: int = 2) -> dict[str, np.ndarray]:
    matrix = np.arange(keys * values, dtype=float).reshape(keys, values)
    return {
        "decay": np.linspace(0, 1, keys),
        "removed": matrix,
        "written": -2 * matrix,
        "state": matrix + 0.5,
    }


def line_figures() -> list[go.Figure]:
    x = np.linspace(-8, 8, 41)
    return [
        plots_kda.gate_curves(x.tolist(), (-5 / (1 + np.exp(-x))).tolist(), x.tolist()),
        plots_kda.exponent_lines(),
        plots_kda.decode_traffic_lines(STATE, TOKEN_BYTES),
    ]


@pytest.mark.parametrize("figure", line_figures(), ids=["gates", "exponents", "traffic"])
def test_lines_have_a_name_beside_them_and_a_dash_of_their_own(figure: go.Figure) -> None:
    lines = [trace for trace in figure.data if trace.mode == "lines"]
    assert len(lines) >= 2
    assert all(a.line.dash != b.line.dash for a, b in itertools.combinations(lines, 2))
    assert all(line.name in texts(figure) for line in lines)
    assert figure.layout.showlegend is False
    assert figure.layout.title.text
    assert figure.layout.xaxis.title.text and figure.layout.yaxis.title.text


def test_gate_curves_draw_what_they_are_given() -> None:
    figure = plots_kda.gate_curves([0.0, 1.0, 2.0], [-2.5, -3.0, -4.0], [-0.5, -1.0, -2.0])
    assert [list(trace.y) for trace in figure.data] == [[-2.5, -3.0, -4.0], [-0.5, -1.0, -2.0]]


def test_half_lives_are_all_there_with_the_median_of_each_head() -> None:
    layers = {0: [[0.2, 0.5, 3.0], [1.0, 2.0, 9000.0]], 4: [[5.0, 4.0, 6.0], [0.3, 0.3, 70.0]]}
    figure = plots_kda.half_life_strips(layers, text_tokens=512)
    dots, medians = figure.data
    assert sorted(dots.y) == sorted(v for heads in layers.values() for head in heads for v in head)
    assert list(medians.y) == [0.5, 2.0, 5.0, 0.3]
    for x, y in zip(dots.x, dots.y, strict=True):  # each dot stands in the strip of its own head
        strip = min(range(4), key=lambda i: abs(medians.x[i] - x))
        assert y in layers[(0, 4)[strip // 2]][strip % 2]
    axis = figure.layout.xaxis
    assert [t.split("<br>")[0] for t in axis.ticktext] == ["0", "1"] * 2
    assert [t.split("<br>")[1] for t in axis.ticktext if "<br>" in t] == ["0", "4"]
    low, high = (10**end for end in figure.layout.yaxis.range)
    assert low < math.log(2) / 5 and high > 9000
    lines = [shape.y0 for shape in figure.layout.shapes]
    assert lines == [pytest.approx(math.log(2) / 5), 512]


def test_exponents_leave_float32_where_it_ends() -> None:
    figure = plots_kda.exponent_lines(-5.0, rows=64)
    key, query = figure.data[:2]
    assert key.y[0] == pytest.approx(5 / np.log(10)) and query.y[-1] == pytest.approx(
        -138.97, abs=0.01
    )
    with np.errstate(over="ignore"):
        first = next(n for n in range(1, 65) if np.isinf(np.exp(np.float32(5 * n))))
    assert first == 18 and f"row {first}: infinity" in texts(figure)
    band = figure.layout.shapes[0]
    assert band.y1 == pytest.approx(log10(3.4028235e38))
    assert band.y0 == pytest.approx(log10(1.4e-45), abs=0.01)


def test_exponents_that_stay_inside_get_no_mark() -> None:
    figure = plots_kda.exponent_lines(-5.0, rows=16)
    assert not any("infinity" in text for text in texts(figure))
    assert [trace.mode for trace in figure.data] == ["lines", "lines"]


def test_traffic_crosses_where_reading_rows_costs_as_much_as_moving_the_state() -> None:
    figure = plots_kda.decode_traffic_lines(STATE, TOKEN_BYTES)
    both, rows, state = figure.data[:3]
    assert set(state.y) == {2 * STATE / 1e9}
    for n, total, alone in zip(both.x, both.y, rows.y, strict=True):
        assert alone == pytest.approx(n * TOKEN_BYTES / 1e9)
        assert total == pytest.approx(alone + 2 * STATE / 1e9)
    assert list(figure.data[3].x) == [32_507]
    assert 32_506 * TOKEN_BYTES < 2 * STATE <= 32_507 * TOKEN_BYTES
    assert "32,507 tokens" in texts(figure)


def test_traffic_without_a_crossing_in_sight_marks_none() -> None:
    assert len(plots_kda.decode_traffic_lines(STATE, TOKEN_BYTES, max_tokens=4096).data) == 3


def test_state_step_shows_all_four_on_shared_rows_and_one_scale() -> None:
    given = step()
    figure = plots_kda.state_step(**given, title="a token")
    bars, *maps = figure.data
    assert np.array_equal(bars.x, given["decay"]) and list(bars.y) == [0, 1, 2]
    for drawn, name in zip(maps, ("removed", "written", "state"), strict=True):
        np.testing.assert_allclose(drawn.z, given[name], rtol=1e-6)
        assert drawn.coloraxis == "coloraxis"
    assert {"decay", "removed", "written", "state after"} <= set(texts(figure))
    assert (figure.layout.coloraxis.cmin, figure.layout.coloraxis.cmax) == (-10, 10)
    # Row 0 at the top, as a matrix is written.
    assert figure.layout.yaxis.range == (2.5, -0.5)


def test_state_step_takes_a_scale_and_survives_an_empty_state() -> None:
    assert plots_kda.state_step(**step(), title="", scale=3.0).layout.coloraxis.cmax == 3
    empty = {name: 0 * array for name, array in step().items()}
    assert plots_kda.state_step(**empty, title="").layout.coloraxis.cmax == 1


@pytest.mark.parametrize("name", ["decay", "removed", "written"])
def test_state_step_refuses_shapes_that_do_not_belong_together(name: str) -> None:
    given = step()
    given[name] = given[name][:-1]
    with pytest.raises(ValueError, match=r"expected decay \[K\] and three matrices"):
        plots_kda.state_step(**given, title="")


def test_signs_can_be_told_apart_without_red_and_green() -> None:
    shades = [luminance(color) for _, color in plots_kda.DIVERGING]
    middle = len(shades) // 2
    assert shades[middle] == pytest.approx(1)
    assert shades[:middle] == sorted(shades[:middle])
    assert shades[middle + 1 :] == sorted(shades[middle + 1 :], reverse=True)
    for _, color in plots_kda.DIVERGING[:middle]:  # orange: red channel leads
        assert int(color[1:3], 16) > int(color[5:7], 16)
    for _, color in plots_kda.DIVERGING[middle + 1 :]:  # blue: blue channel leads
        assert int(color[5:7], 16) > int(color[1:3], 16)


def test_figures_are_small_enough_for_a_notebook() -> None:
    plots.use_style()
    matrix = np.random.default_rng(0).normal(size=(128, 128))
    figure = plots_kda.state_step(np.ones(128), matrix, matrix, matrix, title="released width")
    assert len(figure.to_json()) < 400_000

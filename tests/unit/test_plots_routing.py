"""Figures of lesson 02 show what they are given, named without a legend."""

from __future__ import annotations

import math

import plotly.graph_objects as go
import pytest

from kimik3_lab.teaching import plots_routing


def texts(figure: go.Figure) -> list[str]:
    return [annotation.text for annotation in figure.layout.annotations]


def test_sorted_loads_are_shares_of_the_mean_busiest_first() -> None:
    figure = plots_routing.sorted_loads({"bare": [1, 6, 2, 3], "with bias": [3, 3, 3, 3]})
    bare, even = figure.data
    assert list(bare.y) == [2.0, 1.0, 2 / 3, 1 / 3] and list(even.y) == [1.0] * 4
    assert texts(figure) == ["bare", "with bias"]
    assert bare.marker.symbol != even.marker.symbol
    # The names stand beside the last points, clear of the lines and of each other.
    low, high = sorted(note.y for note in figure.layout.annotations)
    assert all(note.x == 4 for note in figure.layout.annotations) and high - low > 0.1
    assert figure.layout.xaxis.range[1] > 4.5


def test_bias_quantile_rises_to_all_tokens_and_marks_the_wanted_share() -> None:
    figure = plots_routing.bias_quantile([0.3, -0.1, 0.1, 0.2], 0.25, -0.1)
    curve, point = figure.data
    assert list(curve.x) == [-0.1, 0.1, 0.2, 0.3] and list(curve.y) == [25, 50, 75, 100]
    assert (point.x[0], point.y[0]) == (-0.1, 25)
    assert texts(figure)[-1] == "bias -0.100"


def test_load_over_steps_keeps_steps_and_has_room_for_the_largest() -> None:
    figure = plots_routing.load_over_steps(
        {"sign": ([0, 1, 2], [7, 6, 5]), "quantile": ([0, 1, 2], [7, 2, 1.1])},
        x_title="batch", title="x",
    )  # fmt: skip
    assert [list(trace.y) for trace in figure.data] == [[7, 6, 5], [7, 2, 1.1]]
    assert 10 ** figure.layout.yaxis.range[1] > 7
    assert figure.layout.yaxis.tickvals[-1] == 8
    assert figure.layout.annotations[0].y == pytest.approx(math.log10(5))


def test_expert_taste_needs_a_row_for_each_kind() -> None:
    figure = plots_routing.expert_taste(["digit", "name"], [[2, 0.5], [1, 1]])
    assert [list(row) for row in figure.data[0].z] == [[2, 0.5], [1, 1]]
    with pytest.raises(ValueError, match="each of 3 kinds, got 1 rows"):
        plots_routing.expert_taste(["a", "b", "c"], [[1.0]])


def test_rank_imbalance_keeps_names_apart_and_in_order() -> None:
    figure = plots_routing.rank_imbalance(
        [1, 64], {"real": [4, 1.31], "uniform": [4, 1.3], "even": [1, 1]}, "x"
    )
    named = [note for note in figure.layout.annotations if note.text]
    ys = {note.text: note.y for note in named}
    assert ys["even"] < ys["uniform"] < ys["real"]
    assert ys["real"] - ys["uniform"] > 0.2


def test_placements_show_every_layer_and_their_mean() -> None:
    figure = plots_routing.placements({"in order": [1.5, 1.1, 1.3], "by load": [1.0]})
    first, second = figure.data
    assert list(first.y) == [1.5, 1.1, 1.3] and list(second.y) == [1.0]
    assert list(first.x) == sorted(first.x) and max(first.x) < min(second.x)
    means = [shape.y0 for shape in figure.layout.shapes[:2]]
    assert means == pytest.approx([1.3, 1.0])
    assert list(figure.layout.xaxis.ticktext) == ["in order", "by load"]
    assert len(figure.layout.shapes) == 3  # and the line that no placement beats
    times = plots_routing.placements(
        {"in order": [1500.0, 1100.0]}, title="t", y_title="us", digits=0, best=None
    )
    assert [note.text for note in times.layout.annotations] == ["1,300"]
    assert (len(times.layout.shapes), times.layout.yaxis.title.text) == (1, "us")

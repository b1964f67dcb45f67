from __future__ import annotations

import math

import plotly.graph_objects as go
import pytest

from kimik3_lab.reference.mxfp4 import MAGNITUDES
from kimik3_lab.teaching import plots_moe

IDS = [[3, 0], [0, 1], [3, 1]]
NAMES = ["a", "b", "c"]


def ways(trace: go.Scatter) -> dict[int, int]:
    """Left end to right end of each line of a trace."""
    ends = list(trace.y)
    return dict(zip(ends[0::3], ends[1::3], strict=True))


def texts(figure: go.Figure) -> list[str]:
    return [annotation.text for annotation in figure.layout.annotations]


# -- permutation -----------------------------------------------------------------------------------


def test_permutation_sends_each_pair_to_its_row() -> None:
    figure = plots_moe.permutation(IDS, NAMES, token=2)
    others, followed = (ways(trace) for trace in figure.data)
    # by expert: 0 gets pairs 1 and 2, 1 gets 3 and 5, 3 gets 0 and 4
    assert followed == {4: 5, 5: 3}
    assert others == {0: 4, 1: 0, 2: 1, 3: 2}
    assert followed.keys() | others.keys() == set(range(6))


def test_permutation_names_tokens_and_busy_experts_only() -> None:
    figure = plots_moe.permutation(IDS, NAMES, token=2)
    want = ["a", "b", "<b>c</b>", "expert 0: 2 rows", "expert 1: 2 rows", "expert 3: 2 rows"]
    assert texts(figure) == want
    assert "expert 1: 1 row" in texts(plots_moe.permutation([[1]], ["a"]))


def test_followed_token_differs_in_width_and_marker_not_in_colour_alone() -> None:
    others, followed = plots_moe.permutation(IDS, NAMES).data
    assert followed.line.width > others.line.width
    assert followed.marker.symbol != others.marker.symbol


@pytest.mark.parametrize("names", [[], ["a", "b"]])
def test_permutation_refuses_names_that_do_not_fit(names: list[str]) -> None:
    with pytest.raises(ValueError, match=f"{len(names)} names for 3 tokens"):
        plots_moe.permutation(IDS, names)


# -- SiTU ------------------------------------------------------------------------------------------


def test_situ_curves_are_bounded_and_meet_swiglu_near_zero() -> None:
    silu, gate, plain, up = plots_moe.situ_curves().data
    assert max(gate.y) < 4 < max(silu.y)
    assert max(map(abs, up.y)) < 25 < max(plain.y)
    zero = gate.x.index(0.0)
    near = gate.x.index(0.5)
    assert gate.y[zero] == silu.y[zero] == 0
    assert gate.y[near] == pytest.approx(silu.y[near], rel=0.01)
    at = gate.x.index(3.0)
    assert gate.y[at] == pytest.approx(4 * math.tanh(0.75) / (1 + math.exp(-3)))
    assert up.y[up.x.index(40.0)] == pytest.approx(25 * math.tanh(1.6))


def test_situ_curves_take_other_bounds_and_say_so() -> None:
    figure = plots_moe.situ_curves(2.0, 9.0)
    assert {"bound 2", "bound 9"} <= set(texts(figure))
    assert max(figure.data[1].y) < 2 and max(figure.data[3].y) < 9
    assert figure.data[0].line.dash != figure.data[1].line.dash


# -- MXFP4 -----------------------------------------------------------------------------------------


def test_staircase_maps_each_weight_to_the_nearest_value() -> None:
    _, stairs, points = plots_moe.mxfp4_staircase(MAGNITUDES).data
    grid = sorted({sign * m for m in MAGNITUDES for sign in (-1, 1)})
    assert list(points.x) == list(points.y) == grid
    assert len(grid) == 15  # sixteen codes, two of them zero
    for left, right, value in zip(stairs.x[0::2], stairs.x[1::2], stairs.y[0::2], strict=True):
        middle = (left + right) / 2
        best = min(grid, key=lambda g: abs(g - middle))
        assert value == best, (left, right)
    assert list(stairs.y[0::2]) == list(stairs.y[1::2])
    assert stairs.x[-2] == 5.0  # all above goes to 6


# -- batch size ------------------------------------------------------------------------------------

BATCHES = [1, 4, 16, 64]


def test_distinct_experts_draws_what_it_is_given() -> None:
    k3 = [1.8, 7.0, 25.0, 68.4], [1.8, 7.1, 25.2, 68.0]
    tiny = [25.0, 68.4, 99.0, 100.0], [25.0, 60.0]
    figure = plots_moe.distinct_experts(BATCHES, k3, tiny)
    assert [list(trace.y) for trace in figure.data] == [*k3, *tiny]
    assert list(figure.data[3].x) == [1, 4]  # fewer draws than batches
    assert [trace.mode for trace in figure.data] == ["lines", "markers"] * 2
    assert figure.data[1].marker.symbol != figure.data[3].marker.symbol
    assert texts(figure) == ["K3: 16 of 896", "tiny K3: 4 of 32"]
    assert figure.layout.annotations[0].x == math.log10(16)


def test_expert_bytes_has_the_flat_line_and_logarithmic_axes() -> None:
    figure = plots_moe.expert_bytes(BATCHES, [25.8, 100.6, 362.3, 989.9], 111.2)
    assert list(figure.data[0].y) == [25.8, 100.6, 362.3, 989.9]
    assert list(figure.data[1].y) == [111.2] * 4
    assert (figure.layout.xaxis.type, figure.layout.yaxis.type) == ("log", "log")
    low, high = (10**end for end in figure.layout.yaxis.range)
    assert low < 25.8 and high > 1500
    assert figure.data[0].line.dash != figure.data[1].line.dash
    assert texts(figure) == ["routed experts", "all other weights"]

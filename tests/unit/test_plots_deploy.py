"""Figures of lesson 13: what they draw is what they were given."""

from __future__ import annotations

import math

import pytest

from kimik3_lab.teaching import plots_deploy, plots_deploy_run
from kimik3_lab.teaching.plots_deploy import Curve, Rank

FITS = Rank("tp: TP8", 259.0, 206.0, 4.8, 8.0, "88 sequences")
DOES_NOT = Rank("dep: TP1 DP8", 259.0, 295.0, 0.0, 8.0, "44 GB too many")


def test_rank_memory_ends_where_memory_does() -> None:
    figure = plots_deploy.rank_memory([("B300", [FITS, DOES_NOT]), ("H200", [FITS])])
    parts = figure.data[:4]
    assert [trace.name for trace in parts] == [
        "weights", "drafter", "kept free", "room for sequences"
    ]  # fmt: skip
    assert sum(trace.x[0] for trace in parts) == pytest.approx(FITS.usable)
    assert sum(trace.x[1] for trace in parts) == pytest.approx(303.0)  # over the mark
    assert parts[3].x[1] == 0.0
    usable = figure.data[4]
    assert list(usable.x) == [259.0, 259.0]
    assert usable.marker.symbol == "line-ns"  # not told by colour alone
    patterns = {(trace.marker.color, trace.marker.pattern.shape) for trace in parts}
    assert len(patterns) == 4
    notes = [note.text for note in figure.layout.annotations]
    assert notes == ["B300", "H200", "88 sequences", "44 GB too many", "88 sequences"]
    # The words behind a bar must not lie on it.
    assert figure.layout.annotations[3].x == pytest.approx(303.0)
    shown = {trace.name for trace in figure.data if trace.showlegend}
    assert len(shown) == 5


def test_defaults_change_their_shade_where_they_change() -> None:
    rows = {"tokens": ["8", "16", "16", "32"], "caching": ["on"] * 4}
    figure = plots_deploy.defaults_by_release(["a", "b", "c", "d"], rows)
    shades = [[int(shade) for shade in row] for row in figure.data[0].z]
    assert shades == [[0, 1, 1, 2], [0, 0, 0, 0]]
    assert [list(row) for row in figure.data[0].text] == list(rows.values())
    with pytest.raises(ValueError, match="caching: expected a value for each of 3"):
        plots_deploy.defaults_by_release(["a", "b", "c"], {"caching": ["on", "off"]})


def test_strategies_can_be_told_apart_and_say_their_requests() -> None:
    curves = [Curve(name, [100.0, 20.0], [10.0, 300.0], [1, 64]) for name in ("TP8", "TP16")]
    figure = plots_deploy.strategy_curves([("a", curves), ("b", curves)], x_title="x", y_title="y")
    assert [trace.name for trace in figure.data] == ["TP8", "TP16"] * 2
    assert [trace.showlegend for trace in figure.data] == [True, True, False, False]
    one, two = figure.data[:2]
    assert one.marker.symbol != two.marker.symbol and one.line.dash != two.line.dash
    assert list(one.customdata) == [1, 64]
    assert figure.layout.xaxis2.type == figure.layout.yaxis.type == "log"
    with pytest.raises(ValueError, match="must have the strategies TP8, TP16"):
        plots_deploy.strategy_curves([("a", curves), ("b", curves[:1])], x_title="", y_title="")


def test_gap_shares_count_from_the_longest() -> None:
    gaps = [10.0] * 90 + [200.0] * 9 + [900.0]
    figure = plots_deploy_run.gap_shares({"mixed": gaps, "calm": [10.0, 11.0]})
    line = figure.data[0]
    assert (line.x[0], line.y[0]) == (10.0, 1.0)
    assert (line.x[-1], line.y[-1]) == (900.0, pytest.approx(0.01))
    by_x = dict(zip(line.x, line.y, strict=True))
    assert by_x[200.0] <= 0.1
    assert {note.text for note in figure.layout.annotations} == {"mixed", "calm"}
    with pytest.raises(ValueError, match="calm has no gap"):
        plots_deploy_run.gap_shares({"calm": []})


def test_gap_shares_leave_out_only_what_nobody_sees() -> None:
    gaps = [20.0 + i * 1e-3 for i in range(5_000)]
    line = plots_deploy_run.gap_shares({"many": gaps}).data[0]
    assert len(line.x) < 400
    for x, y in zip(line.x, line.y, strict=True):
        assert y == pytest.approx(sum(gap >= x for gap in gaps) / len(gaps), abs=1e-9)


def test_overload_sorts_requests_by_how_they_fared() -> None:
    arms = {"no bound": ([0, 1, 2], [0.5, 4.0, 3.0], []), "bound": ([0], [1.0], [1, 2])}
    figure = plots_deploy_run.overload(arms, 3.0)
    names = [trace.name for trace in figure.data]
    assert names == ["answered in time", "answered late", "refused"] * 2
    in_time, late, refused, *_, turned_away = figure.data
    assert list(in_time.x) == [0, 2] and list(late.x) == [1]
    assert not refused.x and list(turned_away.x) == [1, 2]
    assert max(turned_away.y) < 0  # below the axis: they have no time to the first token
    assert len({trace.marker.symbol for trace in figure.data[:3]}) == 3
    # A name stands in the legend once, where it has points: one without any is not drawn there.
    assert [trace.showlegend for trace in figure.data] == [True, True, False, False, False, True]
    assert {shape.y0 for shape in figure.layout.shapes} == {3.0}


def test_waits_keep_the_order_of_the_classes() -> None:
    figure = plots_deploy_run.waits_by_length(
        ["1,000", "8,000"], {"fcfs": [3.0, 3.1], "aged": [1.0, 4.0]}, {"fcfs": 9.0, "aged": 12.0}
    )
    assert figure.layout.xaxis.type == "category"  # "8,000" would else be a number on an axis
    assert [list(trace.y) for trace in figure.data] == [[3.0, 3.1], [9.0], [1.0, 4.0], [12.0]]
    assert figure.data[0].marker.pattern.shape != figure.data[2].marker.pattern.shape


def test_token_distances_keep_zeros_on_the_axis() -> None:
    figure = plots_deploy_run.token_distances({"def f": [0.0, 1e-4]}, 1e-3, wrong=0.1)
    assert list(figure.data[0].y) == [1e-8, 1e-4]
    lines = [shape.y0 for shape in figure.layout.shapes]
    assert lines == [1e-3, 0.1]
    heights = [note.y for note in figure.layout.annotations]
    assert heights == [pytest.approx(math.log10(1e-3)), pytest.approx(-1.0)]


def test_two_dashboards_are_drawn_over_work_not_time() -> None:
    quick = [
        {"seconds": 5.0, "running": 0.0, "waiting": 8.0, "output_tokens": 100.0},
        {"seconds": 6.0, "running": 4.0, "waiting": 4.0, "output_tokens": 130.0},
    ]
    slow = [sample | {"seconds": 10 * sample["seconds"]} for sample in quick]
    figure = plots_deploy_run.two_dashboards({"quick": quick, "slow": slow})
    one, two = figure.data[:3], figure.data[3:]
    for a, b in zip(one[:2], two[:2], strict=True):
        assert (list(a.x), list(a.y)) == (list(b.x), list(b.y))
    assert list(one[2].x) == [0.0, 1.0] and list(two[2].x) == [0.0, 10.0]
    assert one[0].line.dash != two[0].line.dash

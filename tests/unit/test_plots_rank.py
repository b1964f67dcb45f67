"""Figures of the rank ladder show the numbers they were given, readable without colour."""

from __future__ import annotations

import pytest

from kimik3_lab.teaching import plots_rank

NAMES = ["old", "new", "far"]
ROWS = [
    {"concurrency": c, "rung": name, "output_tokens_per_s": rate * c, "beyond_published": beyond}
    for c in (1, 4)
    for name, rate, beyond in (("old", 100.0, False), ("new", 150.0, False), ("far", 160.0, True))
]


def test_every_concurrency_has_a_panel() -> None:
    figure = plots_rank.rungs(ROWS, names=NAMES, last_published="new")
    assert [list(t.x) for t in figure.data] == [[100.0, 150.0, 160.0], [400.0, 600.0, 640.0]]
    assert [(t.xaxis, t.yaxis) for t in figure.data] == [("x", "y"), ("x2", "y2")]
    texts = [note.text for note in figure.layout.annotations]
    assert texts == ["1 concurrent", "4 concurrent", "1.50 x", "1.50 x"]
    assert {line.y0 for line in figure.layout.shapes} == {1.5}
    assert "Miniature, Measured" in figure.layout.title.text
    with pytest.raises(ValueError, match="no rung 'other'"):
        plots_rank.rungs(ROWS, names=NAMES, last_published="other")


def test_what_was_not_measured_is_said() -> None:
    rows = [row for row in ROWS if (row["rung"], row["concurrency"]) != ("new", 4)]
    figure = plots_rank.rungs(rows, names=["old", "lost", "new", "far"], last_published="new")
    notes = [(n.xref, n.y) for n in figure.layout.annotations if n.text == "not measured"]
    assert notes == [("x", "lost"), ("x2", "lost"), ("x2", "new")]
    assert list(figure.data[1].y) == ["old", "far"]
    assert list(figure.layout.yaxis.categoryarray) == ["old", "lost", "new", "far"]


def test_a_second_run_published_gains_and_floors_stand_beside_the_rungs() -> None:
    again = [{**ROWS[0], "output_tokens_per_s": 80.0}, {**ROWS[3], "output_tokens_per_s": 390.0}]
    figure = plots_rank.rungs(
        ROWS, names=NAMES, last_published="new", again=again, published={1: 2.2, 4: 2.5},
        floors={1: 300.0},
    )  # fmt: skip
    order = list(figure.layout.yaxis.categoryarray)
    assert order == ["old", "new", "first rung x published gain", "far"]
    stars = "first rung x published gain (Derived)"
    drawn = [(t.name, t.xaxis, list(t.x), t.y[0]) for t in figure.data if t.name != "recorded"]
    assert drawn == [
        ("again", "x", [80.0], "old"),
        (stars, "x", [pytest.approx(220.0)], order[2]),
        (stars, "x", [pytest.approx(176.0)], order[2]),
        ("September's rung at its floor", "x", [300.0, 300.0], "old"),
        ("again", "x2", [390.0], "old"),
        (stars, "x2", [1000.0], order[2]),
        (stars, "x2", [975.0], order[2]),
    ]
    looks = {t.name: (t.mode, t.marker.symbol) for t in figure.data if t.mode != "lines"}
    assert len(set(looks.values())) == 3
    assert [t.showlegend for t in figure.data if t.name == stars] == [True, False, False, False]
    colors = [t.marker.color for t in figure.data if t.name == stars]
    assert colors[0] == colors[2] == figure.data[0].marker.color != colors[1]
    numbers = [n for n in figure.layout.annotations if n.text.endswith(" x")]
    left = [(n.text, n.x, n.xanchor) for n in numbers if n.y == order[2]]
    assert left == [("2.20 x", pytest.approx(176.0), "right"), ("2.50 x", 975.0, "right")]
    assert all(line.y0 == 2.5 for line in figure.layout.shapes)  # above its own row
    assert all(
        max(t.x) < figure.layout[t.xaxis.replace("x", "xaxis")].range[1] for t in figure.data
    )


def test_parts_of_a_step_are_stacked_and_told_apart() -> None:
    parts = {
        "one": {"floor": 3.0, "above": 2.0, "host": 0.01},
        "many": {"floor": 9.0, "above": 4.0, "host": 1.0},
    }
    figure = plots_rank.step_parts(parts)
    assert {t.name: list(t.x) for t in figure.data} == {
        "floor": [3.0, 9.0], "above": [2.0, 4.0], "host": [0.01, 1.0]
    }  # fmt: skip
    assert figure.layout.barmode == "stack"
    looks = [(t.marker.color, t.marker.pattern.shape) for t in figure.data]
    assert len(set(looks)) == 3
    assert [note.text for note in figure.layout.annotations] == ["5.0 ms", "14.0 ms"]
    assert figure.data[2].text[0] == ""  # too narrow for a number
    with pytest.raises(ValueError, match="the same parts in every bar"):
        plots_rank.step_parts({"one": {"floor": 1.0}, "many": {"host": 1.0}})


def test_ours_and_the_published_are_labelled() -> None:
    figure = plots_rank.gains_beside_published(
        {"first token": {1: 1.4, 16: 1.6}, "latency": {1: 1.1, 16: 1.2}},
        {"first token": {1: 2.2, 16: 2.8}, "latency": {1: 2.1, 16: 2.4}},
    )
    assert [list(t.y) for t in figure.data] == [[1.4, 1.6], [1.1, 1.2], [2.2, 2.8], [2.1, 2.4]]
    assert [t.showlegend for t in figure.data] == [True, False, True, False]
    ours, theirs = figure.data[0], figure.data[2]
    assert "Measured" in ours.name and "Published" in theirs.name
    assert ours.marker.pattern.shape != theirs.marker.pattern.shape
    assert [note.text for note in figure.layout.annotations[:2]] == ["first token", "latency"]
    twice = plots_rank.gains_beside_published({"x": {1: 1.4}}, {"x": {1: 2.2}}, {"x": {1: 3.0}})
    assert [(t.name, t.y[0]) for t in twice.data][1] == ("measured again", 3.0)
    assert len({t.marker.pattern.shape for t in twice.data}) == 3
    assert twice.layout.yaxis.range[1] > 3.0
    assert {t.textangle for t in twice.data} == {-90}  # three bars are narrower than a number
    assert {t.textangle for t in figure.data} == {0}


def test_curves_have_their_floors() -> None:
    decode = [
        {"requests": n, "context": c, "target_ms": 5.0 * n, "target_floor_ms": 3.0 * n}
        for n in (1, 16)
        for c in (1000, 8000)
    ]
    prefill = [
        {"tokens": 1024, "start": 0, "ms": 30.0, "floor_ms": 20.0},
        {"tokens": 1024, "start": 7000, "ms": 33.0, "floor_ms": 21.0},
    ]
    figure = plots_rank.step_curves({"decode": decode, "prefill": prefill})
    drawn = {trace.name: list(trace.y) for trace in figure.data}
    assert drawn["16 requests"] == [80.0, 80.0] and drawn["16 requests, floor"] == [48.0, 48.0]
    assert drawn["measured"] == [30.0] and drawn["floor"] == [20.0]
    assert "16 requests" in [note.text for note in figure.layout.annotations]

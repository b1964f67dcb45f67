"""Figures of the rank ladder show the numbers they were given, readable without colour."""

from __future__ import annotations

import pytest

from kimik3_lab.teaching import plots_rank

ROWS = [
    {"concurrency": c, "rung": name, "output_tokens_per_s": rate * c, "beyond_published": beyond}
    for c in (1, 4)
    for name, rate, beyond in (("old", 100.0, False), ("new", 150.0, False), ("far", 160.0, True))
]


def test_rungs_are_multiples_of_the_first() -> None:
    figure = plots_rank.rungs(ROWS, last_published="new")
    assert [list(t.x) for t in figure.data] == [[1.0, 1.5, 1.6]] * 2
    assert [t.name for t in figure.data] == ["1 concurrent", "4 concurrent"]
    assert len({(t.line.dash, t.marker.symbol) for t in figure.data}) == 2
    (line,) = figure.layout.shapes
    assert line.y0 == 1.5
    assert "Miniature, Measured" in figure.layout.title.text
    with pytest.raises(ValueError, match="no rung 'other'"):
        plots_rank.rungs(ROWS, last_published="other")


def test_ours_and_the_published_are_labelled() -> None:
    ours, theirs = plots_rank.gains_beside_published(
        {"1": 1.4, "16": 1.6}, {"1": 2.2, "16": 2.8}
    ).data
    assert list(ours.y) == [1.4, 1.6] and list(theirs.y) == [2.2, 2.8]
    assert "Measured" in ours.name and "Published" in theirs.name
    assert ours.marker.pattern.shape != theirs.marker.pattern.shape


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

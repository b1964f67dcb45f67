"""The figures of lesson 08 hold the numbers that they are given."""

from __future__ import annotations

import pytest

from kimik3_lab.teaching import plots_batching


def test_seats_has_a_panel_for_each_and_a_line_at_the_total() -> None:
    figure = plots_batching.seats({"a": [(0, 1), (2, 3)], "b": [(0, 4)]}, total=4)
    assert [trace.x for trace in figure.data] == [(0, 2), (0,)]
    assert [trace.yaxis for trace in figure.data] == ["y", "y2"]
    assert [shape.y0 for shape in figure.layout.shapes] == [4, 4]
    assert [note.text for note in figure.layout.annotations] == ["a", "b"]


def test_seats_keeps_changes_and_the_end_only() -> None:
    figure = plots_batching.seats({"a": [(0, 2), (1, 2), (2, 1), (3, 1), (4, 1)]}, total=2)
    assert (figure.data[0].x, figure.data[0].y) == ((0, 2, 4), (2, 1, 1))


def test_token_gaps_names_each_line_at_its_last_peak() -> None:
    figure = plots_batching.token_gaps(
        {"whole": [(0, 20), (1, 500), (2, 500), (3, 20)], "cut": [(0, 20), (1, 60)]}, bound=100
    )
    assert [(note.text, note.x) for note in figure.layout.annotations] == [("whole", 2), ("cut", 1)]
    assert figure.layout.annotations[0].y == pytest.approx(2.69897)  # of a logarithmic axis
    assert figure.layout.shapes[0].y0 == 100
    assert len(plots_batching.token_gaps({"a": [(0, 1)]}).layout.shapes) == 0


def test_recompute_wants_three_lists_of_a_length() -> None:
    figure = plots_batching.recompute([8, 16], [0.5, 0.0], [10, 20])
    assert [list(trace.y) for trace in figure.data] == [[50, 0], [10, 20]]
    with pytest.raises(ValueError, match="each of 2 pools, got 1 and 2"):
        plots_batching.recompute([8, 16], [0.5], [10, 20])


def test_page_fill_is_in_percent() -> None:
    figure = plots_batching.page_fill([16, 128], [0.01, 0.05], [0.02, 0.04])
    assert [list(trace.y) for trace in figure.data] == [[1, 5], [2, 4]]
    assert list(figure.data[0].text) == ["1.0", "5.0"]

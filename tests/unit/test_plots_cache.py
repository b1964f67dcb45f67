"""The figures of lesson 07 show what they are given, and refuse what does not fit."""

from __future__ import annotations

import pytest

from kimik3_lab.teaching import plots_cache


def test_padding_is_in_per_cent_and_named() -> None:
    figure = plots_cache.padding_by_drafts([0, 8], {"bf16": [0.087, 0.163], "fp8": [0.087, 0.08]})
    assert [list(trace.y) for trace in figure.data] == [
        pytest.approx([8.7, 16.3]),
        pytest.approx([8.7, 8.0]),
    ]
    assert [note.text for note in figure.layout.annotations] == ["bf16", "fp8"]
    assert len({trace.marker.symbol for trace in figure.data}) == 2
    with pytest.raises(ValueError, match="fp8: got 1 shares for 2"):
        plots_cache.padding_by_drafts([0, 8], {"fp8": [0.1]})


def test_tables_are_filled_up_and_say_what_a_cell_is() -> None:
    figure = plots_cache.block_tables(
        {"MLA": [("rows", "1"), ("rows", "2")], "KDA": [("state", "16")]}, block_size=16, title="t"
    )
    (heatmap,) = figure.data
    assert list(heatmap.text) == [["rows<br>1", "rows<br>2"], ["state<br>16", ""]]
    assert list(heatmap.x) == ["0 to 16", "16 to 32"]
    assert heatmap.z[1][1] == 0 and len({*heatmap.z[0], *heatmap.z[1]}) == 3
    with pytest.raises(ValueError, match="called 'page'"):
        plots_cache.block_tables({"MLA": [("page", "1")]}, block_size=16, title="t")


def test_every_kind_has_its_own_colour() -> None:
    cells = [("", ""), ("rows", "1"), ("state", "2"), ("export", "3")]
    (heatmap,) = plots_cache.block_tables({"all": cells}, block_size=1, title="t").data
    positions = [(z - heatmap.zmin) / (heatmap.zmax - heatmap.zmin) for z in heatmap.z[0]]
    scale = heatmap.colorscale
    colors = [next(c for edge, c in reversed(scale) if edge <= place) for place in positions]
    assert len(set(colors)) == 4


def test_hits_have_a_ceiling() -> None:
    figure = plots_cache.hits_by_memory([1, 2], {"all": [0.2, 0.5], "few": [0.4, 0.6]}, ceiling=0.7)
    assert [trace.y for trace in figure.data] == [(20.0, 50.0), (40.0, 60.0)]
    assert figure.layout.shapes[0].y0 == pytest.approx(70)
    with pytest.raises(ValueError, match="few: got 1 rates for 2 sizes"):
        plots_cache.hits_by_memory([1, 2], {"few": [0.4]}, ceiling=0.7)

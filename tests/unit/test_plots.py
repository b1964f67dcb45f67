from __future__ import annotations

import itertools
import math

import plotly.graph_objects as go
import plotly.io as pio
import pytest

from kimik3_lab.teaching import plots


def luminance(color: str) -> float:
    """Relative luminance of an sRGB colour, as WCAG 2 defines it."""
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast_with_white(color: str) -> float:
    return 1.05 / (luminance(color) + 0.05)


def test_series_differ_in_colour_and_in_marker() -> None:
    styles = [plots.series_style(index) for index in range(len(plots.COLORS))]
    assert len({style["line"]["color"] for style in styles}) == len(styles)
    assert len({style["marker"]["symbol"] for style in styles}) == len(styles)
    pairs = itertools.pairwise(styles)
    assert all(a["line"]["dash"] != b["line"]["dash"] for a, b in pairs)
    with pytest.raises(ValueError, match="several figures"):
        plots.series_style(len(styles))


@pytest.mark.parametrize("index", range(len(plots.COLORS)))
def test_labels_can_be_read_on_white(index: int) -> None:
    figure = plots.label(go.Figure(), 1, 2, "text", index)
    assert contrast_with_white(figure.layout.annotations[0].font.color) >= 4.5


def test_labels_stand_where_the_point_is() -> None:
    figure = go.Figure(layout={"xaxis": {"type": "log"}})
    plots.label(figure, 1000, 5, "above", 0, side="above")
    assert (figure.layout.annotations[0].x, figure.layout.annotations[0].y) == (3, 5)
    with pytest.raises(ValueError, match="right, left, above, below"):
        plots.label(figure, 1, 1, "text", 0, side="top")


def test_style_makes_large_text_on_white_and_small_output() -> None:
    plots.use_style()
    layout = pio.templates["k3lab"].layout
    sizes = (layout.font.size, layout.legend.font.size, layout.hoverlabel.font.size)
    assert min(sizes) >= 11 * 96 / 72  # 11 pt in pixels
    assert (layout.paper_bgcolor, layout.plot_bgcolor) == ("white", "white")
    assert layout.colorway == plots.COLORS
    figure = go.Figure(go.Scatter(x=[1], y=[1]))
    assert figure.layout.template.layout.font.size == layout.font.size
    bundle = pio.renderers._build_mime_bundle(figure.to_dict())
    assert list(bundle) == ["application/vnd.plotly.v1+json"]


def test_heat_map_scale_is_one_hue_from_light_to_dark() -> None:
    shades = [luminance(color) for _, color in plots.SEQUENTIAL]
    assert shades == sorted(shades, reverse=True)
    assert math.isclose(plots.SEQUENTIAL[-1][0], 1)

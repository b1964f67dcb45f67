"""One look for every figure: colours that all readers can tell apart, a second channel, labels.

Needs plotly. :func:`kimik3_lab.teaching.session.start` calls :func:`use_style`, so every lesson has
the style before its first figure.

A figure must read without colour: give each series its own marker and dash (:func:`series_style`),
write its name beside it instead of in a legend (:func:`label`), and state in the notebook, in a
sentence after the figure, what there is to see.
"""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go
import plotly.io as pio

__all__ = ["COLORS", "DASHES", "SEQUENTIAL", "SYMBOLS", "label", "series_style", "use_style"]

#: Okabe and Ito's colours that stay apart under colour-vision deficiency, in the order of use:
#: blue, orange, green, vermilion, purple, sky blue, black. Their yellow is left out: it is too
#: pale for a line on white. Source: https://jfly.uni-koeln.de/color/
COLORS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000")
#: The second channel: line dash and marker of the same series.
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot", "solid")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "star", "cross")
#: One hue from light to dark, for heat maps.
SEQUENTIAL = ((0.0, "#F2F7FB"), (0.5, "#6BAED6"), (1.0, "#08306B"))

_NAME = "k3lab"
_FONT_SIZE = 15  # pixels: 11.25 pt


def use_style() -> None:
    """Make the lab's template plotly's default and draw figures as JupyterLab output.

    Only figure data goes into the notebook (``plotly_mimetype``): no script, no random identifiers.

    Examples
    --------
    >>> use_style()
    >>> pio.templates.default, pio.renderers.default
    ('k3lab', 'plotly_mimetype')
    """
    pio.templates[_NAME] = _template()
    pio.templates.default = _NAME
    pio.renderers.default = "plotly_mimetype"


def series_style(index: int) -> dict[str, Any]:
    """Line and marker of series number ``index``, as keyword arguments for ``go.Scatter``.

    Raises
    ------
    ValueError
        If there are more series than colours: such a figure should be split.

    Examples
    --------
    >>> series_style(1)["line"]["dash"], series_style(1)["marker"]["symbol"]
    ('dash', 'square')
    """
    if not 0 <= index < len(COLORS):
        raise ValueError(
            f"got series {index}, expected 0 to {len(COLORS) - 1}: more series than that cannot be "
            f"told apart, so draw several figures"
        )
    color = COLORS[index]
    return {
        "line": {"color": color, "dash": DASHES[index], "width": 2.5},
        "marker": {"color": color, "symbol": SYMBOLS[index], "size": 9},
    }


def label(
    figure: go.Figure,
    x: Any,
    y: Any,
    text: str,
    index: int,
    *,
    side: str = "right",
    panel: int = 1,
) -> go.Figure:
    """Write a series' name beside one of its points, in the series' colour; returns the figure.

    On a logarithmic axis plotly wants the logarithm of a position: this takes the plain value and
    converts it, so set the axis types before you label.

    Parameters
    ----------
    x, y
        The point, in data units.
    index
        Number of the series, as for :func:`series_style`.
    side
        ``"right"``, ``"left"``, ``"above"`` or ``"below"`` the point.
    panel
        Number of the subplot, from 1.

    Examples
    --------
    >>> figure = go.Figure(go.Scatter(x=[1, 2], y=[3, 4], **series_style(0)))
    >>> label(figure, 2, 4, "continuous", 0).layout.annotations[0].text
    'continuous'
    """
    places = {
        "right": {"xanchor": "left", "yanchor": "middle", "xshift": 8},
        "left": {"xanchor": "right", "yanchor": "middle", "xshift": -8},
        "above": {"xanchor": "center", "yanchor": "bottom", "yshift": 8},
        "below": {"xanchor": "center", "yanchor": "top", "yshift": -8},
    }
    if side not in places:
        raise ValueError(f"got side {side!r}, expected one of {', '.join(places)}")
    number = "" if panel == 1 else str(panel)
    figure.add_annotation(
        x=_position(x, figure.layout[f"xaxis{number}"].type),
        y=_position(y, figure.layout[f"yaxis{number}"].type),
        xref=f"x{number}",
        yref=f"y{number}",
        text=text,
        showarrow=False,
        font={"color": _readable(COLORS[index])},
        **places[side],
    )
    return figure


def _position(value: Any, axis_type: str | None) -> Any:
    if axis_type != "log":
        return value
    import math

    return math.log10(value)


def _readable(color: str) -> str:
    """Darken the light hues for text: contrast of at least 4.5 to 1 against white (WCAG AA)."""
    darker = {"#E69F00": "#8F6300", "#009E73": "#007A59", "#D55E00": "#B85000"}
    darker |= {"#CC79A7": "#A34A7B", "#56B4E9": "#1F78AD"}
    return darker.get(color, color)


def _template() -> go.layout.Template:
    axis = {
        "showgrid": True,
        "gridcolor": "#E5E5E5",
        "linecolor": "#444444",
        "showline": True,
        "ticks": "outside",
        "zeroline": False,
        "automargin": True,
        "title": {"standoff": 10},
    }
    template = go.layout.Template(
        layout={
            "colorway": list(COLORS),
            "colorscale": {"sequential": [list(stop) for stop in SEQUENTIAL]},
            "font": {"size": _FONT_SIZE, "color": "#222222", "family": "sans-serif"},
            "title": {"x": 0, "xref": "paper", "font": {"size": _FONT_SIZE + 3}},
            "paper_bgcolor": "white",
            "plot_bgcolor": "white",
            "xaxis": axis,
            "yaxis": axis,
            "legend": {"font": {"size": _FONT_SIZE}},
            "hoverlabel": {"font": {"size": _FONT_SIZE}},
            "margin": {"l": 70, "r": 40, "t": 60, "b": 60},
            "height": 420,
        }
    )
    template.data.heatmap = [go.Heatmap(colorscale=[list(stop) for stop in SEQUENTIAL])]
    return template

"""Figures of lesson 11, second half: points and intervals, what changes are worth, memory.

Needs plotly. Each function takes plain numbers and returns a figure.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import NamedTuple

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kimik3_lab.teaching.plots import COLORS, series_style

__all__ = ["Gain", "Pair", "Segment", "held_line", "memory_map", "point_pairs", "refusal", "worth"]


class Pair(NamedTuple):
    """A published figure and what was simulated for it, with an interval if there is one."""

    name: str
    published: float
    simulated: float
    low: float | None = None
    high: float | None = None


def point_pairs(panels: Sequence[tuple[str, str, Sequence[Pair]]], *, title: str) -> go.Figure:
    """Draw published and simulated figures side by side, a panel a quantity.

    Parameters
    ----------
    panels
        Name of the quantity, its unit, and its pairs; every panel names the same rows in the same
        order.

    Examples
    --------
    >>> figure = point_pairs([("latency", "s", [Pair("c=1", 5.3, 5.2)])], title="")
    >>> [trace.name for trace in figure.data]
    ['published', 'simulated']
    """
    names = [pair.name for pair in panels[0][2]]
    if any([pair.name for pair in pairs] != names for _, _, pairs in panels):
        raise ValueError(f"every panel must have the rows {', '.join(names)}")
    figure = make_subplots(cols=len(panels), shared_yaxes=True, horizontal_spacing=0.06)
    for column, (quantity, unit, pairs) in enumerate(panels, 1):
        for low, high in ((p.low, p.high) for p in pairs):
            if (low is None) != (high is None):
                raise ValueError(f"{quantity}: an interval needs both ends, got {low} and {high}")
        figure.add_scatter(
            x=[p.published for p in pairs], y=names, mode="markers", row=1, col=column,
            name="published", showlegend=column == 1,
            marker={"symbol": "diamond-open", "size": 13, "color": "#000000", "line": {"width": 2}},
            hovertemplate="%{y}: published %{x:.4g} " + unit + "<extra></extra>",
        )  # fmt: skip
        bars = {
            "type": "data",
            "symmetric": False,
            "array": [0 if p.high is None else p.high - p.simulated for p in pairs],
            "arrayminus": [0 if p.low is None else p.simulated - p.low for p in pairs],
            "thickness": 2,
        }
        figure.add_scatter(
            x=[p.simulated for p in pairs], y=names, mode="markers", row=1, col=column,
            name="simulated", showlegend=column == 1, error_x=bars,
            marker={"color": COLORS[0], "size": 9},
            hovertemplate="%{y}: simulated %{x:.4g} " + unit + "<extra></extra>",
        )  # fmt: skip
        figure.update_xaxes(title=f"{quantity}, {unit}", rangemode="tozero", row=1, col=column)
    figure.update_yaxes(autorange="reversed", tickvals=names)
    figure.update_layout(
        title=title,
        height=150 + 40 * len(names),
        legend={"orientation": "h", "x": 1, "xanchor": "right", "y": 1.02, "yanchor": "bottom"},
    )
    return figure


def held_line(rows: Sequence[tuple[str, float, bool]]) -> go.Figure:
    """Draw errors in percent; filled where a constant was set on the figure, open where none was.

    Parameters
    ----------
    rows
        Name, error, and whether a constant was set on it.

    Examples
    --------
    >>> figure = held_line([("a", 1.0, True), ("b", -8.0, False)])
    >>> [trace.marker.symbol for trace in figure.data]
    ['circle', 'circle-open']
    """
    figure = go.Figure()
    for was_set, name, symbol, color in (
        (True, "a constant was set on it", "circle", COLORS[0]),
        (False, "none was", "circle-open", COLORS[3]),
    ):
        chosen = [(text, error) for text, error, flag in rows if flag is was_set]
        figure.add_scatter(
            x=[error for _, error in chosen], y=[text for text, _ in chosen], mode="markers",
            name=name,
            marker={"symbol": symbol, "size": 12, "color": color, "line": {"width": 2.5}},
            hovertemplate="%{y}: %{x:+.1f} %<extra></extra>",
        )  # fmt: skip
    figure.add_vline(x=0, line={"color": "#444444", "width": 1})
    most = 1.15 * max(10.0, *(abs(error) for _, error, _ in rows))
    figure.update_xaxes(title="computed against published, %", range=[-most, most])
    figure.update_yaxes(
        categoryorder="array", categoryarray=[name for name, _, _ in reversed(rows)]
    )
    figure.update_layout(
        title="On both sides of the line",
        height=140 + 30 * len(rows),
        legend={"orientation": "h", "x": 1, "xanchor": "right", "y": 1.0, "yanchor": "bottom"},
    )
    return figure


class Gain(NamedTuple):
    """What a change is worth as a share of all: in both orders, and the range of each."""

    name: str
    ladder: float
    ladder_range: tuple[float, float]
    reverse: float
    reverse_range: tuple[float, float]


def worth(panels: Sequence[tuple[str, Sequence[Gain]]]) -> go.Figure:
    """Draw what each change is worth, in both orders, a panel a concurrency; shares in percent.

    Examples
    --------
    >>> gain = Gain("budget", 0.2, (0.1, 0.3), 0.4, (0.3, 0.5))
    >>> [trace.name for trace in worth([("c=1", [gain])]).data]
    ['oldest change first', 'newest change first']
    """
    names = [gain.name for gain in panels[0][1]]
    figure = make_subplots(
        cols=len(panels), shared_yaxes=True, horizontal_spacing=0.04,
        subplot_titles=[title for title, _ in panels],
    )  # fmt: skip
    places = {name: float(i) for i, name in enumerate(names)}
    for column, (_, gains) in enumerate(panels, 1):
        for index, (order, attribute) in enumerate(
            (("oldest change first", "ladder"), ("newest change first", "reverse"))
        ):
            values = [getattr(gain, attribute) for gain in gains]
            ranges = [getattr(gain, f"{attribute}_range") for gain in gains]
            style = series_style((0, 3)[index])
            figure.add_scatter(
                x=[100 * v for v in values],
                y=[places[gain.name] + (0.15, -0.15)[index] * -1 for gain in gains],
                mode="markers", name=order, showlegend=column == 1, row=1, col=column,
                marker={**style["marker"], "size": 10},
                error_x={
                    "type": "data", "symmetric": False, "thickness": 2,
                    "array": [100 * (r[1] - v) for r, v in zip(ranges, values, strict=True)],
                    "arrayminus": [100 * (v - r[0]) for r, v in zip(ranges, values, strict=True)],
                },
                hovertemplate="%{x:.1f} %<extra>" + order + "</extra>",
            )  # fmt: skip
        figure.add_vline(x=0, line={"color": "#444444", "width": 1}, row=1, col=column)
    figure.update_xaxes(title="of the seconds saved, %", zeroline=False)
    figure.update_yaxes(
        tickvals=list(places.values()), ticktext=names, range=[len(names) - 0.5, -0.5]
    )
    figure.update_layout(
        title={"text": "What each change is worth", "y": 0.97},
        height=230 + 42 * len(names),
        margin={"t": 90},
        legend={"orientation": "h", "x": 0, "y": -0.3, "yanchor": "top"},
    )
    return figure


class Segment(NamedTuple):
    """A share of a GPU's memory. ``hatch`` sets it apart without colour."""

    name: str
    gigabytes: float
    color: str
    hatch: str = ""


def memory_map(segments: Sequence[Segment], *, title: str) -> go.Figure:
    """Draw the memory of one GPU as a bar, each part with its name and size beside it.

    Examples
    --------
    >>> figure = memory_map([Segment("weights", 205.0, "#0072B2")], title="One GPU")
    >>> figure.data[0].name, figure.layout.annotations[0].text
    ('weights', 'weights: 205.0 GB')
    """
    figure = go.Figure()
    total = sum(segment.gigabytes for segment in segments)
    if total <= 0:
        raise ValueError(f"a GPU has some memory: got parts that add up to {total}")
    figure.update_xaxes(visible=False, range=[-0.5, 3.2], fixedrange=True)
    bottom, lowest = 0.0, 0.0
    for segment in segments:
        if segment.gigabytes <= 0:
            continue
        figure.add_bar(
            x=[0], y=[segment.gigabytes], base=[bottom], width=0.8, name=segment.name,
            marker={
                "color": segment.color, "line": {"color": "#222222", "width": 1},
                "pattern": {
                    "shape": segment.hatch, "fgcolor": "#222222", "solidity": 0.15, "size": 9,
                    "fillmode": "overlay",
                },
            },
            hovertemplate=f"{segment.name}: {segment.gigabytes:.1f} GB<extra></extra>",
        )  # fmt: skip
        # Names of thin parts are pushed up, so that none covers another.
        height = max(bottom + segment.gigabytes / 2, lowest)
        lowest = height + 0.062 * total
        figure.add_annotation(
            x=0.42, y=bottom + segment.gigabytes / 2, ax=0.75, ay=height, axref="x", ayref="y",
            text=f"{segment.name}: {segment.gigabytes:.1f} GB", xanchor="left", showarrow=True,
            arrowhead=0, arrowwidth=1, arrowcolor="#888888",
        )  # fmt: skip
        bottom += segment.gigabytes
    figure.update_yaxes(title="GB of one GPU", range=[0, 1.04 * max(total, lowest - 0.05 * total)])
    figure.update_layout(title=title, barmode="overlay", showlegend=False, height=480)
    return figure


def refusal(text: str) -> go.Figure:
    """Draw nothing but the reason why there is nothing to draw.

    Examples
    --------
    >>> refusal("too large").layout.title.text
    'This does not fit'
    """
    figure = go.Figure()
    lines = "<br>".join(textwrap.wrap(text, 70))
    figure.add_annotation(
        text=lines, showarrow=False, x=0, y=0.8, xref="paper", yref="paper", xanchor="left",
        yanchor="top", align="left",
    )  # fmt: skip
    figure.update_xaxes(visible=False)
    figure.update_yaxes(visible=False)
    return figure.update_layout(title="This does not fit", height=240)

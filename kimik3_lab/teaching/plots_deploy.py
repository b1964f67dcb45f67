"""Figures of lesson 13, first half: what fits a GPU, defaults by release, strategies.

Needs plotly. Plain numbers in, figure out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kimik3_lab.teaching.plots import COLORS, series_style

__all__ = ["Curve", "Rank", "defaults_by_release", "rank_memory", "strategy_curves"]

#: Part of a rank's memory: its name, colour and pattern.
_PARTS = (
    ("weights", COLORS[0], ""),
    ("drafter", COLORS[4], "."),
    ("kept free", COLORS[1], "x"),
    ("room for sequences", "#FFFFFF", ""),
)


class Rank(NamedTuple):
    """What lies on one GPU under a layout, GB; ``says`` is written behind the bar."""

    name: str
    usable: float
    weights: float
    drafter: float
    reserve: float
    says: str

    @property
    def room(self) -> float:
        """What is left for sequences; 0 if the rest is too large already."""
        return max(0.0, self.usable - self.weights - self.drafter - self.reserve)


def rank_memory(panels: Sequence[tuple[str, Sequence[Rank]]]) -> go.Figure:
    """Draw one GPU's memory under several layouts, a panel for each kind of machine.

    A bar that crosses the black mark does not fit.

    Examples
    --------
    >>> rank = Rank("TP8", 137.0, 206.0, 0.0, 8.0, "does not fit")
    >>> figure = rank_memory([("H200", [rank])])
    >>> [trace.name for trace in figure.data][:3], rank.room
    (['weights', 'drafter', 'kept free'], 0.0)
    """
    most = max(
        max(rank.usable, rank.weights + rank.drafter + rank.reserve)
        for _, ranks in panels
        for rank in ranks
    )
    count = [len(ranks) for _, ranks in panels]
    figure = make_subplots(
        rows=len(panels), shared_xaxes=True, vertical_spacing=0.3 / sum(count) + 0.02,
        row_heights=count, subplot_titles=[title for title, _ in panels],
    )  # fmt: skip
    for row, (_, ranks) in enumerate(panels, 1):
        names = [rank.name for rank in ranks]
        sizes = zip(*((r.weights, r.drafter, r.reserve, r.room) for r in ranks), strict=True)
        for (part, color, pattern), values in zip(_PARTS, sizes, strict=True):
            figure.add_bar(
                y=names, x=values, orientation="h", name=part, showlegend=row == 1, width=0.62,
                marker={
                    "color": color, "line": {"color": "#222222", "width": 1},
                    "pattern": {"shape": pattern, "fgcolor": "#222222", "solidity": 0.2,
                                "fillmode": "overlay"},
                },
                hovertemplate="%{y}, " + part + ": %{x:.1f} GB<extra></extra>",
                row=row, col=1,
            )  # fmt: skip
        figure.add_scatter(
            y=names, x=[rank.usable for rank in ranks], mode="markers", name="usable",
            showlegend=row == 1, row=row, col=1,
            marker={"symbol": "line-ns", "size": 24, "line": {"width": 3.5, "color": "#000000"}},
            hovertemplate="%{y}: %{x:.1f} GB usable<extra></extra>",
        )  # fmt: skip
        for rank in ranks:
            end = max(rank.usable, rank.weights + rank.drafter + rank.reserve)
            figure.add_annotation(
                x=end, y=rank.name, text=rank.says, showarrow=False, xanchor="left", xshift=10,
                row=row, col=1,
            )  # fmt: skip
    figure.update_xaxes(range=[0, 1.42 * most])
    figure.update_xaxes(title="GB of one GPU", row=len(panels), col=1)
    figure.update_yaxes(autorange="reversed", showgrid=False)
    for note in figure.layout.annotations[: len(panels)]:
        note.update(x=0, xanchor="left")
    figure.update_layout(
        barmode="stack",
        height=150 + 38 * sum(count) + 45 * len(panels),
        margin={"t": 90},
        legend={
            "orientation": "h", "x": 0, "y": 0.995, "yanchor": "top", "yref": "container",
            "traceorder": "normal",
        },
    )  # fmt: skip
    return figure


def defaults_by_release(releases: Sequence[str], rows: Mapping[str, Sequence[str]]) -> go.Figure:
    """Draw what each release does when nothing is said; a shade begins where a value changed.

    Parameters
    ----------
    rows
        Setting to its default in each release, as text.

    Examples
    --------
    >>> figure = defaults_by_release(["0.27.1", "0.28.0"], {"tokens a step": ["8192", "16384"]})
    >>> [[int(shade) for shade in row] for row in figure.data[0].z]
    [[0, 1]]
    """
    wrong = [name for name, values in rows.items() if len(values) != len(releases)]
    if wrong:
        raise ValueError(f"{', '.join(wrong)}: expected a value for each of {len(releases)}")
    shades = []
    for values in rows.values():
        changes, found = 0, []
        for before, value in zip([values[0], *values], values, strict=False):
            changes += before != value
            found.append(changes)
        shades.append(found)
    figure = go.Figure(
        go.Heatmap(
            x=list(releases),
            y=list(rows),
            z=shades,
            zmin=0,
            zmax=3,
            showscale=False,
            xgap=2,
            ygap=4,
            text=list(rows.values()),
            texttemplate="%{text}",
            colorscale=[[0.0, "#F2F2F2"], [1.0, "#4A90C4"]],
            textfont={"size": 14, "color": "#111111"},
            hovertemplate="%{y}, %{x}: %{text}<extra></extra>",
        )
    )
    figure.update_xaxes(side="top", type="category", showgrid=False, ticks="")
    figure.update_yaxes(autorange="reversed", showgrid=False, ticks="")
    figure.update_layout(height=90 + 44 * len(rows), margin={"t": 50, "b": 20})
    return figure


class Curve(NamedTuple):
    """A strategy under growing load: a point for each number of requests."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    requests: Sequence[int]


def strategy_curves(
    panels: Sequence[tuple[str, Sequence[Curve]]], *, x_title: str, y_title: str
) -> go.Figure:
    """Draw what a user gets against what a GPU gives, a line a strategy, on logarithmic axes.

    The lines cross and end close to each other, so their names are in a legend. Every panel has
    the same strategies in the same order.

    Examples
    --------
    >>> curve = Curve("TP8", [200.0, 40.0], [12.0, 150.0], [1, 64])
    >>> strategy_curves([("B300", [curve])], x_title="x", y_title="y").data[0].mode
    'lines+markers'
    """
    names = [curve.name for curve in panels[0][1]]
    if any([curve.name for curve in curves] != names for _, curves in panels):
        raise ValueError(f"every panel must have the strategies {', '.join(names)}")
    figure = make_subplots(
        cols=len(panels), shared_yaxes=True, horizontal_spacing=0.05,
        subplot_titles=[title for title, _ in panels],
    )  # fmt: skip
    for column, (_, curves) in enumerate(panels, 1):
        for index, curve in enumerate(curves):
            style: dict[str, Any] = series_style(index)
            style["marker"] = {**style["marker"], "size": 8}
            figure.add_scatter(
                x=list(curve.x), y=list(curve.y), name=curve.name, mode="lines+markers",
                showlegend=column == 1, customdata=list(curve.requests), row=1, col=column,
                hovertemplate="%{customdata} requests: %{x:.3g}, %{y:.3g}<extra>"
                + curve.name + "</extra>", **style,
            )  # fmt: skip
    figure.update_xaxes(type="log", title=x_title, tickvals=[10, 20, 50, 100, 200, 500])
    figure.update_yaxes(type="log", tickvals=[3, 10, 30, 100, 300, 1000, 3000])
    figure.update_yaxes(title=y_title, row=1, col=1)
    figure.update_layout(
        height=560, margin={"t": 110, "b": 60},
        legend={"orientation": "h", "x": 0, "y": 1.1, "yanchor": "bottom", "entrywidth": 140},
    )  # fmt: skip
    return figure

"""Figures of lesson 12 about load: windows, queues, stalls, and what a closed loop hides.

Needs plotly. Functions take plain numbers and return a figure.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kimik3_lab.teaching.plots import COLORS, label, series_style

__all__ = ["goodput", "load_curve", "stall", "ttft_distribution", "window_edges"]

#: How a request counts: name, colour, pattern.
_KINDS = (
    ("ends in the window: counts twice", COLORS[0], ""),
    ("touches it, ends later: latency only", COLORS[5], "/"),
    ("does not count", "#BBBBBB", ""),
    ("cut off at the end", "#FFFFFF", "."),
)


def window_edges(
    requests: Sequence[tuple[float, float, bool]],
    window: tuple[float, float],
    *,
    title: str,
    until: float | None = None,
) -> go.Figure:
    """Draw requests as bars over time, and which of them a window counts.

    Parameters
    ----------
    requests
        Start, end in seconds, and whether it completed.
    window
        When it opens and closes.
    until
        Right end of the axis.
    """
    opens, closes = window
    rows = _rows(requests)
    bars: dict[int, list[tuple[int, float, float]]] = {}
    for row, (start, end, completed) in zip(rows, requests, strict=True):
        kind = 2
        if not completed:
            kind = 3
        elif opens <= end <= closes:
            kind = 0
        elif end >= opens and start <= closes:
            kind = 1
        bars.setdefault(kind, []).append((row, start, end))
    figure = go.Figure()
    for kind, (name, color, pattern) in enumerate(_KINDS):
        found = bars.get(kind, [])
        figure.add_bar(
            y=[row + 1 for row, _, _ in found],
            x=[end - start for _, start, end in found],
            base=[start for _, start, _ in found],
            orientation="h",
            width=0.75,
            name=f"{name} ({len(found)})",
            marker={
                "color": color,
                "line": {"color": "#333333", "width": 1},
                "pattern": {"shape": pattern, "fgcolor": "#333333", "solidity": 0.15, "size": 7},
            },
            hovertemplate="from %{base:.1f} s, took %{x:.1f} s<extra></extra>",
        )
    for edge, text, anchor in ((opens, "opens", "left"), (closes, "closes", "right")):
        figure.add_vline(x=edge, line={"color": "#000000", "width": 2.5, "dash": "dash"})
        figure.add_annotation(
            x=edge, y=1.0, yref="paper", text=f" {text} at {edge:g} s ", showarrow=False,
            xanchor=anchor, yanchor="bottom",
        )  # fmt: skip
    last = until or max(end for _, end, _ in requests)
    figure.update_xaxes(title="seconds since the load began", range=[0, last], showgrid=False)
    streams = max(rows) + 1
    figure.update_yaxes(title="stream", dtick=1 if streams < 8 else 5, autorange="reversed",
                        showgrid=False)  # fmt: skip
    figure.update_layout(
        title={"text": title, "y": 0.97},
        barmode="overlay",
        height=max(330, 190 + 18 * streams + 60),
        margin={"t": 85},
        legend={"orientation": "h", "y": -0.32 if streams < 8 else -0.2, "x": 0},
    )
    return figure


def _rows(requests: Sequence[tuple[float, float, bool]]) -> list[int]:
    """Put each request into the first row that is free when it starts."""
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    rows = []
    for start, end, _ in requests:
        while busy and busy[0][0] <= start + 1e-9:
            heapq.heappush(free, heapq.heappop(busy)[1])
        row = heapq.heappop(free) if free else len(busy)
        rows.append(row)
        heapq.heappush(busy, (end, row))
    return rows


def ttft_distribution(
    seconds: Sequence[float], marks: Mapping[str, float], *, title: str
) -> go.Figure:
    """Draw the share of requests whose first token came within a time, and marks on that axis."""
    ordered = sorted(seconds)
    shares = [(i + 1) / len(ordered) for i in range(len(ordered))]
    figure = go.Figure()
    figure.add_scatter(
        x=ordered, y=shares, mode="lines+markers", line={"shape": "hv", "color": COLORS[0]},
        marker={"size": 6, "color": COLORS[0]}, name="requests",
        hovertemplate="%{y:.0%} within %{x:.2f} s<extra></extra>",
    )  # fmt: skip
    heights = (0.08, 0.21, 0.34, 0.47)
    for index, (name, value) in enumerate(marks.items(), 1):
        style = series_style(index)["line"]
        figure.add_vline(x=value, line={**style, "width": 2})
        label(figure, value, heights[(index - 1) % 4], f"{name}: {value:.2f} s", index)
        figure.layout.annotations[-1].bgcolor = "white"  # other lines pass behind the text
    figure.update_xaxes(title="seconds to the first token", rangemode="tozero")
    figure.update_yaxes(title="share of the requests", tickformat=".0%", range=[0, 1.03])
    figure.update_layout(title=title, showlegend=False)
    return figure


def load_curve(
    offered: Sequence[float],
    served: Sequence[float],
    ttft_median_s: Sequence[float],
    closed: Sequence[tuple[int, float, float]],
) -> go.Figure:
    """Draw an open loop beside a closed one: requests served, and the wait for a first token.

    Parameters
    ----------
    offered
        Open loop: requests a second that arrived.
    served
        Requests a second that ended while they arrived.
    ttft_median_s
        Median time to the first token.
    closed
        Closed loop: concurrency, requests a second, median time to the first token.
    """
    figure = make_subplots(
        cols=2, horizontal_spacing=0.16, subplot_titles=("requests that ended, 1/s", "median TTFT")
    )
    top = max(max(offered), max(rate for _, rate, _ in closed)) * 1.12
    figure.add_scatter(
        x=[0, top], y=[0, top], mode="lines", row=1, col=1, name="all that came",
        line={"color": "#888888", "dash": "dot"}, hoverinfo="skip",
    )  # fmt: skip
    for panel, values in ((1, served), (2, ttft_median_s)):
        figure.add_scatter(
            x=list(offered), y=list(values), mode="lines+markers", row=1, col=panel,
            name="open loop", **series_style(0),
            hovertemplate="%{x:.2f} requests/s came: %{y:.2f}<extra></extra>",
        )  # fmt: skip
        figure.add_scatter(
            x=[rate for _, rate, _ in closed],
            y=[row[panel] for row in closed],
            text=[f"c={c}" for c, _, _ in closed], textposition="bottom right",
            textfont={"color": "#B85000"}, mode="markers+text", row=1, col=panel,
            name="closed loop",
            marker={"symbol": "diamond-open", "size": 12, "color": COLORS[3],
                    "line": {"width": 2.5}},
            hovertemplate="%{text}: %{y:.2f}<extra></extra>",
        )  # fmt: skip
    figure.update_xaxes(title="requests a second that came", range=[0, top])
    figure.update_yaxes(range=[0, top], row=1, col=1)
    figure.update_yaxes(
        type="log", title="seconds", row=1, col=2,
        tickvals=[0.1, 0.3, 1, 3, 10, 30, 100, 300], minor={"showgrid": False},
    )  # fmt: skip
    figure.update_layout(
        title="A closed loop stops where the trouble begins", height=460, showlegend=False,
        margin={"t": 100},
    )  # fmt: skip
    label(figure, offered[-1], served[-1], "open loop", 0, side="below", panel=1)
    label(figure, offered[-1], ttft_median_s[-1], "open loop", 0, side="left", panel=2)
    label(figure, closed[-1][1], closed[-1][1], "closed loop", 3, side="left", panel=1)
    return figure


def stall(
    closed: Sequence[tuple[float, float]], opened: Sequence[tuple[float, float]], stall_s: float
) -> go.Figure:
    """Draw time to first token over the time of sending, for both loops around one stall."""
    figure = go.Figure()
    for index, (name, points) in enumerate((("closed loop", closed), ("open loop", opened))):
        style = series_style(index)
        figure.add_scatter(
            x=[sent for sent, _ in points], y=[ttft for _, ttft in points], mode="markers",
            marker={**style["marker"], "opacity": 0.85}, name=f"{name} ({len(points)} requests)",
            hovertemplate="sent at %{x:.1f} s, first token after %{y:.2f} s<extra></extra>",
        )  # fmt: skip
    figure.add_vrect(
        x0=0, x1=stall_s, fillcolor="#DDDDDD", opacity=0.5, line_width=0, layer="below"
    )
    figure.add_annotation(
        x=stall_s / 2, y=0.3, yref="paper", text="the server<br>stalls", showarrow=False,
    )  # fmt: skip
    figure.update_xaxes(title="sent, seconds", rangemode="tozero")
    figure.update_yaxes(title="seconds to the first token", rangemode="tozero")
    figure.update_layout(
        title="One stall, seen by two clients",
        legend={"orientation": "h", "y": -0.25, "x": 0},
    )
    return figure


def goodput(
    offered: Sequence[float], served: Sequence[float], good: Sequence[float], *, title: str
) -> go.Figure:
    """Draw requests a second that were served, and those that were served in time."""
    figure = go.Figure()
    for index, (name, values) in enumerate((("served", served), ("served in time", good))):
        figure.add_scatter(
            x=list(offered), y=list(values), mode="lines+markers", name=name, **series_style(index),
            hovertemplate="%{x:.2f}/s came: %{y:.2f}/s " + name + "<extra></extra>",
        )  # fmt: skip
    label(figure, offered[-1], served[-1], "served", 0, side="above")
    label(figure, offered[-1], good[-1], "in time", 1, side="above")
    top = max(*offered, *served) * 1.12
    figure.update_xaxes(title="requests a second that came", range=[0, top])
    figure.update_yaxes(title="requests a second", range=[-0.02 * top, top])
    figure.update_layout(title=title, showlegend=False)
    return figure

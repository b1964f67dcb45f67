"""Figures of lesson 08: seats, gaps between tokens, and what too few blocks cost.

Needs plotly. Each function takes plain numbers and returns a figure; who computes what in which
step is drawn by ``plots_schedule``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kimik3_lab.teaching.plots import COLORS, label, series_style

__all__ = ["page_fill", "recompute", "seats", "token_gaps"]

Points = Sequence[tuple[float, float]]

#: Of a logarithmic axis: few enough to read.
_TICKS = [10, 20, 50, 100, 200, 500, 1000, 2000, 5000]


def seats(busy: Mapping[str, Points], total: int) -> go.Figure:
    """Draw how many seats are taken over time, one panel a way of batching.

    Parameters
    ----------
    busy
        For each way, the start of every step in seconds and the requests in it, in order.
    total
        Seats that there are: drawn as a line.

    Examples
    --------
    >>> figure = seats({"static": [(0, 2), (1, 1)], "continuous": [(0, 2)]}, total=2)
    >>> [(trace.name, trace.y) for trace in figure.data]
    [('static', (2, 1)), ('continuous', (2,))]
    """
    figure = make_subplots(
        rows=len(busy), shared_xaxes=True, vertical_spacing=0.1, subplot_titles=list(busy)
    )
    for row, (name, points) in enumerate(busy.items(), 1):
        x, y = zip(*_changes(points), strict=True)
        figure.add_scatter(
            x=x, y=y, mode="lines", name=name, fill="tozeroy",
            line={"shape": "hv", "width": 1, "color": COLORS[row - 1]},
            hovertemplate="%{x:.1f} s: %{y} of " + str(total) + "<extra>" + name + "</extra>",
            row=row, col=1,
        )  # fmt: skip
        figure.add_hline(
            y=total, line={"color": "#444444", "width": 1.5, "dash": "dot"}, row=row, col=1
        )
    figure.update_yaxes(title="seats taken", range=[0, total * 1.08])
    figure.update_xaxes(title="virtual seconds", row=len(busy), col=1)
    figure.update_layout(title="White is paid for too", showlegend=False, height=210 * len(busy))
    return figure


def _changes(points: Points) -> Points:
    """Leave out the points that change nothing, so that a notebook stays small."""
    inner = pairwise(points)
    return [points[0], *(new for old, new in inner if new[1] != old[1] or new is points[-1])]


def token_gaps(gaps: Mapping[str, Points], bound: float | None = None) -> go.Figure:
    """Draw the time from one token of a request to its next, one line a setting.

    A gap is drawn over the time that it lasts, with its mark at the end.

    Parameters
    ----------
    gaps
        For each setting, when a token came (seconds), and how long after the one before it (ms).
    bound
        A line to hold the gaps against, in ms.

    Examples
    --------
    >>> figure = token_gaps({"whole": [(0.1, 20), (0.5, 400)]}, bound=100)
    >>> figure.data[0].y, figure.layout.yaxis.type
    ((20, 400), 'log')
    """
    figure = go.Figure()
    figure.update_yaxes(title="time since the token before, ms", type="log", tickvals=_TICKS)
    for index, (name, points) in enumerate(gaps.items()):
        x, y = zip(*points, strict=True)
        style = series_style(index)
        figure.add_scatter(
            x=x, y=y, mode="lines+markers", name=name,
            line={**style["line"], "width": 1.5, "shape": "vh"},
            marker={**style["marker"], "size": 6},
            hovertemplate="%{x:.2f} s: %{y:.0f} ms<extra>" + name + "</extra>",
        )  # fmt: skip
        last = max(place for place in range(len(y)) if 2 * y[place] >= max(y))
        label(figure, x[last], y[last], name, index, side="right")
    if bound is not None:
        figure.add_hline(y=bound, line={"color": "#444444", "width": 1.5, "dash": "dot"})
    figure.update_xaxes(title="virtual seconds")
    figure.update_layout(
        title="A long prompt comes: what the others feel", showlegend=False, height=420
    )
    return figure


def recompute(
    blocks: Sequence[int], twice: Sequence[float], throughput: Sequence[float]
) -> go.Figure:
    """Draw what a pool of so many blocks costs: tokens computed anew, and tokens a second.

    Parameters
    ----------
    blocks
        Sizes of the pool.
    twice
        Tokens computed beyond those needed, over those needed.
    throughput
        Output tokens a second.

    Examples
    --------
    >>> figure = recompute([64, 128], [0.5, 0], [200, 400])
    >>> list(figure.data[0].y), list(figure.data[1].y)
    ([50.0, 0], [200, 400])
    """
    if not len(blocks) == len(twice) == len(throughput):
        raise ValueError(
            f"expected a share and a throughput for each of {len(blocks)} pools, got {len(twice)} "
            f"and {len(throughput)}"
        )
    figure = make_subplots(cols=2, horizontal_spacing=0.13)
    for col, values in enumerate(([100 * share for share in twice], throughput), 1):
        figure.add_scatter(
            x=list(blocks), y=list(values), mode="lines+markers", **series_style(col - 1),
            hovertemplate="%{x} blocks: %{y:.0f}<extra></extra>", row=1, col=col,
        )  # fmt: skip
    figure.update_xaxes(title="blocks in the pool", rangemode="tozero")
    figure.update_yaxes(title="computed anew, %", rangemode="tozero", row=1, col=1)
    figure.update_yaxes(title="output tokens per second", rangemode="tozero", row=1, col=2)
    figure.update_layout(title="Too few blocks are paid for twice", showlegend=False, height=380)
    return figure


def page_fill(sizes: Sequence[int], found: Sequence[float], rule: Sequence[float]) -> go.Figure:
    """Draw the share of empty places in held blocks by block size, beside the rule of thumb.

    Examples
    --------
    >>> figure = page_fill([16, 896], [0.01, 0.2], [0.008, 0.19])
    >>> list(figure.data[0].x), list(figure.data[1].y)
    (['16', '896'], [0.8, 19.0])
    """
    names = [str(size) for size in sizes]
    figure = go.Figure()
    for index, (name, shares) in enumerate((("in the run", found), ("half a block each", rule))):
        figure.add_bar(
            x=names, y=[100 * share for share in shares], name=name,
            marker={"color": COLORS[index], "pattern": {"shape": ("", "/")[index]}},
            text=[f"{100 * share:.1f}" for share in shares], textposition="outside",
            hovertemplate="%{x} tokens: %{y:.1f} %<extra>" + name + "</extra>",
        )  # fmt: skip
    figure.update_xaxes(title="tokens of a block", type="category")
    figure.update_yaxes(title="empty places in held blocks, %", rangemode="tozero")
    figure.update_layout(
        title="Larger blocks, emptier blocks", height=380,
        legend={"orientation": "h", "x": 1, "xanchor": "right", "y": 1.0, "yanchor": "bottom"},
    )  # fmt: skip
    return figure

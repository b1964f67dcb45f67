"""Figures of lesson 12: how sure the published ratios are, and where the time went.

Needs plotly, and scipy for the intervals. The first two functions take the comparisons that
:func:`kimik3_lab.performance.published.compare` returns, the others plain numbers. Figures about
load are in :mod:`kimik3_lab.teaching.plots_load`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from kimik3_lab.performance.published import OUTPUT_TOKENS, Comparison
from kimik3_lab.teaching.plots import COLORS, SYMBOLS

__all__ = ["count_spread", "ratio_intervals", "relative_to_published", "time_split"]


def ratio_intervals(comparisons: Sequence[Comparison], confidence: float = 0.95) -> go.Figure:
    """Draw each throughput ratio with its interval, and the latency ratio beside it."""
    names = [f"concurrency {c.concurrency}" for c in comparisons]
    intervals = [c.throughput_interval(confidence) for c in comparisons]
    pairs = list(zip((c.throughput_ratio for c in comparisons), intervals, strict=True))
    counts = [
        f"{c.after.completed_requests} against {c.before.completed_requests} requests"
        for c in comparisons
    ]
    figure = go.Figure()
    figure.add_scatter(
        x=[c.throughput_ratio for c in comparisons],
        y=names,
        mode="markers",
        name="ratio of counts",
        marker={"symbol": "circle", "size": 12, "color": COLORS[0]},
        error_x={
            "type": "data",
            "symmetric": False,
            "array": [high - ratio for ratio, (_, high) in pairs],
            "arrayminus": [ratio - low for ratio, (low, _) in pairs],
            "color": COLORS[0],
            "thickness": 2.5,
            "width": 8,
        },
        hovertemplate="%{y}: %{x:.2f}x by counts<extra></extra>",
    )
    figure.add_scatter(
        x=[c.latency_ratio for c in comparisons],
        y=names,
        mode="markers",
        name="ratio of latencies",
        marker={
            "symbol": "diamond-open",
            "size": 14,
            "color": COLORS[3],
            "line": {"width": 2.5},
        },
        hovertemplate="%{y}: %{x:.2f}x by latency<extra></extra>",
    )
    for name, comparison, text in zip(names, comparisons, counts, strict=True):
        figure.add_annotation(
            x=comparison.throughput_ratio, y=name, text=text, showarrow=False, yshift=22,
            font={"color": COLORS[0]},
        )  # fmt: skip
        figure.add_annotation(
            x=comparison.latency_ratio, y=name, text=f"latency {comparison.latency_ratio:.2f}x",
            showarrow=False, yshift=-22, font={"color": "#B85000"},
        )  # fmt: skip
    figure.add_vline(x=1, line={"color": "#444444", "dash": "dash", "width": 2})
    figure.update_xaxes(
        title=f"after over before, with {confidence:.0%} interval of the counts",
        range=[0.5, max(high for _, high in intervals) + 0.3],
        tickvals=[1, 2, 3, 4, 5],
        ticktext=["1x: no change", "2x", "3x", "4x", "5x"],
    )
    figure.update_yaxes(range=[len(names) - 0.45, -0.55], ticks="", showgrid=False)
    figure.update_layout(title="Ten requests leave much room", showlegend=False, height=420)
    return figure


def time_split(comparisons: Sequence[Comparison]) -> go.Figure:
    """Draw a request's seconds before and after, split at its first token."""
    points = [point for c in comparisons for point in (c.before, c.after)]
    names = [f"c{p.concurrency}, {p.version}" for p in points]
    first = [p.ttft_ms / 1000 for p in points]
    rest = [p.latency_s - t for p, t in zip(points, first, strict=True)]
    figure = go.Figure()
    figure.add_bar(
        x=first,
        y=names,
        orientation="h",
        name="to the first token",
        marker={
            "color": COLORS[1],
            "pattern": {"shape": "/", "fillmode": "overlay", "fgcolor": "#FFFFFF", "solidity": 0.2},
        },
        hovertemplate="%{y}: %{x:.2f} s to the first token<extra></extra>",
    )
    figure.add_bar(
        x=rest,
        y=names,
        orientation="h",
        name=f"the other {OUTPUT_TOKENS - 1} tokens",
        marker={"color": COLORS[0]},
        text=[f"{t:.2f} s + {r:.2f} s" for t, r in zip(first, rest, strict=True)],
        textposition="outside",
        cliponaxis=False,
        hovertemplate="%{y}: %{x:.2f} s for the other tokens<extra></extra>",
    )
    figure.update_layout(
        barmode="stack",
        title="Where a request's seconds go",
        height=430,
        legend={"orientation": "h", "y": -0.28, "x": 0, "traceorder": "normal"},
    )
    figure.update_xaxes(title="seconds", range=[0, 1.3 * max(p.latency_s for p in points)])
    figure.update_yaxes(autorange="reversed", ticks="", showgrid=False)
    return figure


def count_spread(
    names: Sequence[str],
    published: Sequence[int],
    poisson: Sequence[tuple[float, float]],
    simulated: Sequence[tuple[int, int]],
) -> go.Figure:
    """Draw each published count with its Poisson interval, and the range of a closed loop.

    Parameters
    ----------
    names
        Of the cells.
    published
        Their counts.
    poisson
        Interval of each, had requests ended at random.
    simulated
        Fewest and most that ended in a window of the same length, anywhere in a simulated run.
    """
    figure = go.Figure()
    rows = list(range(len(names)))
    for low_high, offset, color, width, name in (
        (poisson, -0.24, COLORS[1], 2.5, "if requests ended at random"),
        (simulated, 0.24, COLORS[2], 9, "simulated closed loop, window anywhere"),
    ):
        for row, (low, high) in zip(rows, low_high, strict=True):
            figure.add_scatter(
                x=[low, high],
                y=[row + offset] * 2,
                mode="lines+markers",
                line={"color": color, "width": width},
                marker={"symbol": "line-ns", "size": 12, "line": {"color": color, "width": 2.5}},
                name=name,
                legendgroup=name,
                showlegend=row == 0,
                hovertemplate="%{x:.1f}<extra></extra>",
            )
    figure.add_scatter(
        x=list(published),
        y=rows,
        mode="markers",
        marker={"symbol": "diamond", "size": 12, "color": COLORS[0]},
        name="published count",
        hovertemplate="published: %{x}<extra></extra>",
    )
    figure.update_xaxes(title="requests that end in 120 seconds (logarithmic)", type="log",
                        tickvals=[5, 10, 20, 30, 50, 100])  # fmt: skip
    figure.update_yaxes(tickvals=rows, ticktext=list(names), autorange="reversed", showgrid=False,
                        ticks="")  # fmt: skip
    figure.update_layout(
        title="A closed loop counts evenly",
        height=470,
        legend={"orientation": "h", "y": -0.22, "x": 0},
    )
    return figure


def relative_to_published(
    names: Sequence[str], ratios: Mapping[str, Sequence[float]], *, band: float = 0.1
) -> go.Figure:
    """Draw simulated over published, one row a cell and one marker a figure.

    Parameters
    ----------
    names
        Of the cells.
    ratios
        Name of a figure to its ratios, one a cell.
    band
        Half the width of the shaded band around 1.
    """
    figure = go.Figure()
    spread = 0.5 / max(len(ratios), 1)
    for index, (name, values) in enumerate(ratios.items()):
        figure.add_scatter(
            x=list(values),
            y=[row + (index - (len(ratios) - 1) / 2) * spread for row in range(len(names))],
            mode="markers",
            name=name,
            marker={"symbol": SYMBOLS[index], "size": 11, "color": COLORS[index]},
            hovertemplate=name + ": %{x:.2f} of the published<extra></extra>",
        )
    figure.add_vrect(x0=1 - band, x1=1 + band, fillcolor="#E5E5E5", opacity=0.6, line_width=0,
                     layer="below")  # fmt: skip
    figure.add_vline(x=1, line={"color": "#444444", "dash": "dash", "width": 2})
    figure.update_xaxes(title=f"simulated over published; shaded: within {band:.0%}")
    figure.update_yaxes(tickvals=list(range(len(names))), ticktext=list(names), ticks="",
                        autorange="reversed", showgrid=False)  # fmt: skip
    figure.update_layout(
        title="Simulated beside published", height=470,
        legend={"orientation": "h", "y": -0.22, "x": 0},
    )  # fmt: skip
    return figure

"""Figures of lesson 11, first half: where a step's time goes, and what the model leaves open.

Needs plotly. Each function takes plain numbers and returns a figure. The second half is in
:mod:`kimik3_lab.teaching.plots_b300_use`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kimik3_lab.teaching.plots import COLORS, label, series_style

__all__ = [
    "acceptance_valley",
    "curves_and_points",
    "expert_coverage",
    "graph_boundary",
    "part_bars",
]


def part_bars(
    parts: Mapping[str, float], *, title: str, unit: str = "ms", floor: float | None = None
) -> go.Figure:
    """Draw the parts of a step as bars, the longest on top, with the share of each.

    Parameters
    ----------
    parts
        Wording to time, in any order.
    floor
        Time of the whole step that no kernel can beat; written below the bars.

    Examples
    --------
    >>> figure = part_bars({"norms": 1.0, "experts": 3.0}, title="A step")
    >>> list(figure.data[0].y), list(figure.data[0].text)
    (['norms', 'experts'], ['1.00 (25 %)', '3.00 (75 %)'])
    """
    total = sum(parts.values())
    if total <= 0:
        raise ValueError(f"a step takes some time: got parts that add up to {total}")
    rows = sorted(((v, name) for name, v in parts.items() if v > 0), reverse=False)
    figure = go.Figure(
        go.Bar(
            x=[value for value, _ in rows],
            y=[name for _, name in rows],
            orientation="h",
            marker={"color": COLORS[0]},
            text=[f"{value:.2f} ({value / total:.0%})".replace("%)", " %)") for value, _ in rows],
            textposition="outside",
            cliponaxis=False,
            hovertemplate="%{y}: %{x:.3f} " + unit + "<extra></extra>",
        )
    )
    below = f"together {total:.2f} {unit}"
    if floor is not None:
        below += f"; bytes alone would take {floor:.2f}"
    figure.update_xaxes(title=f"{unit} ({below})", range=[0, 1.25 * max(v for v, _ in rows)])
    figure.update_yaxes(showgrid=False)
    figure.update_layout(title=title, height=130 + 28 * len(rows), showlegend=False)
    return figure


def expert_coverage(
    tokens: Sequence[int],
    curves: Mapping[str, Sequence[float]],
    marks: Mapping[int, str],
    *,
    num_experts: int = 896,
) -> go.Figure:
    """Draw the share of experts that a step reads against its tokens, one line a load.

    Parameters
    ----------
    tokens
        Rows of a step, ascending; they make a logarithmic axis.
    curves
        Name of a load to distinct experts at each of ``tokens``.
    marks
        Rows at which a vertical line is drawn, and its name.

    Examples
    --------
    >>> figure = expert_coverage([1, 144], {"even": [16, 829]}, {144: "16 requests"})
    >>> [round(y) for y in figure.data[0].y]
    [2, 93]
    """
    figure = go.Figure()
    figure.update_xaxes(type="log", title="rows in the step", dtick=1)
    for index, (name, distinct) in enumerate(curves.items()):
        figure.add_scatter(
            x=list(tokens), y=[100 * d / num_experts for d in distinct], mode="lines",
            line=series_style(index)["line"], name=name,
            hovertemplate="%{x} rows: %{y:.0f} %<extra>" + name + "</extra>",
        )  # fmt: skip
    for place, (rows, text) in enumerate(marks.items()):
        figure.add_vline(x=rows, line={"color": "#888888", "width": 1, "dash": "dot"})
        label(figure, rows, 103 + 7 * (place % 2), text, 6, side="above")
    figure.update_yaxes(
        title="experts read, % of 896", range=[0, 122], tickvals=[0, 25, 50, 75, 100]
    )
    figure.update_layout(
        title="How much of the experts a step reads",
        legend={"x": 0.99, "y": 0.05, "xanchor": "right", "yanchor": "bottom"},
        height=430,
    )
    return figure


def curves_and_points(
    x: Sequence[float],
    curves: Mapping[str, Sequence[float]],
    points: Mapping[str, Sequence[tuple[float, float]]],
    *,
    title: str,
    x_title: str,
    y_title: str,
) -> go.Figure:
    """Draw computed curves through published points of the same name, both axes logarithmic.

    Examples
    --------
    >>> figure = curves_and_points(
    ...     [1, 8], {"a": [3, 9]}, {"a": [(8, 9.2)]}, title="", x_title="", y_title=""
    ... )
    >>> [trace.mode for trace in figure.data]
    ['lines', 'markers']
    """
    if unknown := sorted(set(points) - set(curves)):
        raise ValueError(f"points without a curve: {', '.join(unknown)}")
    figure = go.Figure()
    figure.update_xaxes(type="log", title=x_title)
    figure.update_yaxes(type="log", title=y_title)
    for index, (name, values) in enumerate(curves.items()):
        style = series_style(index)
        figure.add_scatter(
            x=list(x), y=list(values), mode="lines", line=style["line"], name=f"{name}, model",
            hovertemplate="%{x}: %{y:.3g}<extra>" + name + ", model</extra>",
        )  # fmt: skip
        if found := points.get(name):
            figure.add_scatter(
                x=[a for a, _ in found], y=[b for _, b in found], mode="markers",
                marker={**style["marker"], "size": 11, "line": {"width": 1.5, "color": "#000000"}},
                name=f"{name}, published",
                hovertemplate="%{x}: %{y:.3g}<extra>" + name + ", published</extra>",
            )  # fmt: skip
    figure.update_layout(title=title, height=460, legend={"x": 0.01, "y": 0.99, "yanchor": "top"})
    return figure


def graph_boundary(
    rows: Sequence[int],
    curves: Mapping[str, Sequence[float]],
    published: tuple[float, float, str],
    *,
    boundaries: Mapping[str, int],
) -> go.Figure:
    """Draw a step's milliseconds against its rows, with the jumps where captured graphs end.

    Parameters
    ----------
    boundaries
        Most rows of a captured graph, by what has it, from few to many.
    published
        Rows, milliseconds and name of a published point.

    Examples
    --------
    >>> figure = graph_boundary(
    ...     [1, 512, 513], {"old": [9, 90, 280]}, (1024, 283, "published"), boundaries={"old": 512}
    ... )
    >>> figure.data[-1].x, figure.data[-1].y
    ((1024,), (283,))
    """
    figure = go.Figure()
    figure.update_xaxes(type="log", title="prompt tokens in the step", dtick=1)
    for boundary in boundaries.values():
        figure.add_vline(x=boundary, line={"color": "#888888", "width": 1.5, "dash": "dot"})
    for index, (name, values) in enumerate(curves.items()):
        figure.add_scatter(
            x=list(rows), y=list(values), mode="lines", line=series_style(index)["line"],
            hovertemplate="%{x} tokens: %{y:.0f} ms<extra>" + name + "</extra>",
        )  # fmt: skip
        # Names stand above the first curve and below the others, apart from each other.
        near, side = (24, "above") if index == 0 else (200, "below")
        at = min(range(len(rows)), key=lambda i: abs(rows[i] - near))
        label(figure, rows[at], values[at], name, index, side=side)
    x, y, name = published
    figure.add_scatter(
        x=(x,), y=(y,), mode="markers",
        marker={"symbol": "diamond-open", "size": 14, "color": "#000000", "line": {"width": 2.5}},
        hovertemplate=f"{name}: {y:.1f} ms<extra></extra>",
    )  # fmt: skip
    label(figure, x, y, f"{name}: {y:.1f}", 6, side="above")
    top = 1.1 * max(max(v) for v in curves.values())
    for index, (name, boundary) in enumerate(boundaries.items()):
        height = (0.08 if index else 0.93) * top
        side = "right" if index else "left"
        label(figure, boundary, height, f"{name} captures up to {boundary:,}", 6, side=side)
    figure.update_yaxes(title="milliseconds", range=[0, top])
    figure.update_layout(title="What a step of a prompt takes", showlegend=False, height=430)
    return figure


def acceptance_valley(
    lengths: Sequence[float],
    overhead_ms: Sequence[float],
    errors: Mapping[str, Sequence[float]],
    *,
    band: float = 5.0,
) -> go.Figure:
    """Draw the overhead that fits an assumed acceptance length, and how well it then fits.

    Parameters
    ----------
    overhead_ms
        Overhead of a step with which the latency of one request comes out right.
    errors
        Name to error in percent at each of ``lengths``, with that overhead.
    band
        Shaded: errors up to so much count as a fit.

    Examples
    --------
    >>> figure = acceptance_valley([3, 4], [1, 5], {"1 request": [0.0, 0.1]})
    >>> list(figure.data[0].y)
    [1, 5]
    """
    figure = make_subplots(cols=2, horizontal_spacing=0.14)
    figure.add_scatter(
        x=list(lengths), y=list(overhead_ms), mode="lines+markers", row=1, col=1,
        **series_style(0), hovertemplate="%{x:.2f} tokens: %{y:.2f} ms<extra></extra>",
    )  # fmt: skip
    for index, (name, values) in enumerate(errors.items(), 1):
        figure.add_scatter(
            x=list(lengths), y=list(values), mode="lines+markers", row=1, col=2, name=name,
            **series_style(index), hovertemplate="%{x:.2f}: %{y:+.1f} %<extra>" + name + "</extra>",
        )  # fmt: skip
    # Only a subplot that has something to show takes a band.
    figure.add_hrect(
        y0=-band, y1=band, fillcolor="#DDDDDD", opacity=0.5, line_width=0, layer="below",
        row=1, col=2,
    )  # fmt: skip
    most = max(2 * band, *(abs(v) for values in errors.values() for v in values))
    ends = sorted(
        (values[-1], index, name) for index, (name, values) in enumerate(errors.items(), 1)
    )
    lowest = -float("inf")
    for value, index, name in ends:  # names are moved up so that none covers another
        lowest = max(value, lowest + 0.16 * most)
        label(figure, lengths[-1], lowest, name, index, side="right", panel=2)
    span = lengths[-1] - lengths[0]
    figure.update_xaxes(title="assumed tokens a verification", tickvals=list(lengths))
    figure.update_xaxes(range=[lengths[0] - 0.06 * span, lengths[-1] + 0.5 * span], row=1, col=2)
    figure.update_yaxes(title="overhead of a step, ms", rangemode="tozero", row=1, col=1)
    figure.update_yaxes(title="latency error, %", range=[-1.1 * most, 1.1 * most], row=1, col=2)
    figure.update_layout(title="One number for two unknowns", showlegend=False, height=420)
    return figure

"""Figures of lessons 11 and 13 on exchanges between GPUs: times by size, misses, what overlaps.

Needs plotly. Each function takes plain numbers and returns a figure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log10

import plotly.graph_objects as go

from kimik3_lab.teaching.plots import COLORS, label, series_style

__all__ = ["exchange_times", "prediction_errors", "share_bars"]

_SIZES = {
    4 << 10: "4 KiB", 64 << 10: "64 KiB", 1 << 20: "1 MiB", 16 << 20: "16 MiB", 256 << 20: "256 MiB"
}  # fmt: skip


def exchange_times(
    measured: Mapping[str, Mapping[int, float]],
    line: tuple[str, float, float],
    marks: Mapping[int, str],
    *,
    title: str,
) -> go.Figure:
    """Draw microseconds against bytes, both logarithmic, with a line and its two ends.

    Parameters
    ----------
    measured
        Name of each series to bytes and microseconds.
    line
        Name, latency in microseconds, and bytes a microsecond.
    marks
        Sizes to point out, and what they are.

    Examples
    --------
    >>> figure = exchange_times(
    ...     {"graph": {4096: 13.0, 1 << 28: 900.0}}, ("line", 13.0, 3e5), {7168: "T = 1"}, title=""
    ... )
    >>> [trace.name for trace in figure.data]
    ['graph', 'line']
    """
    figure = go.Figure()
    sizes = sorted({size for points in measured.values() for size in points})
    low, high = log10(sizes[0]), log10(sizes[-1])
    shown = {size: text for size, text in _SIZES.items() if sizes[0] <= size <= sizes[-1]}
    figure.update_xaxes(
        type="log", title="bytes of the message (logarithmic)", range=[low - 0.15, high + 0.15],
        tickvals=list(shown), ticktext=list(shown.values()),
    )  # fmt: skip
    times = [us for points in measured.values() for us in points.values()]
    figure.update_yaxes(
        type="log", title="microseconds (logarithmic)", dtick=1,
        range=[log10(min(times)) - 0.3, log10(max(times)) + 0.45],
    )  # fmt: skip
    ends = []
    for index, (name, points) in enumerate(measured.items()):
        figure.add_scatter(
            x=list(points), y=list(points.values()), mode="lines+markers", name=name,
            **series_style(index),
            hovertemplate="%{x} bytes: %{y:.1f} us<extra>" + name + "</extra>",
        )  # fmt: skip
        # A label spans some sizes, over which times may go up and down.
        near = [us for size, us in points.items() if size <= 64 * min(points)]
        ends.append((min(points), min(near), max(near), name, index))
    name, latency, rate = line
    grid = [10 ** (low + (high - low) * i / 60) for i in range(61)]
    style = series_style(len(measured))
    figure.add_scatter(
        x=grid, y=[latency + size / rate for size in grid], mode="lines", name=name,
        line=style["line"], hovertemplate="%{y:.1f} us<extra>" + name + "</extra>",
    )  # fmt: skip
    # The flat left ends are apart; the line is written below itself, where it bends.
    highest = max(most for _, _, most, _, _ in ends)
    for first, least, most, text, index in ends:
        label(figure, first, 1.25 * most if most == highest else 0.78 * least, text, index)
    bend = latency * rate
    label(figure, 1.5 * bend, 0.72 * (latency + 1.5 * bend / rate), name, len(measured))
    for size, text in marks.items():
        figure.add_vline(x=size, line={"color": "#777777", "width": 1, "dash": "dot"})
        figure.add_annotation(
            x=log10(size), y=1, yref="paper", text=text, showarrow=False, textangle=-90,
            xanchor="right", yanchor="top", font={"color": "#444444"},
        )  # fmt: skip
    figure.update_layout(title=title, showlegend=False, height=460)
    return figure


def prediction_errors(
    groups: Sequence[tuple[str, Sequence[tuple[str, float, float]]]],
    names: tuple[str, str],
    *,
    within: float = 10.0,
    title: str,
) -> go.Figure:
    """Draw errors in percent twice, before and after a change, group beside group.

    Parameters
    ----------
    groups
        Name of each group, and of its cases a name, shown when pointed at, and the errors before
        and after. Cases stand beside each other in their order.
    names
        Of the two columns.
    within
        Half width of the band that was asked for.

    Examples
    --------
    >>> cases = [("MoE, TP2", 11.0, 9.0)]
    >>> figure = prediction_errors([("T = 1", cases)], ("before", "after"), title="")
    >>> [list(trace.y) for trace in figure.data]
    [[11.0], [9.0]]
    """
    figure = go.Figure()
    figure.add_hrect(y0=-within, y1=within, fillcolor="#E8E8E8", line_width=0, layer="below")
    figure.add_hline(y=0, line={"color": "#444444", "width": 1})
    for column, (name, symbol, color) in enumerate(
        zip(names, ("circle-open", "diamond"), (COLORS[3], COLORS[0]), strict=True)
    ):
        x: list[float] = []
        y: list[float] = []
        texts: list[str] = []
        for place, (group, cases) in enumerate(groups):
            middle = place + (-0.2 if column == 0 else 0.2)
            for number, (case, *errors) in enumerate(cases):
                # Side by side, so that equal errors do not hide each other.
                x.append(middle + 0.32 * (number / max(1, len(cases) - 1) - 0.5))
                y.append(errors[column])
                texts.append(f"{group}, {case}")
        figure.add_scatter(
            x=x, y=y, text=texts, mode="markers", name=name,
            marker={"symbol": symbol, "size": 9, "color": color, "line": {"width": 2}},
            hovertemplate="%{text}: %{y:+.1f} %<extra>" + name + "</extra>",
        )  # fmt: skip
    figure.update_xaxes(tickvals=list(range(len(groups))), ticktext=[name for name, _ in groups])
    figure.update_yaxes(title="predicted against measured, %")
    figure.update_layout(
        title=title,
        height=430,
        legend={"orientation": "h", "x": 1, "xanchor": "right", "y": 1.0, "yanchor": "bottom"},
    )
    return figure


def share_bars(
    tokens: Sequence[int], series: Mapping[str, Sequence[float]], *, title: str
) -> go.Figure:
    """Draw the share of a layer that its exchanges take, in percent.

    Examples
    --------
    >>> figure = share_bars([1, 4096], {"TP2": [11.8, 3.5], "EP2": [10.6, 4.1]}, title="")
    >>> list(figure.data[1].text)
    ['10.6', '4.1']
    """
    figure = go.Figure()
    for index, (name, values) in enumerate(series.items()):
        figure.add_bar(
            x=[f"{count:,}" for count in tokens], y=list(values), name=name,
            marker={"color": COLORS[index], "pattern": {"shape": ("", "/", "x")[index]}},
            text=[f"{value:.1f}" for value in values],
            textposition="outside", cliponaxis=False,
            hovertemplate="%{x} tokens: %{y:.1f} %<extra>" + name + "</extra>",
        )  # fmt: skip
    figure.update_xaxes(title="tokens in the step", type="category")
    figure.update_yaxes(title="of the layer, %")
    figure.update_layout(
        title=title,
        barmode="group",
        height=400,
        legend={"orientation": "h", "x": 1, "xanchor": "right", "y": 1.0, "yanchor": "bottom"},
    )
    return figure

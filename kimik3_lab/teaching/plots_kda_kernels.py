"""Figures of lesson 06: two ladders, the size of a program, bytes of a verify step, launches.

Needs plotly. Each function takes plain numbers and returns a figure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log10

import plotly.graph_objects as go

from kimik3_lab.teaching.plots import COLORS, label, series_style

__all__ = ["launch_bars", "program_sizes", "rung_lines", "traffic_bars"]

_GREY = "#777777"
#: A second channel for bars: no two neighbours have the same hatching.
_PATTERNS = ("", "/", "x", ".", "\\")


def rung_lines(
    rungs: Sequence[str], ratios: Mapping[str, Sequence[float]], *, title: str
) -> go.Figure:
    """Draw each rung's time as a multiple of the floor, one line for a size.

    Parameters
    ----------
    rungs
        Names, from the ground up.
    ratios
        By name of a size: time over floor for every rung, all greater than zero.
    title
        Of the figure.

    Examples
    --------
    >>> figure = rung_lines(["separate", "tuned"], {"B = 1": [90.0, 9.0]}, title="Decode")
    >>> [trace.name for trace in figure.data]
    ['B = 1']
    """
    for name, values in ratios.items():
        if len(values) != len(rungs):
            raise ValueError(
                f"{name}: got {len(values)} times, expected one for each of {len(rungs)} rungs"
            )
    figure = go.Figure()
    top = log10(max(value for values in ratios.values() for value in values))
    figure.update_xaxes(type="log", title="time / floor", range=[-0.08, top + 0.15])
    for index, (name, values) in enumerate(ratios.items()):
        figure.add_scatter(
            x=list(values), y=list(rungs), mode="lines+markers", name=name,
            hovertemplate="%{y}: %{x:.3g} times the floor<extra>" + name + "</extra>",
            **series_style(index),
        )  # fmt: skip
    figure.add_vline(x=1, line={"color": _GREY, "dash": "dot", "width": 1.5})
    ticks = [tick for tick in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if log10(tick) < top + 0.1]
    figure.update_xaxes(tickvals=ticks, ticktext=[str(tick) for tick in ticks])
    figure.update_yaxes(categoryorder="array", categoryarray=list(rungs))
    figure.update_layout(
        title=title,
        height=400,
        showlegend=len(ratios) > 1,
        legend={"x": 0.98, "y": 0.98, "xanchor": "right", "yanchor": "top",
                "bordercolor": "#CCCCCC", "borderwidth": 1},
    )  # fmt: skip
    return figure


def program_sizes(
    series: Mapping[str, Sequence[tuple[int, int, float]]],
) -> go.Figure:
    """Draw time over floor against the number of values that a program takes of a state.

    Parameters
    ----------
    series
        By name: (values, warps, time over floor) of every configuration. Of several with as many
        values all are drawn, and the fastest are joined.

    Examples
    --------
    >>> figure = program_sizes({"B = 16": [(8, 1, 1.6), (128, 4, 2.2), (128, 8, 2.1)]})
    >>> list(figure.data[0].y)
    [1.6, 2.1]
    """
    figure = go.Figure()
    sizes = sorted({values for rows in series.values() for values, _, _ in rows})
    figure.update_xaxes(
        type="log", title="values of a head's 128 in one program", tickvals=sizes,
        ticktext=[str(size) for size in sizes],
        range=[log10(sizes[0]) - 0.1, log10(sizes[-1]) + 0.42],
    )  # fmt: skip
    figure.update_yaxes(title="time / floor", rangemode="tozero")
    for index, (name, rows) in enumerate(series.items()):
        best = {
            size: min(ratio for values, _, ratio in rows if values == size)
            for size in sorted({values for values, _, _ in rows})
        }
        figure.add_scatter(
            x=list(best), y=list(best.values()), mode="lines", name=name, hoverinfo="skip",
            line=series_style(index)["line"],
        )  # fmt: skip
        figure.add_scatter(
            x=[values for values, _, _ in rows], y=[ratio for _, _, ratio in rows],
            mode="markers", name=name, marker=series_style(index)["marker"],
            customdata=[warps for _, warps, _ in rows],
            hovertemplate="%{x} values, %{customdata} warps: %{y:.2f}<extra>" + name + "</extra>",
        )  # fmt: skip
        label(figure, sizes[-1], best[max(best)], name, index)
    figure.add_hline(y=1, line={"color": _GREY, "dash": "dot", "width": 1.5})
    figure.update_layout(title="How much of a state one program takes", showlegend=False)
    return figure


def _stacked(
    bars: Mapping[str, Mapping[str, float]], unit: str, *, title: str, totals: str
) -> go.Figure:
    figure = go.Figure()
    # The bar with the most parts says in which order they come.
    longest_first = sorted(bars.values(), key=len, reverse=True)
    names = list(dict.fromkeys(part for parts in longest_first for part in parts))
    if len(names) > len(_PATTERNS):
        raise ValueError(f"got {len(names)} parts, expected at most {len(_PATTERNS)}")
    for index, name in enumerate(names):
        figure.add_bar(
            y=list(bars), x=[parts.get(name, 0.0) for parts in bars.values()], name=name,
            orientation="h",
            marker={"color": COLORS[index], "line": {"color": "#FFFFFF", "width": 1},
                    "pattern": {"shape": _PATTERNS[index], "bgcolor": COLORS[index],
                                "fgcolor": "#FFFFFF", "size": 7}},
            hovertemplate="%{y}: %{x:,.1f} " + unit + "<extra>" + name + "</extra>",
        )  # fmt: skip
    longest = max(sum(parts.values()) for parts in bars.values())
    for bar, parts in bars.items():
        total = sum(parts.values())
        figure.add_annotation(
            x=total, y=bar, text=totals.format(total), showarrow=False, xanchor="left", xshift=6
        )
    figure.update_xaxes(title=unit, range=[0, 1.16 * longest])
    figure.update_yaxes(autorange="reversed", showgrid=False)
    figure.update_layout(
        title=title, barmode="stack", height=140 + 70 * len(bars), margin={"t": 100},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "traceorder": "normal"},
    )  # fmt: skip
    return figure


def traffic_bars(bars: Mapping[str, Mapping[str, float]], *, title: str) -> go.Figure:
    """Draw what ways of doing the same thing move, a stacked bar each, in kB.

    Parameters
    ----------
    bars
        By way, and within it by kind of traffic: kilobytes.
    title
        Of the figure.

    Examples
    --------
    >>> figure = traffic_bars({"records": {"states read": 131.0, "records": 13.0}}, title="Bytes")
    >>> [trace.name for trace in figure.data], figure.layout.annotations[0].text
    (['states read', 'records'], '144 kB')
    """
    return _stacked(bars, "kB", title=title, totals="{:,.0f} kB")


def launch_bars(
    rungs: Mapping[str, Mapping[str, float]], floor_us: float, *, title: str
) -> go.Figure:
    """Draw the launches of each rung behind each other, and the floor as a line.

    Parameters
    ----------
    rungs
        By rung, from the ground up: microseconds of each launch in their order.
    floor_us
        Of the whole.
    title
        Of the figure.

    Examples
    --------
    >>> figure = launch_bars({"chunks": {"prepare": 90.0, "walk": 500.0}}, 30.0, title="Prefill")
    >>> figure.layout.shapes[0].x0
    30.0
    """
    figure = _stacked(rungs, "µs", title=title, totals="{:,.0f} µs")
    figure.add_vline(x=floor_us, line={"color": "#000000", "dash": "dot", "width": 2})
    figure.update_xaxes(title=f"µs (dotted: the floor, {floor_us:.0f} µs)")
    return figure

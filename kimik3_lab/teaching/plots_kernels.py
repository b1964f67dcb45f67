"""Figures of lesson 04: the ladder, the roofline, and our times against those of other kernels.

Needs plotly. Each function takes plain numbers and returns a figure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from kimik3_lab.teaching.plots import COLORS, label, series_style

__all__ = ["against_peers", "ladder", "roofline"]

_GREY = "#777777"


def ladder(rungs: Sequence[str], times: Mapping[int, Sequence[float]]) -> go.Figure:
    """Draw each rung's time as a multiple of the floor, one line for a number of tokens.

    Parameters
    ----------
    rungs
        Names, from the ground up.
    times
        By number of tokens: time over floor for every rung, all greater than zero.

    Examples
    --------
    >>> figure = ladder(["loop", "tuned"], {1: [900.0, 3.0], 16: [1900.0, 1.3]})
    >>> [trace.name for trace in figure.data]
    ['1 token', '16 tokens']
    """
    for tokens, values in times.items():
        if len(values) != len(rungs):
            raise ValueError(
                f"{tokens} tokens: got {len(values)} times, expected one for each of "
                f"{len(rungs)} rungs"
            )
    figure = go.Figure()
    figure.update_xaxes(type="log", title="time / floor of the MXFP4 bytes", range=[-0.12, 3.55])
    for index, (tokens, values) in enumerate(times.items()):
        figure.add_scatter(
            x=list(values), y=list(rungs), mode="lines+markers", name=_tokens(tokens),
            hovertemplate="%{y}: %{x:.3g} times the floor<extra>" + _tokens(tokens) + "</extra>",
            **series_style(index),
        )  # fmt: skip
    figure.add_vline(x=1, line={"color": _GREY, "dash": "dot", "width": 1.5})
    ticks = [1, 2, 5, 10, 100, 1000]
    figure.update_xaxes(tickvals=ticks, ticktext=[str(tick) for tick in ticks])
    figure.update_yaxes(categoryorder="array", categoryarray=list(rungs))
    figure.update_layout(
        title="Every rung comes closer to the floor",
        height=440,
        legend={"x": 0.72, "y": 0.97, "yanchor": "top", "bordercolor": "#CCCCCC", "borderwidth": 1},
    )
    return figure


def _tokens(count: int) -> str:
    return f"{count} token{'' if count == 1 else 's'}"


def roofline(
    series: Mapping[str, Sequence[tuple[int, float, float]]],
    bandwidth: float,
    flop_rate: float,
) -> go.Figure:
    """Draw operations a second against operations a byte, under the two limits of a machine.

    Parameters
    ----------
    series
        By name: (tokens, operations a byte, operations a second) of every call.
    bandwidth, flop_rate
        Bytes and operations a second that the machine has reached.

    Examples
    --------
    >>> roofline({"MXFP4": [(1, 3.8, 6e12)]}, 4.3e12, 790e12).layout.xaxis.type
    'log'
    """
    figure = go.Figure()
    figure.update_xaxes(type="log", title="operations for a byte from memory", range=[-0.2, 3.45])
    figure.update_yaxes(type="log", title="TFLOP/s", range=[0.2, 3.25])
    ridge = flop_rate / bandwidth
    edges = [0.5, ridge, 3000.0]
    figure.add_scatter(
        x=edges, y=[min(bandwidth * x, flop_rate) / 1e12 for x in edges], mode="lines",
        line={"color": "#222222", "width": 2}, hoverinfo="skip", name="roof",
    )  # fmt: skip
    for index, (name, calls) in enumerate(series.items()):
        style = series_style(index)
        x, y = [call[1] for call in calls], [call[2] / 1e12 for call in calls]
        figure.add_scatter(
            x=x, y=y, mode="lines+markers", name=name, customdata=[call[0] for call in calls],
            hovertemplate="T = %{customdata}: %{y:.3g} TFLOP/s<extra>" + name + "</extra>", **style,
        )  # fmt: skip
        for tokens, at, height in zip((call[0] for call in calls), x, y, strict=True):
            last = tokens == calls[-1][0]
            if last or tokens == calls[0][0] or (index == 0 and tokens == 64):
                side = "above" if last and index else "below"
                label(figure, at, height, f"T={tokens}", index, side=side)
                if side == "above":
                    figure.layout.annotations[-1].xshift = 18  # clear of the roof
    ticks = [1, 10, 100, 1000]
    figure.update_xaxes(tickvals=ticks, ticktext=[str(t) for t in ticks])
    figure.update_yaxes(tickvals=ticks, ticktext=[str(t) for t in ticks])
    label(figure, 50, bandwidth * 50 / 1e12, f"{bandwidth / 1e12:g} TB/s", 6, side="left")
    figure.layout.annotations[-1].yshift = 8  # clear of the slope
    label(figure, 1000, flop_rate / 1e12, f"{flop_rate / 1e12:g} TFLOP/s", 6, side="above")
    figure.update_layout(
        title="Where the calls lie under the roof",
        height=480,
        legend={"x": 0.62, "y": 0.08, "yanchor": "bottom", "bordercolor": "#CCCCCC",
                "borderwidth": 1},
    )  # fmt: skip
    return figure


def against_peers(
    tokens: Sequence[int],
    ratios: Mapping[str, Sequence[float]],
) -> go.Figure:
    """Draw the best peer's time over ours; above 1 ours is the faster.

    Parameters
    ----------
    tokens
        Sizes of the calls.
    ratios
        By name of a series: one ratio for each size.

    Examples
    --------
    >>> figure = against_peers([1, 16], {"MXFP4, TP8": [1.8, 1.5], "bf16, TP8": [1.0, 1.1]})
    >>> [trace.name for trace in figure.data]
    ['MXFP4, TP8', 'bf16, TP8']
    """
    figure = go.Figure()
    figure.update_xaxes(type="log", title="tokens", range=[-0.1, 4.75])
    for index, (name, values) in enumerate(ratios.items()):
        if len(values) != len(tokens):
            raise ValueError(
                f"{name}: got {len(values)} ratios for {len(tokens)} sizes, expected one each"
            )
        figure.add_scatter(
            x=list(tokens), y=list(values), mode="lines+markers", name=name,
            hovertemplate="T = %{x}: %{y:.2f}<extra>" + name + "</extra>", **series_style(index),
        )  # fmt: skip
    for index, name, y in _apart([(i, n, v[-1]) for i, (n, v) in enumerate(ratios.items())]):
        label(figure, tokens[-1], y, name, index)
    figure.add_hline(y=1, line={"color": _GREY, "dash": "dot", "width": 1.5})
    figure.update_xaxes(tickvals=list(tokens), ticktext=[str(t) for t in tokens])
    figure.update_yaxes(title="best peer's time / ours", rangemode="tozero")
    figure.update_layout(
        title="Above the dotted line ours is faster",
        showlegend=False,
        height=440,
        colorway=list(COLORS),
    )
    return figure


def _apart(names: list[tuple[int, str, float]], gap: float = 0.11) -> list[tuple[int, str, float]]:
    """Move names up until no two stand closer than ``gap``."""
    placed: list[tuple[int, str, float]] = []
    for index, name, y in sorted(names, key=lambda entry: entry[2]):
        if placed:
            y = max(y, placed[-1][2] + gap)
        placed.append((index, name, y))
    return placed

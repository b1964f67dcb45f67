"""Figures of lesson 05: two gates, half-lives, one update of a state, exponents, bytes per token.

Needs plotly and numpy. Each function takes numbers that the lesson has worked out and returns a
figure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log, log10
from statistics import median

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kimik3_lab.teaching.plots import COLORS, label
from kimik3_lab.teaching.plots_context import lines_over_context, mark_crossing

__all__ = [
    "DIVERGING",
    "decode_traffic_lines",
    "exponent_lines",
    "gate_curves",
    "half_life_strips",
    "state_step",
]

#: Negative orange, zero white, positive blue: apart under every colour-vision deficiency, and dark
#: at both ends.
DIVERGING = ((0.0, "#8F4A00"), (0.25, "#E6A04D"), (0.5, "#FFFFFF"), (0.75, "#6BAED6"),
             (1.0, "#08306B"))  # fmt: skip

_FLOAT32 = np.finfo(np.float32)


def gate_curves(
    x: Sequence[float], bounded: Sequence[float], clamped: Sequence[float]
) -> go.Figure:
    """Draw the log-decay of K3's gate and that of a clamped softplus against the gate's input."""
    figure = go.Figure()
    series = (("K3: -5 sigmoid(x)", bounded, 0, "solid"),
              ("softplus, clamped at -5", clamped, 3, "dash"))  # fmt: skip
    for name, values, color, dash in series:
        figure.add_scatter(
            x=list(x),
            y=list(values),
            mode="lines",
            name=name,
            line={"color": COLORS[color], "dash": dash, "width": 3},
            hovertemplate="x = %{x:.2f}: log-decay %{y:.2f}<extra>" + name + "</extra>",
        )
    figure.update_xaxes(title="gate input x (at a rate of 1)")
    figure.update_yaxes(title="log-decay g of a channel", range=[-5.4, 0.4])
    for (name, values, color, _), share, side in zip(
        series, (0.42, 0.65), ("left", "right"), strict=True
    ):
        at = int(share * (len(x) - 1))
        label(figure, x[at], values[at], name, color, side=side)
        figure.layout.annotations[-1].xshift *= 2  # clear of the slope
    figure.update_layout(title="Bounded is not clamped", showlegend=False)
    return figure


def half_life_strips(
    half_lives: Mapping[int, Sequence[Sequence[float]]],
    *,
    text_tokens: int,
    lower_bound: float = -5.0,
) -> go.Figure:
    """Draw how long each channel remembers: a strip of dots for every head of every layer.

    Parameters
    ----------
    half_lives
        Layer id to its heads, each a half-life in tokens for every channel.
    text_tokens
        Length of the text that they were measured on: longer ones are extrapolated.
    lower_bound
        Smallest log-decay of the gate, which gives the shortest half-life there can be.

    Examples
    --------
    >>> figure = half_life_strips({0: [[1.0, 2.0, 9.0]], 2: [[0.5, 4.0, 5.0]]}, text_tokens=100)
    >>> list(figure.data[1].y)  # the medians
    [2.0, 4.0]
    """
    step, places, ticks, dots, medians = 0.0, [], [], [], []
    for layer_id, heads in half_lives.items():
        for head, values in enumerate(heads):
            places.append(step)
            ticks.append(f"{head}<br>{layer_id}" if head == (len(heads) - 1) // 2 else f"{head}")
            # Three columns to a strip, so that neighbours do not hide each other.
            dots += [(step + 0.22 * (i % 3 - 1), v) for i, v in enumerate(sorted(values))]
            medians.append(median(values))
            step += 1
        step += 0.6
    figure = go.Figure()
    figure.add_scatter(
        x=[round(x, 2) for x, _ in dots],
        y=[float(f"{v:.3g}") for _, v in dots],
        mode="markers",
        marker={"color": COLORS[0], "size": 4, "opacity": 0.55},
        hovertemplate="half-life %{y:.3g} tokens<extra></extra>",
    )
    figure.add_scatter(
        x=places,
        y=medians,
        mode="markers",
        marker={"symbol": "line-ew", "size": 11, "line": {"width": 3, "color": "#000000"}},
        hovertemplate="median %{y:.3g} tokens<extra></extra>",
    )
    floor = log(2) / -lower_bound
    top = max(10 * text_tokens, 2 * max(v for _, v in dots))
    figure.update_yaxes(
        type="log",
        title="half-life, tokens (logarithmic)",
        range=[log10(floor / 4), log10(top)],
        tickvals=[10**n for n in range(-1, int(log10(top)) + 1)],
    )
    figure.update_xaxes(
        title="head (upper row) of each KDA layer (lower row)",
        tickvals=places,
        ticktext=ticks,
        tickangle=0,
        tickfont={"size": 12},
        range=[places[0] - 1, places[-1] + 1],
        showgrid=False,
    )
    for y, text, anchor in (
        (floor, "the fastest that the gate allows", "top"),
        (text_tokens, "length of the text", "bottom"),
    ):
        figure.add_hline(y=y, line={"color": "#777777", "width": 1, "dash": "dot"})
        label(figure, places[0] - 0.8, y, text, 6, side="right")
        figure.layout.annotations[-1].update(yanchor=anchor, xshift=0)
    figure.update_layout(
        title="Most channels forget at once, a few remember", showlegend=False, height=460
    )
    return figure


def state_step(
    decay: np.ndarray,
    removed: np.ndarray,
    written: np.ndarray,
    state: np.ndarray,
    *,
    title: str,
    scale: float | None = None,
) -> go.Figure:
    """Draw what one token does to the state of one head.

    Parameters
    ----------
    decay
        ``[K]``: the factor of each key channel, from 0 to 1.
    removed, written
        ``[K, V]``: what the token takes out of the decayed state under its key, and what it puts
        there instead.
    state
        ``[K, V]``: the state after the token.
    title
        Of the figure: which token, head and layer.
    scale
        Magnitude at the dark ends of the colours; by default the largest one shown. Give the same
        one for several figures to compare them; what lies beyond it is as dark as it gets.

    Raises
    ------
    ValueError
        If the shapes do not belong together.
    """
    keys, values = state.shape
    if decay.shape != (keys,) or not removed.shape == written.shape == state.shape:
        raise ValueError(
            f"expected decay [K] and three matrices [K, V], got {decay.shape}, {removed.shape}, "
            f"{written.shape} and {state.shape}"
        )
    panels = (("removed", removed), ("written", written), ("state after", state))
    if scale is None:
        scale = max(float(np.abs(matrix).max()) for _, matrix in panels) or 1.0
    figure = make_subplots(
        cols=4,
        shared_yaxes=True,
        column_widths=[0.16, 0.28, 0.28, 0.28],
        horizontal_spacing=0.025,
        subplot_titles=["decay", *(name for name, _ in panels)],
    )
    figure.add_bar(
        x=decay,
        y=list(range(keys)),
        orientation="h",
        marker={"color": COLORS[0]},
        hovertemplate="key channel %{y}: factor %{x:.3f}<extra></extra>",
        row=1,
        col=1,
    )
    for column, (name, matrix) in enumerate(panels, 2):
        figure.add_heatmap(
            z=matrix.astype(np.float32),
            coloraxis="coloraxis",
            hovertemplate=f"key %{{y}}, value %{{x}}: %{{z:.3f}}<extra>{name}</extra>",
            row=1,
            col=column,
        )
    figure.update_xaxes(title="value channel", range=[-0.5, values - 0.5], showgrid=False)
    figure.update_xaxes(title="factor", range=[0, 1.05], tickvals=[0, 0.5, 1], col=1)
    figure.update_yaxes(range=[keys - 0.5, -0.5], showgrid=False)
    figure.update_yaxes(title="key channel", col=1)
    figure.update_layout(
        title=title,
        coloraxis={
            "colorscale": [list(stop) for stop in DIVERGING],
            "cmin": -scale,
            "cmax": scale,
            "colorbar": {
                "thickness": 14,
                "tickvals": [-scale, 0, scale],
                "ticktext": [f"-{scale:.2g}", "0", f"+{scale:.2g}"],
            },
        },
        showlegend=False,
        bargap=0.15,
        height=440,
        margin={"t": 100},
    )
    return figure


def exponent_lines(log_decay: float = -5.0, rows: int = 64) -> go.Figure:
    """Draw the two factors of a decay, and their product, row by row for a gate that stands still.

    Parameters
    ----------
    log_decay
        Of every row, negative.
    rows
        Rows of the chunk, from 1.
    """
    row = np.arange(1, rows + 1)
    G = log_decay * row
    largest, smallest = float(_FLOAT32.max), float(_FLOAT32.smallest_subnormal)
    figure = go.Figure()
    series = (("e<sup>-G</sup>, weighs a key", -G, 3, "dash"),
              ("e<sup>G</sup>, weighs a query", G, 0, "solid"))  # fmt: skip
    for name, exponent, color, dash in series:
        figure.add_scatter(
            x=row,
            y=exponent / np.log(10),
            mode="lines",
            name=name,
            line={"color": COLORS[color], "dash": dash, "width": 3},
            hovertemplate="row %{x}: 10^%{y:.0f}<extra></extra>",
        )
    figure.add_hrect(
        y0=log10(smallest), y1=log10(largest), fillcolor="#D9EAF5", line_width=0, layer="below"
    )
    figure.update_xaxes(title="row of the chunk", range=[0, rows + 1])
    figure.update_yaxes(title="power of ten", range=[-150, 150])
    at = rows * 2 // 3 - 1
    label(figure, row[at], -G[at] / np.log(10), series[0][0], 3, side="left")
    figure.layout.annotations[-1].yshift = 14  # clear of the slope
    label(figure, row[at], G[at] / np.log(10), series[1][0], 0, side="left")
    figure.layout.annotations[-1].yshift = -14
    label(figure, rows + 1, 0, "what float32 can hold", 6, side="left")
    figure.layout.annotations[-1].xshift = -6
    over = int(np.argmax(np.log(largest) < -G))
    if -G[over] > np.log(largest):
        figure.add_scatter(
            x=[row[over]],
            y=[-G[over] / np.log(10)],
            mode="markers+text",
            text=[f"row {row[over]}: infinity"],
            textposition="top left",
            marker={"symbol": "x", "size": 11, "color": "#000000"},
            hoverinfo="skip",
        )
    figure.update_layout(
        title="A product below 1, made of two factors that do not fit", showlegend=False
    )
    return figure


def decode_traffic_lines(
    state_bytes: int, bytes_per_token: int, max_tokens: int = 1_048_576
) -> go.Figure:
    """Draw the bytes that one decoded token moves for its sequence against the context length.

    Parameters
    ----------
    state_bytes
        Of all KDA layers; read and written for every token.
    bytes_per_token
        Rows of all MLA layers for one token of context; read.
    max_tokens
        Longest context to draw.
    """
    tokens = [1024 * 2**i for i in range(32) if 1024 * 2**i <= max_tokens]
    state = 2 * state_bytes
    cross = -(-state // bytes_per_token)
    series = (
        ("both", [(state + n * bytes_per_token) / 1e9 for n in tokens], 0, "solid"),
        ("MLA rows, read", [n * bytes_per_token / 1e9 for n in tokens], 3, "dash"),
        ("KDA state, read and written", [state / 1e9] * len(tokens), 2, "dot"),
    )
    figure = lines_over_context(tokens, series, "GB")
    figure.update_yaxes(
        type="log", title="GB moved per token", range=[log10(0.02), log10(50)],
        tickvals=[0.1, 1, 10],
    )  # fmt: skip
    label(figure, tokens[2], series[0][1][2], series[0][0], 0, side="above")
    label(figure, tokens[2], series[1][1][2], series[1][0], 3, side="right")
    figure.layout.annotations[-1].update(xshift=24, yshift=-6)
    label(figure, tokens[-3], state / 1e9, series[2][0], 2, side="below")
    if tokens[0] < cross < tokens[-1]:
        mark_crossing(figure, cross, state / 1e9, "bottom right")
    figure.update_layout(title="What a decoded token moves for its own memory", showlegend=False)
    return figure

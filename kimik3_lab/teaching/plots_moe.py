"""Figures of lesson 03: the permutation, SiTU, the MXFP4 grid, experts against batch size.

Needs plotly. Each function takes plain numbers and returns a figure.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import exp, log10, tanh

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kimik3_lab.teaching.plots import COLORS, label, series_style

__all__ = [
    "distinct_experts",
    "expert_bytes",
    "mxfp4_staircase",
    "permutation",
    "situ_curves",
]

_GREY = "#AAAAAA"


def permutation(
    expert_ids: Sequence[Sequence[int]], names: Sequence[str], token: int = 0
) -> go.Figure:
    """Draw each (token, choice) pair's way from token order to expert order.

    Left, the pairs as the router wrote them; right, sorted by expert. One token is followed.

    Examples
    --------
    >>> figure = permutation([[2, 0], [0, 1]], ["a", "b"])
    >>> list(figure.data[1].y)  # the pairs of token "a" go to rows 3 and 0
    [0, 3, None, 1, 0, None]
    """
    if not names or len(expert_ids) != len(names):
        raise ValueError(
            f"expected a name for each of the tokens, at least one; got {len(names)} names for "
            f"{len(expert_ids)} tokens"
        )
    top_k = len(expert_ids[0])
    flat = [expert for row in expert_ids for expert in row]
    order = sorted(range(len(flat)), key=flat.__getitem__)
    place = {pair: row for row, pair in enumerate(order)}
    figure = go.Figure()
    for thick in (False, True):
        mine = [pair for pair in range(len(flat)) if (pair // top_k == token) is thick]
        color = COLORS[0] if thick else _GREY
        figure.add_scatter(
            x=[0, 1, None] * len(mine),
            y=[y for pair in mine for y in (pair, place[pair], None)],
            mode="lines+markers",
            line={"color": color, "width": 3 if thick else 1},
            marker={"size": 9, "symbol": "circle" if thick else "circle-open"},
            hoverinfo="skip",
        )
    for t, name in enumerate(names):
        text = f"<b>{name}</b>" if t == token else name
        _side_text(figure, 0, t * top_k + (top_k - 1) / 2, text, "right")
    for expert in dict.fromkeys(flat[pair] for pair in order):
        rows = [row for row, pair in enumerate(order) if flat[pair] == expert]
        plural = "s" if len(rows) > 1 else ""
        text = f"expert {expert}: {len(rows)} row{plural}"
        _side_text(figure, 1, sum(rows) / len(rows), text, "left")
    figure.update_xaxes(visible=False, range=[-0.35, 1.6], fixedrange=True)
    figure.update_yaxes(visible=False, range=[len(flat) - 0.3, -0.7], fixedrange=True)
    figure.update_layout(
        title="From token order to expert order",
        showlegend=False,
        height=21 * len(flat) + 90,
        margin={"l": 10, "r": 10, "t": 60, "b": 20},
    )
    return figure


def _side_text(figure: go.Figure, x: float, y: float, text: str, anchor: str) -> None:
    figure.add_annotation(
        x=x,
        y=y,
        text=text,
        xanchor=anchor,
        xshift=-14 if anchor == "right" else 14,
        showarrow=False,
    )


def situ_curves(beta: float = 4.0, linear_beta: float = 25.0) -> go.Figure:
    """Draw the two factors of SiTU beside those of SwiGLU: the gate, and the part it multiplies."""
    gates = [i / 10 for i in range(-80, 121)]
    ups = [float(i) for i in range(-80, 81)]
    silu = [a / (1 + exp(-a)) for a in gates]
    bounded = [beta * tanh(a / beta) / (1 + exp(-a)) for a in gates]
    figure = make_subplots(cols=2, horizontal_spacing=0.12)
    panels = (
        (gates, silu, bounded, beta, "SiLU", "gate, w1 z"),
        (ups, ups, [linear_beta * tanh(b / linear_beta) for b in ups], linear_beta, "no bound",
         "up, w3 z"),
    )  # fmt: skip
    for panel, (x, plain, soft, bound, name, axis) in enumerate(panels, 1):
        for index, values in ((1, plain), (0, soft)):
            style = series_style(index)["line"]
            figure.add_scatter(x=x, y=values, mode="lines", line=style, row=1, col=panel)
        figure.add_hline(y=bound, line={"color": "#777777", "width": 1, "dash": "dot"},
                         row=1, col=panel)  # fmt: skip
        figure.update_xaxes(title=axis, row=1, col=panel)
        at = len(x) * 7 // 8
        label(figure, x[at], plain[at], name, 1, side="left", panel=panel)
        figure.layout.annotations[-1].xshift = -18  # clear of the slope
        label(figure, x[at], soft[at], "SiTU", 0, side="below", panel=panel)
        label(figure, x[0], bound, f"bound {bound:g}", 6, side="right", panel=panel)
        figure.layout.annotations[-1].update(yanchor="bottom", xshift=0)
    figure.update_yaxes(title="factor", row=1, col=1)
    figure.update_layout(
        title="SiTU follows SwiGLU near zero and levels off", showlegend=False, height=400
    )
    return figure


def mxfp4_staircase(magnitudes: Sequence[float]) -> go.Figure:
    """Draw what a weight becomes, in units of its group's scale."""
    grid = sorted({-m for m in magnitudes} | set(magnitudes))
    edges = [-8.0, *((a + b) / 2 for a, b in pairwise(grid)), 8.0]
    x = [edge for left, right in pairwise(edges) for edge in (left, right)]
    y = [value for value in grid for _ in range(2)]
    figure = go.Figure()
    line = series_style(1)["line"]
    figure.add_scatter(x=[-8, 8], y=[-8, 8], mode="lines", line=line, hoverinfo="skip")
    figure.add_scatter(x=x, y=y, mode="lines", line=series_style(0)["line"])
    figure.add_scatter(
        x=grid, y=grid, mode="markers", marker=series_style(0)["marker"],
        hovertemplate="%{y:g} is stored exactly<extra></extra>",
    )  # fmt: skip
    label(figure, 7.6, 7.6, "exact", 1, side="left")
    figure.layout.annotations[-1].xshift = -30  # clear of the slope
    label(figure, 7.0, 6.0, "stored", 0, side="below")
    ticks = [g for g in grid if abs(g) not in (0.5, 1.5)]
    figure.update_xaxes(title="weight / scale", tickvals=ticks, range=[-8.2, 8.2])
    figure.update_yaxes(title="stored value / scale", tickvals=ticks, range=[-8.2, 8.2])
    figure.update_layout(
        title="Fine steps near zero, coarse ones far out", showlegend=False, height=520
    )
    return figure


def distinct_experts(
    batches: Sequence[int],
    k3: tuple[Sequence[float], Sequence[float]],
    tiny: tuple[Sequence[float], Sequence[float]],
) -> go.Figure:
    """Draw the share of a layer's experts that a batch touches.

    Parameters
    ----------
    batches
        Tokens in a step.
    k3, tiny
        For the released and for the tiny shape: percentages from the formula and from draws, one
        for each batch. The drawn list may be shorter.
    """
    figure = go.Figure()
    for index, (name, (expected, drawn)) in enumerate(
        (("K3: 16 of 896", k3), ("tiny K3: 4 of 32", tiny))
    ):
        style = series_style(index)
        figure.add_scatter(
            x=list(batches), y=list(expected), mode="lines", line=style["line"],
            hovertemplate="%{x} tokens: %{y:.1f} %<extra>" + name + ", formula</extra>",
        )  # fmt: skip
        figure.add_scatter(
            x=list(batches)[: len(drawn)], y=list(drawn), mode="markers", marker=style["marker"],
            hovertemplate="%{x} tokens: %{y:.1f} %<extra>" + name + ", drawn</extra>",
        )  # fmt: skip
    _batch_axis(figure, batches)
    figure.update_yaxes(title="experts of a layer touched, %", range=[0, 108])
    middle = len(batches) // 2
    label(figure, batches[middle], k3[0][middle], "K3: 16 of 896", 0, side="right")
    figure.layout.annotations[-1].xshift = 24
    label(figure, batches[1], tiny[0][1], "tiny K3: 4 of 32", 1, side="above")
    figure.layout.annotations[-1].update(yshift=22, xshift=-28)
    figure.update_layout(title="Few tokens touch many experts", showlegend=False)
    return figure


def expert_bytes(
    batches: Sequence[int], experts_gb: Sequence[float], always_gb: float
) -> go.Figure:
    """Draw what a decode step reads: the touched experts, and the weights every step reads."""
    figure = go.Figure()
    series = (
        ("routed experts", list(experts_gb), 1),
        ("all other weights", [always_gb] * len(batches), 0),
    )
    for name, values, index in series:
        figure.add_scatter(
            x=list(batches), y=values, mode="lines+markers", **series_style(index),
            hovertemplate="%{x} tokens: %{y:,.1f} GB<extra>" + name + "</extra>",
        )  # fmt: skip
    _batch_axis(figure, batches)
    figure.update_yaxes(
        type="log",
        title="GB read in a step (logarithmic)",
        range=[1, log10(3000)],
        tickvals=[10, 30, 100, 300, 1000, 3000],
    )
    last = len(batches) - 2
    label(figure, batches[last], experts_gb[last], "routed experts", 1, side="left")
    figure.layout.annotations[-1].update(yshift=16, xshift=-16)
    label(figure, batches[last], always_gb, "all other weights", 0, side="below")
    figure.update_layout(
        title="Experts overtake all other weights within a few tokens", showlegend=False
    )
    return figure


def _batch_axis(figure: go.Figure, batches: Sequence[int]) -> None:
    figure.update_xaxes(
        type="log",
        title="tokens in the step (logarithmic)",
        range=[log10(batches[0]) - 0.06, log10(batches[-1]) + 0.06],
        tickvals=list(batches),
    )

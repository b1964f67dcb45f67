"""Lines over the length of the context: the axis that lessons 01 and 05 share.

Needs plotly.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log10

import plotly.graph_objects as go

from kimik3_lab.teaching.plots import COLORS

__all__ = ["lines_over_context", "mark_crossing"]


def lines_over_context(
    tokens: list[int], series: Sequence[tuple[str, list[float], int, str]], unit: str
) -> go.Figure:
    """Draw lines over a logarithmic context axis: name, values, colour and dash of each."""
    figure = go.Figure()
    for name, values, color, dash in series:
        figure.add_scatter(
            x=tokens,
            y=values,
            mode="lines",
            name=name,
            line={"color": COLORS[color], "dash": dash, "width": 3},
            hovertemplate="%{x:,} tokens: %{y:.3g} " + unit + "<extra>" + name + "</extra>",
        )
    figure.update_xaxes(
        type="log",
        title="context, tokens (logarithmic)",
        range=[log10(tokens[0]), log10(tokens[-1]) + 0.05],
        tickvals=[1024, 4096, 16384, 65536, 262144, 1048576],
        ticktext=["1 Ki", "4 Ki", "16 Ki", "64 Ki", "256 Ki", "1 Mi"],
    )
    return figure


def mark_crossing(figure: go.Figure, tokens: int, value: float, side: str) -> None:
    """Put a dot with its number of tokens where two lines cross."""
    figure.add_scatter(
        x=[tokens],
        y=[value],
        mode="markers+text",
        text=[f"{tokens:,} tokens"],
        textposition=side,
        marker={"symbol": "circle", "size": 11, "color": "#000000"},
        hoverinfo="skip",
    )

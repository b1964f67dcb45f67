"""Figure of lesson 00: what a batching policy does to throughput and to waiting.

Needs plotly. Takes the rows of benchmark results, so it draws a fresh run and a recorded one alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kimik3_lab.teaching.plots import label, series_style

__all__ = ["batching_figure"]

_PANELS = (
    ("output_tokens_per_s", "output tokens a second"),
    ("ttft_ms_mean", "mean time to first token, ms"),
)


def batching_figure(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> go.Figure:
    """Draw throughput and time to first token over concurrency, a line for each policy.

    Parameters
    ----------
    rows
        Policy name to the rows of :func:`kimik3_lab.benchmark.rows`, one row a concurrency. At most
        two policies: more would not leave room for their names.

    Returns
    -------
    plotly.graph_objects.Figure
        Two panels. Values that the samples could not support are left out.
    """
    figure = make_subplots(
        rows=1, cols=2, subplot_titles=[title for _, title in _PANELS], horizontal_spacing=0.12
    )
    for column, (key, _) in enumerate(_PANELS, 1):
        figure.update_yaxes(rangemode="tozero", row=1, col=column)
        for index, (name, cells) in enumerate(rows.items()):
            points = [(c["concurrency"], c[key]) for c in cells if c[key] is not None]
            figure.add_scatter(
                x=[x for x, _ in points],
                y=[y for _, y in points],
                name=name,
                mode="lines+markers",
                **series_style(index),
                hovertemplate=f"{name}, %{{x}} clients: %{{y:,.0f}}<extra></extra>",
                row=1,
                col=column,
            )
    streams = sorted({c["concurrency"] for cells in rows.values() for c in cells})
    figure.update_xaxes(type="log", tickvals=streams, title="clients (concurrency)")
    figure.update_annotations(font_size=16)
    key = _PANELS[-1][0]
    for index, (name, cells) in enumerate(rows.items()):
        if ends := [(c["concurrency"], c[key]) for c in cells if c[key] is not None]:
            label(figure, *max(ends), name, index, panel=len(_PANELS))
    figure.update_layout(
        title="One model, one processor, two batching policies",
        showlegend=False,
        height=430,
        margin={"t": 100, "r": 110},
    )
    return figure

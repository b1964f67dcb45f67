"""Figures of lesson 10: a server while it works.

Needs plotly. Plain numbers in, figure out.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kimik3_lab.teaching.plots import series_style

__all__ = ["dashboard"]


class _Sample(Protocol):
    seconds: float
    running: float
    waiting: float
    cache_usage: float
    output_tokens: float
    drafts: float
    accepted: float


def dashboard(samples: Sequence[_Sample]) -> go.Figure:
    """Draw requests, cache, tokens a second and tokens a verification over time.

    Parameters
    ----------
    samples
        Looks at a server's metrics in order of time
        (:class:`~kimik3_lab.teaching.widgets_engine.Sample`).

    Examples
    --------
    >>> from kimik3_lab.teaching.widgets_engine import Sample
    >>> looks = [Sample(0, 0, 0, 0, 0, 0, 0), Sample(1, 4, 2, 0.5, 30, 10, 20)]
    >>> [list(trace.y) for trace in dashboard(looks).data]
    [[0, 4], [0, 2], [0, 50.0], [30.0], [3.0]]
    """
    titles = ("Requests", "Cache in use, %", "Output tokens a second", "Tokens a verification")
    figure = make_subplots(
        2, 2, subplot_titles=titles, horizontal_spacing=0.1, vertical_spacing=0.18
    )
    seconds = [sample.seconds for sample in samples]
    for index, name in enumerate(("running", "waiting")):
        figure.add_scatter(
            x=seconds,
            y=[getattr(sample, name) for sample in samples],
            name=name,
            mode="lines",
            line_shape="hv",
            **series_style(index),
            row=1,
            col=1,
        )
    figure.add_scatter(
        x=seconds, y=[100 * sample.cache_usage for sample in samples],
        mode="lines", line_shape="hv", showlegend=False, **series_style(0), row=1, col=2,
    )  # fmt: skip
    # A rate belongs to the time between two looks; a pause without verifications has none.
    rates, verifications = [], []
    for before, after in pairwise(samples):
        elapsed = after.seconds - before.seconds
        rates.append((after.seconds, (after.output_tokens - before.output_tokens) / elapsed))
        drafts = after.drafts - before.drafts
        if drafts > 0:
            kept = (after.accepted - before.accepted) / drafts
            verifications.append((after.seconds, 1 + kept))
    for col, points in ((1, rates), (2, verifications)):
        figure.add_scatter(
            x=[x for x, _ in points], y=[y for _, y in points],
            mode="lines+markers", showlegend=False, **series_style(0), row=2, col=col,
        )  # fmt: skip
    figure.update_xaxes(title_text="seconds", row=2)
    if seconds:
        figure.update_xaxes(range=[0, max(seconds)])
    figure.update_yaxes(rangemode="tozero")
    figure.update_layout(
        height=480, legend={"orientation": "h", "x": 0, "y": 1.17}, margin={"t": 60}
    )
    return figure

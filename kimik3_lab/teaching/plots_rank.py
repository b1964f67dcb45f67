"""Figures of lesson 10: the ladder on one rank of eight, and what a step costs beside its floor.

Needs plotly. Each function takes plain content of ``data/results/h200/ladder.json`` and returns a
figure. What was measured here is labelled *Miniature, Measured*; what others measured on another
machine, *Published*.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kimik3_lab.teaching.plots import COLORS, series_style

__all__ = ["gains_beside_published", "rungs", "step_curves"]

_GREY = "#777777"


def rungs(rows: Sequence[Mapping[str, Any]], *, last_published: str) -> go.Figure:
    """Draw the throughput of every rung as a multiple of the first one, a line for a concurrency.

    Parameters
    ----------
    rows
        ``rows`` of the file, in ladder order.
    last_published
        The rung that the published comparison ends with.

    Examples
    --------
    >>> row = {"concurrency": 1, "beyond_published": False}
    >>> figure = rungs([{**row, "rung": "old", "output_tokens_per_s": 100.0},
    ...                 {**row, "rung": "new", "output_tokens_per_s": 150.0}], last_published="new")
    >>> list(figure.data[0].x)
    [1.0, 1.5]
    """
    names = list(dict.fromkeys(row["rung"] for row in rows))
    if last_published not in names:
        raise ValueError(f"no rung {last_published!r} among {names}")
    figure = go.Figure()
    for index, concurrency in enumerate(sorted({row["concurrency"] for row in rows})):
        rate = {
            row["rung"]: row["output_tokens_per_s"]
            for row in rows
            if row["concurrency"] == concurrency
        }
        there = [name for name in names if name in rate]
        name = f"{concurrency} concurrent"
        figure.add_scatter(
            x=[rate[n] / rate[there[0]] for n in there], y=there, mode="lines+markers", name=name,
            customdata=[rate[n] for n in there],
            hovertemplate="%{y}: %{x:.2f} times, %{customdata:.0f} tokens/s<extra>" + name
            + "</extra>", **series_style(index),
        )  # fmt: skip
    figure.add_hline(
        y=names.index(last_published) + 0.5, line={"color": _GREY, "dash": "dot", "width": 1.5}
    )
    figure.update_xaxes(title="output tokens/s, times the first rung")
    figure.update_yaxes(categoryorder="array", categoryarray=names)
    figure.update_layout(
        title="One rank of eight on one H200 (Miniature, Measured)",
        height=120 + 30 * len(names),
        legend={"x": 0.72, "y": 0.03, "yanchor": "bottom"},
    )
    return figure


def gains_beside_published(
    measured: Mapping[str, float], published: Mapping[str, float]
) -> go.Figure:
    """Draw September's throughput over 0.27.1's, by concurrency: ours and the published.

    Parameters
    ----------
    measured
        ``september_over_first`` of the file.
    published
        Of 8 B300 with collectives, the whole model and the same acceptance in both runs.

    Examples
    --------
    >>> figure = gains_beside_published({"1": 1.4}, {"1": 2.2})
    >>> [trace.name for trace in figure.data]
    ['one rank, H200: Miniature, Measured', '8 B300: Published']
    """
    figure = go.Figure()
    for index, (name, values) in enumerate(
        (("one rank, H200: Miniature, Measured", measured), ("8 B300: Published", published))
    ):
        keys = list(values)
        figure.add_bar(
            x=[f"{key} concurrent" for key in keys],
            y=[values[key] for key in keys],
            name=name,
            text=[f"{values[key]:.2f}" for key in keys],
            textposition="outside",
            marker={"color": COLORS[index], "pattern": {"shape": ("", "/")[index]}},
        )
    figure.add_hline(y=1, line={"color": _GREY, "dash": "dot", "width": 1.5})
    top = 1.2 * max([*measured.values(), *published.values()])
    figure.update_yaxes(title="output tokens/s, main over 0.27.1", range=[0, top])
    figure.update_layout(
        title="What one rank shows of the published gain",
        barmode="group",
        height=420,
        legend={"orientation": "h", "y": -0.15},
    )
    return figure


def step_curves(curves: Mapping[str, Sequence[Mapping[str, Any]]]) -> go.Figure:
    """Draw the time of a verification step against the context, and of a prompt, with floors.

    Parameters
    ----------
    curves
        ``curves`` of the file: ``decode`` and ``prefill``.

    Examples
    --------
    >>> decode = [{"requests": 1, "context": c, "target_ms": 5.0, "target_floor_ms": 3.0}
    ...           for c in (1000, 8000)]
    >>> prefill = [{"tokens": 1024, "start": 0, "ms": 30.0, "floor_ms": 20.0}]
    >>> len(step_curves({"decode": decode, "prefill": prefill}).data)
    4
    """
    figure = make_subplots(
        cols=2, subplot_titles=("verification, K = 8", "prompt, nothing cached"),
        horizontal_spacing=0.12,
    )  # fmt: skip
    numbers = sorted({row["requests"] for row in curves["decode"]})
    for index, number in enumerate(numbers):
        members = [row for row in curves["decode"] if row["requests"] == number]
        style = series_style(index)
        figure.add_scatter(
            x=[row["context"] for row in members], y=[row["target_ms"] for row in members],
            mode="lines+markers", name=f"{number} requests", col=1, row=1, **style,
        )  # fmt: skip
        figure.add_scatter(
            x=[row["context"] for row in members], y=[row["target_floor_ms"] for row in members],
            mode="lines", name=f"{number} requests, floor", showlegend=False, col=1, row=1,
            line={"color": style["line"]["color"], "dash": "dot", "width": 1.5},
        )  # fmt: skip
    fresh = [row for row in curves["prefill"] if row["start"] == 0]
    figure.add_scatter(
        x=[row["tokens"] for row in fresh], y=[row["ms"] for row in fresh], mode="lines+markers",
        name="measured", showlegend=False, col=2, row=1, **series_style(0),
    )  # fmt: skip
    figure.add_scatter(
        x=[row["tokens"] for row in fresh], y=[row["floor_ms"] for row in fresh], mode="lines",
        name="floor", col=2, row=1, line={"color": _GREY, "dash": "dot", "width": 1.5},
    )  # fmt: skip
    figure.update_xaxes(type="log", title="tokens in the cache", col=1)
    figure.update_xaxes(type="log", title="tokens of the prompt", col=2)
    figure.update_yaxes(type="log", title="ms", col=1)
    figure.update_yaxes(type="log", title="ms", col=2)
    figure.update_layout(
        title="A step of one rank on one H200, and its floor (Miniature, Measured)",
        height=460,
        legend={"orientation": "h", "y": -0.2},
    )
    return figure

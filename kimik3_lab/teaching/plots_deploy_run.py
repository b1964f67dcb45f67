"""Figures of lesson 13, second half: gaps between tokens, overload, queues, two servers at once.

Needs plotly. Plain numbers in, figure out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kimik3_lab.teaching.plots import COLORS, label, series_style

__all__ = ["gap_shares", "overload", "token_distances", "two_dashboards", "waits_by_length"]


def gap_shares(
    series: Mapping[str, Sequence[float]], *, sides: Mapping[str, str] | None = None
) -> go.Figure:
    """Draw which share of the gaps between two tokens of a stream is longer than a time.

    Parameters
    ----------
    series
        Name to the gaps in milliseconds.
    sides
        Where a name stands, as for :func:`~kimik3_lab.teaching.plots.label`; right if left out.

    Examples
    --------
    >>> figure = gap_shares({"one node": [10.0, 10.0, 400.0, 20.0]})
    >>> list(figure.data[0].x), list(figure.data[0].y)
    ([10.0, 10.0, 20.0, 400.0], [1.0, 0.75, 0.5, 0.25])
    """
    figure = go.Figure()
    figure.update_xaxes(
        type="log", title="milliseconds between two tokens",
        tickvals=[10, 20, 50, 100, 200, 500, 1000, 2000],
    )  # fmt: skip
    figure.update_yaxes(
        type="log", title="share of gaps at least that long", tickvals=[1, 0.1, 0.01, 0.001],
        ticktext=["1", "1 in 10", "1 in 100", "1 in 1,000"],
    )  # fmt: skip
    for index, (name, gaps) in enumerate(series.items()):
        if not gaps:
            raise ValueError(f"{name} has no gap to draw")
        ordered = sorted(gaps)
        shares = [1 - place / len(ordered) for place in range(len(ordered))]
        keep = _thinned(ordered, shares)
        style = series_style(index)
        figure.add_scatter(
            x=[ordered[i] for i in keep], y=[shares[i] for i in keep], mode="lines", name=name,
            line={**style["line"], "shape": "vh"}, showlegend=False,
            hovertemplate="%{y:.3g} of the gaps: %{x:.0f} ms or more<extra>" + name + "</extra>",
        )  # fmt: skip
        middle = next((i for i in keep if shares[i] <= 0.005), keep[-1])
        label(
            figure, ordered[middle], shares[middle], name, index,
            side=(sides or {}).get(name, "right"),
        )  # fmt: skip
    figure.update_layout(height=420)
    return figure


def _thinned(values: Sequence[float], shares: Sequence[float]) -> list[int]:
    """Leave out points that nobody could see: a step of less than 1 % in either direction."""
    keep = [0]
    for i in range(1, len(values)):
        last = keep[-1]
        if values[i] > 1.01 * values[last] or shares[i] < 0.97 * shares[last]:
            keep.append(i)
    return keep if keep[-1] == len(values) - 1 else [*keep, len(values) - 1]


def overload(
    arms: Mapping[str, tuple[Sequence[float], Sequence[float], Sequence[float]]], limit_s: float
) -> go.Figure:
    """Draw when each request came and how long it waited for its first token, an arm a panel.

    Parameters
    ----------
    arms
        Name to arrivals, seconds to the first token of those, and arrivals that were refused.
    limit_s
        What was promised.

    Examples
    --------
    >>> figure = overload({"no bound": ([0.0, 1.0], [0.5, 3.0], [])}, 2.0)
    >>> [trace.name for trace in figure.data]
    ['answered in time', 'answered late', 'refused']
    """
    figure = make_subplots(
        cols=len(arms), shared_yaxes=True, horizontal_spacing=0.05, subplot_titles=list(arms)
    )
    most = max(max(waits, default=0.0) for _, waits, _ in arms.values())
    named: set[str] = set()
    for column, (came, waits, refused) in enumerate(arms.values(), 1):
        pairs = list(zip(came, waits, strict=True))
        good = [(at, wait) for at, wait in pairs if wait <= limit_s]
        late = [(at, wait) for at, wait in pairs if wait > limit_s]
        for name, points, color, symbol in (
            ("answered in time", good, COLORS[0], "circle"),
            ("answered late", late, COLORS[3], "triangle-up"),
            ("refused", [(at, -0.03 * most) for at in refused], "#000000", "x-thin"),
        ):
            marker = {"color": color, "symbol": symbol, "size": 8}
            if symbol == "x-thin":
                marker |= {"line": {"width": 1.5, "color": color}}
            figure.add_scatter(
                x=[at for at, _ in points], y=[wait for _, wait in points], mode="markers",
                name=name, showlegend=bool(points) and name not in named, marker=marker,
                row=1, col=column,
            )  # fmt: skip
            named |= {name} if points else set()
        figure.add_hline(
            y=limit_s, line={"dash": "dash", "width": 2, "color": "#444444"}, row=1, col=column
        )
    figure.update_xaxes(title="arrival, s")
    figure.update_yaxes(title="seconds to the first token", row=1, col=1)
    figure.update_layout(
        height=420, margin={"t": 90}, legend={"orientation": "h", "x": 0, "y": 1.22}
    )
    return figure


def waits_by_length(
    classes: Sequence[str], queues: Mapping[str, Sequence[float]], worst: Mapping[str, float]
) -> go.Figure:
    """Draw the mean wait by length of the prompt under several queues, and the longest of all.

    Parameters
    ----------
    classes
        Names of the lengths.
    queues
        Name of a queue to the mean wait in each class, seconds.
    worst
        To the longest wait of a single request.

    Examples
    --------
    >>> figure = waits_by_length(["short"], {"fcfs": [3.0]}, {"fcfs": 9.0})
    >>> [list(trace.y) for trace in figure.data]
    [[3.0], [9.0]]
    """
    figure = make_subplots(
        cols=2, column_widths=[0.7, 0.3], horizontal_spacing=0.1,
        subplot_titles=["Mean, by length of the prompt", "Longest of all"],
    )  # fmt: skip
    for index, (name, means) in enumerate(queues.items()):
        look: dict[str, Any] = {
            "color": COLORS[index], "line": {"color": "#222222", "width": 1},
            "pattern": {"shape": ("", "/", "x", ".", "\\")[index], "fgcolor": "#222222",
                        "solidity": 0.2, "fillmode": "overlay"},
        }  # fmt: skip
        figure.add_bar(
            x=list(classes), y=list(means), name=name, marker=look, row=1, col=1,
            text=[f"{m:.1f}" for m in means], textposition="outside", cliponaxis=False,
        )  # fmt: skip
        figure.add_bar(
            x=[name], y=[worst[name]], marker=look, showlegend=False, row=1, col=2,
            text=[f"{worst[name]:.0f}"], textposition="outside", cliponaxis=False,
        )  # fmt: skip
    figure.update_yaxes(title="seconds to the first token", row=1, col=1)
    figure.update_xaxes(type="category", title="tokens", row=1, col=1)
    figure.update_xaxes(showticklabels=False, row=1, col=2)
    figure.update_layout(
        height=420, margin={"t": 90}, legend={"orientation": "h", "x": 0, "y": 1.25}
    )
    return figure


def token_distances(
    answers: Mapping[str, Sequence[float]], tolerance: float, *, wrong: float | None = None
) -> go.Figure:
    """Draw how far two servers' log-probabilities of the same tokens are apart, token by token.

    Parameters
    ----------
    answers
        Prompt to the distances, 0 where they are equal to the last digit.
    tolerance
        Above this they would be called different.
    wrong
        Distance of a token that is another one, if one is to be drawn for comparison.

    Examples
    --------
    >>> figure = token_distances({"def f": [0.0, 1e-5]}, 1e-3)
    >>> list(figure.data[0].y)
    [1e-08, 1e-05]
    """
    figure = go.Figure()
    figure.update_yaxes(type="log", title="distance of the log-probabilities", range=[-8.4, 1.2],
                        tickformat="~e", dtick=1)  # fmt: skip
    for index, (prompt, distances) in enumerate(answers.items()):
        figure.add_scatter(
            x=list(range(1, len(distances) + 1)), y=[max(d, 1e-8) for d in distances],
            mode="markers", name=repr(prompt[:24]), marker=series_style(index)["marker"],
        )  # fmt: skip
    figure.add_hline(y=tolerance, line={"dash": "dash", "width": 2, "color": "#000000"})
    figure.add_annotation(
        x=0, xref="paper", xanchor="left", y=_log(tolerance), text="called different above",
        showarrow=False, yshift=10,
    )  # fmt: skip
    if wrong is not None:
        figure.add_hline(y=wrong, line={"dash": "dot", "width": 2, "color": COLORS[3]})
        figure.add_annotation(
            x=0, xref="paper", xanchor="left", y=_log(wrong), showarrow=False, yshift=10,
            text="smallest distance to another token that was ever possible",
        )  # fmt: skip
    figure.update_xaxes(title="token of the answer")
    figure.update_layout(
        height=420, margin={"t": 30}, legend={"orientation": "h", "x": 0, "y": -0.25}
    )
    return figure


def _log(value: float) -> float:
    return math.log10(value)


def two_dashboards(servers: Mapping[str, Sequence[Mapping[str, float]]]) -> go.Figure:
    """Draw several servers' own metrics under the same load, a panel a metric.

    The first two are drawn over the tokens that the server has written, not over time: what was
    decided is the same on a quick machine and on a slow one. The last shows the time.

    Parameters
    ----------
    servers
        Name to samples as :class:`~kimik3_lab.teaching.widgets_engine.Sample` has them; tokens and
        seconds count from the first sample on.

    Examples
    --------
    >>> sample = {"seconds": 2.0, "running": 4.0, "waiting": 8.0, "output_tokens": 100.0}
    >>> figure = two_dashboards({"vLLM": [sample, sample | {"output_tokens": 130.0}]})
    >>> [list(trace.x) for trace in figure.data], list(figure.data[2].y)
    ([[0.0, 30.0], [0.0, 30.0], [0.0, 0.0]], [0.0, 30.0])
    """
    figure = make_subplots(
        cols=3, subplot_titles=["Running", "Waiting", "Tokens written"], horizontal_spacing=0.08
    )
    for index, (name, samples) in enumerate(servers.items()):
        first = samples[0]
        tokens = [sample["output_tokens"] - first["output_tokens"] for sample in samples]
        seconds = [sample["seconds"] - first["seconds"] for sample in samples]
        style = series_style(index)["line"]
        for column, (x, y, shape) in enumerate(
            (
                (tokens, [sample["running"] for sample in samples], "hv"),
                (tokens, [sample["waiting"] for sample in samples], "hv"),
                (seconds, tokens, "linear"),
            ),
            1,
        ):
            figure.add_scatter(
                x=x, y=y, mode="lines", name=name, line={**style, "shape": shape},
                showlegend=column == 1, row=1, col=column,
            )  # fmt: skip
    for column, title in enumerate(("tokens written", "tokens written", "seconds"), 1):
        figure.update_xaxes(title=title, row=1, col=column)
    figure.update_yaxes(rangemode="tozero")
    figure.update_layout(
        height=360, margin={"t": 90}, legend={"orientation": "h", "x": 0, "y": 1.3}
    )
    return figure

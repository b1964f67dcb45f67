"""Figures of lesson 02: loads, the bias as a quantile, what experts like, ranks that wait.

Needs plotly. Each function takes plain numbers and returns a figure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log10

import plotly.graph_objects as go

from kimik3_lab.teaching.plots import COLORS, SEQUENTIAL, label, series_style

__all__ = [
    "bias_quantile",
    "expert_taste",
    "load_over_steps",
    "placements",
    "rank_imbalance",
    "sorted_loads",
]


def sorted_loads(loads: Mapping[str, Sequence[float]]) -> go.Figure:
    """Draw loads of one layer's experts, the busiest first, in units of the fair share.

    Parameters
    ----------
    loads
        Name of each series, and the number of tokens that each expert got.

    Examples
    --------
    >>> figure = sorted_loads({"alone": [1, 3, 0], "balanced": [1, 2, 1]})
    >>> [round(share, 2) for share in figure.data[0].y]
    [2.25, 0.75, 0.0]
    """
    figure = go.Figure()
    experts = 0
    for index, (name, load) in enumerate(loads.items()):
        experts = len(load)
        mean = sum(load) / experts
        shares = sorted((value / mean for value in load), reverse=True)
        figure.add_scatter(
            x=list(range(1, experts + 1)), y=shares, mode="lines+markers", **series_style(index),
            hovertemplate="%{y:.2f} times the fair share<extra>" + name + "</extra>",
        )  # fmt: skip
        label(figure, experts, shares[-1], name, index, side="right")
    _spread(figure)
    figure.add_hline(y=1, line={"color": "#777777", "width": 1, "dash": "dot"})
    # Room for the names at the end of each line.
    figure.update_xaxes(title="experts of the layer, busiest first", range=[0.4, 1.15 * experts])
    figure.update_yaxes(title="load / fair share", rangemode="tozero")
    figure.update_layout(
        title="The bias brings every expert close to its share", showlegend=False, height=400
    )
    return figure


def bias_quantile(required: Sequence[float], share: float, solved: float) -> go.Figure:
    """Draw how many tokens would choose an expert, by its bias, and the bias that is wanted.

    Parameters
    ----------
    required
        For each token, the bias at which the expert just reaches that token's cutoff.
    share
        The wanted share of tokens, k / E.
    solved
        The bias at which that share chooses the expert.

    Examples
    --------
    >>> bias_quantile([0.1, -0.2, 0.3, 0.0], 0.25, -0.2).data[0].x[0]
    -0.2
    """
    ordered = sorted(required)
    count = len(ordered)
    figure = go.Figure()
    figure.add_scatter(
        x=ordered, y=[100 * (i + 1) / count for i in range(count)], mode="lines",
        line=series_style(0)["line"],
        hovertemplate="bias %{x:.3f}: %{y:.1f} % of tokens<extra></extra>",
    )  # fmt: skip
    dotted = {"color": "#777777", "width": 1, "dash": "dot"}
    figure.add_hline(y=100 * share, line=dotted)
    figure.add_scatter(
        x=[solved], y=[100 * share], mode="markers",
        marker={**series_style(1)["marker"], "size": 13},
        hovertemplate="solved bias %{x:.3f}<extra></extra>",
    )  # fmt: skip
    label(figure, solved, 100 * share, f"bias {solved:+.3f}", 1, side="right")
    figure.layout.annotations[-1].update(yanchor="top", yshift=-4)
    figure.update_xaxes(title="bias of this expert")
    figure.update_yaxes(title="tokens that choose it, %", range=[0, 103])
    figure.update_layout(
        title=f"The bias that {100 * share:g} % of tokens say yes to", showlegend=False, height=400
    )
    return figure


def load_over_steps(
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    x_title: str,
    title: str,
    log_x: bool = False,
) -> go.Figure:
    """Draw the load of the busiest expert over steps, in units of the fair share (logarithmic).

    Parameters
    ----------
    series
        Name, steps and values of each line.
    x_title, title
        What a step is, and what there is to see.
    log_x
        Steps on a logarithmic axis.

    Examples
    --------
    >>> figure = load_over_steps({"sign": ([0, 1], [8.0, 7.5])}, x_title="batch", title="Slow")
    >>> figure.layout.annotations[0].text
    'sign'
    """
    figure = go.Figure()
    last = max(steps[-1] for steps, _ in series.values())
    figure.update_xaxes(title=x_title, type="log" if log_x else "linear")
    if log_x:  # room for the names at the end of each line
        decades = range(int(log10(last)) + 1)
        figure.update_xaxes(range=[-0.1, log10(last) + 0.75], tickvals=[10**n for n in decades])
    top = max(max(values) for _, values in series.values())
    ticks = [tick for tick in (1, 1.2, 1.5, 2, 3, 4, 6, 8, 12, 16, 32) if tick <= 1.3 * top]
    figure.update_yaxes(
        title="busiest expert / fair share (logarithmic)", type="log", tickvals=ticks,
        range=[log10(0.88), log10(1.3 * top)],
    )  # fmt: skip
    for index, (name, (steps, values)) in enumerate(series.items()):
        figure.add_scatter(
            x=list(steps), y=list(values), **series_style(index),
            mode="lines+markers" if len(steps) <= 20 else "lines",
            hovertemplate="%{x}: %{y:.2f}<extra>" + name + "</extra>",
        )  # fmt: skip
        label(figure, steps[-1], values[-1], name, index, side="right")
        if values[-1] < 1.05:  # clear of the axis and of a line that ends at the same height
            figure.layout.annotations[-1].update(yanchor="bottom" if index else "top")
    figure.update_layout(title=title, showlegend=False, height=420)
    return figure


def expert_taste(kinds: Sequence[str], lift: Sequence[Sequence[float]]) -> go.Figure:
    """Draw how much more often than on average each kind of token chooses each expert.

    Parameters
    ----------
    kinds
        Names of the kinds of tokens, one for each row.
    lift
        For each kind and expert, the share of such tokens that choose it over the share of all.

    Examples
    --------
    >>> expert_taste(["digit", "name"], [[2.0, 0.5], [1.0, 1.0]]).data[0].z[0][0]
    2.0
    """
    if len(kinds) != len(lift):
        raise ValueError(f"expected a row for each of {len(kinds)} kinds, got {len(lift)} rows")
    figure = go.Figure(
        go.Heatmap(
            z=[list(row) for row in lift],
            y=list(kinds),
            x=list(range(len(lift[0]))),
            colorscale=[list(stop) for stop in SEQUENTIAL],
            zmin=0,
            colorbar={"title": "times the average"},
            hovertemplate="expert %{x}, %{y}: %{z:.1f} times the average<extra></extra>",
        )
    )
    figure.update_xaxes(title="expert", dtick=4, showgrid=False)
    figure.update_yaxes(autorange="reversed", showgrid=False)
    figure.update_layout(title="Balanced experts still have tastes", height=60 * len(kinds) + 130)
    return figure


def rank_imbalance(
    tokens: Sequence[int], series: Mapping[str, Sequence[float]], title: str
) -> go.Figure:
    """Draw the load of the busiest rank over the mean, against tokens in the step.

    Examples
    --------
    >>> figure = rank_imbalance([1, 16], {"uniform": [4.0, 1.5]}, "Large steps are even")
    >>> list(figure.data[0].y)
    [4.0, 1.5]
    """
    figure = go.Figure()
    figure.update_xaxes(
        type="log", title="tokens in the step (logarithmic)", tickvals=list(tokens),
        range=[log10(tokens[0]) - 0.08, log10(tokens[-1]) + 0.45],
    )  # fmt: skip
    figure.update_yaxes(title="busiest rank / mean", rangemode="tozero")
    for index, (name, values) in enumerate(series.items()):
        figure.add_scatter(
            x=list(tokens), y=list(values), mode="lines+markers", **series_style(index),
            hovertemplate="%{x} tokens: %{y:.2f}<extra>" + name + "</extra>",
        )  # fmt: skip
        label(figure, tokens[-1], values[-1], name, index, side="right")
    _spread(figure)
    figure.add_hline(y=1, line={"color": COLORS[6], "width": 1, "dash": "dot"})
    figure.update_layout(title=title, showlegend=False, height=420)
    return figure


def placements(
    values: Mapping[str, Sequence[float]],
    *,
    title: str = "Placed by load, the busiest rank has less to do",
    y_title: str = "busiest rank / mean",
    digits: int = 2,
    best: float | None = 1.0,
) -> go.Figure:
    """Draw a value for each placement: a dot a layer, a line at their mean.

    Parameters
    ----------
    values
        Name of each placement, and its value in every layer.
    title, y_title
        What there is to see, and what the value is: the busiest rank over the mean.
    digits
        Decimals that are written.
    best
        A dotted line at what no placement can beat; None draws none.

    Examples
    --------
    >>> figure = placements({"in order": [1.4, 1.2], "by load": [1.1, 1.0]})
    >>> list(figure.data[1].y), round(figure.layout.shapes[0].y0, 2)
    ([1.1, 1.0], 1.3)
    """
    figure = go.Figure()
    for index, (name, found) in enumerate(values.items()):
        mean = sum(found) / len(found)
        # Beside each other, in the order of the layers.
        x = [index + 0.5 * (i / max(1, len(found) - 1) - 0.5) for i in range(len(found))]
        figure.add_scatter(
            x=x, y=list(found), mode="markers", marker=series_style(index)["marker"],
            hovertemplate=f"{y_title}: %{{y:,.{digits}f}}<extra>{name}</extra>",
        )  # fmt: skip
        figure.add_shape(
            type="line", x0=index - 0.32, x1=index + 0.32, y0=mean, y1=mean,
            line={"color": COLORS[index], "width": 3},
        )  # fmt: skip
        label(figure, index + 0.3, mean, f"{mean:,.{digits}f}", index, side="right")
    names = list(values)
    figure.update_xaxes(tickvals=list(range(len(names))), ticktext=names, showgrid=False)
    figure.update_yaxes(title=y_title)
    if best is not None:
        figure.add_hline(y=best, line={"color": COLORS[6], "width": 1, "dash": "dot"})
    figure.update_layout(title=title, showlegend=False, height=420)
    return figure


def _spread(figure: go.Figure, gap: float = 0.14) -> None:
    """Move names at the right margin apart, in the order of their lines."""
    notes = sorted(figure.layout.annotations, key=lambda note: note.y)
    notes[0].update(yanchor="top")
    span = max(max(trace.y) for trace in figure.data)
    last = None
    for note in notes:
        wanted = note.y if last is None else max(note.y, last + gap * span / 2)
        note.update(y=wanted)
        last = wanted

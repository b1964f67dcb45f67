"""Figures of lesson 09: how many drafts are kept, and how many to make.

Needs plotly. Each function takes plain numbers and returns a figure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kimik3_lab.teaching.plots import label, series_style

__all__ = ["accepted_lengths", "speed_by_k"]


def accepted_lengths(counts: Sequence[int], position_rates: Sequence[float]) -> go.Figure:
    """Draw how often 0, 1, ... K drafts were kept, and how often the draft at each place was.

    Parameters
    ----------
    counts
        Verifications that kept exactly 0 to K drafts.
    position_rates
        For each place from 1 to K, the share of verifications that kept the draft there.

    Examples
    --------
    >>> figure = accepted_lengths([1, 1, 2], [0.75, 0.5])
    >>> list(figure.data[0].y), list(figure.data[1].y)
    ([25.0, 25.0, 50.0], [75.0, 50.0])
    """
    if len(counts) != len(position_rates) + 1:
        raise ValueError(
            f"K drafts can be kept in K + 1 ways: got {len(counts)} counts for "
            f"{len(position_rates)} places"
        )
    total = sum(counts)
    figure = make_subplots(cols=2, horizontal_spacing=0.13)
    figure.add_bar(
        x=list(range(len(counts))), y=[100 * count / total for count in counts],
        marker={"color": series_style(0)["line"]["color"]},
        hovertemplate="%{x} kept: %{y:.1f} %<extra></extra>", row=1, col=1,
    )  # fmt: skip
    figure.add_scatter(
        x=list(range(1, len(counts))), y=[100 * rate for rate in position_rates],
        mode="lines+markers", **series_style(1),
        hovertemplate="draft %{x}: %{y:.1f} %<extra></extra>", row=1, col=2,
    )  # fmt: skip
    figure.update_xaxes(title="drafts kept", dtick=1, row=1, col=1)
    figure.update_xaxes(title="place of the draft", dtick=1, row=1, col=2)
    figure.update_yaxes(title="of verifications, %", rangemode="tozero", row=1, col=1)
    figure.update_yaxes(title="kept, %", range=[0, 100], row=1, col=2)
    figure.update_layout(
        title="All or little: drafts are kept in runs", showlegend=False, height=380
    )
    return figure


def speed_by_k(ks: Sequence[int], speed: Mapping[str, Sequence[float]]) -> go.Figure:
    """Draw speed against the number of drafts, one line a cost of rows; the best of each is marked.

    Examples
    --------
    >>> figure = speed_by_k([0, 1, 2], {"free": [1, 1.5, 1.8], "dear": [1, 1.2, 1.1]})
    >>> [trace.x for trace in figure.data if trace.mode == "markers"]
    [(2,), (1,)]
    """
    figure = go.Figure()
    for index, (name, values) in enumerate(speed.items()):
        style = series_style(index)
        figure.add_scatter(
            x=list(ks), y=list(values), mode="lines+markers", **style,
            hovertemplate="K = %{x}: %{y:.2f}<extra>" + name + "</extra>",
        )  # fmt: skip
        best = max(range(len(ks)), key=values.__getitem__)
        figure.add_scatter(
            x=(ks[best],), y=(values[best],), mode="markers", hoverinfo="skip",
            marker={**style["marker"], "size": 17, "symbol": "circle-open", "line": {"width": 2}},
        )  # fmt: skip
        label(figure, ks[-1], values[-1], name, index, side="right")
        figure.layout.annotations[-1].update(xshift=14)  # clear of the ring
    figure.update_xaxes(title="drafts K", tickvals=list(ks), range=[ks[0] - 0.2, ks[-1] + 2.6])
    figure.update_yaxes(title="speed against no drafts", rangemode="tozero")
    figure.update_layout(title="The dearer a row, the fewer drafts", showlegend=False, height=400)
    return figure

"""Two servers side by side: what each took for the same requests (lesson 13).

Needs plotly. Plain numbers in, figure out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kimik3_lab.teaching.plots import series_style

__all__ = ["side_by_side"]

_PANELS = (
    ("first_token_ms", "First token, ms"),
    ("token_ms", "Each further token, ms"),
    ("seconds", "Whole answer, s"),
)


def side_by_side(rows: Sequence[Mapping[str, Any]]) -> go.Figure:
    """Draw time to first token, time of a token and time of an answer, a bar for each server.

    Parameters
    ----------
    rows
        One a server, as :meth:`kimik3_lab.vllm_cpu.side_by_side.SideBySide.rows` makes them.

    Raises
    ------
    ValueError
        If there is no row.

    Examples
    --------
    >>> rows = [{"server": "vLLM", "first_token_ms": 90.0, "token_ms": 30.0, "seconds": 0.6},
    ...         {"server": "k3lab", "first_token_ms": 40.0, "token_ms": 20.0, "seconds": 0.4}]
    >>> [list(trace.y) for trace in side_by_side(rows).data]
    [[90.0], [30.0], [0.6], [40.0], [20.0], [0.4]]
    """
    if not rows:
        raise ValueError("no server to draw: give one row a server")
    figure = make_subplots(
        1, len(_PANELS), subplot_titles=[title for _, title in _PANELS], horizontal_spacing=0.1
    )
    for index, row in enumerate(rows):
        for column, (name, _) in enumerate(_PANELS, start=1):
            figure.add_bar(
                x=[row["server"]],
                y=[row[name]],
                text=[f"{row[name]:.3g}"],
                textposition="outside",
                cliponaxis=False,
                marker_color=series_style(index)["marker"]["color"],
                # The second channel beside the name under each bar.
                marker_pattern_shape=("", "/", "x", ".", "\\", "-", "+")[index],
                showlegend=False,
                row=1,
                col=column,
            )
    figure.update_yaxes(rangemode="tozero")
    figure.update_layout(height=380, bargap=0.4)
    return figure

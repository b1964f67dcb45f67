"""Figures of lesson 07: padding of pages, block tables, and hits against memory.

Needs plotly. Each function takes plain numbers and returns a figure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from kimik3_lab.teaching.plots import COLORS, label, series_style

__all__ = ["block_tables", "hits_by_memory", "padding_by_drafts"]

#: Kinds of cells in a table: what the text says, and the colour behind it.
_KINDS = {"": "#F4F4F4", "rows": "#B7D7EC", "state": "#F6D79B", "export": "#A9DFCB"}


def padding_by_drafts(ks: Sequence[int], padding: Mapping[str, Sequence[float]]) -> go.Figure:
    """Draw the padding of a state's page, in per cent of the state, against the drafts K.

    Parameters
    ----------
    ks
        Numbers of drafts.
    padding
        For each type of the rows, the share of padding for each K: 0.087 is 8.7 %.

    Examples
    --------
    >>> figure = padding_by_drafts([0, 1], {"bf16": [0.087, 0.075]})
    >>> [round(value, 1) for value in figure.data[0].y]
    [8.7, 7.5]
    """
    figure = go.Figure()
    for index, (name, shares) in enumerate(padding.items()):
        if len(shares) != len(ks):
            raise ValueError(f"{name}: got {len(shares)} shares for {len(ks)} numbers of drafts")
        figure.add_scatter(
            x=list(ks), y=[100 * share for share in shares], mode="lines+markers",
            **series_style(index), hovertemplate="K = %{x}: %{y:.1f} %<extra>" + name + "</extra>",
        )  # fmt: skip
        label(figure, ks[-1], 100 * shares[-1], name, index)
    figure.update_xaxes(title="drafts K", tickvals=list(ks), range=[ks[0] - 0.3, ks[-1] + 1.2])
    figure.update_yaxes(title="padding, % of the state", rangemode="tozero")
    figure.update_layout(
        title="A few bytes more, and the block is 128 tokens longer", showlegend=False, height=380
    )
    return figure


def block_tables(
    tables: Mapping[str, Sequence[tuple[str, str]]], *, block_size: int, title: str
) -> go.Figure:
    """Draw block tables: a line a group, a cell a column, empty where the null block stands.

    Parameters
    ----------
    tables
        For each group its cells: kind (``"rows"``, ``"state"``, ``"export"`` or ``""``), and what
        is written below it, such as the id of the block or the tokens that a state has read.
    block_size
        Tokens of a column, for the axis.

    Raises
    ------
    ValueError
        If a kind is unknown.

    Examples
    --------
    >>> figure = block_tables(
    ...     {"MLA": [("rows", "1")], "KDA": [("", "")]}, block_size=16, title="a")
    >>> list(figure.data[0].text)
    [['rows<br>1'], ['']]
    """
    kinds = list(_KINDS)
    width = max(len(cells) for cells in tables.values())
    padded = [[*cells, *[("", "")] * (width - len(cells))] for cells in tables.values()]
    for kind in {kind for cells in padded for kind, _ in cells} - _KINDS.keys():
        raise ValueError(f"no kind of cell is called {kind!r}: expected one of {kinds}")
    colors = [
        edge
        for number, color in enumerate(_KINDS.values())
        for edge in ((number / len(kinds), color), ((number + 1) / len(kinds), color))
    ]
    figure = go.Figure(
        go.Heatmap(
            z=[[kinds.index(kind) for kind, _ in cells] for cells in padded],
            text=[[f"{kind}<br>{note}" if kind else "" for kind, note in c] for c in padded],
            x=[f"{i * block_size:,} to {(i + 1) * block_size:,}" for i in range(width)],
            y=list(tables), texttemplate="%{text}", colorscale=colors, zmin=-0.5,
            zmax=len(kinds) - 0.5, showscale=False, xgap=3, ygap=3, hoverinfo="skip",
        )
    )  # fmt: skip
    figure.update_xaxes(title="tokens of the column", type="category", showgrid=False)
    figure.update_yaxes(autorange="reversed", type="category", showgrid=False)
    figure.update_layout(title=title, height=150 + 62 * len(tables))
    return figure


def hits_by_memory(
    gib: Sequence[float], rates: Mapping[str, Sequence[float]], *, ceiling: float
) -> go.Figure:
    """Draw hit rates against the memory of the pool, one line a rule.

    Parameters
    ----------
    gib
        Memory for the cache on each GPU.
    rates
        For each rule the hit rate at each size, in [0, 1].
    ceiling
        Share of the tokens that came before: no cache finds more.

    Examples
    --------
    >>> figure = hits_by_memory([1, 2], {"all": [0.2, 0.5]}, ceiling=0.8)
    >>> figure.data[0].y, figure.layout.shapes[0].y0
    ((20.0, 50.0), 80.0)
    """
    figure = go.Figure()
    for index, (name, values) in enumerate(rates.items()):
        if len(values) != len(gib):
            raise ValueError(f"{name}: got {len(values)} rates for {len(gib)} sizes")
        figure.add_scatter(
            x=tuple(gib), y=tuple(100 * value for value in values), mode="lines+markers", name=name,
            **series_style(index),
            hovertemplate="%{x:.1f} GiB: %{y:.1f} %<extra>" + name + "</extra>",
        )  # fmt: skip
    figure.add_hline(y=100 * ceiling, line={"color": COLORS[6], "dash": "dot", "width": 1.5})
    figure.add_annotation(
        x=0, xref="paper", xanchor="left", y=100 * ceiling, yanchor="bottom", showarrow=False,
        text="tokens that were there before",
    )  # fmt: skip
    figure.update_xaxes(title="cache on each GPU, GiB")
    lowest = 100 * min(map(min, rates.values()))
    figure.update_yaxes(title="prompt tokens found, %", range=[max(lowest // 10 * 10 - 10, 0), 92])
    figure.update_layout(
        title="Which states to keep, when memory is short", height=420,
        legend={"x": 0.98, "y": 0.04, "xanchor": "right", "yanchor": "bottom"},
    )  # fmt: skip
    return figure

"""Figures of lesson 01: where the parameters are, what a sequence keeps, what a token costs.

Needs plotly. Each function takes numbers that the accounting has worked out and returns a figure.
The figures of the running model and of the decode step are in
:mod:`kimik3_lab.teaching.plots_anatomy_run`.
"""

from __future__ import annotations

from math import log10

import plotly.graph_objects as go

from kimik3_lab.performance.accounting import AnatomyReport, SequenceMemory, short_count
from kimik3_lab.performance.flops import TokenFlops
from kimik3_lab.teaching.plots import COLORS, label
from kimik3_lab.teaching.plots_context import lines_over_context, mark_crossing

__all__ = ["component_dots", "flops_lines", "sequence_memory_lines"]

_TOTAL, _ACTIVE = 0, 3  # colours, as numbers of a series


def component_dots(report: AnatomyReport) -> go.Figure:
    """Draw each part's parameters, all of them and those a token uses, on a logarithmic axis.

    Parts are sorted by size. A ring is what is stored, a filled diamond what is active; where one
    sits inside the other, a token uses the whole part.
    """
    rows = sorted(report.components, key=lambda row: row.parameters)
    names = [row.label for row in rows]
    figure = go.Figure()
    for row in rows:
        if 0 < row.active_parameters < row.parameters:
            figure.add_scatter(
                x=[row.active_parameters, row.parameters],
                y=[row.label] * 2,
                mode="lines",
                line={"color": "#999999", "width": 2},
                hoverinfo="skip",
            )
    figure.add_scatter(
        x=[row.parameters for row in rows],
        y=names,
        mode="markers+text",
        text=[short_count(row.parameters) for row in rows],
        textposition="middle right",
        marker={
            "symbol": "circle-open",
            "size": 15,
            "color": COLORS[_TOTAL],
            "line": {"width": 2.5},
        },
        name="stored",
        hovertemplate="%{y}: %{x:,} stored<extra></extra>",
    )
    active = [row for row in rows if row.active_parameters]
    figure.add_scatter(
        x=[row.active_parameters for row in active],
        y=[row.label for row in active],
        mode="markers+text",
        text=[
            short_count(row.active_parameters) if row.active_parameters < row.parameters else ""
            for row in active
        ],
        textposition="middle left",
        marker={"symbol": "diamond", "size": 8, "color": COLORS[_ACTIVE]},
        name="used by a token",
        hovertemplate="%{y}: %{x:,} used by a token<extra></extra>",
    )
    smallest, largest = rows[0].parameters, rows[-1].parameters
    figure.update_xaxes(
        type="log",
        title="parameters (logarithmic)",
        range=[log10(smallest) - 0.4, log10(largest) + 1.1],
        tickvals=[1e2, 1e4, 1e6, 1e8, 1e10, 1e12],
        ticktext=["100", "10 K", "1 M", "100 M", "10 B", "1 T"],
    )
    figure.update_yaxes(ticks="", categoryorder="array", categoryarray=names)
    largest_row = rows[-1]
    label(figure, largest_row.parameters, largest_row.label, "stored", _TOTAL, side="above")
    if 0 < largest_row.active_parameters < largest_row.parameters:
        used = largest_row.active_parameters
        label(figure, used, largest_row.label, "used by a token", _ACTIVE, side="above")
    figure.update_layout(
        title="Stored parameters, and those a token uses",
        showlegend=False,
        height=520,
    )
    return figure


def sequence_memory_lines(memory: SequenceMemory, max_tokens: int = 1_048_576) -> go.Figure:
    """Draw a sequence's memory against its length: the hybrid, an all-MLA twin, the KDA state."""
    tokens = _doublings(max_tokens)
    series = (
        ("KDA and MLA: K3", [memory.bytes_at(n) / 1e9 for n in tokens], 0, "solid"),
        ("MLA in every layer", [memory.all_mla_bytes_at(n) / 1e9 for n in tokens], 3, "dash"),
        ("KDA state alone", [memory.state_bytes / 1e9] * len(tokens), 2, "dot"),
    )
    figure = lines_over_context(tokens, series, "GB")
    figure.update_yaxes(
        type="log",
        title="memory of one sequence, GB",
        range=[log10(0.08), log10(300)],
        tickvals=[0.1, 1, 10, 100],
    )
    at = tokens[len(tokens) * 7 // 10]
    label(figure, at, memory.all_mla_bytes_at(at) / 1e9, series[1][0], 3, side="left")
    figure.layout.annotations[-1].xshift = -28  # clear of the slope
    label(figure, at, memory.bytes_at(at) / 1e9, series[0][0], 0, side="right")
    figure.layout.annotations[-1].xshift = 28
    label(figure, tokens[-2], memory.state_bytes / 1e9, series[2][0], 2, side="below")
    if (cross := memory.all_mla_break_even) is not None and tokens[0] < cross < tokens[-1]:
        mark_crossing(figure, cross, memory.bytes_at(cross) / 1e9, "top left")
    figure.update_layout(title="A fixed price first, a gentler slope after", showlegend=False)
    return figure


def flops_lines(flops: TokenFlops, max_tokens: int = 1_048_576) -> go.Figure:
    """Draw the operations of a decoded token against the tokens in its cache."""
    tokens = _doublings(max_tokens)
    attention = [n * flops.mla_per_cached_token / 1e9 for n in tokens]
    series = (
        ("one token", [flops.decode(n) / 1e9 for n in tokens], 0, "solid"),
        ("MLA attention over the cache", attention, 3, "dash"),
        ("all else", [flops.fixed / 1e9] * len(tokens), 2, "dot"),
    )
    figure = lines_over_context(tokens, series, "GFLOP")
    figure.update_yaxes(
        type="log",
        title="operations of a decoded token, GFLOP",
        range=[log10(3), log10(12_000)],
        tickvals=[10, 100, 1000, 10_000],
        ticktext=["10", "100", "1,000", "10,000"],
    )
    at = len(tokens) * 3 // 10
    label(figure, tokens[at], attention[at], series[1][0], 3, side="right")
    figure.layout.annotations[-1].update(xshift=24, yshift=-6)  # clear of the slope
    label(figure, tokens[-2], flops.fixed / 1e9, series[2][0], 2, side="below")
    label(figure, tokens[1], flops.decode(tokens[1]) / 1e9, series[0][0], 0, side="above")
    if (cross := flops.decode_crossover) is not None and tokens[0] < cross < tokens[-1]:
        mark_crossing(figure, cross, flops.fixed / 1e9, "bottom right")
    figure.update_layout(title="Attention overtakes everything else", showlegend=False)
    return figure


def _doublings(max_tokens: int) -> list[int]:
    return [1024 * 2**i for i in range(32) if 1024 * 2**i <= max_tokens]

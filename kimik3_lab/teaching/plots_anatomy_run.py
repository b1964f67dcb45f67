"""Figures of lesson 01 on the model at work: who reads which block, and what a step reads.

Needs plotly. Each function takes numbers that the lesson has worked out and returns a figure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import nan

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kimik3_lab.performance.step_bytes import StepBytes
from kimik3_lab.performance.wiring import ResidualRead
from kimik3_lab.teaching.plots import COLORS, SEQUENTIAL, label, series_style

__all__ = ["residual_heatmap", "step_panels"]

#: Attribute of a step, its name in the figure, colour, and the fill that tells it apart.
_PARTS = (
    ("trunk", "trunk", 0, ""),
    ("experts", "routed experts", 1, "/"),
    ("state", "KDA states", 2, "."),
    ("rows", "MLA rows", 3, "x"),
)
#: Colour and side of the label of each GPU's line.
_LINES = ((6, "right"), (4, "left"))
_SUBLAYERS = {"attention": "a", "feed-forward": "f", "output": "out"}


def residual_heatmap(
    reads: Sequence[ResidualRead], shares: Sequence[Sequence[float]], block_size: int
) -> go.Figure:
    """Draw how much of each source every read takes, over the depth of the model.

    Parameters
    ----------
    reads
        Reads in the order of the forward pass.
    shares
        The weights of each read's sources: closed blocks first, the running sum last.
    block_size
        Layers in a block, to say what each one holds.

    Raises
    ------
    ValueError
        If a read's number of weights is not its number of sources.
    """
    for read, share in zip(reads, shares, strict=True):
        if len(share) != read.sources:
            raise ValueError(f"{read}: got {len(share)} weights, expected {read.sources}")
    blocks = max(read.blocks for read in reads)
    names = ["embedding", *(_block(number, block_size) for number in range(1, blocks))]
    names.append("running sum")
    # The running sum gets the top row, however many blocks there are by then.
    columns = [[*share[:-1], *[nan] * (blocks - len(share) + 1), share[-1]] for share in shares]
    table = [list(row) for row in zip(*columns, strict=True)]
    ticks = [f"{_SUBLAYERS[r.sublayer]}{'' if r.layer_id is None else r.layer_id}" for r in reads]
    figure = go.Figure(
        go.Heatmap(
            x=ticks,
            y=names,
            z=table,
            text=[["" if cell != cell else f"{100 * cell:.0f}" for cell in row] for row in table],
            texttemplate="%{text}",
            textfont={"size": 12},
            colorscale=[list(stop) for stop in SEQUENTIAL],
            zmin=0,
            zmax=1,
            xgap=2,
            ygap=2,
            hoverongaps=False,
            colorbar={"title": "share", "tickformat": ".0%"},
            hovertemplate="%{x} reads %{z:.1%} of %{y}<extra></extra>",
        )
    )
    figure.update_xaxes(
        title="reader: attention (a) and feed-forward (f) of each layer, then the output",
        showgrid=False,
        type="category",
        tickangle=0,
        tickfont={"size": 12},
    )
    figure.update_yaxes(showgrid=False, ticks="")
    figure.update_layout(title="What each sublayer reads of the residual stream, %", height=380)
    return figure


def _block(number: int, size: int) -> str:
    return f"layers {(number - 1) * size} to {number * size - 1}"


def step_panels(steps: Sequence[StepBytes], bandwidths: Mapping[str, float]) -> go.Figure:
    """Draw what a step reads at each batch size, and the time that it takes at least.

    Parameters
    ----------
    steps
        One for each batch size, of one layout and one context.
    bandwidths
        Names of two GPUs to the bytes a second that they read, the faster first.

    Returns
    -------
    plotly.graph_objects.Figure
        Two panels: bytes of one GPU by part, and the floor under the time of a step.
    """
    figure = make_subplots(
        rows=1,
        cols=2,
        subplot_titles=["a step reads on each GPU, GB", "so it takes at least, ms"],
        horizontal_spacing=0.12,
        column_widths=[0.56, 0.44],
    )
    batches = [str(step.batch) for step in steps]
    for key, name, color, shape in _PARTS:
        figure.add_bar(
            x=batches,
            y=[getattr(step, key) / 1e9 for step in steps],
            name=name,
            marker={
                "color": COLORS[color],
                "pattern": {"shape": shape, "fillmode": "overlay", "size": 6, "solidity": 0.25},
            },
            hovertemplate=name + ", %{x} sequences: %{y:.3g} GB<extra></extra>",
            row=1,
            col=1,
        )
    figure.add_scatter(
        x=batches,
        y=[step.total / 1e9 for step in steps],
        mode="text",
        text=[f"{step.total / 1e9:.0f}" for step in steps],
        textposition="top center",
        showlegend=False,
        hoverinfo="skip",
        row=1,
        col=1,
    )
    for (color, _), (name, bandwidth) in zip(_LINES, bandwidths.items(), strict=True):
        floors = [1e3 * step.floor_seconds(bandwidth) for step in steps]
        figure.add_scatter(
            x=[step.batch for step in steps],
            y=floors,
            name=name,
            mode="lines+markers",
            showlegend=False,
            **series_style(color),
            hovertemplate=name + ", %{x} sequences: %{y:.1f} ms<extra></extra>",
            row=1,
            col=2,
        )
    figure.update_xaxes(title="sequences in the batch", type="category", row=1, col=1)
    figure.update_xaxes(
        title="sequences (logarithmic)",
        type="log",
        tickvals=[step.batch for step in steps],
        row=1,
        col=2,
    )
    figure.update_yaxes(range=[0, 1.12e-9 * max(step.total for step in steps)], row=1, col=1)
    figure.update_yaxes(rangemode="tozero", row=1, col=2)
    figure.update_annotations(font_size=16)
    near = steps[-2]
    for (color, side), (name, bandwidth) in zip(_LINES, bandwidths.items(), strict=True):
        value = 1e3 * near.floor_seconds(bandwidth)
        label(figure, near.batch, value, name, color, side=side, panel=2)
    figure.layout.annotations[-2].yshift = -10  # below the slope
    figure.update_layout(
        barmode="stack",
        legend={"orientation": "h", "x": 0, "y": -0.22, "traceorder": "normal"},
        margin={"b": 100},
        height=460,
    )
    return figure

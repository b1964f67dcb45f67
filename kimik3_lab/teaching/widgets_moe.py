"""Lesson 03's walk through dispatch: pick a step and a token, see where its rows go.

Needs plotly; ipywidgets for the controls only. :func:`dispatch_step` draws one step from plain
lists. :func:`dispatch_explorer` puts two controls above it; without widgets it returns that figure.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import plotly.graph_objects as go

from kimik3_lab.teaching.plots import COLORS

if TYPE_CHECKING:
    import ipywidgets

__all__ = ["STEPS", "dispatch_explorer", "dispatch_step"]

#: Names of the steps, in order.
STEPS = ("route", "sort", "run", "combine")
_TITLES = (
    "1. Route: each token chooses {top_k} experts",
    "2. Sort: rows of one expert side by side",
    "3. Run: one product for each of {busy} experts",
    "4. Combine: weigh the rows, add them where they came from",
)
_TOKENS, _ROWS, _SUMS = 0.0, 1.0, 2.0  # where the columns stand
_ROW_HEIGHT = 21  # pixels
_GAP = "\u2002"  # a space that HTML keeps, between a marker and its text


def dispatch_step(
    expert_ids: Sequence[Sequence[int]],
    weights: Sequence[Sequence[float]],
    names: Sequence[str],
    *,
    step: int = 1,
    token: int = 0,
) -> go.Figure:
    """Draw one step of dispatch and follow one token through it.

    Parameters
    ----------
    expert_ids, weights
        ``[N][top_k]``: the routing of the step.
    names
        What to call the N tokens.
    step
        Index into :data:`STEPS`.
    token
        The token to follow: its rows are filled and its lines thick.

    Raises
    ------
    ValueError
        If the step or the token is not there, or the lists do not belong together.

    Examples
    --------
    >>> figure = dispatch_step([[1, 0], [1, 2]], [[0.6, 0.4], [0.5, 0.5]], ["a", "b"], step=1)
    >>> figure.layout.title.text
    '2. Sort: rows of one expert side by side'
    """
    _refuse_misfits(expert_ids, weights, names, step, token)
    top_k = len(expert_ids[0])
    flat = [expert for row in expert_ids for expert in row]
    order = list(range(len(flat)))  # pairs from top to bottom
    if step >= 1:
        order.sort(key=flat.__getitem__)  # stable, like the sort it shows
    height = {pair: place for place, pair in enumerate(order)}
    middle = [top_k * t + (top_k - 1) / 2 for t in range(len(names))]

    figure = go.Figure()
    if step == 2:
        _draw_experts(figure, [flat[pair] for pair in order])
    start = _TOKENS if step < 3 else _SUMS
    for thick in (False, True):
        lines_x: list[float | None] = []
        lines_y: list[float | None] = []
        for pair in order:
            if (pair // top_k == token) is thick:
                lines_x += [start, _ROWS, None]
                lines_y += [middle[pair // top_k], height[pair], None]
        color, width = (COLORS[0], 3) if thick else ("#BBBBBB", 1)
        figure.add_scatter(
            x=lines_x,
            y=lines_y,
            mode="lines",
            line={"color": color, "width": width},
            hoverinfo="skip",
        )
    _draw_rows(figure, order, flat, [w for row in weights for w in row], names, step, token)
    _draw_tokens(figure, _TOKENS, middle, names, token, "middle left")
    if step == 3:
        _draw_tokens(figure, _SUMS, middle, names, token, "middle right")
    figure.update_xaxes(visible=False, range=[-0.7, 2.6], fixedrange=True)
    figure.update_yaxes(visible=False, range=[len(flat) - 0.3, -0.7], fixedrange=True)
    title = _TITLES[step].format(top_k=top_k, busy=len(set(flat)))
    figure.update_layout(
        title=title,
        showlegend=False,
        height=_ROW_HEIGHT * len(flat) + 90,
        margin={"l": 10, "r": 10, "t": 60, "b": 20},
    )
    return figure


def dispatch_explorer(
    expert_ids: Sequence[Sequence[int]],
    weights: Sequence[Sequence[float]],
    names: Sequence[str],
    *,
    step: int = 1,
    token: int = 0,
    widgets: bool = True,
) -> go.Figure | ipywidgets.VBox:
    """Show :func:`dispatch_step` under a choice of step and token.

    Parameters
    ----------
    widgets
        False returns the figure for ``step`` and ``token`` alone.

    Returns
    -------
    Figure or VBox
        The box holds the step buttons, the token list and an output with the figure.
    """
    figure = dispatch_step(expert_ids, weights, names, step=step, token=token)
    if not widgets:
        return figure
    import ipywidgets

    steps = ipywidgets.ToggleButtons(
        options=[(name, index) for index, name in enumerate(STEPS)], value=step, description="Step"
    )
    tokens = ipywidgets.Dropdown(
        options=[(f"{index}: {name}", index) for index, name in enumerate(names)],
        value=token,
        description="Token",
    )
    view = ipywidgets.Output(outputs=(_as_output(figure),))

    def redraw(_: Any) -> None:
        chosen = dispatch_step(expert_ids, weights, names, step=steps.value, token=tokens.value)
        # Setting the outputs at once: nothing flickers, and no message asks to clear anything.
        view.outputs = (_as_output(chosen),)

    steps.observe(redraw, names="value")
    tokens.observe(redraw, names="value")
    return ipywidgets.VBox([steps, tokens, view])


def _as_output(figure: go.Figure) -> dict[str, Any]:
    data = {"application/vnd.plotly.v1+json": json.loads(figure.to_json())}
    return {"output_type": "display_data", "data": data, "metadata": {}}


def _refuse_misfits(
    expert_ids: Sequence[Sequence[int]],
    weights: Sequence[Sequence[float]],
    names: Sequence[str],
    step: int,
    token: int,
) -> None:
    shapes = [[len(row) for row in table] for table in (expert_ids, weights)]
    if not names or shapes[0] != shapes[1] or len(shapes[0]) != len(names):
        raise ValueError(
            f"expected ids, weights and names of the same tokens, at least one; got "
            f"{len(expert_ids)}, {len(weights)} and {len(names)}, or rows of unequal length"
        )
    if len(set(shapes[0])) != 1:
        raise ValueError(f"every token has equally many experts; got {shapes[0]}")
    if not 0 <= step < len(STEPS):
        raise ValueError(f"step must be 0 to {len(STEPS) - 1}, got {step}")
    if not 0 <= token < len(names):
        raise ValueError(f"token must be 0 to {len(names) - 1}, got {token}")


def _draw_tokens(
    figure: go.Figure, x: float, y: list[float], names: Sequence[str], token: int, side: str
) -> None:
    figure.add_scatter(
        x=[x] * len(names),
        y=y,
        mode="markers+text",
        text=[
            f"{_GAP}<b>{name}</b>{_GAP}" if i == token else f"{_GAP}{name}{_GAP}"
            for i, name in enumerate(names)
        ],
        textposition=side,
        marker={
            "symbol": ["square" if i == token else "square-open" for i in range(len(names))],
            "size": 13,
            "color": [COLORS[0] if i == token else "#777777" for i in range(len(names))],
        },
        hoverinfo="skip",
    )


def _draw_rows(
    figure: go.Figure,
    order: list[int],
    flat: list[int],
    weights: list[float],
    names: Sequence[str],
    step: int,
    token: int,
) -> None:
    top_k = len(flat) // len(names)
    mine = [pair // top_k == token for pair in order]
    runs = [flat[pair] for pair in order]
    first = [place == 0 or runs[place - 1] != expert for place, expert in enumerate(runs)]
    text = [f"expert {expert}" for expert in runs]
    if step in (1, 2):  # once for a run
        text = [name if begins else "" for name, begins in zip(text, first, strict=True)]
    if step == 3:
        text = [
            f"{weights[pair]:.2f} × expert {flat[pair]}" if own else ""
            for pair, own in zip(order, mine, strict=True)
        ]
    figure.add_scatter(
        x=[_ROWS] * len(order),
        y=list(range(len(order))),
        mode="markers+text",
        text=[f"{_GAP}{line}{_GAP}" if line else "" for line in text],
        textposition="middle left" if step == 3 else "middle right",
        marker={
            "symbol": ["circle" if own else "circle-open" for own in mine],
            "size": 11,
            "color": [COLORS[0] if own else "#777777" for own in mine],
        },
        customdata=[
            [names[pair // top_k], pair % top_k, flat[pair], weights[pair]] for pair in order
        ],
        hovertemplate=(
            "row %{y}: token %{customdata[0]}, choice %{customdata[1]}, "
            "expert %{customdata[2]}, weight %{customdata[3]:.3f}<extra></extra>"
        ),
    )


def _draw_experts(figure: go.Figure, runs: list[int]) -> None:
    """One box around each run of rows, with how many rows its product has."""
    for number, expert in enumerate(dict.fromkeys(runs)):
        first, count = runs.index(expert), runs.count(expert)
        figure.add_shape(
            type="rect",
            x0=_ROWS - 0.08,
            x1=_ROWS + 0.72,
            y0=first - 0.48,
            y1=first + count - 0.52,
            line={"color": "#444444", "width": 1},
            fillcolor="#F2F7FB" if number % 2 else "#DCEAF5",
            layer="below",
        )
        figure.add_annotation(
            x=_ROWS + 0.75,
            y=first + (count - 1) / 2,
            text=f"{count} row{'s' if count > 1 else ''}",
            xanchor="left",
            showarrow=False,
        )

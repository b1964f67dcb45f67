"""The memory of one GPU, to turn the knobs of: lesson 01.

Needs plotly, and ipywidgets for the knobs. :func:`memory_figure` is a pure function of its
arguments; :func:`memory_view` only puts menus in front of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import plotly.graph_objects as go

from kimik3_lab.config import K3Config
from kimik3_lab.performance.capacity import (
    KV_ITEMSIZE,
    UTILIZATION,
    Capacity,
    DoesNotFitError,
    capacity,
)
from kimik3_lab.performance.hardware import ACCELERATORS, Accelerator
from kimik3_lab.performance.placement import Layout, RankWeights
from kimik3_lab.teaching.plots import COLORS

__all__ = ["CONTEXTS", "LAYOUTS", "memory_figure", "memory_menus", "memory_view"]

#: What the menus offer. The first of each is what the view opens with.
LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout(8),
        Layout(8, expert_parallel=True),
        Layout(1, 8, expert_parallel=True),
        Layout(16),
        Layout(16, expert_parallel=True),
        Layout(1, 16, expert_parallel=True),
        Layout(32, expert_parallel=True),
    )
}
CONTEXTS = {"8 Ki": 8192, "32 Ki": 32_768, "128 Ki": 131_072, "512 Ki": 524_288, "1 Mi": 1_048_576}


def memory_figure(
    config: K3Config,
    hardware: str = "B300",
    layout: str = "TP8",
    kv_dtype: str = "bf16",
    context: int = 8192,
) -> go.Figure:
    """Draw what fills one GPU: weights, then sequences; or why they do not fit, and what would.

    Parameters
    ----------
    hardware
        A key of :data:`~kimik3_lab.performance.hardware.ACCELERATORS`.
    layout
        A key of :data:`LAYOUTS`.
    kv_dtype
        ``"bf16"`` or ``"fp8"``.
    context
        Tokens of each sequence.

    Raises
    ------
    ValueError
        If a name is not on the menu; what does not fit is drawn, not raised.

    Examples
    --------
    >>> figure = memory_figure(K3Config.released(), "B300", "TP8", context=131_072)
    >>> figure.layout.title.text.partition("<br>")[0]
    '14 sequences of 131,072 tokens on 8 B300'
    """
    for got, menu in ((hardware, ACCELERATORS), (layout, LAYOUTS)):
        if got not in menu:
            raise ValueError(f"got {got!r}, expected one of {', '.join(menu)}")
    gpu, chosen = ACCELERATORS[hardware], LAYOUTS[layout]
    try:
        found = capacity(config, gpu, chosen, context, kv_dtype=kv_dtype)
    except DoesNotFitError as refusal:
        why, _, instead = str(refusal).partition("; ")
        title = f"Does not fit: {instead}{_second_line(why)}"
        return _bar(gpu, refusal.weights, (), title)
    number = found.sequences // chosen.data_parallel
    title = (
        f"{found.sequences:,} {'sequence' if found.sequences == 1 else 'sequences'} of "
        f"{context:,} tokens on {chosen.gpus} {hardware}"
        + _second_line(
            f"{layout}, rows in {kv_dtype}: {found.room_bytes / 1e9:.1f} GB beside the weights, "
            f"{found.sequence_bytes / 1e9:.3g} GB a sequence on each GPU"
        )
    )
    return _bar(gpu, found.weights, _sequences(found, number), title)


def _second_line(text: str) -> str:
    return f"<br><span style='font-size:15px'>{text}</span>"


def _sequences(found: Capacity, number: int) -> tuple[tuple[str, float, str, str], ...]:
    rows = number * found.context * found.row_bytes
    return (
        ("KDA states", number * found.state_bytes, COLORS[2], "."),
        ("MLA rows", rows, COLORS[3], "x"),
    )


def _bar(
    gpu: Accelerator,
    weights: RankWeights,
    sequences: tuple[tuple[str, float, str, str], ...],
    title: str,
) -> go.Figure:
    usable = gpu.memory_bytes * UTILIZATION
    trunk = weights.total - weights.experts
    parts = [
        ("weights: all but experts", trunk, COLORS[0], ""),
        ("weights: routed experts", weights.experts, COLORS[1], "/"),
        *sequences,
    ]
    if (left := usable - sum(part[1] for part in parts)) > 0:
        parts.append(("free", left, "#E5E5E5", ""))
    figure = go.Figure()
    for name, size, color, shape in parts:
        figure.add_bar(
            x=[size / 1e9],
            y=["one GPU"],
            orientation="h",
            name=f"{name}, {size / 1e9:.1f} GB",
            marker={
                "color": color,
                "pattern": {"shape": shape, "fillmode": "overlay", "size": 7, "solidity": 0.25},
            },
            hovertemplate=f"{name}: %{{x:.1f}} GB<extra></extra>",
        )
    for at, text, dash, anchor in (
        (usable, f"usable {usable / 1e9:.1f}", "dash", "right"),
        (gpu.memory_bytes, f"memory {gpu.memory_bytes / 1e9:.0f}", "solid", "left"),
    ):
        figure.add_vline(
            x=at / 1e9,
            line={"color": "#000000", "dash": dash, "width": 2},
            annotation={"text": text, "xanchor": anchor, "yanchor": "bottom", "y": 1.0},
        )
    end = max(gpu.memory_bytes, weights.total) / 1e9
    figure.update_xaxes(title="GB of one GPU", range=[0, end * 1.16], showgrid=False)
    figure.update_yaxes(ticks="", showticklabels=False, showgrid=False)
    figure.update_layout(
        barmode="stack",
        title={"text": title, "y": 0.95, "yanchor": "top"},
        legend={"orientation": "h", "x": 0, "y": -0.62, "traceorder": "normal"},
        height=340,
        margin={"t": 90, "b": 140},
    )
    return figure


def memory_view(config: K3Config, *, widgets: bool = True) -> go.Figure | None:
    """Put menus in front of :func:`memory_figure`.

    Parameters
    ----------
    widgets
        False returns the figure that the view opens with, for readers without a running kernel.

    Returns
    -------
    plotly.graph_objects.Figure or None
        With widgets, menus and figure are displayed and nothing is returned.
    """
    if not widgets:
        return memory_figure(config)
    from IPython.display import display

    def show(new: go.Figure) -> None:
        # JupyterLab's plotly renderer keeps the graph that it has. Another kind of content in
        # between makes it start afresh.
        shown.update({"text/plain": ""}, raw=True)
        shown.update(_as_data(new), raw=True)

    # Neither an Output widget, which is not stored with the notebook, nor the figure itself, which
    # displays itself without an id: as plain data with an id it is stored, and can be replaced.
    menus, figure = memory_menus(config, show)
    display(menus)
    shown = display(_as_data(figure), raw=True, display_id=True)
    return None


def _as_data(figure: go.Figure) -> dict[str, Any]:
    return {"application/vnd.plotly.v1+json": json.loads(figure.to_json())}


def memory_menus(config: K3Config, show: Callable[[go.Figure], None]) -> tuple[Any, go.Figure]:
    """Make the menus, and hand each newly chosen figure to ``show``.

    Returns
    -------
    tuple of ipywidgets.HBox and plotly.graph_objects.Figure
        The menus, whose children are GPU, layout, type of the rows and context, and the figure of
        their first entries.
    """
    import ipywidgets

    entries = {
        "hardware": ("GPU", list(ACCELERATORS)),
        "layout": ("layout", list(LAYOUTS)),
        "kv_dtype": ("MLA rows in", list(KV_ITEMSIZE)),
        "context": ("context", list(CONTEXTS.items())),
    }
    menus = {
        name: ipywidgets.Dropdown(
            options=options,
            description=text,
            style={"description_width": "initial"},
            layout={"width": "200px"},
        )
        for name, (text, options) in entries.items()
    }

    def chosen() -> go.Figure:
        return memory_figure(config, **{name: menu.value for name, menu in menus.items()})

    for menu in menus.values():
        menu.observe(lambda _: show(chosen()), names="value")
    box = ipywidgets.HBox(list(menus.values()), layout={"flex_flow": "row wrap"})
    return box, chosen()

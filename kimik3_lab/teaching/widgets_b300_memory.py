"""Lesson 11: what lies on one GPU of a node, with sliders over a pure function.

Needs numpy and plotly; ipywidgets for the sliders only. :func:`node_memory` counts bytes, and the
cache in blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import plotly.graph_objects as go

from kimik3_lab.serving.kv_cache_capacity import blocks_per_request
from kimik3_lab.serving.presets import MAIN_2026_09_13
from kimik3_lab.simulation.spec import RESERVED_BYTES, SimulationSpec
from kimik3_lab.teaching.plots import COLORS
from kimik3_lab.teaching.plots_b300_use import Segment, memory_map, refusal
from kimik3_lab.teaching.widgets_b300 import LAYOUTS, explorer, int_slider

if TYPE_CHECKING:
    import ipywidgets

__all__ = ["NodeMemory", "memory_explorer", "memory_figure", "node_memory"]


@dataclass(frozen=True)
class NodeMemory:
    """What lies on one GPU of a node, bytes; the eight are alike.

    Attributes
    ----------
    trunk, experts, reserve
        Weights, and what activations, graphs, communication and the drafter take.
    rows, states, for_drafts
        Blocks of the requests: MLA rows, KDA states, and blocks that only drafts need.
    free
        Blocks that nobody uses.
    withheld
        Memory that the server leaves alone.
    requests, seats
        Requests that are drawn, and how many such would fit.
    """

    trunk: float
    experts: float
    reserve: float
    rows: float
    states: float
    for_drafts: float
    free: float
    withheld: float
    requests: int
    seats: int


def node_memory(
    *,
    requests: int = 16,
    context: int = 9000,
    drafts: int = 8,
    hardware: str = "B300",
    layout: str = "TP8",
    kv_dtype: str = "bf16",
    utilization: float = 0.9,
) -> NodeMemory:
    """Count the memory of one GPU, the cache in blocks as vLLM hands them out.

    Raises
    ------
    ValueError
        If the weights do not fit, with the numbers.

    Examples
    --------
    >>> memory = node_memory(requests=16)
    >>> round((memory.trunk + memory.experts) / 1e9, 1), memory.seats > 16
    (205.1, True)
    """
    spec = SimulationSpec(
        MAIN_2026_09_13, hardware=hardware, parallel=LAYOUTS[layout], kv_dtype=kv_dtype,
        utilization=utilization, scheduler={"num_speculative_tokens": drafts},
    )  # fmt: skip
    cache = spec.cache_config
    block = spec.room_bytes / cache.num_blocks
    need = blocks_per_request(cache, context, drafts)
    seats = cache.num_usable_blocks // need.total
    shown = min(requests, seats)
    trunk, experts = spec.parallel.weight_bytes(spec.config)
    return NodeMemory(
        trunk=trunk,
        experts=experts,
        reserve=RESERVED_BYTES,
        rows=shown * need.attention * block,
        states=shown * need.states * block,
        for_drafts=shown * need.scratch * block,
        free=spec.room_bytes - shown * need.total * block,
        withheld=spec.accelerator.memory_bytes * (1 - utilization),
        requests=shown,
        seats=seats,
    )


def memory_figure(**choices: Any) -> go.Figure:
    """Draw :func:`node_memory`; choices that cannot be are a figure that says why."""
    try:
        found = node_memory(**choices)
    except ValueError as error:
        return refusal(str(error))
    segments = [
        Segment("trunk", found.trunk / 1e9, COLORS[0]),
        Segment("routed experts", found.experts / 1e9, COLORS[5], "/"),
        Segment("reserve", found.reserve / 1e9, COLORS[1], "x"),
        Segment("KDA states", found.states / 1e9, COLORS[3], "\\"),
        Segment("blocks for drafts", found.for_drafts / 1e9, COLORS[4], "."),
        Segment("MLA rows", found.rows / 1e9, COLORS[2], "-"),
        Segment("free blocks", found.free / 1e9, "#FFFFFF"),
        Segment("not for the server", found.withheld / 1e9, "#BBBBBB", "|"),
    ]
    return memory_map(segments, title=f"{found.requests} requests; {found.seats} would have a seat")


def memory_explorer(*, widgets: bool = True) -> go.Figure | ipywidgets.VBox:
    """Change what is in memory with sliders, or get the figure of the first."""
    if not widgets:
        return memory_figure()
    import ipywidgets

    names = {
        "requests": int_slider("requests", 16, 1, 512),
        "context": int_slider("tokens each", 9000, 1000, 400_000, step=1000),
        "drafts": int_slider("drafts K", 8, 0, 8),
        "hardware": ipywidgets.Dropdown(
            options=["B300", "GB300", "B200", "H200"], description="GPU"
        ),
        "layout": ipywidgets.Dropdown(options=list(LAYOUTS), description="layout"),
        "kv_dtype": ipywidgets.Dropdown(options=["bf16", "fp8"], description="MLA rows in"),
    }
    controls = list(names.values())

    def draw() -> go.Figure:
        return memory_figure(**{name: control.value for name, control in names.items()})

    return explorer((ipywidgets.HBox(controls[:3]), ipywidgets.HBox(controls[3:])), controls, draw)

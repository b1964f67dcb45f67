"""Lesson 13: choose machines, release, strategy and traffic; see command, memory and refusals.

Needs pydantic, numpy and plotly; ipywidgets for the boxes only. :func:`choose` is a pure function
over ``k3lab deploy``'s own plan, so what it shows is what the command line would print.
"""

from __future__ import annotations

import shlex
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import plotly.graph_objects as go

from kimik3_lab.deploy.choices import cache_type
from kimik3_lab.deploy.command import Deployment
from kimik3_lab.deploy.flags import releases
from kimik3_lab.deploy.layouts import groups
from kimik3_lab.deploy.memory import Memory, memory
from kimik3_lab.deploy.plan import plan
from kimik3_lab.deploy.spec import (
    HARDWARE,
    STRATEGIES,
    WORKLOADS,
    DeploymentSpec,
    RefusedError,
)
from kimik3_lab.performance.placement import LayoutError
from kimik3_lab.teaching.plots import COLORS
from kimik3_lab.teaching.plots_b300_use import Segment
from kimik3_lab.teaching.widgets_b300 import explorer, int_slider

if TYPE_CHECKING:
    import ipywidgets

__all__ = ["Choice", "choose", "deploy_explorer", "deploy_figure"]

_WIDTH = 76


@dataclass(frozen=True)
class Choice:
    """What comes of some choices.

    Attributes
    ----------
    title
        The layout and what it holds, or that it is refused.
    lines
        The commands of the first node as lines of shell, or the reason of the refusal with the
        nearest that fits.
    segments
        Memory of one GPU of the first group; empty if the model cannot be divided like that.
    usable
        GB that vLLM may take of that GPU.
    refused
        Whether nothing would be started.
    """

    title: str
    lines: tuple[str, ...]
    segments: tuple[Segment, ...]
    usable: float
    refused: bool


def choose(**choices: Any) -> Choice:
    """Plan a deployment and say what comes of it.

    Parameters
    ----------
    **choices
        Fields of :class:`~kimik3_lab.deploy.spec.DeploymentSpec`.

    Examples
    --------
    >>> choose(hardware="b300").title
    'TP8: 148 sequences of 9,000 tokens fit'
    >>> choose(hardware="h200").refused
    True
    """
    try:
        spec = DeploymentSpec(**choices)
    except ValueError as error:
        return Choice("Refused", tuple(textwrap.wrap(_plain(error), _WIDTH)), (), 0.0, True)
    try:
        found = plan(spec)
    except RefusedError as error:
        refusal = error.refusal
        lines = textwrap.wrap(refusal.reason, _WIDTH)
        lines += textwrap.wrap(f"Known from: {refusal.source}", _WIDTH, break_long_words=False)
        if refusal.alternative is None:
            lines.append("Nothing near it fits.")
        else:
            line = f"  k3lab deploy {refusal.alternative.command_line()}"
            lines += ["The nearest that fits:", *textwrap.wrap(line, _WIDTH)]
        return Choice("Refused", tuple(lines), *_memory(spec), True)
    group = found.groups[0]
    title = " + ".join(
        f"{g.role} {g.layout}" if len(found.groups) > 1 else g.layout for g in found.groups
    )
    seats = min(g.sequences for g in found.groups)
    title += f": {seats:,} sequences of {group.context:,} tokens fit"
    return Choice(title, tuple(_lines(found)), *_memory(found.spec), False)


def _plain(error: ValueError) -> str:
    errors = getattr(error, "errors", None)
    if errors is None:
        return str(error)
    return "; ".join(found["msg"].removeprefix("Value error, ") for found in errors())


def _memory(spec: DeploymentSpec) -> tuple[tuple[Segment, ...], float]:
    try:
        group = groups(spec)[0]
    except LayoutError:
        return (), 0.0
    found = memory(spec, group, cache_type(spec))
    return _segments(found), found.usable / 1e9


def _segments(found: Memory) -> tuple[Segment, ...]:
    parts = (
        Segment("weights", found.weights / 1e9, COLORS[0]),
        Segment("drafter", found.drafter / 1e9, COLORS[4], "."),
        Segment("kept free", found.reserve / 1e9, COLORS[1], "x"),
        Segment("sequences", max(0, found.room) / 1e9, "#FFFFFF"),
    )
    return tuple(part for part in parts if part.gigabytes > 0)


def _lines(found: Deployment) -> list[str]:
    node = found.nodes[0]
    lines = [f"{name}={shlex.quote(value)} \\" for name, value in node.environment().items()]
    line = ""
    for word in map(shlex.quote, node.argv):
        if line and len(line) + len(word) >= _WIDTH:
            lines.append(f"{line} \\")
            line = " "
        line = f"{line} {word}" if line else word
        # Inside the quotes, JSON does not mind an end of line after a comma.
        while len(line) > _WIDTH and "," in line[:_WIDTH]:
            cut = line.rindex(",", 0, _WIDTH) + 1
            lines.append(line[:cut])
            line = f"    {line[cut:]}"
    lines.append(line)
    others = len(found.nodes) - 1
    if others:
        lines.append(f"# and {others} more node{'s' if others > 1 else ''}")
    for note in found.notes:
        lines += textwrap.wrap(f"# Note: {note}.", _WIDTH, subsequent_indent="#   ")
    return lines


def deploy_figure(**choices: Any) -> go.Figure:
    """Draw :func:`choose`: the memory of a GPU on the left, the command on the right."""
    found = choose(**choices)
    figure = go.Figure()
    names: list[tuple[float, str]] = []
    bottom = 0.0
    for segment in found.segments:
        figure.add_bar(
            x=[0], y=[segment.gigabytes], base=[bottom], width=0.9, name=segment.name,
            marker={
                "color": segment.color, "line": {"color": "#222222", "width": 1},
                "pattern": {"shape": segment.hatch, "fgcolor": "#222222", "solidity": 0.2,
                            "fillmode": "overlay"},
            },
            hovertemplate=f"{segment.name}: {segment.gigabytes:.1f} GB<extra></extra>",
        )  # fmt: skip
        names.append(
            (bottom + segment.gigabytes / 2, f"{segment.name}: {segment.gigabytes:.0f} GB")
        )
        bottom += segment.gigabytes
    if found.segments:
        figure.add_shape(
            type="line", x0=-0.6, x1=0.6, y0=found.usable, y1=found.usable,
            line={"width": 3.5, "color": "#000000"},
        )  # fmt: skip
        names.append((found.usable, f"<b>usable: {found.usable:.0f} GB</b>"))
    top = max(bottom, found.usable, 1.0)
    lowest = 0.0
    for place, text in sorted(names):
        height = max(place, lowest)  # pushed up, so that no name covers another
        lowest = height + 0.06 * top
        figure.add_annotation(
            x=0.62, y=height, xanchor="left", showarrow=False, text=text, font={"size": 13}
        )
    figure.add_annotation(
        x=0.33, y=1.0, xref="paper", yref="paper", xanchor="left", yanchor="top", align="left",
        showarrow=False, text="<br>".join(_escaped(line) for line in found.lines),
        font={"family": "monospace", "size": 12},
    )  # fmt: skip
    figure.update_xaxes(visible=False, range=[-0.65, 2.0], domain=[0.0, 0.3])
    figure.update_yaxes(title="GB of one GPU", range=[0, 1.18 * top], visible=bool(found.segments))
    figure.update_layout(
        title=found.title, barmode="overlay", showlegend=False,
        height=max(380, 110 + 17 * len(found.lines)), margin={"b": 30},
    )  # fmt: skip
    return figure


def _escaped(line: str) -> str:
    """Keep plotly from reading marks, and from dropping the spaces at the front."""
    text = line.replace("&", "&amp;").replace("<", "&lt;")
    indent = len(text) - len(text.lstrip(" "))
    return "\u00a0" * indent + text.lstrip(" ")


def deploy_explorer(*, widgets: bool = True, **choices: Any) -> go.Figure | ipywidgets.VBox:
    """Change the choices with boxes, or get the figure of the first.

    Parameters
    ----------
    widgets
        False returns :func:`deploy_figure`, for pages without a running kernel.
    **choices
        To begin with.
    """
    if not widgets:
        return deploy_figure(**choices)
    import ipywidgets

    begin = DeploymentSpec(**choices)

    def box(name: str, options: tuple[str, ...]) -> Any:
        return ipywidgets.Dropdown(
            options=options, value=getattr(begin, name), description=name,
            layout=ipywidgets.Layout(width="220px"),
        )  # fmt: skip

    names = {
        "hardware": box("hardware", HARDWARE),
        "nodes": int_slider("nodes", begin.nodes, 1, 16),
        "vllm": box("vllm", releases()),
        "strategy": box("strategy", STRATEGIES),
        "workload": box("workload", WORKLOADS),
        "spec": box("spec", ("none", "dspark")),
    }
    controls = list(names.values())

    def draw() -> go.Figure:
        return deploy_figure(**{name: control.value for name, control in names.items()})

    rows = (ipywidgets.HBox(controls[:3]), ipywidgets.HBox(controls[3:]))
    return explorer(rows, controls, draw)

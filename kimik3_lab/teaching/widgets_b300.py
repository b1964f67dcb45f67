"""Lesson 11: what a step would cost under other choices, with sliders over a pure function.

Needs numpy and plotly; ipywidgets for the sliders only. :func:`what_if` prices one step with the
cost model; nothing is simulated when a slider moves. What lies where in memory is shown by
:mod:`kimik3_lab.teaching.widgets_b300_memory`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import plotly.graph_objects as go

from kimik3_lab.performance.attribution import explain
from kimik3_lab.performance.parallelism import Parallelism
from kimik3_lab.performance.scenarios import Scenario
from kimik3_lab.performance.step_cost import EXECUTION_SWITCHES
from kimik3_lab.performance.step_work import decode_work, prefill_work
from kimik3_lab.serving.presets import MAIN_2026_09_13
from kimik3_lab.simulation.acceptance import chance_of_mean, survival_curve
from kimik3_lab.simulation.spec import SimulationSpec
from kimik3_lab.teaching.plots_b300 import part_bars
from kimik3_lab.teaching.plots_b300_use import refusal

if TYPE_CHECKING:
    import ipywidgets

__all__ = [
    "LAYOUTS",
    "WhatIf",
    "explorer",
    "int_slider",
    "what_if",
    "what_if_explorer",
    "what_if_figure",
]

#: Layouts that the sliders offer.
LAYOUTS: Mapping[str, Parallelism] = {
    layout.name: layout
    for layout in (Parallelism(8), Parallelism(8, ep=8), Parallelism(8, dcp=8), Parallelism(16))
}


@dataclass(frozen=True)
class WhatIf:
    """A decode step under some choices, and what it means for a user and for the node.

    Attributes
    ----------
    step_ms, floor_ms
        The step, and the time that its bytes or operations take at least.
    tokens_per_step
        Tokens that a request gets out of it on average.
    tpot_ms, tokens_per_s
        Milliseconds a token for one user, and output tokens a second of all of them, while no
        prompt is computed.
    prompt_ms
        A step with one prompt of 8,000 tokens alone.
    parts
        Milliseconds of the decode step by part, in words.
    """

    step_ms: float
    floor_ms: float
    tokens_per_step: float
    tpot_ms: float
    tokens_per_s: float
    prompt_ms: float
    parts: Mapping[str, float]


def what_if(
    *,
    requests: int = 1,
    drafts: int = 8,
    acceptance_length: float = 3.45,
    context: int = 8500,
    hardware: str = "B300",
    layout: str = "TP8",
    switches: frozenset[str] = EXECUTION_SWITCHES,
    scenario: Scenario | None = None,
) -> WhatIf:
    """Price one decode step.

    Parameters
    ----------
    requests
        That decode together.
    drafts
        K, for each of them.
    acceptance_length
        Tokens a verification would yield with eight drafts; other K follow from it.
    context
        Cached tokens of each request.
    layout
        A key of :data:`LAYOUTS`.
    switches
        Names of :data:`~kimik3_lab.performance.step_cost.EXECUTION_SWITCHES` that are thrown.

    Raises
    ------
    ValueError
        If the weights do not fit, with the numbers.

    Examples
    --------
    >>> one, many = what_if(requests=1), what_if(requests=16)
    >>> many.step_ms > one.step_ms, many.tokens_per_s > one.tokens_per_s
    (True, True)
    """
    scenario = replace(scenario or Scenario.default(), acceptance_length=acceptance_length)
    preset = replace(MAIN_2026_09_13, execution=switches)
    spec = SimulationSpec(
        preset, hardware=hardware, parallel=LAYOUTS[layout], scenario=scenario,
        scheduler={"num_speculative_tokens": drafts},
    )  # fmt: skip
    if spec.room_bytes <= 0:
        raise ValueError(
            f"{layout} on {hardware}: the weights are {-spec.room_bytes / 1e9:.0f} GB more than "
            "one GPU has room for"
        )
    costs: Any = spec.make_costs()
    work = decode_work(requests, context=context, num_speculative_tokens=drafts)
    step = costs.step_cost(work)
    tokens = 1.0
    if drafts:
        chance = chance_of_mean(acceptance_length, scenario.acceptance_num_drafts)
        tokens += sum(survival_curve(chance, drafts))
    prompt = costs.step_cost(prefill_work(8000, num_speculative_tokens=drafts))
    return WhatIf(
        step_ms=1e3 * step.total_s,
        floor_ms=1e3 * costs.floor_seconds(work),
        tokens_per_step=tokens,
        tpot_ms=1e3 * step.total_s / tokens,
        tokens_per_s=requests * tokens / step.total_s,
        prompt_ms=1e3 * prompt.total_s,
        parts={row.label: 1e3 * row.seconds for row in explain(step)},
    )


def what_if_figure(**choices: Any) -> go.Figure:
    """Draw :func:`what_if`; choices that cannot be are a figure that says why."""
    try:
        found = what_if(**choices)
    except ValueError as error:
        return refusal(str(error))
    return part_bars(
        found.parts,
        title=f"{found.step_ms:.1f} ms a step, {found.tpot_ms:.2f} ms a token, "
        f"{found.tokens_per_s:,.0f} tokens/s; a prompt of 8,000: {found.prompt_ms:.0f} ms",
        floor=found.floor_ms,
    )


def what_if_explorer(*, widgets: bool = True) -> go.Figure | ipywidgets.VBox:
    """Change the choices with sliders and boxes, or get the figure of the first.

    Parameters
    ----------
    widgets
        False returns :func:`what_if_figure`, for pages without a running kernel.
    """
    if not widgets:
        return what_if_figure()
    import ipywidgets

    requests = int_slider("requests", 1, 1, 256)
    drafts = int_slider("drafts K", 8, 0, 8)
    length = ipywidgets.FloatSlider(
        value=3.45, min=1.5, max=6.5, step=0.05, description="acceptance", continuous_update=False
    )
    context = int_slider("context", 8500, 500, 256_000, step=500)
    hardware = ipywidgets.Dropdown(options=["B300", "GB300", "B200", "H200"], description="GPU")
    layout = ipywidgets.Dropdown(options=list(LAYOUTS), description="layout")
    boxes = {
        name: ipywidgets.Checkbox(value=True, description=name.replace("_", " "), indent=False)
        for name in sorted(EXECUTION_SWITCHES)
    }
    names = {"requests": requests, "drafts": drafts, "acceptance_length": length,
             "context": context, "hardware": hardware, "layout": layout}  # fmt: skip

    def draw() -> go.Figure:
        on = frozenset(name for name, box in boxes.items() if box.value)
        return what_if_figure(**{n: c.value for n, c in names.items()}, switches=on)

    rows = (
        ipywidgets.HBox([requests, drafts, length]),
        ipywidgets.HBox([context, hardware, layout]),
        ipywidgets.HBox(list(boxes.values())),
    )
    return explorer(rows, [*names.values(), *boxes.values()], draw)


def int_slider(text: str, value: int, low: int, high: int, step: int = 1) -> Any:
    """Make a slider that reports when it is let go."""
    import ipywidgets

    return ipywidgets.IntSlider(
        value=value, min=low, max=high, step=step, description=text, continuous_update=False
    )


def explorer(
    rows: tuple[Any, ...], controls: list[Any], draw: Callable[[], go.Figure]
) -> ipywidgets.VBox:
    """Put a figure below controls and draw it anew when one changes."""
    import ipywidgets

    view = ipywidgets.Output()

    def show(_change: object = None) -> None:
        figure = draw()
        plain = json.loads(figure.to_json())  # arrays as text, which a widget can send
        view.outputs = (
            {
                "output_type": "display_data",
                "data": {
                    "application/vnd.plotly.v1+json": plain,
                    "text/plain": figure.layout.title.text,
                },
                "metadata": {},
            },
        )

    for control in controls:
        control.observe(show, names="value")
    show()
    return ipywidgets.VBox([*rows, view])

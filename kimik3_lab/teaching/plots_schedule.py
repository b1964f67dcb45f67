"""Figures of lessons 07 to 09: who computed what in which step, and how full the steps were.

Needs plotly. They draw a :class:`~kimik3_lab.teaching.timeline.Timeline`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kimik3_lab.teaching.plots import COLORS
from kimik3_lab.teaching.timeline import Step, Timeline

__all__ = ["schedule"]

#: What a row of a step can be: its name, colour and pattern, so that it reads without colour.
_KINDS = (
    ("prefill", COLORS[0], ""),
    ("decode", COLORS[1], ""),
    ("accepted", COLORS[2], ""),
    ("rejected draft", "#BBBBBB", "/"),
)


def schedule(
    timeline: Timeline,
    *,
    requests: Sequence[str] | None = None,
    budget: int | None = None,
    title: str = "Who computes what",
    unit: str = "step",
    last: float | None = None,
) -> go.Figure:
    """Draw requests down and steps across; below, the tokens of each step.

    A step of a request is one bar: blue for prompt tokens, orange for a decoded one. Where drafts
    were verified, the bar is split: green is the share of its rows that became output, hatched grey
    the drafts that were wrong. A cross marks a preemption.

    Parameters
    ----------
    timeline
        What to draw.
    requests
        Ids, from top to bottom; by default in the order of arrival.
    budget
        Tokens that a step may hold: drawn as a line.
    unit
        Of the horizontal axis, as the timeline's clock has it.
    last
        Where the horizontal axis ends.

    Examples
    --------
    >>> from kimik3_lab.serving import CacheConfig, Request, SamplingParams
    >>> from kimik3_lab.serving import Scheduler, SchedulerConfig
    >>> from kimik3_lab.teaching import timeline
    >>> scheduler = Scheduler(SchedulerConfig(4, 8, 64), CacheConfig(num_blocks=9))
    >>> prompt = Request("a", [5] * 10, SamplingParams(max_tokens=1))
    >>> figure = schedule(timeline.run(scheduler, [prompt]), budget=8)
    >>> [(bar.name, list(bar.base)) for bar in figure.data[:2]]
    [('prefill', [0.0, 1.0]), ('decode', [1.5])]
    """
    names = list(requests) if requests is not None else list(timeline.arrivals)
    figure = make_subplots(
        rows=2, shared_xaxes=True, row_heights=[0.72, 0.28], vertical_spacing=0.06
    )
    pieces = {name: [piece for piece in _pieces(timeline, names) if piece[0] == name]
              for name, _, _ in _KINDS}  # fmt: skip
    for name, color, pattern in _KINDS:
        if not pieces[name]:
            continue
        _, who, starts, lengths, notes = zip(*pieces[name], strict=True)
        figure.add_bar(
            y=list(who), base=list(starts), x=list(lengths), orientation="h", name=name,
            marker={"color": color, "pattern": {"shape": pattern}, "line": {"width": 0.4,
                    "color": "white"}},
            customdata=list(notes), hovertemplate="%{y}, %{customdata}<extra>" + name + "</extra>",
            row=1, col=1,
        )  # fmt: skip
    _mark_preemptions(figure, timeline, names)
    _fill_of_steps(figure, timeline, budget)
    figure.update_yaxes(
        type="category", categoryorder="array", categoryarray=names[::-1], row=1, col=1
    )
    # The lower panel may be 40 pixels high: more ticks would be written over each other.
    figure.update_yaxes(title="tokens", rangemode="tozero", nticks=3, row=2, col=1)
    end = timeline.seconds if last is None else last
    figure.update_xaxes(range=[0, end], showgrid=False)
    figure.update_xaxes(title=unit, row=2, col=1)
    figure.update_layout(
        title=title, barmode="overlay", bargap=0.15, height=190 + 26 * max(len(names), 4),
        legend={"orientation": "h", "x": 1, "xanchor": "right", "y": 1.0, "yanchor": "bottom"},
    )  # fmt: skip
    return figure


_Piece = tuple[str, str, float, float, str]


def _pieces(timeline: Timeline, names: Sequence[str]) -> Iterator[_Piece]:
    """Kind, request, start, length and note of each bar."""
    shown = set(names)
    for step in timeline.steps:
        for name, row in step.rows.items():
            if name not in shown or not row.tokens:
                continue
            note = f"step {step.number}: {row.tokens} tokens"
            if row.drafts:
                note += f", {row.accepted} of {row.drafts} drafts kept"
            parts = (row.prefill, row.decode, row.accepted, row.drafts - row.accepted)
            if row.prefill:  # a step of a prompt is one: its last token does not show beside it
                parts = (row.prefill, row.prefill * row.decode, 0, 0)
            start = step.start
            for (kind, _, _), part in zip(_KINDS, parts, strict=True):
                length = (step.end - step.start) * part / sum(parts)
                if part:
                    yield kind, name, round(start, 3), round(length, 3), note
                start += length


def _mark_preemptions(figure: go.Figure, timeline: Timeline, names: Sequence[str]) -> None:
    marks = [
        (s.start, name) for s in timeline.steps for name in sorted(s.preempted) if name in names
    ]
    if marks:
        x, y = zip(*marks, strict=True)
        figure.add_scatter(
            x=list(x), y=list(y), mode="markers", name="preempted",
            marker={"symbol": "x", "size": 11, "color": COLORS[3]},
            hovertemplate="%{y} loses its blocks<extra></extra>", row=1, col=1,
        )  # fmt: skip


def _fill_of_steps(figure: go.Figure, timeline: Timeline, budget: int | None) -> None:
    def middle(step: Step) -> float:
        return (step.start + step.end) / 2

    steps = timeline.steps
    parts = (
        [sum(row.prefill for row in step.rows.values()) for step in steps],
        [sum(row.decode for row in step.rows.values()) for step in steps],
        [sum(row.accepted for row in step.rows.values()) for step in steps],
        [sum(row.drafts - row.accepted for row in step.rows.values()) for step in steps],
    )
    base = [0] * len(steps)
    for (name, color, pattern), values in zip(_KINDS, parts, strict=True):
        if not any(values):
            continue
        figure.add_bar(
            x=[middle(step) for step in steps], y=values, base=list(base),
            width=[step.end - step.start for step in steps], name=name, showlegend=False,
            marker={"color": color, "pattern": {"shape": pattern}, "line": {"width": 0}},
            hovertemplate="%{y} tokens<extra>" + name + "</extra>", row=2, col=1,
        )  # fmt: skip
        base = [b + v for b, v in zip(base, values, strict=True)]
    if budget is not None:
        figure.add_hline(
            y=budget, line={"color": "#444444", "width": 1.5, "dash": "dot"},
            annotation={"text": f"budget {budget:,}", "yanchor": "bottom"}, row=2, col=1,
        )  # fmt: skip

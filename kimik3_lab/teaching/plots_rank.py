"""Figures of lesson 10: the ladder on one rank of eight, and what a step costs beside its floor.

Needs plotly. Each function takes plain content of ``data/results/h200/ladder.json`` and returns a
figure. What was measured here is labelled *Miniature, Measured*; what others measured on another
machine, *Published*.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kimik3_lab.teaching.plots import COLORS, label, series_style

__all__ = ["gains_beside_published", "rungs", "step_curves", "step_parts"]

_GREY = "#777777"
_PUBLISHED = "first rung x published gain"
#: Fill and hatching of a step's parts, the second channel beside colour.
_PARTS = ((COLORS[0], ""), (COLORS[5], "/"), (COLORS[3], ""), (COLORS[1], "\\"), ("#BBBBBB", "x"))


def rungs(
    rows: Sequence[Mapping[str, Any]],
    *,
    names: Sequence[str],
    last_published: str,
    again: Sequence[Mapping[str, Any]] = (),
    published: Mapping[int, float] | None = None,
    floors: Mapping[int, float] | None = None,
) -> go.Figure:
    """Draw the throughput of every rung, a panel for each concurrency.

    Parameters
    ----------
    rows
        ``rows`` of the file.
    names
        All rungs from the ground up. What has no row is marked as not measured.
    last_published
        The rung that the published comparison ends with.
    again
        Rows of a second run, drawn as open markers.
    published
        By concurrency: the published gain of that rung. Times the first rung of each run it is
        drawn in a row of its own: where September's rung would be, had it gained as much.
    floors
        By concurrency: output tokens a second if all steps of that rung were at their floor.

    Examples
    --------
    >>> row = {"concurrency": 1, "beyond_published": False}
    >>> figure = rungs([{**row, "rung": "old", "output_tokens_per_s": 100.0},
    ...                 {**row, "rung": "new", "output_tokens_per_s": 150.0}],
    ...                names=["old", "new"], last_published="new")
    >>> list(figure.data[0].x)
    [100.0, 150.0]
    """
    if last_published not in names:
        raise ValueError(f"no rung {last_published!r} among {list(names)}")
    order, published, floors = list(names), published or {}, floors or {}
    if published:
        order.insert(order.index(last_published) + 1, _PUBLISHED)
    numbers = sorted({row["concurrency"] for row in rows})
    figure = make_subplots(
        cols=len(numbers), subplot_titles=[f"{c} concurrent" for c in numbers],
        shared_yaxes=True, horizontal_spacing=0.03,
    )  # fmt: skip
    for panel, concurrency in enumerate(numbers, 1):
        runs = [
            {r["rung"]: r["output_tokens_per_s"] for r in run if r["concurrency"] == concurrency}
            for run in (rows, again)
        ]
        ground = next(name for name in names if name in runs[0])
        first = runs[0][ground]
        drawn = ((runs[0], "recorded", 0, ""), (runs[1], "again", 1, "-open"))
        for rate, name, index, suffix in drawn:
            there = [n for n in names if n in rate]
            if not there:
                continue
            style = series_style(index)
            figure.add_scatter(
                x=[rate[n] for n in there], y=there, name=name, legendgroup=name,
                mode="markers" if suffix else "lines+markers", showlegend=panel == 1,
                line=style["line"], row=1, col=panel,
                marker={**style["marker"], "symbol": style["marker"]["symbol"] + suffix,
                        "line": {"width": 2.5, "color": style["marker"]["color"]}},
                hovertemplate="%{y}: %{x:.0f} tokens/s<extra>" + name + "</extra>",
            )  # fmt: skip
        top = max([max(runs[0].values()), *runs[1].values()])
        if last_published in runs[0]:
            gain = runs[0][last_published] / first
            _number(figure, runs[0][last_published], last_published, gain, panel)
        if concurrency in published:
            stars: list[float] = []
            for index, run in enumerate(("recorded", "again")):
                if ground not in runs[index]:
                    continue
                stars.append(runs[index][ground] * published[concurrency])
                figure.add_scatter(
                    x=stars[-1:], y=[_PUBLISHED], mode="markers", name=f"{_PUBLISHED} (Derived)",
                    legendgroup="published", showlegend=panel == 1 and index == 0,
                    row=1, col=panel,
                    marker={"symbol": "star-open", "size": 12,
                            "color": series_style(index)["marker"]["color"]},
                    hovertemplate=f"%{{x:.0f}} tokens/s<extra>published gain, {run}</extra>",
                )  # fmt: skip
            _number(figure, min(stars), _PUBLISHED, published[concurrency], panel)
            top = max(top, *stars)
        if concurrency in floors:
            figure.add_scatter(
                x=[floors[concurrency]] * 2, y=[order[0], order[-1]], mode="lines",
                name="September's rung at its floor", legendgroup="floor",
                showlegend=panel == 1, line={"color": COLORS[3], "dash": "dash", "width": 2},
                hovertemplate="%{x:.0f} tokens/s<extra>floor</extra>", row=1, col=panel,
            )  # fmt: skip
            top = max(top, floors[concurrency])
        for name in (name for name in names if name not in runs[0]):
            figure.add_annotation(
                x=0.5 * first, y=name, text="not measured", showarrow=False,
                font={"color": _GREY, "size": 13}, row=1, col=panel,
            )  # fmt: skip
        figure.update_xaxes(range=[0, 1.12 * top], nticks=5, col=panel)
    last = order.index(_PUBLISHED if published else last_published)
    figure.add_hline(y=last + 0.5, line={"color": _GREY, "dash": "dot", "width": 1.5})
    figure.update_xaxes(title="output tokens/s")
    figure.update_yaxes(categoryorder="array", categoryarray=order, range=[-0.5, len(order) - 0.5])
    figure.update_layout(
        title="One rank of eight on one H200 (Miniature, Measured)",
        height=230 + 30 * len(order),
        margin={"t": 90},
        legend={"orientation": "h", "x": 0, "y": -0.17, "yanchor": "top"},
    )
    return figure


def _number(figure: go.Figure, x: float, y: str, gain: float, panel: int) -> None:
    """Write a gain to the left of its marker: to the right there may be a floor or the edge."""
    number = "" if panel == 1 else str(panel)
    figure.add_annotation(
        x=x, y=y, text=f"{gain:.2f} x", showarrow=False, xanchor="right", xshift=-9,
        xref=f"x{number}", yref=f"y{number}", font={"size": 13}, bgcolor="rgba(255, 255, 255, 0.8)",
    )  # fmt: skip


def step_parts(parts: Mapping[str, Mapping[str, float]]) -> go.Figure:
    """Draw one bar for a verification step: floors, what lies above them, and the host.

    Parameters
    ----------
    parts
        By name of a bar: milliseconds by part, at most five parts, all bars the same ones.

    Examples
    --------
    >>> figure = step_parts({"1 request": {"model, floor": 3.0, "host and the rest": 1.0}})
    >>> [trace.name for trace in figure.data]
    ['model, floor', 'host and the rest']
    """
    bars = list(parts)
    names = list(parts[bars[0]])
    if any(list(found) != names for found in parts.values()) or len(names) > len(_PARTS):
        raise ValueError(
            f"expected the same parts in every bar, at most {len(_PARTS)}, got "
            f"{[list(found) for found in parts.values()]}"
        )
    totals = {bar: sum(parts[bar].values()) for bar in bars}
    figure = go.Figure()
    for (color, pattern), name in zip(_PARTS, names, strict=False):
        values = [parts[bar][name] for bar in bars]
        figure.add_bar(
            x=values, y=bars, name=name, orientation="h",
            text=[f"{v:.1f}" if v > 0.035 * max(totals.values()) else "" for v in values],
            textposition="inside", insidetextanchor="middle", textangle=0,
            textfont={"color": "white" if color in (COLORS[0], COLORS[3]) else "#111111"},
            marker={"color": color, "pattern": {"shape": pattern, "bgcolor": color,
                                                "fgcolor": "white", "solidity": 0.13}},
            hovertemplate="%{y}: %{x:.2f} ms<extra>" + name + "</extra>",
        )  # fmt: skip
    for bar, total in totals.items():
        figure.add_annotation(
            x=total, y=bar, text=f"{total:.1f} ms", showarrow=False, xanchor="left", xshift=6
        )
    figure.update_xaxes(
        title="ms of a step that verifies 8 drafts after 8,000 tokens",
        range=[0, 1.12 * max(totals.values())],
    )
    figure.update_yaxes(autorange="reversed")
    figure.update_layout(
        title="Where a step goes (Miniature, Measured)",
        barmode="stack",
        height=170 + 60 * len(bars),
        margin={"b": 110},
        legend={"orientation": "h", "x": 0, "y": -0.36, "yanchor": "top", "traceorder": "normal"},
    )
    return figure


def gains_beside_published(
    measured: Mapping[str, Mapping[int, float]],
    published: Mapping[str, Mapping[int, float]],
    again: Mapping[str, Mapping[int, float]] | None = None,
) -> go.Figure:
    """Draw September over 0.27.1: ours and the published, a panel for each figure.

    Parameters
    ----------
    measured
        By title of a panel: gain by concurrency, on one rank of eight.
    published
        The same, of 8 B300 with collectives and the whole model.
    again
        The same as ``measured``, of a second run.

    Examples
    --------
    >>> figure = gains_beside_published({"latency": {1: 1.2}}, {"latency": {1: 2.3}})
    >>> [trace.name for trace in figure.data]
    ['one rank, H200: Miniature, Measured', '8 B300: Published']
    """
    titles = list(measured)
    figure = make_subplots(cols=len(titles), subplot_titles=titles, horizontal_spacing=0.07)
    series = [("one rank, H200: Miniature, Measured", measured, 0, "")]
    if again is not None:
        series.append(("measured again", again, 5, "\\"))
    series.append(("8 B300: Published", published, 1, "/"))
    for name, panels, index, shape in series:
        for column, title in enumerate(titles, 1):
            values = panels[title]
            figure.add_bar(
                x=[str(c) for c in values], y=list(values.values()), name=name,
                text=[f"{value:.2f}" for value in values.values()], textposition="outside",
                # Three bars a group are narrower than their numbers.
                textfont={"size": 13}, textangle=0 if again is None else -90,
                showlegend=column == 1, legendgroup=name,
                marker={"color": COLORS[index], "pattern": {"shape": shape}},
                cliponaxis=False, row=1, col=column,
            )  # fmt: skip
    for column, title in enumerate(titles, 1):
        top = max(max(panels[title].values()) for _, panels, *_ in series)
        figure.update_yaxes(range=[0, (1.15 if again is None else 1.2) * top], col=column)
        figure.add_hline(y=1, line={"color": _GREY, "dash": "dot", "width": 1.5}, col=column)
    figure.update_xaxes(title="concurrent requests", type="category")
    figure.update_yaxes(title="0.27.1 over main", col=1)
    figure.update_layout(
        title="How many times less, from 0.27.1 to main of 2026-09-13",
        barmode="group",
        bargap=0.1,
        height=430,
        margin={"t": 90},
        legend={"orientation": "h", "x": 0, "y": -0.25, "yanchor": "top"},
    )
    return figure


def step_curves(curves: Mapping[str, Sequence[Mapping[str, Any]]]) -> go.Figure:
    """Draw the time of a verification step against the context, and of a prompt, with floors.

    Parameters
    ----------
    curves
        ``curves`` of the file: ``decode`` and ``prefill``.

    Examples
    --------
    >>> decode = [{"requests": 1, "context": c, "target_ms": 5.0, "target_floor_ms": 3.0}
    ...           for c in (1000, 8000)]
    >>> prefill = [{"tokens": 1024, "start": 0, "ms": 30.0, "floor_ms": 20.0}]
    >>> len(step_curves({"decode": decode, "prefill": prefill}).data)
    4
    """
    figure = make_subplots(
        cols=2, subplot_titles=("verifying 8 drafts", "a prompt, nothing cached"),
        horizontal_spacing=0.11, column_widths=[0.56, 0.44],
    )  # fmt: skip
    panels = (
        (1, "context of each request, tokens", [500, 400_000], (1000, 8000, 16000, 64000)),
        (2, "tokens of the prompt", [700, 24_000], (1024, 2048, 4096, 8000, 16000)),
    )
    times = {
        1: [row[key] for row in curves["decode"] for key in ("target_ms", "target_floor_ms")],
        2: [row[key] for row in curves["prefill"] for key in ("ms", "floor_ms")],
    }
    for col, title, (low, high), ticks in panels:
        figure.update_xaxes(
            type="log", title=title, range=[_log(low), _log(high)], tickvals=ticks,
            ticktext=[f"{t // 1000}k" if t % 1000 == 0 else f"{t / 1024:.0f}k" for t in ticks],
            col=col,
        )  # fmt: skip
        bottom, top = min(times[col]) / 1.3, max(times[col]) * 1.3
        marks = [m * 10**p for p in range(4) for m in (1, 2, 5) if bottom < m * 10**p < top]
        figure.update_yaxes(
            type="log", title="ms", range=[_log(bottom), _log(top)], tickvals=marks,
            ticktext=[f"{m}" for m in marks], col=col,
        )  # fmt: skip
    numbers = sorted({row["requests"] for row in curves["decode"]})
    for index, number in enumerate(numbers):
        members = [row for row in curves["decode"] if row["requests"] == number]
        style = series_style(index)
        x = [row["context"] for row in members]
        figure.add_scatter(
            x=x, y=[row["target_ms"] for row in members], mode="lines+markers",
            name=f"{number} requests", col=1, row=1, **style,
        )  # fmt: skip
        figure.add_scatter(
            x=x, y=[row["target_floor_ms"] for row in members], mode="lines",
            name=f"{number} requests, floor", col=1, row=1,
            line={"color": style["line"]["color"], "dash": "dot", "width": 1.5},
        )  # fmt: skip
        name = f"{number} request{'s' if number > 1 else ''}"
        label(figure, x[-1], members[-1]["target_ms"], name, index)
    fresh = [row for row in curves["prefill"] if row["start"] == 0]
    for name, key, style in (
        ("measured", "ms", series_style(0)),
        ("floor", "floor_ms", {"line": {"color": _GREY, "dash": "dot", "width": 1.5}}),
    ):
        figure.add_scatter(
            x=[row["tokens"] for row in fresh], y=[row[key] for row in fresh], name=name,
            mode="lines+markers" if "marker" in style else "lines", col=2, row=1, **style,
        )  # fmt: skip
    figure.update_layout(
        title="A step of one rank on one H200; dotted: its floor (Miniature, Measured)",
        height=460,
        margin={"t": 90},
        showlegend=False,
    )
    return figure


def _log(value: float) -> float:
    from math import log10

    return log10(value)

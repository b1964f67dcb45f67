"""Lesson 12: move a window over a run, and limits over a load, with sliders.

Needs plotly; ipywidgets for the sliders only. Both views are functions of runs that have been made:
nothing is simulated when a slider moves.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import plotly.graph_objects as go

from kimik3_lab.benchmark import RequestRecord, Window
from kimik3_lab.teaching import plots_load

if TYPE_CHECKING:
    import ipywidgets

__all__ = [
    "LoadLevel",
    "WindowView",
    "good_rate",
    "goodput_explorer",
    "goodput_figure",
    "sliding_counts",
    "view_window",
    "window_explorer",
    "window_figure",
]


# -- windows ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WindowView:
    """What a window makes of a run.

    Attributes
    ----------
    ended
        Completed requests that ended in it.
    touching
        Completed requests whose latencies count.
    mean_latency_s
        Theirs; NaN without any.
    tokens_per_s
        Output tokens of those that ended, over its length: the published method.
    arrived_tokens_per_s
        Tokens that arrived in it, of whichever request, over its length.
    """

    ended: int
    touching: int
    mean_latency_s: float
    tokens_per_s: float
    arrived_tokens_per_s: float


def view_window(records: Sequence[RequestRecord], window: Window) -> WindowView:
    """Look at a run through a window, by the client's rule.

    Raises
    ------
    ValueError
        If the window has no length.

    Examples
    --------
    >>> done = dict(status="completed", output_tokens=2)
    >>> run = [
    ...     RequestRecord(0, start=0.0, token_times=[1.0, 4.0], end=4.0, **done),
    ...     RequestRecord(1, start=4.0, token_times=[5.0, 12.0], end=12.0, **done),
    ... ]
    >>> view = view_window(run, Window(2, 10))
    >>> view.ended, view.touching, view.mean_latency_s
    (1, 2, 6.0)
    >>> view.tokens_per_s, view.arrived_tokens_per_s
    (0.25, 0.25)
    """
    if window.duration <= 0:
        raise ValueError(f"a window needs a length, got {window.open} to {window.close}")
    completed = [record for record in records if record.status == "completed"]
    touching = [record for record in completed if window.touches(record)]
    ended = [record for record in touching if window.contains(record.end)]
    arrived = 0.0
    for record in records:
        if record.end < window.open or record.start > window.close or not record.token_times:
            continue
        inside = sum(map(window.contains, record.token_times))
        # A chunk may carry several tokens: how many, on average over its request.
        arrived += inside * (record.tokens_per_chunk or 1.0)
    return WindowView(
        ended=len(ended),
        touching=len(touching),
        mean_latency_s=float(np.mean([r.e2e for r in touching])) if touching else float("nan"),
        tokens_per_s=sum(r.output_tokens for r in ended) / window.duration,
        arrived_tokens_per_s=arrived / window.duration,
    )


def sliding_counts(
    records: Sequence[RequestRecord],
    length_s: float,
    *,
    begin_s: float,
    until_s: float,
    step_s: float = 1.0,
) -> np.ndarray:
    """Count the requests that end in a window, for windows that open later and later.

    Examples
    --------
    >>> run = [RequestRecord(i, start=i, end=i + 1.0, status="completed") for i in range(100)]
    >>> sorted(set(sliding_counts(run, 10.5, begin_s=0, until_s=50, step_s=0.25).tolist()))
    [10, 11]
    """
    ends = np.sort([record.end for record in records if record.status == "completed"])
    opens = np.arange(begin_s, until_s - length_s + 1e-9, step_s)
    if not len(opens):
        raise ValueError(f"no window of {length_s} s fits between {begin_s} and {until_s}")
    found = np.searchsorted(ends, opens + length_s, "right") - np.searchsorted(ends, opens, "left")
    return np.asarray(found)


def window_figure(
    records: Sequence[RequestRecord], opens_s: float, length_s: float, *, name: str = ""
) -> go.Figure:
    """Draw a run and a window, with what it makes of it in the title."""
    window = Window(opens_s, opens_s + length_s)
    view = view_window(records, window)
    until = max(window.close * 1.12, 40.0)
    shown = [
        (r.start, r.end, r.status == "completed")
        for r in records
        if r.start < until and r.end > r.start
    ]
    first = f"{name}: " if name else ""
    return plots_load.window_edges(
        shown,
        (window.open, window.close),
        title=f"{first}{view.ended} ended, {view.tokens_per_s:.0f} tokens/s, "
        f"mean latency {view.mean_latency_s:.2f} s of {view.touching}",
        until=until,
    )


def window_explorer(
    runs: Mapping[str, Sequence[RequestRecord]],
    *,
    opens_s: float = 15.0,
    length_s: float = 120.0,
    widgets: bool = True,
) -> go.Figure | ipywidgets.VBox:
    """Move a window over recorded runs with sliders, or get the figure of the first.

    Parameters
    ----------
    runs
        Name to the requests of a run.
    opens_s, length_s
        The window to show first.
    widgets
        False returns :func:`window_figure`, for pages without a running kernel.
    """
    name = next(iter(runs))
    first = window_figure(runs[name], opens_s, length_s, name=name)
    if not widgets:
        return first
    import ipywidgets

    last = {key: max(r.end for r in records) for key, records in runs.items()}
    pick = ipywidgets.Dropdown(options=list(runs), value=name, description="run")
    opens = _slider("opens, s", opens_s, 0, max(last.values()) - 20, 1)
    length = _slider("length, s", length_s, 10, 300, 5)
    view = ipywidgets.Output()

    def show(_change: object = None) -> None:
        key = pick.value
        start = min(opens.value, last[key] - 15)
        size = min(length.value, last[key] - start)
        view.outputs = (_as_output(window_figure(runs[key], start, size, name=key)),)

    for control in (pick, opens, length):
        control.observe(show, names="value")
    show()
    return ipywidgets.VBox([pick, ipywidgets.HBox([opens, length]), view])


# -- goodput ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LoadLevel:
    """One rate of an open loop.

    Attributes
    ----------
    offered
        Requests a second that arrived.
    duration_s
        Seconds over which they arrived.
    records
        All of them.
    """

    offered: float
    duration_s: float
    records: Sequence[RequestRecord]

    @property
    def served(self) -> float:
        """Requests a second that ended while others still arrived."""
        ended = (r.status == "completed" and r.end <= self.duration_s for r in self.records)
        return sum(ended) / self.duration_s

    @property
    def ttft_s(self) -> list[float]:
        """Seconds to the first token, of all that got one."""
        return [r.ttft for r in self.records if r.ttft is not None]


def good_rate(level: LoadLevel, ttft_ms: float, tpot_ms: float) -> float:
    """Count the requests that keep both limits, a second of their arriving.

    Examples
    --------
    >>> quick = RequestRecord(0, 0.0, None, "completed", [0.5, 0.6], 0.6, output_tokens=2)
    >>> slow = RequestRecord(1, 0.0, None, "completed", [3.0, 3.1], 3.1, output_tokens=2)
    >>> good_rate(LoadLevel(1.0, 2.0, [quick, slow]), ttft_ms=1000, tpot_ms=200)
    0.5
    """
    kept = (
        r.status == "completed"
        and r.ttft is not None
        and r.ttft * 1e3 <= ttft_ms
        and (r.tpot or 0.0) * 1e3 <= tpot_ms
        for r in level.records
    )
    return sum(kept) / level.duration_s


def goodput_figure(levels: Sequence[LoadLevel], ttft_ms: float, tpot_ms: float) -> go.Figure:
    """Draw served and good requests over the load, for limits."""
    return plots_load.goodput(
        [level.offered for level in levels],
        [level.served for level in levels],
        [good_rate(level, ttft_ms, tpot_ms) for level in levels],
        title=f"Good: first token within {ttft_ms / 1e3:g} s, then {tpot_ms:g} ms a token",
    )


def goodput_explorer(
    levels: Sequence[LoadLevel],
    *,
    ttft_ms: float = 2000,
    tpot_ms: float = 25,
    widgets: bool = True,
) -> go.Figure | ipywidgets.VBox:
    """Move the limits with sliders, or get the figure of the first.

    Parameters
    ----------
    levels
        Runs of an open loop, by rising rate.
    ttft_ms, tpot_ms
        Limits to show first.
    widgets
        False returns :func:`goodput_figure`.
    """
    first = goodput_figure(levels, ttft_ms, tpot_ms)
    if not widgets:
        return first
    import ipywidgets

    ttft = _slider("TTFT, ms", ttft_ms, 250, 20_000, 250)
    tpot = _slider("TPOT, ms", tpot_ms, 5, 60, 1)
    view = ipywidgets.Output()

    def show(_change: object = None) -> None:
        view.outputs = (_as_output(goodput_figure(levels, ttft.value, tpot.value)),)

    for control in (ttft, tpot):
        control.observe(show, names="value")
    show()
    return ipywidgets.VBox([ipywidgets.HBox([ttft, tpot]), view])


def _slider(text: str, value: float, low: float, high: float, step: float) -> Any:
    import ipywidgets

    return ipywidgets.FloatSlider(
        value=value, min=low, max=high, step=step, description=text, continuous_update=False,
        readout_format=".0f",
    )  # fmt: skip


def _as_output(figure: go.Figure) -> dict[str, Any]:
    plain = json.loads(figure.to_json())  # arrays as text, which a widget can send
    return {
        "output_type": "display_data",
        "data": {"application/vnd.plotly.v1+json": plain, "text/plain": figure.layout.title.text},
        "metadata": {},
    }

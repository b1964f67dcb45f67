"""Figures of lesson 01 on running, and the memory view: what they draw is what was worked out."""

from __future__ import annotations

import math

import plotly.graph_objects as go
import pytest

from kimik3_lab.config import K3Config
from kimik3_lab.performance.flops import flops_per_token
from kimik3_lab.performance.placement import Layout, rank_weights
from kimik3_lab.performance.step_bytes import step_bytes
from kimik3_lab.performance.wiring import residual_reads
from kimik3_lab.teaching import plots_anatomy, plots_anatomy_run, widgets_anatomy

RELEASED, TINY = K3Config.released(), K3Config.tiny()


def test_flops_lines_cross_at_the_crossover():
    flops = flops_per_token(RELEASED)
    figure = plots_anatomy.flops_lines(flops)
    token, attention, fixed, mark = figure.data
    assert token.y[0] * 1e9 == pytest.approx(flops.decode(token.x[0]))
    assert attention.y[-1] * 1e9 == pytest.approx(1_048_576 * flops.mla_per_cached_token)
    assert set(fixed.y) == {flops.fixed / 1e9}
    assert (mark.x[0], mark.text[0]) == (41_722, "41,722 tokens")


def test_heatmap_puts_every_share_in_its_row():
    reads = list(residual_reads(TINY))
    shares = [[round((i + 1) / 100, 2)] * read.sources for i, read in enumerate(reads)]
    heatmap = plots_anatomy_run.residual_heatmap(reads, shares, TINY.attn_res_block_size).data[0]
    assert list(heatmap.y) == [
        "embedding",
        *(f"layers {first} to {first + 2}" for first in (0, 3, 6, 9)),
        "running sum",
    ]
    assert list(heatmap.x)[:3] == ["a0", "f0", "a1"]
    assert heatmap.x[-1] == "out"
    for column, share in enumerate(shares):
        drawn = [row[column] for row in heatmap.z if not math.isnan(row[column])]
        assert drawn == share
        assert heatmap.z[-1][column] == share[-1]  # the running sum is always on top
        assert heatmap.text[-1][column] == f"{100 * share[-1]:.0f}"
    with pytest.raises(ValueError, match="got 1 weights, expected 2"):
        plots_anatomy_run.residual_heatmap(reads, [share[:1] for share in shares], 3)


def test_step_panels_stack_to_the_total():
    steps = [step_bytes(RELEASED, batch, 8192, Layout(8)) for batch in (1, 16, 64)]
    figure = plots_anatomy_run.step_panels(steps, {"B300": 8e12, "H200": 4.8e12})
    bars = [trace for trace in figure.data if isinstance(trace, go.Bar)]
    for index, step in enumerate(steps):
        assert sum(bar.y[index] for bar in bars) * 1e9 == pytest.approx(step.total)
    lines = [trace for trace in figure.data if trace.type == "scatter" and trace.mode != "text"]
    assert [line.y[0] for line in lines] == [
        pytest.approx(1e3 * steps[0].floor_seconds(bandwidth)) for bandwidth in (8e12, 4.8e12)
    ]


def bars(figure: go.Figure) -> dict[str, float]:
    return {trace.name.rpartition(",")[0]: trace.x[0] for trace in figure.data}


def test_memory_figure_fills_the_gpu():
    figure = widgets_anatomy.memory_figure(RELEASED, context=131_072)
    assert figure.layout.title.text.startswith("14 sequences of 131,072 tokens on 8 B300")
    assert sum(bars(figure).values()) == pytest.approx(0.9 * 288)
    weights = rank_weights(RELEASED, Layout(8))
    assert bars(figure)["weights: routed experts"] * 1e9 == weights.experts
    one = widgets_anatomy.memory_figure(RELEASED, context=1_048_576)
    assert one.layout.title.text.startswith("1 sequence of")
    copies = widgets_anatomy.memory_figure(RELEASED, layout="DP16 + EP16")
    assert copies.layout.title.text.startswith("1,296 sequences of 8,192 tokens on 16 B300")
    assert sum(bars(copies).values()) == pytest.approx(0.9 * 288)


def test_memory_figure_draws_what_does_not_fit():
    figure = widgets_anatomy.memory_figure(RELEASED, "H200", "TP8")
    assert figure.layout.title.text.startswith(
        "Does not fit: the nearest that fits is TP16 + EP16 on 16 GPUs, 108.3 GB"
    )
    assert sum(bars(figure).values()) == pytest.approx(205.06, abs=0.01)
    assert figure.layout.xaxis.range[1] > 205.06
    assert not any("sequence" in trace.name or "free" in trace.name for trace in figure.data)


def test_memory_figure_knows_its_menu():
    with pytest.raises(ValueError, match="'H100', expected one of B300, GB300, B200, H200"):
        widgets_anatomy.memory_figure(RELEASED, "H100")
    with pytest.raises(ValueError, match="'TP7', expected one of TP8"):
        widgets_anatomy.memory_figure(RELEASED, layout="TP7")


def test_view_without_widgets_is_the_figure():
    figure = widgets_anatomy.memory_view(RELEASED, widgets=False)
    assert figure == widgets_anatomy.memory_figure(RELEASED)


def test_menus_redraw():
    shown: list[go.Figure] = []
    box, first = widgets_anatomy.memory_menus(RELEASED, shown.append)
    assert first == widgets_anatomy.memory_figure(RELEASED)
    gpu, layout, rows, context = box.children
    context.value = 131_072
    rows.value = "fp8"
    layout.value = "TP16 + EP16"
    gpu.value = "H200"
    titles = [figure.layout.title.text.partition("<")[0] for figure in shown]
    assert titles == [
        "14 sequences of 131,072 tokens on 8 B300",
        "28 sequences of 131,072 tokens on 8 B300",
        "82 sequences of 131,072 tokens on 16 B300",
        "10 sequences of 131,072 tokens on 16 H200",
    ]


def test_view_shows_menus_and_a_figure_that_can_change(monkeypatch):
    """Through IPython's own display: the figure is plain data with an id, and is replaced by it."""
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.display import display

    InteractiveShell.clear_instance()
    shell = InteractiveShell.instance()
    published: list[tuple[dict, dict, bool]] = []

    def publish(data, metadata=None, *, transient=None, update=False, **kwargs):
        published.append((data, transient or {}, update))

    monkeypatch.setattr(shell.display_pub, "publish", publish)
    boxes: list[object] = []

    def show(thing, **kwargs):
        if not kwargs:
            return boxes.append(thing)
        return display(thing, **kwargs)

    monkeypatch.setattr("IPython.display.display", show)
    monkeypatch.setattr("IPython.core.display_functions.display", show)
    try:
        assert widgets_anatomy.memory_view(RELEASED) is None
        boxes[0].children[3].value = 1_048_576
    finally:
        InteractiveShell.clear_instance()
    assert [update for *_, update in published] == [False, True, True]
    assert len({transient["display_id"] for _, transient, _ in published}) == 1
    first, between, second = (data for data, *_ in published)
    # Without this the graph that is there would stay.
    assert set(between) == {"text/plain"}
    titles = [
        data["application/vnd.plotly.v1+json"]["layout"]["title"]["text"]
        for data in (first, second)
    ]
    assert titles[0].startswith("191 sequences of 8,192 tokens")
    assert titles[1].startswith("1 sequence of 1,048,576 tokens")

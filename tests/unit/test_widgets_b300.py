"""Figures and sliders of lesson 11 show what the cost model and the cache count."""

from __future__ import annotations

import itertools

import pytest

from kimik3_lab.performance.step_cost import EXECUTION_SWITCHES
from kimik3_lab.teaching import plots_b300, plots_b300_use, widgets_b300, widgets_b300_memory
from kimik3_lab.teaching.plots_b300_use import Gain, Pair, Segment


def test_what_if_adds_up_and_never_beats_its_floor() -> None:
    for requests in (1, 16, 64):
        found = widgets_b300.what_if(requests=requests)
        assert sum(found.parts.values()) == pytest.approx(found.step_ms)
        assert found.floor_ms < found.step_ms
        assert found.tokens_per_s == pytest.approx(1e3 * requests / found.tpot_ms)


def test_what_if_follows_its_choices() -> None:
    base = widgets_b300.what_if()
    assert base.tokens_per_step == pytest.approx(3.45)
    none = widgets_b300.what_if(drafts=0)
    assert (
        none.tokens_per_step == 1.0 and none.step_ms < base.step_ms and "drafter" not in none.parts
    )
    assert widgets_b300.what_if(acceptance_length=4.0).tpot_ms < base.tpot_ms
    assert widgets_b300.what_if(acceptance_length=4.0).step_ms == base.step_ms
    assert widgets_b300.what_if(switches=frozenset()).step_ms > base.step_ms
    one_less = EXECUTION_SWITCHES - {"kda_prefill_in_place"}
    assert widgets_b300.what_if(switches=one_less).prompt_ms > base.prompt_ms
    assert widgets_b300.what_if(context=128_000, requests=16).step_ms > 1.5 * base.step_ms


def test_what_does_not_fit_says_why() -> None:
    with pytest.raises(ValueError, match=r"TP8 on B200: the weights are .* GB more"):
        widgets_b300.what_if(hardware="B200")
    for figure in (
        widgets_b300.what_if_figure(hardware="B200"),
        widgets_b300_memory.memory_figure(hardware="H200"),
    ):
        assert figure.layout.title.text == "This does not fit" and not figure.data
        assert "GB" in figure.layout.annotations[0].text


def test_memory_adds_up_to_the_gpu() -> None:
    memory = widgets_b300_memory.node_memory(requests=16)
    parts = (
        memory.trunk, memory.experts, memory.reserve, memory.rows, memory.states,
        memory.for_drafts, memory.free, memory.withheld,
    )  # fmt: skip
    assert sum(parts) == pytest.approx(288e9, rel=1e-6) and min(parts) > 0
    assert memory.for_drafts == pytest.approx(8 * memory.states)
    full = widgets_b300_memory.node_memory(requests=10_000)
    assert full.requests == full.seats == memory.seats and 0 <= full.free < memory.free
    assert widgets_b300_memory.node_memory(drafts=0).for_drafts == 0
    assert widgets_b300_memory.node_memory(kv_dtype="fp8", context=90_000).seats > (
        widgets_b300_memory.node_memory(context=90_000).seats
    )


def test_sliders_redraw() -> None:
    box = widgets_b300.what_if_explorer()
    view = box.children[-1]
    before = view.outputs[0]["data"]["text/plain"]
    box.children[0].children[0].value = 16
    assert view.outputs[0]["data"]["text/plain"] != before
    box = widgets_b300_memory.memory_explorer()
    view = box.children[-1]
    assert view.outputs[0]["data"]["text/plain"].startswith("16 requests")
    box.children[0].children[0].value = 2
    assert view.outputs[0]["data"]["text/plain"].startswith("2 requests")


def test_figures_refuse_what_they_cannot_draw() -> None:
    with pytest.raises(ValueError, match="add up to 0"):
        plots_b300.part_bars({"a": 0.0}, title="")
    with pytest.raises(ValueError, match="points without a curve: b"):
        plots_b300.curves_and_points(
            [1], {"a": [1]}, {"b": [(1, 1)]}, title="", x_title="", y_title=""
        )
    with pytest.raises(ValueError, match="every panel must have the rows a"):
        plots_b300_use.point_pairs(
            [("x", "s", [Pair("a", 1, 1)]), ("y", "s", [Pair("b", 1, 1)])], title=""
        )
    with pytest.raises(ValueError, match="needs both ends"):
        plots_b300_use.point_pairs([("x", "s", [Pair("a", 1, 1, 0.5)])], title="")
    with pytest.raises(ValueError, match="add up to 0"):
        plots_b300_use.memory_map([Segment("a", 0.0, "#000000")], title="")


def test_parts_are_sorted_and_named() -> None:
    figure = plots_b300.part_bars({"small": 1.0, "none": 0.0, "large": 9.0}, title="", floor=2.5)
    assert list(figure.data[0].y) == ["small", "large"]
    assert "bytes alone would take 2.50" in figure.layout.xaxis.title.text


def test_worth_puts_the_orders_apart_and_spans_ranges() -> None:
    gain = Gain("a", 0.2, (0.1, 0.4), 0.3, (0.25, 0.35))
    ladder, reverse = plots_b300_use.worth([("c=1", [gain])]).data
    assert ladder.y[0] != reverse.y[0]
    assert list(ladder.error_x.array) == pytest.approx([20]) and list(ladder.x) == [20]
    assert list(reverse.error_x.arrayminus) == pytest.approx([5])


def test_names_in_memory_do_not_cover_each_other() -> None:
    thin = [Segment(str(i), 0.1, "#000000") for i in range(6)] + [Segment("rest", 100.0, "#FFFFFF")]
    figure = plots_b300_use.memory_map(thin, title="")
    heights = [note.ay for note in figure.layout.annotations]
    assert all(b - a > 5 for a, b in itertools.pairwise(heights))


def test_held_line_keeps_the_order_and_the_sides() -> None:
    figure = plots_b300_use.held_line([("a", 1.0, True), ("b", -8.0, False), ("c", 2.0, True)])
    assert list(figure.data[0].y) == ["a", "c"] and list(figure.data[1].y) == ["b"]
    assert list(figure.layout.yaxis.categoryarray) == ["c", "b", "a"]

"""The explorer of lesson 13 shows what ``k3lab deploy`` would print."""

from __future__ import annotations

import json
import shlex
from itertools import pairwise

import pytest

from kimik3_lab.deploy.plan import plan
from kimik3_lab.deploy.spec import STRATEGIES, DeploymentSpec
from kimik3_lab.teaching.widgets_deploy import choose, deploy_explorer, deploy_figure

WISHES = [
    {"hardware": "b300", "spec": "dspark", "workload": "chat"},
    {"hardware": "gb300", "nodes": 4, "strategy": "tep", "spec": "dspark", "workload": "agents"},
    {"hardware": "b200", "nodes": 2, "strategy": "dcp", "workload": "long-context"},
    {"hardware": "b300", "nodes": 3, "strategy": "pd"},
]


@pytest.mark.parametrize("wish", WISHES)
def test_the_command_is_the_plan_of_the_first_node(wish: dict[str, object]) -> None:
    found = choose(**wish)
    node = plan(DeploymentSpec(**wish)).nodes[0]
    # As a shell reads it, over several lines and with comments behind.
    words = shlex.split("\n".join(found.lines).replace("\\\n", " "), comments=True)
    variables = dict(word.split("=", 1) for word in words[: words.index("vllm")])
    assert variables == node.environment()
    command = words[words.index("vllm") :]
    assert [_plain(word) for word in command] == [_plain(word) for word in node.argv]
    assert not found.refused
    assert all(len(line) <= 80 for line in found.lines)


def _plain(word: str) -> object:
    """JSON may be broken over lines, and then means the same."""
    return json.loads(word) if word.startswith("{") else word


def test_memory_adds_up_or_goes_beyond() -> None:
    fits = choose(hardware="b300")
    assert sum(part.gigabytes for part in fits.segments) == pytest.approx(fits.usable)
    refused = choose(hardware="h200")
    assert refused.refused
    assert sum(part.gigabytes for part in refused.segments) > refused.usable
    drafted = choose(hardware="b300", spec="dspark")
    assert "drafter" in {part.name for part in drafted.segments}


def test_a_refusal_says_why_and_what_would_do() -> None:
    found = choose(hardware="h200")
    text = " ".join(found.lines)
    assert found.title == "Refused" and "136.8 GB usable" in text
    assert "--hardware h200 --nodes 2 --strategy tep" in text
    impossible = choose(strategy="tp-pp")
    assert impossible.segments == () and "second stage" in impossible.lines[0]
    wrong = choose(hosts=("a", "b"))
    assert wrong.refused and "2 hosts for 1 nodes" in wrong.lines[0]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_can_be_drawn(strategy: str) -> None:
    figure = deploy_figure(hardware="b300", nodes=2, strategy=strategy)
    texts = [note.text for note in figure.layout.annotations]
    assert any("vllm" in text for text in texts)
    json.loads(figure.to_json())


def test_names_of_parts_do_not_cover_each_other() -> None:
    figure = deploy_figure(hardware="gb300", nodes=4, strategy="tep", spec="dspark")
    heights = sorted(note.y for note in figure.layout.annotations if note.xref == "x")
    top = figure.layout.yaxis.range[1]
    assert all(b - a > 0.04 * top for a, b in pairwise(heights))


def test_the_figure_stands_for_the_widget() -> None:
    figure = deploy_explorer(widgets=False, hardware="b200", nodes=2)
    assert figure.layout.title.text == choose(hardware="b200", nodes=2).title


def test_boxes_draw_anew() -> None:
    ipywidgets = pytest.importorskip("ipywidgets")
    box = deploy_explorer(hardware="b300")
    assert isinstance(box, ipywidgets.VBox)
    controls = [control for row in box.children[:2] for control in row.children]
    hardware = next(control for control in controls if control.description == "hardware")
    view = box.children[2]
    before = view.outputs[0]["data"]["text/plain"]
    hardware.value = "h200"
    assert before.startswith("TP8") and view.outputs[0]["data"]["text/plain"] == "Refused"

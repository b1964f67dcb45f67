"""Recording a prompt and stepping through it: true states, and a view that follows its sliders."""

from __future__ import annotations

import json

import ipywidgets
import numpy as np
import plotly.graph_objects as go
import pytest
import torch

from kimik3_lab.config import K3Config
from kimik3_lab.reference import kda
from kimik3_lab.reference.initialization import random_model
from kimik3_lab.reference.model import SequenceMixer
from kimik3_lab.teaching import widgets_kda

torch.set_num_threads(1)
IDS = [0, 7, 9, 7, 30, 7]
TEXTS = ["a", "b\n", "<c>", "d", "e", "f"]


@pytest.fixture(scope="module")
def model():
    return random_model(K3Config.micro(), dtype=torch.float64)


@pytest.fixture(scope="module")
def trace(model) -> widgets_kda.KDATrace:
    return widgets_kda.record(model, IDS, TEXTS)


def test_recorded_states_are_those_of_decoding(model, trace) -> None:
    mixer = SequenceMixer(model.new_state())
    with torch.inference_mode():
        for n, token in enumerate(IDS, 1):
            model(torch.tensor([token]), mixer)
            for layer_id, states in trace.states.items():
                torch.testing.assert_close(
                    states[n], mixer.state.recurrent[layer_id], rtol=1e-11, atol=1e-12
                )
    assert list(trace.states) == list(model.config.kda_layer_ids)
    assert not any(states[0].any() for states in trace.states.values())


def test_inputs_reproduce_the_layer(trace) -> None:
    for layer_id, seen in trace.inputs.items():
        _, after = kda.recurrent(*seen.batch())
        torch.testing.assert_close(after[0], trace.states[layer_id][-1], rtol=1e-11, atol=1e-12)
        _, tail = kda.recurrent(*seen.batch(2, 4), trace.states[layer_id][2:3])
        torch.testing.assert_close(tail[0], trace.states[layer_id][4], rtol=1e-11, atol=1e-12)
        y, _ = kda.short_conv(seen.u, seen.taps)
        v = y.unflatten(-1, (3, *seen.v.shape[1:]))[:, 2]
        torch.testing.assert_close(v, seen.v)


@pytest.mark.parametrize("position", range(len(IDS)))
def test_a_step_adds_up(trace, position: int) -> None:
    for layer_id in trace.inputs:
        for head in range(2):
            step = trace.step(layer_id, head, position)
            old = trace.states[layer_id][position, head]
            rebuilt = step["decay"][:, None] * old - step["removed"] + step["written"]
            torch.testing.assert_close(rebuilt, step["state"], rtol=1e-11, atol=1e-12)
            assert ((step["decay"] > 0) & (step["decay"] < 1)).all()
            for part in ("removed", "written"):
                assert torch.linalg.matrix_rank(step[part]) <= 1
    assert not trace.step(0, 0, 0)["removed"].any(), "an empty memory has nothing to remove"
    assert trace.step(0, 0, 3)["removed"].any()


def test_recording_leaves_the_model_output_alone(model, trace) -> None:
    """Recording goes through the same mixer: a second recording gives the same states."""
    again = widgets_kda.record(model, IDS)
    assert again.tokens == tuple(str(i) for i in IDS)
    assert all(torch.equal(again.states[i], trace.states[i]) for i in trace.states)


def test_refusals(model, trace) -> None:
    with pytest.raises(ValueError, match="got 1 texts for 2 token ids"):
        widgets_kda.record(model, [0, 1], ["a"])
    with pytest.raises(ValueError, match="layer 99 is no KDA layer; these are"):
        trace.step(99, 0, 0)
    for head, position in ((2, 0), (0, len(IDS)), (-1, 0), (0, -1)):
        with pytest.raises(ValueError, match="expected heads 0 to 1 and tokens 0 to 5"):
            trace.step(0, head, position)


def test_figure_shows_the_step(trace) -> None:
    figure = widgets_kda.state_figure(trace, 0, 1, 3)
    step = trace.step(0, 1, 3)
    np.testing.assert_allclose(figure.data[0].x, step["decay"])
    for drawn, name in zip(figure.data[1:], ("removed", "written", "state"), strict=True):
        np.testing.assert_allclose(drawn.z, step[name].numpy(), rtol=1e-5, atol=1e-7)
    assert figure.layout.title.text == "Token 3 “d” in layer 0, head 1"


def test_titles_survive_line_ends_and_markup(trace) -> None:
    assert "b⏎" in widgets_kda.state_figure(trace, 0, 0, 1).layout.title.text
    assert "&lt;c>" in widgets_kda.state_figure(trace, 0, 0, 2).layout.title.text


def test_tokens_of_a_head_share_one_scale(trace) -> None:
    scales = {widgets_kda.state_figure(trace, 0, 0, n).layout.coloraxis.cmax for n in range(6)}
    assert len(scales) == 1
    assert scales != {widgets_kda.state_figure(trace, 0, 1, 0).layout.coloraxis.cmax}


def controls(box: ipywidgets.VBox) -> tuple[dict[str, ipywidgets.Widget], ipywidgets.Output]:
    pickers, token, view = box.children
    return {w.description: w for w in (*pickers.children, token)}, view


def title(view: ipywidgets.Output) -> str:
    (output,) = view.outputs
    return output["data"]["application/vnd.plotly.v1+json"]["layout"]["title"]["text"]


def test_without_widgets_it_is_the_figure(trace) -> None:
    figure = widgets_kda.state_explorer(trace, head=1, position=2, widgets=False)
    assert isinstance(figure, go.Figure)
    assert figure == widgets_kda.state_figure(trace, 0, 1, 2)


def test_the_view_follows_its_controls(trace) -> None:
    box = widgets_kda.state_explorer(trace, position=2)
    by_name, view = controls(box)
    assert title(view) == "Token 2 “&lt;c>” in layer 0, head 0"
    by_name["token"].value = 4
    assert title(view) == "Token 4 “e” in layer 0, head 0"
    by_name["head"].value = 1
    assert title(view) == "Token 4 “e” in layer 0, head 1"
    last = list(trace.inputs)[-1]
    by_name["layer"].value = last
    assert title(view) == f"Token 4 “e” in layer {last}, head 1"
    assert by_name["token"].max == len(IDS) - 1


def test_the_view_can_be_sent_as_json_and_equals_the_figure(trace) -> None:
    _, view = controls(widgets_kda.state_explorer(trace, position=1))
    sent = json.loads(json.dumps(view.outputs[0]["data"]["application/vnd.plotly.v1+json"]))
    assert go.Figure(sent) == widgets_kda.state_figure(trace, 0, 0, 1)

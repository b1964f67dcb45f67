"""Lesson 05: record what a KDA layer does to its state, token by token, and step through it.

Needs torch and plotly; ipywidgets for the sliders only. The view is a function of a recording:
:func:`state_figure` draws one token, and :func:`state_explorer` puts sliders around it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import plotly.graph_objects as go
import torch
from torch import Tensor

from kimik3_lab.reference import kda
from kimik3_lab.reference.model import K3ForCausalLM, SequenceMixer
from kimik3_lab.teaching import plots_kda

if TYPE_CHECKING:
    import ipywidgets

__all__ = ["KDAInputs", "KDATrace", "record", "state_explorer", "state_figure"]


@dataclass(frozen=True)
class KDAInputs:
    """What one KDA layer hands to the recurrence for a prompt, and the convolution's inputs.

    ``q, k, g [T, H, K]``, ``v [T, H, V]``, ``beta [T, H]`` as for :func:`kda.recurrent`, without
    the batch; ``u [T, 3P]`` and ``taps [3P, kernel]`` as for :func:`kda.short_conv`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    u: Tensor
    taps: Tensor

    def batch(self, start: int = 0, stop: int | None = None) -> list[Tensor]:
        """``q, k, v, g, beta`` of some tokens with a batch of one, as the reference takes them."""
        return [x[None, start:stop] for x in (self.q, self.k, self.v, self.g, self.beta)]


class _Recorder(SequenceMixer):
    """A mixer that keeps what passes through it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seen: dict[int, KDAInputs] = {}

    def conv(self, layer_id: int, u: Tensor, weight: Tensor) -> Tensor:
        self._u, self._taps = u, weight
        return super().conv(layer_id, u, weight)

    def kda(
        self, layer_id: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
    ) -> Tensor:
        self.seen[layer_id] = KDAInputs(q, k, v, g, beta, self._u, self._taps)
        return super().kda(layer_id, q, k, v, g, beta)


@dataclass(frozen=True)
class KDATrace:
    """A prompt's way through the KDA layers of a model.

    Attributes
    ----------
    tokens
        Text of each token.
    inputs
        Of each KDA layer, by its id.
    states
        Layer to ``[T + 1, H, K, V]``: the state before the first token and after each one.
    """

    tokens: tuple[str, ...]
    inputs: dict[int, KDAInputs]
    states: dict[int, Tensor]

    def step(self, layer_id: int, head: int, position: int) -> dict[str, Tensor]:
        """Take one token's update apart.

        ``decay [K]`` scales the rows of the old state; ``removed`` is what the decayed state held
        under the token's key, times beta; ``written`` is beta times the key and the value;
        ``state`` is the result. It holds that ``state == decay * old - removed + written``.

        Raises
        ------
        ValueError
            If there is no such layer, head or token.
        """
        if layer_id not in self.inputs:
            raise ValueError(f"layer {layer_id} is no KDA layer; these are: {list(self.inputs)}")
        seen, states = self.inputs[layer_id], self.states[layer_id]
        length, heads = seen.beta.shape
        if not (0 <= head < heads and 0 <= position < length):
            raise ValueError(
                f"got head {head} and token {position}, expected heads 0 to {heads - 1} and "
                f"tokens 0 to {length - 1}"
            )
        k, v, beta = (x[position, head] for x in (seen.k, seen.v, seen.beta))
        decay = seen.g[position, head].exp()
        decayed = decay[:, None] * states[position, head]
        return {
            "decay": decay,
            "removed": torch.outer(k, beta * (decayed.mT @ k)),
            "written": torch.outer(k, beta * v),
            "state": states[position + 1, head],
        }


@torch.inference_mode()
def record(
    model: K3ForCausalLM, token_ids: Sequence[int], tokens: Sequence[str] | None = None
) -> KDATrace:
    """Prefill ``token_ids`` and keep the inputs and states of every KDA layer.

    Parameters
    ----------
    tokens
        Text of each token, for titles; the ids by default.

    Raises
    ------
    ValueError
        If ``tokens`` has another length than ``token_ids``.

    Examples
    --------
    >>> from kimik3_lab.config import K3Config
    >>> from kimik3_lab.reference.initialization import random_model
    >>> trace = record(random_model(K3Config.micro()), [0, 7, 9])
    >>> trace.tokens, trace.states[0].shape
    (('0', '7', '9'), torch.Size([4, 2, 16, 16]))
    """
    names = tuple(tokens) if tokens is not None else tuple(str(i) for i in token_ids)
    if len(names) != len(token_ids):
        raise ValueError(f"got {len(names)} texts for {len(token_ids)} token ids")
    mixer = _Recorder(model.new_state())
    model(torch.tensor(list(token_ids), device=model.device), mixer)
    states = {}
    for layer_id, seen in mixer.seen.items():
        positions = range(len(names) + 1)
        checkpoints = kda.chunked(*seen.batch(), checkpoint_at=positions)[2]
        states[layer_id] = torch.cat([checkpoints[n] for n in positions])
    return KDATrace(names, mixer.seen, states)


def state_figure(trace: KDATrace, layer_id: int, head: int, position: int) -> go.Figure:
    """Draw one token's update of one head.

    All tokens of a head share one colour scale, so that pictures of a sequence can be compared.
    """
    step = {name: x.cpu().numpy() for name, x in trace.step(layer_id, head, position).items()}
    # A few large values would leave all others white: the darkest percent shares one colour.
    scale = trace.states[layer_id][1:, head].abs().quantile(0.99).item() or 1.0
    text = trace.tokens[position].replace("\n", "⏎").replace("<", "&lt;")
    return plots_kda.state_step(
        **step,
        title=f"Token {position} “{text}” in layer {layer_id}, head {head}",
        scale=scale,
    )


def state_explorer(
    trace: KDATrace,
    *,
    layer_id: int = 0,
    head: int = 0,
    position: int = 0,
    widgets: bool = True,
) -> go.Figure | ipywidgets.VBox:
    """Step through a recording with sliders, or get the figure of one token.

    Parameters
    ----------
    layer_id, head, position
        What to show first.
    widgets
        False returns :func:`state_figure`, for pages without a running kernel.
    """
    first = state_figure(trace, layer_id, head, position)
    if not widgets:
        return first
    import ipywidgets

    heads = trace.inputs[layer_id].beta.shape[1]
    pick_layer = ipywidgets.Dropdown(
        options=list(trace.inputs), value=layer_id, description="layer"
    )
    pick_head = ipywidgets.Dropdown(options=list(range(heads)), value=head, description="head")
    token = ipywidgets.IntSlider(
        value=position, max=len(trace.tokens) - 1, description="token",
        continuous_update=False, layout={"width": "480px"},
    )  # fmt: skip
    view = ipywidgets.Output()

    def show(_change: object = None) -> None:
        # Assigned, not displayed: nothing is cleared, so the picture does not flicker, and no
        # output leaks into the cell that is running.
        figure = state_figure(trace, pick_layer.value, pick_head.value, token.value)
        view.outputs = (_as_output(figure),)

    for control in (pick_layer, pick_head, token):
        control.observe(show, names="value")
    show()
    return ipywidgets.VBox([ipywidgets.HBox([pick_layer, pick_head]), token, view])


def _as_output(figure: go.Figure) -> dict[str, Any]:
    plain = json.loads(figure.to_json())  # arrays as text, which a widget can send
    return {
        "output_type": "display_data",
        "data": {"application/vnd.plotly.v1+json": plain, "text/plain": figure.layout.title.text},
        "metadata": {},
    }

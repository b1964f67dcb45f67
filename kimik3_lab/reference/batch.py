"""Sequences of equal length side by side: the mixer for training data and for evaluation.

Needs torch. Lesson 01 measures bits per byte with it; ``tools/train_tiny_k3`` trains the drafter
on what it generates.

The engine of lesson 10 mixes sequences of any length. Here all are equally long, so a step of
N = B * T tokens is a rectangle ``[B, T]`` laid flat, and no page table is needed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kimik3_lab.config import K3Config
from kimik3_lab.reference import kda, mla
from kimik3_lab.reference.state import SequenceState

__all__ = ["BatchMixer"]


class BatchMixer:
    """The mixer of ``batch`` sequences that advance together, sequence after sequence in a step.

    Each step continues where the last one stopped, as with
    :class:`~kimik3_lab.reference.state.SequenceMixer`; single tokens go through the forms meant
    for decoding, several through those meant for prefill.

    Parameters
    ----------
    state
        An empty state of *one* sequence (``model.new_state()``): gives shapes, types and device.
    batch
        Number of sequences B.

    Examples
    --------
    >>> from kimik3_lab.reference.initialization import random_model
    >>> model = random_model(K3Config.micro(), seed=0)
    >>> token_ids = torch.tensor([[0, 7, 9], [0, 4, 4]])
    >>> mixer = BatchMixer(model.new_state(), len(token_ids))
    >>> model(token_ids.flatten(), mixer).view(2, 3, -1).shape  # prefill of two prompts
    torch.Size([2, 3, 64])
    >>> model(torch.tensor([5, 6]), mixer).shape, mixer.num_tokens  # one more token each
    (torch.Size([2, 64]), 4)
    """

    def __init__(self, state: SequenceState, batch: int) -> None:
        if batch < 1:
            raise ValueError(f"a batch needs at least one sequence, got {batch}")
        if state.num_tokens:
            raise ValueError(
                f"expected an empty state, got one with {state.num_tokens} tokens: "
                "pass model.new_state()"
            )

        def repeat(group: dict[int, Tensor]) -> dict[int, Tensor]:
            return {i: x.unsqueeze(0).repeat(batch, *[1] * x.dim()) for i, x in group.items()}

        self.batch = batch
        self.recurrent, self.window = repeat(state.recurrent), repeat(state.conv)
        self.latent = repeat(state.latent)
        self.num_tokens = 0
        self._last_layer = state.num_layers - 1

    def conv(self, layer_id: int, u: Tensor, weight: Tensor) -> Tensor:
        """See :meth:`kimik3_lab.reference.mixer.Mixer.conv`."""
        y, self.window[layer_id] = kda.short_conv(self._split(u), weight, self.window[layer_id])
        return y.flatten(0, 1)

    def kda(
        self, layer_id: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
    ) -> Tensor:
        """See :meth:`kimik3_lab.reference.mixer.Mixer.kda`."""
        inputs = [self._split(x) for x in (q, k, v, g, beta)]
        before = self.recurrent[layer_id]
        if inputs[0].shape[1] == 1:
            o, after = kda.recurrent(*inputs, before)
        else:
            o, after, _ = kda.chunked(*inputs, before)
        self.recurrent[layer_id] = after
        self._advance(layer_id, o.shape[1])
        return o.flatten(0, 1)

    def mla(
        self, layer_id: int, q: Tensor, latent: Tensor, kv_b: Tensor, config: K3Config
    ) -> Tensor:
        """See :meth:`kimik3_lab.reference.mixer.Mixer.mla`."""
        queries = self._split(q)
        rows = torch.cat((self.latent[layer_id], self._split(latent)), 1)
        self.latent[layer_id] = rows
        self._advance(layer_id, queries.shape[1])
        form = mla.absorbed if queries.shape[1] == 1 else mla.expanded
        return torch.vmap(lambda q, rows: form(q, rows, kv_b))(queries, rows).flatten(0, 1)

    def _split(self, x: Tensor) -> Tensor:
        """``[N, ...]`` to ``[B, T, ...]``."""
        if len(x) % self.batch:
            raise ValueError(
                f"{len(x)} tokens are no equal share of {self.batch} sequences: each step takes "
                "the same number of tokens of every sequence"
            )
        return x.unflatten(0, (self.batch, -1))

    def _advance(self, layer_id: int, count: int) -> None:
        if layer_id == self._last_layer:
            self.num_tokens += count

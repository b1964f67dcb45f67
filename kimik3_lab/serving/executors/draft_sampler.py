"""From the drafter's hidden states to draft tokens: the Markov loop, for many requests at once.

Needs torch. :mod:`kimik3_lab.serving.executors.proposer` uses it, lesson 09 with that.

All places of a block are computed together, but chosen in order: the Markov head corrects each
place by the token that was chosen just before it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from kimik3_lab.reference.drafter import DSparkDrafter
from kimik3_lab.serving.executors.drafts import Draft, DraftRequest
from kimik3_lab.serving.executors.random_stream import RandomStream, exponentials
from kimik3_lab.serving.executors.sampler import distribution
from kimik3_lab.serving.request import SamplingParams

__all__ = ["choose_blocks", "sample_blocks"]


def sample_blocks(
    drafter: DSparkDrafter,
    hidden: Tensor,
    base: Tensor,
    requests: Sequence[DraftRequest],
    *,
    probabilistic: bool,
    shared_noise: bool,
    truncate: bool,
) -> list[Draft]:
    """Choose the tokens of R drafted blocks.

    Parameters
    ----------
    drafter
        Its Markov head and its confidence head are used.
    hidden : Tensor
        ``[R, N, hidden]``, after the final norm.
    base : Tensor
        ``[R, N, vocab]``: logits before the correction, float32 or wider.
    requests
        The R requests.
    probabilistic, shared_noise, truncate
        See :class:`~kimik3_lab.serving.executors.proposer.Proposer`.

    Returns
    -------
    list of Draft
        N tokens for each request; with probabilities where they were drawn.
    """
    drawing = [row for row, r in enumerate(requests) if probabilistic and not r.params.greedy]
    params = [_params(requests[row].params, truncate=truncate) for row in drawing]
    noise = {row: _Noise(requests[row], base.shape[-1], shared=shared_noise) for row in drawing}
    previous = torch.tensor([r.anchor for r in requests], device=base.device)
    tokens, probs, confidence = [], [], []
    for place in range(base.shape[1]):
        embedding = drafter.markov_head.markov_w1(previous)
        logits = base[:, place] + drafter.markov_head.bias(embedding).to(base.dtype)
        previous = logits.argmax(-1)
        if drawing:
            probabilities = distribution(logits[drawing], params)
            numbers = torch.stack([noise[row].at(place) for row in drawing]).to(base.device)
            previous[drawing] = (probabilities / numbers).argmax(-1)
            probs.append(probabilities)
        if drafter.confidence_head is not None:
            confidence.append(drafter.confidence_head(hidden[:, place], embedding))
        tokens.append(previous)
    token_ids = torch.stack(tokens, 1).tolist()
    chances = torch.stack(confidence, 1).tolist() if confidence else [None] * len(requests)
    drawn_from = dict(zip(drawing, torch.stack(probs, 1), strict=True)) if drawing else {}
    return [Draft(token_ids[i], drawn_from.get(i), chances[i]) for i in range(len(requests))]


def choose_blocks(drafter: DSparkDrafter, base: Tensor, anchors: Tensor) -> Tensor:
    """Choose the most probable tokens of R drafted blocks, and leave them on the device.

    Parameters
    ----------
    drafter, base
        As for :func:`sample_blocks`.
    anchors : Tensor
        int64 ``[R]``: the token before each block.

    Returns
    -------
    Tensor
        int64 ``[R, N]``.
    """
    tokens, previous = [], anchors
    for place in range(base.shape[1]):
        bias = drafter.markov_head.bias(drafter.markov_head.markov_w1(previous))
        previous = (base[:, place] + bias.to(base.dtype)).argmax(-1)
        tokens.append(previous)
    return torch.stack(tokens, 1)


class _Noise:
    """The random numbers of a drafted block."""

    def __init__(self, request: DraftRequest, vocab_size: int, *, shared: bool) -> None:
        if request.stream is None:
            raise ValueError(
                f"request {request.req_id} has a temperature and no random stream: pass "
                "RandomStream.for_request"
            )
        self._first = request.num_context + 1  # the anchor stands just before
        self._vocab_size = vocab_size
        self._shared = request.stream if shared else None
        self._own = request.stream.generator(self._first, "draft")

    def at(self, place: int) -> Tensor:
        """Return the numbers for a place of the block, float64 ``[vocab]``. Ask in order."""
        stream: RandomStream | None = self._shared
        if stream is not None:
            return stream.exponentials(self._first + place, self._vocab_size)
        return exponentials(self._own, self._vocab_size)


def _params(params: SamplingParams, *, truncate: bool) -> SamplingParams:
    """Return what of ``params`` shapes a draft."""
    return params if truncate else dataclasses.replace(params, top_p=1.0, top_k=0, min_p=0.0)

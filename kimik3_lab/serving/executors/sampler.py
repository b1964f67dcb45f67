"""From logits to tokens: the most probable one, or a repeatable draw.

Needs torch. Lesson 10 uses it. The order of operations is vLLM's (``vllm/v1/sample/sampler.py``):
temperature, min-p, top-k, top-p.

A draw is a race: each token gets an exponential random number E, and the largest ``p / E`` wins,
which is token i with probability ``p_i``. The numbers belong to the request's seed and the token's
position (:mod:`kimik3_lab.serving.executors.random_stream`). So the tokens that are drawn here
depend neither on who else is in the batch nor on preemption; and a drafter that runs the same race
with the same numbers often names the winner in advance
(:mod:`kimik3_lab.serving.executors.rejection_sampler`, ``coupled``). Of drafts that were drawn, its
other rules keep the distribution alone: with them a seed's tokens follow the drafts of each step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kimik3_lab.serving.executors.pinned import to_device
from kimik3_lab.serving.executors.random_stream import RandomStream
from kimik3_lab.serving.request import SamplingParams

__all__ = ["check_logits", "distribution", "draw", "race", "sample"]


def sample(
    logits: Tensor,
    params: Sequence[SamplingParams],
    streams: Sequence[RandomStream | None],
    positions: Sequence[int],
) -> list[int]:
    """Choose one token for each row.

    Parameters
    ----------
    logits : Tensor
        ``[M, vocab]``, float32 or wider.
    params, streams
        One for each row, see :meth:`RandomStream.for_request`.
    positions
        Where each new token stands in its sequence: the number of tokens before it, those of the
        prompt included.

    Returns
    -------
    list of int
        M token ids.

    Raises
    ------
    ValueError
        If a row has no probabilities, because a logit is NaN or +inf; it names the rows.

    Examples
    --------
    >>> sample(torch.tensor([[0.0, 2.0, 1.0]]), [SamplingParams()], [None], [5])
    [1]
    """
    if not len(params):
        return []
    check_logits(logits)
    token_ids: list[int] = logits.argmax(-1).tolist()
    rows = [row for row, p in enumerate(params) if not p.greedy]
    if rows:
        drawn = draw(
            distribution(logits[rows], [params[row] for row in rows]),
            [streams[row] for row in rows],
            [positions[row] for row in rows],
        )
        for row, token_id in zip(rows, drawn, strict=True):
            token_ids[row] = token_id
    return token_ids


def check_logits(logits: Tensor, numbers: Sequence[int] | None = None) -> None:
    """Refuse rows without probabilities, by their ``numbers`` or else by their place."""
    largest = logits.amax(-1)  # NaN and inf both come through
    if not torch.isfinite(largest).all():
        rows = (~torch.isfinite(largest)).nonzero().flatten().tolist()
        if numbers is not None:
            rows = [numbers[row] for row in rows]
        raise ValueError(f"the logits of rows {rows} are not finite, so no token can be chosen")


def distribution(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Probabilities that ``params`` make of ``logits``.

    Temperature first; then tokens below ``min_p`` times the largest probability go, then all but
    the ``top_k`` largest, then all but the smallest set of the rest that has ``top_p`` of its
    probability. Among equals those of lower id stay.

    Parameters
    ----------
    logits : Tensor
        ``[M, vocab]``, every row finite somewhere and nowhere NaN or +inf.
    params
        One for each row, none of them greedy.

    Returns
    -------
    Tensor
        ``[M, vocab]``, float64, on the device of ``logits``; rows sum to 1.

    Examples
    --------
    >>> logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    >>> distribution(logits, [SamplingParams(temperature=1.0, top_k=3, top_p=0.8)])
    tensor([[0.6250, 0.3750, 0.0000, 0.0000]], dtype=torch.float64)
    """

    def column(values: list[float]) -> Tensor:
        return to_device(values, logits.device, dtype=torch.float64).unsqueeze(-1)

    # From the largest, so that a tiny temperature overflows downwards only.
    shifted = logits.double() - logits.double().amax(-1, keepdim=True)
    probabilities = (shifted / column([p.temperature for p in params])).softmax(-1)
    cut = [row for row, p in enumerate(params) if p.top_p < 1.0 or p.top_k or p.min_p]
    if cut:
        chosen, places = [params[row] for row in cut], to_device(cut, logits.device)
        falling, order = probabilities[places].sort(dim=-1, descending=True, stable=True)
        falling = falling.where(falling >= falling[:, :1] * column([p.min_p for p in chosen]), 0.0)
        rank = torch.arange(falling.shape[-1], device=falling.device)
        size = column([p.top_k or falling.shape[-1] for p in chosen])
        falling = falling.where(rank < size, 0.0)
        # A token belongs to the nucleus if those before it have not reached top_p; the first
        # always does.
        mass = falling.cumsum(-1)
        nucleus = column([p.top_p for p in chosen]) * mass[:, -1:]
        falling = falling.where(mass - falling < nucleus, 0.0)
        falling = falling / falling.sum(-1, keepdim=True)
        probabilities[places] = torch.zeros_like(falling).scatter_(-1, order, falling)
    return probabilities


def draw(
    probabilities: Tensor, streams: Sequence[RandomStream | None], positions: Sequence[int]
) -> list[int]:
    """Draw a token from each row ``[M, vocab]`` with the numbers of its stream and position.

    Examples
    --------
    >>> draw(torch.tensor([[0.0, 1.0], [1.0, 0.0]]), [RandomStream(0), RandomStream(0)], [3, 3])
    [1, 0]
    """
    winners: list[int] = race(probabilities, streams, positions).tolist()
    return winners


def race(
    probabilities: Tensor, streams: Sequence[RandomStream | None], positions: Sequence[int]
) -> Tensor:
    """Draw as :func:`draw` does, and leave the winners on the device: int64 ``[M]``."""
    on_gpu = probabilities.is_cuda
    noise = torch.empty(probabilities.shape, dtype=torch.float64, pin_memory=on_gpu)
    for row, stream, position in zip(noise, streams, positions, strict=True):
        row.copy_(_known(stream).exponentials(position, probabilities.shape[-1]))
    return (probabilities / noise.to(probabilities.device, non_blocking=on_gpu)).argmax(-1)


def _known(stream: RandomStream | None) -> RandomStream:
    if stream is None:
        raise ValueError(
            "a request with a temperature needs a random stream: pass RandomStream.for_request"
        )
    return stream

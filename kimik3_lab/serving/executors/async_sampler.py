"""Sampled tokens that stay on the device: verification and draws without the host.

Needs torch. Part of :mod:`~kimik3_lab.serving.executors.async_steps`. It chooses the same tokens as
:func:`~kimik3_lab.serving.executors.rejection_sampler.verify_batch` for greedy requests, and for
those with a temperature that have no drafts: what a draw needs is its position, and without drafts
the host knows it. (With drafts in flight it does not, and such a step waits for the host.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kimik3_lab.serving.executors.pinned import send_columns, to_device
from kimik3_lab.serving.executors.random_stream import RandomStream
from kimik3_lab.serving.executors.sampler import distribution, race
from kimik3_lab.serving.request import SamplingParams

__all__ = ["Sampled", "SampledRows", "pad_tokens", "put_draws", "verify_rows"]


class SampledRows(NamedTuple):
    """The n requests of a step and their rows, on the device.

    Attributes
    ----------
    firsts : Tensor
        int64 ``[n]``: each request's first row among the logits; -1 if it has none.
    num_drafts : Tensor
        int64 ``[n]``: drafts that it verifies; it has one row of the logits more.
    counts : Tensor
        int64 ``[n]``: rows of the step.
    slots : Tensor
        int64 ``[n]``: their seats.
    most : int
        Largest number of drafts.
    """

    firsts: Tensor
    num_drafts: Tensor
    counts: Tensor
    slots: Tensor
    most: int

    @classmethod
    def send(
        cls,
        are_sampled: Sequence[bool],
        num_drafts: Sequence[int],
        counts: Sequence[int],
        slots: Sequence[int],
        device: torch.device,
    ) -> SampledRows:
        """Send the numbers to the device; ``are_sampled`` says who has rows among the logits."""
        firsts, row = [], 0
        for is_sampled, drafts in zip(are_sampled, num_drafts, strict=True):
            firsts.append(row if is_sampled else -1)
            row += (1 + drafts) * is_sampled
        first, drafts_of, count, slot = send_columns(device, firsts, num_drafts, counts, slots)
        return cls(first, drafts_of, count, slot, max(num_drafts))

    def logit_rows(self) -> Tensor:
        """Rows of the logits for the places of each request, ``[n, most + 1]``, the last again."""
        places = torch.arange(self.most + 1, device=self.firsts.device)
        return self.firsts.unsqueeze(-1) + places.minimum(self.num_drafts.unsqueeze(-1))


class Sampled(NamedTuple):
    """New tokens of n requests.

    Attributes
    ----------
    tokens : Tensor
        int64 ``[n, most + 1]``, -1 behind the last.
    num_tokens : Tensor
        int64 ``[n]``: how many there are, 0 if nothing is sampled.
    broken : Tensor
        bool ``[n]``: whether a row that matters had no probabilities.
    """

    tokens: Tensor
    num_tokens: Tensor
    broken: Tensor

    @property
    def last(self) -> Tensor:
        """The last token of each request, int64 ``[n]``; anything if it has none."""
        place = (self.num_tokens.unsqueeze(-1) - 1).clamp(min=0)
        return self.tokens.gather(1, place).squeeze(-1).clamp(min=0)

    @property
    def packed(self) -> Tensor:
        """All three side by side, int64 ``[n, most + 3]``, to be copied at once."""
        return torch.cat((self.tokens, torch.stack((self.num_tokens, self.broken.long()), 1)), 1)


def verify_rows(sampled: SampledRows, drafts: Tensor, best: Tensor) -> Sampled:
    """Keep of each draft what the target would have said, and one token more.

    Parameters
    ----------
    sampled : SampledRows
        Where everything is.
    drafts : Tensor
        int64 ``[n, most]``: -1 where there is none.
    best : Tensor
        int64 ``[M]``: what is chosen in each row of the logits, -1 if they are not finite.

    Examples
    --------
    >>> rows = SampledRows.send([True, True], [2, 0], [3, 1], [0, 1], torch.device("cpu"))
    >>> drafts = torch.tensor([[1, 3], [-1, -1]])
    >>> verify_rows(rows, drafts, torch.tensor([1, 2, 3, 0])).tokens.tolist()
    [[1, 2, -1], [0, -1, -1]]
    """
    places, is_sampled = torch.arange(sampled.most + 1, device=best.device), sampled.firsts >= 0
    choice = best.new_full((len(drafts), sampled.most + 1), -1)
    if len(best):
        choice = best[sampled.logit_rows().clamp(min=0)].where(is_sampled.unsqueeze(-1), -1)
    known = (drafts >= 0) & (places[:-1] < sampled.num_drafts.unsqueeze(-1))
    kept = (known & (drafts == choice[:, :-1])).long().cumprod(1).sum(1)
    num_known = known.long().cumprod(1).sum(1)
    broken = ((choice < 0) & (places <= num_known.unsqueeze(-1))).any(1) & is_sampled
    tokens = choice.masked_fill(places > kept.unsqueeze(-1), -1)
    return Sampled(tokens, (kept + 1).where(is_sampled, 0), broken)


def put_draws(
    best: Tensor,
    logits: Tensor,
    params: Sequence[SamplingParams],
    streams: Sequence[RandomStream | None],
    positions: Sequence[int],
) -> Tensor:
    """Replace the choice of requests with a temperature by their draw; one row for each request."""
    drawing = [row for row, p in enumerate(params) if not p.greedy]
    if not drawing:
        return best
    rows = to_device(drawing, logits.device)
    chosen = logits.index_select(0, rows)
    # NaN has no distribution; what is drawn instead is thrown away with the step.
    finite = chosen.isfinite().any(-1, keepdim=True) & ~chosen.isnan().any(-1, keepdim=True)
    probabilities = distribution(chosen.where(finite, 0.0), [params[row] for row in drawing])
    winners = race(
        probabilities, [streams[row] for row in drawing], [positions[row] for row in drawing]
    )
    drawn = best.index_select(0, rows)
    return best.index_copy(0, rows, winners.where(drawn >= 0, -1))


def pad_tokens(token_ids: Sequence[Sequence[int]], most: int, device: torch.device) -> Sampled:
    """Send tokens that the host has chosen, as :func:`verify_rows` returns them.

    Examples
    --------
    >>> pad_tokens([[5], [6, 7]], 2, torch.device("cpu")).tokens.tolist()
    [[5, -1, -1], [6, 7, -1]]
    """
    padded = [[*ids, *[-1] * (most + 1 - len(ids))] for ids in token_ids]
    counts = [len(ids) for ids in token_ids]
    tokens, count = send_columns(device, [i for ids in padded for i in ids], counts)
    tokens = tokens.view(len(counts), most + 1)
    return Sampled(tokens, count, torch.zeros_like(count, dtype=torch.bool))

"""What passes between executor, proposer and verification: who wants a draft, and a draft.

Needs torch. Lesson 09 prints these.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from kimik3_lab.serving.executors.random_stream import RandomStream
from kimik3_lab.serving.request import SamplingParams

__all__ = ["Draft", "DraftRequest"]


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """A request that is to get a draft.

    Attributes
    ----------
    req_id : str
    anchor : int
        Its last token, sampled and not yet computed.
    num_context : int
        Tokens before the anchor: all of them computed, and written with :meth:`Proposer.write`.
    block_ids : sequence of int
        Its blocks in the group of the MLA layers, at least those of the context.
    params : SamplingParams
    stream : RandomStream or None
        Its random numbers, None if it is greedy.
    slot : int or None
        Its row of the executor's block table, for a proposer that reads the table on the device.
    """

    req_id: str
    anchor: int
    num_context: int
    block_ids: Sequence[int]
    params: SamplingParams
    stream: RandomStream | None = None
    slot: int | None = None


@dataclass(frozen=True)
class Draft:
    """Draft tokens of one request.

    Attributes
    ----------
    token_ids : list of int
        Empty for a request without a draft. -1 is a placeholder: from there on there is no draft,
        only rows that were computed for nothing.
    probs : Tensor or None
        ``[N, vocab]``: what each token was drawn from. None if it was chosen without a draw.
    confidence : list of float or None
        The drafter's guess of each token's chance to be kept, if it has that head.
    """

    token_ids: list[int]
    probs: Tensor | None = None
    confidence: list[float] | None = None

    def matching(self, scheduled: Sequence[int]) -> Draft:
        """Return this draft as the scheduler scheduled it, which may be a part of it.

        Tokens that are not this draft's are taken as they are, without probabilities.

        Examples
        --------
        >>> import torch
        >>> draft = Draft([4, 5, 6], torch.full((3, 8), 0.125))
        >>> draft.matching([4, 5]).probs.shape, draft.matching([4, 7]).probs
        (torch.Size([2, 8]), None)
        """
        count = len(scheduled)
        if list(scheduled) != self.token_ids[:count]:
            return Draft(list(scheduled))
        return dataclasses.replace(
            self,
            token_ids=self.token_ids[:count],
            probs=None if self.probs is None else self.probs[:count],
            confidence=None if self.confidence is None else self.confidence[:count],
        )

    @property
    def num_known(self) -> int:
        """Tokens before the first placeholder."""
        known = (i for i, token_id in enumerate(self.token_ids) if token_id < 0)
        return next(known, len(self.token_ids))

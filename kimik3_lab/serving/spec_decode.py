"""What a drafter asks of the scheduler: rows in the batch, slots in the cache, a block to drop.

Needs the standard library only. Lesson 09 tabulates it. vLLM answers the same questions in
``SpeculativeConfig.max_num_new_slots_for_drafting``, ``VllmConfig.num_lookahead_tokens`` and
``SpeculativeConfig.use_eagle_block_drop``. With K draft tokens:

===================  ==================  ==================  ==============  ====================
method               draft rows, static  draft rows, 0.28+   draft rows,     lookahead slots
                     (0.27.1)            (#51725, #51256)    lookahead cap
===================  ==================  ==================  ==============  ====================
``ngram``            0                   0                   0               0
``eagle3``, ``mtp``  0                   0                   0               K
``eagle3-parallel``  K - 1               K - 1               K - 1           K
``draft_model``      1                   1                   1               K
``pard``             K                   K                   K               K
``dspark``           K - 1               K - 1               0               K
``dflash``           K - 1               K                   0               K + 1
===================  ==================  ==================  ==============  ====================

*Draft rows* are rows that drafting adds to the batch of the target model. *Lookahead slots* are
places in the MLA pages behind the scheduled tokens that the drafter writes. DSpark and DFlash draft
in a pass of their own after the target's, so from #52922 on they cost no rows; what remains is that
the drafting pass itself must fit, which caps the number of requests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

__all__ = [
    "SpecDecodingCounter",
    "SpecDecodingStats",
    "SpeculativeMethod",
    "TokenBudgetRule",
    "max_num_new_slots_for_drafting",
    "num_lookahead_tokens",
    "reads_hidden_states",
]

SpeculativeMethod: TypeAlias = Literal[
    "ngram", "eagle3", "eagle3-parallel", "mtp", "draft_model", "pard", "dspark", "dflash"
]
TokenBudgetRule: TypeAlias = Literal["static", "adaptive", "lookahead_cap"]

SPECULATIVE_METHODS: tuple[str, ...] = get_args(SpeculativeMethod)
#: Draft in a pass of their own, a block of tokens at once.
BLOCK_DRAFTERS = ("dspark", "dflash")


def max_num_new_slots_for_drafting(
    method: SpeculativeMethod | None, num_speculative_tokens: int, rule: TokenBudgetRule
) -> int:
    """Rows that drafting adds to the batch for each request.

    >>> [max_num_new_slots_for_drafting("dspark", 8, rule) for rule in get_args(TokenBudgetRule)]
    [7, 7, 0]
    """
    k = num_speculative_tokens
    if method in BLOCK_DRAFTERS and rule == "lookahead_cap":
        return 0
    if method == "dflash" and rule == "adaptive":
        return k
    if method in ("eagle3-parallel", *BLOCK_DRAFTERS):
        return k - 1
    return {"draft_model": 1, "pard": k}.get(method or "", 0)


def num_lookahead_tokens(method: SpeculativeMethod | None, num_speculative_tokens: int) -> int:
    """Cache slots behind the scheduled tokens that the drafter writes.

    >>> num_lookahead_tokens("dspark", 8), num_lookahead_tokens("dflash", 8)
    (8, 9)
    """
    if method in (None, "ngram"):
        return 0
    return num_speculative_tokens + (method == "dflash")


def reads_hidden_states(method: SpeculativeMethod | None) -> bool:
    """Whether the drafter reads the target's hidden states (vLLM: ``use_eagle()``)."""
    return method in ("eagle3", "eagle3-parallel", "mtp", *BLOCK_DRAFTERS)


@dataclass(frozen=True, slots=True)
class SpecDecodingStats:
    """What became of the drafts since the start (``vllm.v1.spec_decode.metrics``).

    Attributes
    ----------
    num_spec_tokens : int
        K, the most draft tokens of one request and step.
    num_drafts : int
        Drafts that were verified: one for each request and step that had any.
    num_draft_tokens, num_accepted_tokens : int
        Their tokens, and those of them that were kept. The token that a verification adds of its
        own is not counted.
    num_accepted_tokens_per_pos : tuple of int
        Drafts whose first token was kept, whose first two were, and so on: K numbers.

    Examples
    --------
    >>> SpecDecodingStats(2, 4, 8, 5, (3, 2)).mean_acceptance_length
    2.25
    """

    num_spec_tokens: int
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: tuple[int, ...] = ()

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted among the drafted tokens; NaN before the first draft."""
        return _ratio(self.num_accepted_tokens, self.num_draft_tokens)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens that a verification brings: the accepted ones and one more; NaN without any."""
        return 1 + _ratio(self.num_accepted_tokens, self.num_drafts)

    @property
    def acceptance_rate_per_pos(self) -> tuple[float, ...]:
        """Share of the drafts that were kept up to each position."""
        return tuple(_ratio(n, self.num_drafts) for n in self.num_accepted_tokens_per_pos)


class SpecDecodingCounter:
    """Counts drafts for :class:`SpecDecodingStats`.

    Examples
    --------
    >>> counter = SpecDecodingCounter(3)
    >>> counter.observe_draft([7, 7, 9], 2)
    >>> counter.observe_draft([-1, -1, -1], 0)  # rows without drafts
    >>> counter.stats().num_accepted_tokens_per_pos, counter.stats().num_drafts
    ((1, 1, 0), 1)
    """

    def __init__(self, num_spec_tokens: int) -> None:
        self.num_spec_tokens = num_spec_tokens
        self._num_drafts = self._num_draft_tokens = 0
        self._kept_per_pos = [0] * num_spec_tokens

    def observe_draft(
        self, draft_token_ids: Sequence[int], num_accepted: int, *, placeholders: bool = False
    ) -> None:
        """Count one verified draft.

        Parameters
        ----------
        draft_token_ids
            As scheduled. -1 stands for no draft, and is not counted.
        num_accepted
            How many were kept.
        placeholders
            With asynchronous scheduling -1 stands for a draft that only the executor knows, so all
            of them count.
        """
        count = len(draft_token_ids)
        if not 0 <= num_accepted <= count:
            raise ValueError(
                f"{num_accepted} of {count} draft tokens cannot have been accepted: a verification "
                "returns the accepted ones and one token more"
            )
        if not placeholders:  # a recorded run may accept rows of padding: they count for nothing
            count -= draft_token_ids.count(-1)
            num_accepted = min(num_accepted, count)
        if count:
            self._num_drafts += 1
            self._num_draft_tokens += count
            for position in range(num_accepted):
                self._kept_per_pos[position] += 1

    def stats(self) -> SpecDecodingStats:
        """Return the counts so far."""
        return SpecDecodingStats(
            self.num_spec_tokens,
            self._num_drafts,
            self._num_draft_tokens,
            sum(self._kept_per_pos),
            tuple(self._kept_per_pos),
        )


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else math.nan

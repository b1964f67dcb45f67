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

from typing import Literal, TypeAlias, get_args

__all__ = [
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

"""What one engine step asks of the machine, in counts: all that the cost model sees of a step.

Needs the standard library only. The simulated executor counts it from a ``SchedulerOutput``, and
:class:`kimik3_lab.performance.step_cost.CostModel` turns it into seconds. Lesson 11 fills one by
hand for each kind of step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

__all__ = ["StepWork", "decode_work", "even_share", "prefill_work", "work_of_all"]


@dataclass(frozen=True, slots=True)
class StepWork:
    """Counts of one step. All are over every request of the step, on all ranks together.

    With data parallelism that is the step of one copy of the trunk, with the requests of this copy.

    Attributes
    ----------
    num_tokens
        Rows through every layer, padding of captured graphs excluded. The sum of the next two.
    num_prefill_tokens, num_decode_tokens
        Rows of prompts, and rows of requests that decode: for each its last token and its drafts.
    num_prefill_seqs, num_decode_seqs
        Requests that those rows belong to.
    decode_context
        Cached tokens of all requests that decode, summed: the MLA rows that they read.
    prefill_pairs
        Pairs of a query and a key in the chunks of prompts: for a chunk of ``count`` tokens behind
        ``start`` earlier ones, ``count * start + count * (count + 1) // 2``.
    num_logits
        Rows through the output head.
    num_draft_seqs
        Requests that a drafter works for after this step; 0 without speculation.
    num_speculative_tokens
        Drafts that it makes for each.

    Examples
    --------
    >>> decode_work(4, context=8500, num_speculative_tokens=8).num_tokens
    36
    """

    num_tokens: int
    num_prefill_tokens: int = 0
    num_prefill_seqs: int = 0
    num_decode_tokens: int = 0
    num_decode_seqs: int = 0
    decode_context: int = 0
    prefill_pairs: int = 0
    num_logits: int = 0
    num_draft_seqs: int = 0
    num_speculative_tokens: int = 0

    def check(self) -> None:
        """Refuse counts that no step can have.

        Not done on construction: the simulator makes millions of these.

        Raises
        ------
        ValueError
            If a count is negative, or the rows do not add up.
        """
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is not int or value < 0:
                raise ValueError(f"{field.name} must be an integer of at least 0, got {value!r}")
        if self.num_tokens != self.num_prefill_tokens + self.num_decode_tokens:
            raise ValueError(
                f"num_tokens={self.num_tokens} must be num_prefill_tokens + num_decode_tokens = "
                f"{self.num_prefill_tokens} + {self.num_decode_tokens}"
            )
        for kind in ("prefill", "decode"):
            tokens = getattr(self, f"num_{kind}_tokens")
            seqs = getattr(self, f"num_{kind}_seqs")
            if not seqs <= tokens or (tokens and not seqs):
                raise ValueError(
                    f"{tokens} {kind} tokens cannot belong to {seqs} requests: each has one or more"
                )


def decode_work(num_seqs: int, *, context: int, num_speculative_tokens: int = 0) -> StepWork:
    """Count a step in which ``num_seqs`` requests decode, each with ``context`` cached tokens.

    With ``num_speculative_tokens`` every request verifies that many drafts beside its last token,
    and a drafter makes as many for the next step.

    Examples
    --------
    >>> work = decode_work(16, context=8500, num_speculative_tokens=8)
    >>> work.num_tokens, work.num_logits, work.decode_context
    (144, 144, 136000)
    """
    rows = num_seqs * (1 + num_speculative_tokens)
    return StepWork(
        num_tokens=rows,
        num_decode_tokens=rows,
        num_decode_seqs=num_seqs,
        decode_context=num_seqs * context,
        num_logits=rows,
        num_draft_seqs=num_seqs if num_speculative_tokens else 0,
        num_speculative_tokens=num_speculative_tokens,
    )


def prefill_work(
    num_tokens: int,
    *,
    start: int = 0,
    num_seqs: int = 1,
    last: bool = True,
    num_speculative_tokens: int = 0,
) -> StepWork:
    """Count a step with a chunk of ``num_tokens`` for each of ``num_seqs`` prompts.

    Parameters
    ----------
    start
        Tokens of each prompt that were computed before.
    last
        Whether the chunk ends the prompt, so that it yields a token.

    Examples
    --------
    >>> prefill_work(4, start=2).prefill_pairs      # 3 + 4 + 5 + 6
    18
    """
    each = num_tokens * start + num_tokens * (num_tokens + 1) // 2
    return StepWork(
        num_tokens=num_seqs * num_tokens,
        num_prefill_tokens=num_seqs * num_tokens,
        num_prefill_seqs=num_seqs,
        prefill_pairs=num_seqs * each,
        num_logits=num_seqs if last else 0,
        num_draft_seqs=num_seqs if num_speculative_tokens else 0,
        num_speculative_tokens=num_speculative_tokens,
    )


def work_of_all(works: Iterable[StepWork]) -> StepWork:
    """Add up the steps of all copies of the trunk.

    Examples
    --------
    >>> work_of_all([decode_work(3, context=100), prefill_work(20)]).num_tokens
    23
    """
    works = list(works)
    names = [field.name for field in fields(StepWork) if field.name != "num_speculative_tokens"]
    sums = {name: sum(getattr(work, name) for work in works) for name in names}
    most = max((work.num_speculative_tokens for work in works), default=0)
    return StepWork(**sums, num_speculative_tokens=most)


def even_share(work: StepWork, copies: int) -> StepWork:
    """Share of one copy, if ``copies`` of the trunk split ``work`` evenly; rounded up.

    Examples
    --------
    >>> share = even_share(decode_work(5, context=100), 2)
    >>> share.num_decode_seqs, share.num_tokens, share.decode_context
    (3, 3, 250)
    """
    if copies == 1:
        return work
    share = {field.name: -(-getattr(work, field.name) // copies) for field in fields(StepWork)}
    share["num_tokens"] = share["num_prefill_tokens"] + share["num_decode_tokens"]
    return StepWork(**share | {"num_speculative_tokens": work.num_speculative_tokens})

"""The tokens that a step may still hand out, and the rows that drafting takes beside them.

Needs the standard library only. Lesson 09 compares the rules. In vLLM these are the variables
``token_budget``, ``input_budget`` and ``draft_slots`` of ``Scheduler.schedule``.
"""

from __future__ import annotations

from kimik3_lab.serving.scheduler_config import SchedulerConfig

__all__ = ["TokenBudget"]


class TokenBudget:
    """What is left of a step.

    Two things run out: tokens that may be scheduled, and rows of the batch, of which each request
    takes its tokens and ``d`` more for its drafts. The static rule has set the rows of
    ``max_num_seqs`` requests aside beforehand, so there only the tokens count.

    Attributes
    ----------
    remaining : int
        Most tokens that the next request can have; nobody gets any when it is 0 or less.

    Examples
    --------
    >>> config = SchedulerConfig(
    ...     1024, 8192, 9000, speculative_method="dspark", num_speculative_tokens=8,
    ...     token_budget="adaptive")
    >>> budget = TokenBudget(config)
    >>> budget.remaining  # alone: 8,192 rows less 7 for its own drafts
    8185
    >>> budget.spend(9)  # a request that verifies eight drafts
    >>> budget.remaining
    8169
    """

    __slots__ = ("_draft_slots", "_rows", "_tokens", "remaining")

    def __init__(self, config: SchedulerConfig) -> None:
        self._tokens = config.scheduled_token_limit
        self._rows = config.max_num_batched_tokens
        self._draft_slots = config.num_draft_slots
        if config.token_budget == "static":
            self._rows, self._draft_slots = self._tokens, 0
        self.remaining = min(self._tokens, self._rows - self._draft_slots)

    def spend(self, num_tokens: int) -> None:
        """Hand tokens to a request."""
        self._change(-num_tokens, -num_tokens - self._draft_slots)

    def give_back(self, num_tokens: int) -> None:
        """Take back what a request was handed in this step, and its rows for drafts."""
        self._change(num_tokens, num_tokens + self._draft_slots)

    def _change(self, num_tokens: int, num_rows: int) -> None:
        self._tokens += num_tokens
        self._rows += num_rows
        self.remaining = min(self._tokens, self._rows - self._draft_slots)

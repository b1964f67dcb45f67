"""How many tokens a request gets of a step: what it lacks, clipped by everything that clips.

Needs the standard library only. Lesson 08 turns the clips one at a time. In vLLM this is the middle
of both loops of ``Scheduler.schedule``.
"""

from __future__ import annotations

from typing import NamedTuple

from kimik3_lab.serving.cache_config import CacheConfig
from kimik3_lab.serving.prefill_checkpoint import BlockAlignedSplit
from kimik3_lab.serving.request import Request
from kimik3_lab.serving.scheduler_config import SchedulerConfig

__all__ = ["Chunk", "Chunking"]


class Chunk(NamedTuple):
    """Tokens that a waiting request begins with; ``num_padding`` of them are placeholder drafts."""

    num_tokens: int
    num_padding: int = 0


class Chunking:
    """Clips what requests lack.

    Parameters
    ----------
    config : SchedulerConfig
        Threshold for long prompts, context length, drafts.
    cache_config : CacheConfig
        Where chunks must end.
    """

    def __init__(self, config: SchedulerConfig, cache_config: CacheConfig) -> None:
        self.config = config
        self._max_position = config.max_model_len - 1  # the last token is sampled, never computed
        self._threshold = config.long_prefill_token_threshold
        self._split: BlockAlignedSplit | None = None
        if cache_config.mamba_cache_mode == "align":
            longest = config.scheduled_token_limit
            if self._threshold:
                longest = min(longest, self._threshold)
            self._split = BlockAlignedSplit(
                cache_config,
                longest,
                config.drops_eagle_block,
                cache_config.keeps_junctions(reads_hidden_states=config.reads_hidden_states),
            )

    def new_step_starts(self, num_requests: int) -> None:
        """Set the threshold for a step with ``num_requests`` requests, waiting ones included.

        It keeps a long prompt from taking everybody's budget; alone there is nobody to protect.
        """
        config = self.config
        self._threshold = config.long_prefill_token_threshold
        if not self._threshold:
            return
        if num_requests <= 1 and not config.threshold_when_alone:
            self._threshold = 0
        elif config.long_prefill_token_threshold_adaptive:
            share = config.max_num_batched_tokens // max(num_requests, 1)
            self._threshold = max(self._threshold, share)

    def running(self, request: Request, budget: int) -> int:
        """Tokens for a running request. 0: its last token has not come back, or it must wait."""
        computed = request.num_computed_tokens
        num_new_tokens = (
            request.num_tokens
            + len(request.spec_token_ids)
            + request.num_output_placeholders
            - computed
        )
        if 0 < self._threshold < num_new_tokens:
            num_new_tokens = self._threshold
        num_new_tokens = min(num_new_tokens, budget, self._max_position - computed)
        if self._split is not None and computed < request.prefill_end:
            return self._split.num_new_tokens(request, computed, num_new_tokens)
        return num_new_tokens

    def waiting(
        self, request: Request, computed: int, budget: int, *, num_decodes: int, prefills: bool
    ) -> Chunk | None:
        """Clip a waiting request behind its hit of ``computed`` tokens; None: not now.

        ``num_decodes`` is the number of running requests in this step, ``prefills`` whether one of
        them is inside its prompt.
        """
        num_new_tokens, padding = request.num_tokens - computed, 0
        if num_new_tokens == 1 and self.config.num_speculative_tokens and not prefills:
            padding = self._padding(computed, budget, num_decodes)
            if padding < 0:
                return None
            num_new_tokens += padding
        if 0 < self._threshold < num_new_tokens:
            num_new_tokens = self._threshold
        num_new_tokens = min(num_new_tokens, budget)
        if self._split is not None:
            num_new_tokens = self._split.num_new_tokens(request, computed, num_new_tokens)
            if num_new_tokens == 0:
                return None
            if padding and num_new_tokens <= padding and self.config.pad_spec_decode == "any":
                num_new_tokens, padding = 1, 0  # placeholders were clipped
        return Chunk(num_new_tokens, padding)

    def _padding(self, computed: int, budget: int, num_decodes: int) -> int:
        """Count placeholder drafts for a last token, so that all rows of the step are alike.

        0 if it is not to be padded, -1 if it would have to be but does not fit: better not at all
        than with rows of another length.
        """
        config, k = self.config, self.config.num_speculative_tokens
        if config.pad_spec_decode == "beside_decodes":
            if not num_decodes:
                return 0
            return k if 1 + k <= budget and computed + 1 + k <= config.max_model_len else -1
        if not (num_decodes or computed) or computed + 1 + k + 1 > config.max_model_len:
            return 0
        return k if 1 + k <= budget else -1

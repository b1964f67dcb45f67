"""The knobs of the scheduler, checked when they are set.

Needs the standard library only. Lessons 08 and 09 turn them. Names are vLLM's where it has one, see
``vllm/config/scheduler.py`` and ``vllm/config/speculative.py``.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Literal

from kimik3_lab.serving.knobs import (
    require_at_least,
    require_booleans,
    require_number,
    require_one_of,
)
from kimik3_lab.serving.spec_decode import (
    BLOCK_DRAFTERS,
    SpeculativeMethod,
    TokenBudgetRule,
    max_num_new_slots_for_drafting,
    num_lookahead_tokens,
    reads_hidden_states,
)

__all__ = ["Batching", "EagleBlockRule", "Policy", "SchedulerConfig"]

Batching = Literal["continuous", "static"]
Policy = Literal["fcfs", "priority"]
EagleBlockRule = Literal["drop", "drop_eagle_only", "lookahead_hash"]


@dataclass(frozen=True)
class SchedulerConfig:
    """What one engine step may hold, and who is served first.

    Parameters
    ----------
    max_num_seqs : int
        Most requests in the running list; also the number of KDA state slots an executor needs.
    max_num_batched_tokens : int
        Rows that one step may compute. A prompt that does not fit is cut (chunked prefill). vLLM
        refuses a value below ``max_num_seqs``; here it is allowed, so that a lesson can show what
        happens: the requests at the end of the running list wait. The default for GPUs of 160 GiB
        and more went from 8,192 to 16,384 (#51726).
    max_model_len : int
        Most tokens of one request, prompt and output together.
    batching : {"continuous", "static"}
        ``"continuous"`` fills a free seat in the next step, as vLLM does. ``"static"`` is the
        contrast: a batch is drawn only when nothing runs, and nobody joins before all of it ended.
    policy : {"fcfs", "priority"}
        First come, first served; or the lowest ``Request.priority`` first, then the earliest
        ``arrival_time``. The same order, backwards, chooses who is preempted.
    speculative_method : str, optional
        The drafter, see :mod:`kimik3_lab.serving.spec_decode`.
    num_speculative_tokens : int
        K: draft tokens that it proposes for each request and step.
    token_budget : {"static", "adaptive", "lookahead_cap"}
        How room for drafts is set aside. ``"static"``: once, for ``max_num_seqs`` requests (vLLM
        0.27.1). ``"adaptive"``: for the requests of this step (#51725, 0.28 to 0.32).
        ``"lookahead_cap"``: not at all for DSpark and DFlash, whose number is limited instead
        (#52922, #52996, #53080, 0.33).
    draft_slots : int, optional
        Rows that drafting adds for each request; left out, it follows from the method.
    max_num_scheduled_tokens : int, optional
        Most tokens of one step; left out, it follows from ``token_budget``.
    max_num_active_seqs : int, optional
        Most requests that are admitted at a time, at most ``max_num_seqs``.
    long_prefill_token_threshold : int
        Most tokens that one prompt may take of a step; 0 means no such limit.
    long_prefill_token_threshold_adaptive : bool
        Raise the threshold to a fair share of ``max_num_batched_tokens``.
    threshold_when_alone : bool
        Apply the threshold to a request that is alone, too: vLLM before #57951.
    scheduler_reserve_full_isl : bool
        Admit a request only if all its known tokens would fit, though it takes only its chunk.
    watermark : float
        Share of all blocks, in [0, 1), that admission leaves free while others run.
    prefill_schedule_interval : int
        Steps between two that compute prompts while others decode; 1 does not hold prompts back.
        Without data parallelism it has an effect in vLLM 0.33 only.
    async_scheduling : bool
        Plan a step before the last one has answered, with placeholders for its tokens
        (:class:`~kimik3_lab.serving.async_scheduler.AsyncScheduler`). vLLM 0.32 does unless it is
        told not to, also with DSpark (``vllm/config/vllm.py``).
    pad_spec_decode : {"any", "beside_decodes"}
        A request that waits with one token left is given K placeholder drafts, so that all rows of
        the step are alike (#45237). ``"beside_decodes"`` is vLLM 0.27.1: only if others decode.
        ``"any"``: also if it resumes behind a prefix hit.
    exact_preemption_index : bool
        Keep the place in the running list when a victim stood before it. False is vLLM 0.27.1,
        where the next request was passed over (#49097).
    continue_after_self_preemption : bool
        Under ``"priority"``, go on with the others after a request has preempted itself, as
        #26765 proposed. False is vLLM up to 0.32.
    forget_unscheduled_hashes : bool
        Under ``"priority"``, take the hashes of this step back from a victim that the step had
        scheduled already: nobody will compute those tokens. False is vLLM up to 0.33, where a later
        request may find rows that were never written (#57580).
    preempt_latest_of_equals : bool
        Under ``"priority"``, of those that are equally dispensable (same ``priority``, same
        ``arrival_time``) preempt the one that got its seat last. False is vLLM up to 0.33, which
        takes the first of them (the order of #19057): two requests may then take each other's
        blocks in turn for ever.
    cache_verified_tokens : bool
        With drafts, hash a block as soon as its tokens are verified. False is vLLM up to 0.32,
        which hashes it a step later, or never if the request ends first (#54979).
    eagle_block_rule : {"lookahead_hash", "drop_eagle_only", "drop"}
        What becomes of the last block of a hit when the drafter reads hidden states. ``"drop"``
        computes it anew for DSpark and DFlash too (vLLM up to 0.32); ``"drop_eagle_only"`` only
        where a drafter's row depends on the next token (#54163, #57110); ``"lookahead_hash"`` has
        the hash cover that token, so that nothing is dropped (#50897, 0.33).

    Raises
    ------
    ValueError
        If a knob cannot work; the message names it and what to change.

    Examples
    --------
    >>> SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=512, max_model_len=2048).batching
    'continuous'
    >>> dspark = dict(speculative_method="dspark", num_speculative_tokens=8)
    >>> SchedulerConfig(1024, 8192, 9000, token_budget="static", **dspark).scheduled_token_limit
    1024
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    _: KW_ONLY
    batching: Batching = "continuous"
    policy: Policy = "fcfs"
    speculative_method: SpeculativeMethod | None = None
    num_speculative_tokens: int = 0
    token_budget: TokenBudgetRule = "lookahead_cap"
    draft_slots: int | None = None
    max_num_scheduled_tokens: int | None = None
    max_num_active_seqs: int | None = None
    long_prefill_token_threshold: int = 0
    long_prefill_token_threshold_adaptive: bool = False
    threshold_when_alone: bool = False
    scheduler_reserve_full_isl: bool = True
    watermark: float = 0.0
    prefill_schedule_interval: int = 1
    async_scheduling: bool = False
    pad_spec_decode: Literal["any", "beside_decodes"] = "any"
    exact_preemption_index: bool = True
    continue_after_self_preemption: bool = True
    forget_unscheduled_hashes: bool = True
    preempt_latest_of_equals: bool = True
    cache_verified_tokens: bool = True
    eagle_block_rule: EagleBlockRule = "lookahead_hash"

    def __post_init__(self) -> None:
        for least, name, why in (
            (1, "max_num_seqs", "it is the number of requests that may run together"),
            (1, "max_num_batched_tokens", "it is the token budget of a step, and a step needs one"),
            (2, "max_model_len", "a request needs one prompt token and one output token"),
            (0, "num_speculative_tokens", "it is a number of tokens"),
            (0, "long_prefill_token_threshold", "0 switches it off"),
            (1, "prefill_schedule_interval", "1 holds no prompt back"),
        ):
            require_at_least(least, name, getattr(self, name), why)
        for name in ("draft_slots", "max_num_scheduled_tokens", "max_num_active_seqs"):
            if getattr(self, name) is not None:
                least = 0 if name == "draft_slots" else 1
                require_at_least(least, name, getattr(self, name), "leave it out to derive it")
        require_one_of("batching", self.batching, Batching)
        require_one_of("policy", self.policy, Policy)
        require_one_of("token_budget", self.token_budget, TokenBudgetRule)
        require_one_of("eagle_block_rule", self.eagle_block_rule, EagleBlockRule)
        require_one_of("pad_spec_decode", self.pad_spec_decode, Literal["any", "beside_decodes"])
        require_booleans(self)
        require_number("watermark", self.watermark)
        if not 0.0 <= self.watermark < 1.0:
            raise ValueError(f"watermark must lie in [0, 1), got {self.watermark}")
        if (self.max_num_active_seqs or 1) > self.max_num_seqs:
            raise ValueError(
                f"max_num_active_seqs={self.max_num_active_seqs} is more than "
                f"max_num_seqs={self.max_num_seqs}"
            )
        self._check_speculation()

    def _check_speculation(self) -> None:
        """Refuse a drafter that leaves no room for a token, with the numbers."""
        method, k = self.speculative_method, self.num_speculative_tokens
        if method is not None:
            require_one_of("speculative_method", method, SpeculativeMethod)
        if (method is None) != (k == 0):
            raise ValueError(
                f"speculative_method={method!r} with num_speculative_tokens={k}: a drafter needs "
                "at least one token, and tokens need a drafter"
            )
        rows, d = self.max_num_batched_tokens, self.num_draft_slots
        if self.token_budget == "static" and self.scheduled_token_limit <= 0:
            raise ValueError(
                f"max_num_batched_tokens={rows} less {d} draft slots for each of "
                f"max_num_seqs={self.max_num_seqs} leaves {rows - d * self.max_num_seqs} tokens to "
                "schedule: raise max_num_batched_tokens, lower max_num_seqs or "
                f"num_speculative_tokens={k}, or take token_budget='adaptive'"
            )
        if self.token_budget == "static" and self.max_num_scheduled_tokens is not None:
            wanted = self.max_num_scheduled_tokens + d * self.max_num_seqs
            if wanted > rows:
                raise ValueError(
                    f"max_num_scheduled_tokens={self.max_num_scheduled_tokens} and {d} draft slots "
                    f"for each of max_num_seqs={self.max_num_seqs} are {wanted} rows, more than "
                    f"max_num_batched_tokens={rows}"
                )
        self._check_padding()
        needed = d if self.token_budget != "lookahead_cap" else max(d, self.num_lookahead_tokens)
        if rows <= needed:
            raise ValueError(
                f"max_num_batched_tokens={rows} leaves no row beside the {needed} that drafting "
                f"needs for a request: raise it or lower num_speculative_tokens={k}"
            )

    def _check_padding(self) -> None:
        """Refuse K drafts that no step could hold: a padded request would wait for ever."""
        k, limit = self.num_speculative_tokens, self.scheduled_token_limit
        if self.token_budget != "static":
            limit = min(limit, self.max_num_batched_tokens - self.num_draft_slots)
        if k and limit < 1 + k:
            raise ValueError(
                f"num_speculative_tokens={k} is too large: a request that verifies its drafts "
                f"takes {1 + k} tokens, and a step has {limit}; raise max_num_batched_tokens="
                f"{self.max_num_batched_tokens} or lower num_speculative_tokens"
            )
        if k and 0 < self.long_prefill_token_threshold < 1 + k:
            raise ValueError(
                f"long_prefill_token_threshold={self.long_prefill_token_threshold} would cut the "
                f"{1 + k} tokens of a request that verifies num_speculative_tokens={k} drafts: "
                "raise it or lower num_speculative_tokens"
            )

    # -- what follows from the knobs -----------------------------------------------------------

    @property
    def num_draft_slots(self) -> int:
        """d: rows that drafting adds to the batch for each request."""
        if self.draft_slots is not None:
            return self.draft_slots
        return max_num_new_slots_for_drafting(
            self.speculative_method, self.num_speculative_tokens, self.token_budget
        )

    @property
    def num_lookahead_tokens(self) -> int:
        """Cache slots behind the scheduled tokens that the drafter writes."""
        return num_lookahead_tokens(self.speculative_method, self.num_speculative_tokens)

    @property
    def scheduled_token_limit(self) -> int:
        """Most tokens of one step: what vLLM's scheduler calls ``max_num_scheduled_tokens``."""
        if self.max_num_scheduled_tokens is not None:
            return self.max_num_scheduled_tokens
        if self.token_budget == "static":
            return self.max_num_batched_tokens - self.num_draft_slots * self.max_num_seqs
        return self.max_num_batched_tokens

    @property
    def active_seqs_limit(self) -> int:
        """Most requests that run at a time."""
        limit = self.max_num_active_seqs or self.max_num_seqs
        if self.token_budget == "lookahead_cap" and self.speculative_method in BLOCK_DRAFTERS:
            limit = min(limit, self.max_num_batched_tokens // self.num_lookahead_tokens)
        return limit

    @property
    def reads_hidden_states(self) -> bool:
        """Whether the drafter reads the target's hidden states."""
        return reads_hidden_states(self.speculative_method)

    @property
    def drops_eagle_block(self) -> bool:
        """Whether the last block of a hit is computed anew for the drafter."""
        if self.eagle_block_rule == "drop":
            return self.reads_hidden_states
        return self._row_depends_on_next_token and self.eagle_block_rule == "drop_eagle_only"

    @property
    def num_hash_lookahead_tokens(self) -> int:
        """Tokens behind a block that its hash covers, for the drafter's sake."""
        return int(self._row_depends_on_next_token and self.eagle_block_rule == "lookahead_hash")

    @property
    def _row_depends_on_next_token(self) -> bool:
        return self.reads_hidden_states and self.speculative_method not in BLOCK_DRAFTERS

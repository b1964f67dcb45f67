"""What passes between scheduler, executor and engine in one step.

Needs the standard library only. Lessons 08 and 10 print these. Names are vLLM's, see
``vllm/v1/core/sched/output.py``, ``vllm/v1/outputs.py`` and ``vllm/v1/engine/__init__.py``.

An executor keeps its own copy of every request. The scheduler sends the whole request once
(:class:`NewRequestData`), later only what changed (:class:`CachedRequestData`), and at last the id
of the request when it is over.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from kimik3_lab.serving.request import Request, RequestStatus, SamplingParams
from kimik3_lab.serving.spec_decode import SpecDecodingStats

__all__ = [
    "AsyncModelRunnerOutput",
    "CachedRequestData",
    "EngineCoreOutput",
    "ModelRunnerOutput",
    "NewRequestData",
    "SchedulerOutput",
    "SchedulerStats",
    "TokenLogprobs",
]


@dataclass(slots=True)
class NewRequestData:
    """A request that an executor sees for the first time.

    ``block_ids`` is its whole table in each group, attention groups first. Those of the first
    ``num_computed_tokens`` tokens were found in the prefix cache.
    """

    req_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int

    @classmethod
    def from_request(cls, request: Request, block_ids: tuple[list[int], ...]) -> NewRequestData:
        """Describe ``request`` as it stands before the step."""
        return cls(
            req_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            sampling_params=request.sampling_params,
            block_ids=block_ids,
            num_computed_tokens=request.num_computed_tokens,
        )


@dataclass(slots=True)
class CachedRequestData:
    """What changed for a request that an executor knows.

    ``new_block_ids`` extend the executor's block table of each group. After a preemption
    (``resumed_from_preemption``) they replace it, the request starts again behind what was found in
    the prefix cache, and ``all_token_ids`` holds all its tokens; otherwise it is None, since the
    executor has sampled the tokens itself.
    """

    req_id: str
    resumed_from_preemption: bool
    new_block_ids: tuple[list[int], ...]
    num_computed_tokens: int
    all_token_ids: list[int] | None = None


@dataclass(slots=True)
class SchedulerOutput:
    """One step: who computes how many tokens (``vllm.v1.core.sched.output.SchedulerOutput``).

    Attributes
    ----------
    num_scheduled_tokens : dict of str to int
        Tokens of this step for each request. A request's ``num_computed_tokens`` in the two lists
        is its value *before* the step.
    scheduled_spec_decode_tokens : dict of str to list of int
        Draft tokens to verify, the last ones of ``num_scheduled_tokens``. -1 is a placeholder: for
        a draft that only the executor knows (asynchronous scheduling), or for none at all.
    num_common_prefix_blocks : list of int
        For each group, blocks at the front of the tables that all running requests share.
    kv_cache_block_copies : list of tuple of int
        (source, target) block ids to be copied before the forward pass, in all layers of a group.
    prefill_checkpoints : dict of str to int
        Requests whose chunk exports a KDA state from its inside, and the tokens which that state
        has read. It goes into the column before that of the chunk's last token.
    preempted_req_ids : set of str
        Requests that lost their blocks and their state since the last step; they come back.
    finished_req_ids : set of str
        Requests that ended since the last step; they do not come back. An executor first drops
        what these two sets name, then looks at the lists.
    """

    scheduled_new_reqs: list[NewRequestData] = field(default_factory=list)
    scheduled_cached_reqs: list[CachedRequestData] = field(default_factory=list)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    total_num_scheduled_tokens: int = 0
    scheduled_spec_decode_tokens: dict[str, list[int]] = field(default_factory=dict)
    num_common_prefix_blocks: list[int] = field(default_factory=list)
    preempted_req_ids: set[str] = field(default_factory=set)
    finished_req_ids: set[str] = field(default_factory=set)
    kv_cache_block_copies: list[tuple[int, int]] = field(default_factory=list)
    prefill_checkpoints: dict[str, int] = field(default_factory=dict)
    #: The scheduler's own note of whom it has scheduled, in the order of num_scheduled_tokens.
    scheduled: list[Request] = field(default_factory=list, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How likely one output token was, and which tokens were likely in its place.

    The distribution is the model's own: before temperature, top-p, top-k and min-p, and for a
    token of a draft the target's, not the drafter's (vLLM's default, ``logprobs_mode`` of
    ``raw_logprobs``).

    Attributes
    ----------
    token_id : int
        The token that was chosen.
    logprob : float
        Natural logarithm of its probability, at most 0.
    rank : int
        Tokens at least as likely, itself among them: 1 for the most probable one.
    top : tuple of (int, float)
        The most probable token ids with their logarithms, the likeliest first, as many as
        ``SamplingParams.logprobs`` asks for. The chosen token need not be among them.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class ModelRunnerOutput:
    """What an executor returns: for each request the tokens it sampled, none inside a prompt.

    ``logprobs`` has an entry for each token of ``sampled_token_ids``, an empty list for a request
    that did not ask; it is None if none of the step did.
    """

    req_ids: list[str]
    sampled_token_ids: list[list[int]]
    logprobs: list[list[TokenLogprobs]] | None = None


class AsyncModelRunnerOutput(Protocol):
    """A step that was handed to the device (``vllm.v1.outputs.AsyncModelRunnerOutput``)."""

    def get_output(self) -> ModelRunnerOutput:
        """Wait for the step and return its output; what went wrong in it is raised here."""
        ...


@dataclass(slots=True)
class EngineCoreOutput:
    """News of one request after a step (``vllm.v1.engine.EngineCoreOutput``).

    ``finish_reason`` is None while the request goes on, else ``stop``, ``length``, ``abort`` or
    ``error``. ``stop_reason`` is the stop token that ended it, None for end-of-sequence.
    ``new_logprobs`` has an entry for each new token, None if the request did not ask for them.
    ``num_cached_tokens`` were found in the prefix cache when the request began; None without one.
    """

    request_id: str
    new_token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | None = None
    num_computed_tokens: int = 0
    new_logprobs: list[TokenLogprobs] | None = None
    num_cached_tokens: int | None = None

    @classmethod
    def from_request(cls, request: Request, new_token_ids: list[int]) -> EngineCoreOutput:
        """News of ``request`` as it stands after the step."""
        if request.status is RequestStatus.RUNNING:  # all requests of most steps
            return cls(
                request.request_id, new_token_ids, None, None,
                request.num_computed_tokens, None, request.num_cached_tokens,
            )  # fmt: skip
        return cls(
            request_id=request.request_id,
            new_token_ids=new_token_ids,
            finish_reason=request.status.finish_reason,
            stop_reason=request.stop_reason,
            num_computed_tokens=request.num_computed_tokens,
            num_cached_tokens=request.num_cached_tokens,
        )

    @property
    def finished(self) -> bool:
        """Whether this is the last news of the request."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """The scheduler at one moment (``vllm.v1.metrics.stats.SchedulerStats``).

    ``kv_cache_usage`` is the share of usable blocks that are taken, in [0, 1];
    ``num_preemptions`` counts from the start, as do the tokens that were looked up in the prefix
    cache and those that were found. ``spec_decoding_stats`` is None without speculation.
    """

    num_running_reqs: int
    num_waiting_reqs: int
    kv_cache_usage: float
    num_preemptions: int
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    spec_decoding_stats: SpecDecodingStats | None = None

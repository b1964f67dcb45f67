"""A request and what the scheduler knows about its progress.

Needs the standard library only. Lessons 08 to 10 follow a request through its states. Names are
vLLM's, see ``vllm/v1/request.py``.

One number carries the progress: ``num_computed_tokens``. There is no prefill phase and no decode
phase. A request whose ``num_computed_tokens`` is behind ``num_tokens`` needs the difference; that
difference is a whole prompt at first and one token later on. Two kinds of tokens that are not
known yet make it larger: drafts to be verified (``spec_token_ids``), and tokens of a step that is
still being computed (``num_output_placeholders``, asynchronous scheduling only).
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

from kimik3_lab.serving.knobs import require_number
from kimik3_lab.serving.sampling_params import SamplingParams, checked_token_ids

__all__ = ["Request", "RequestStatus", "SamplingParams"]


class RequestStatus(enum.IntEnum):
    """Where a request stands (``vllm.v1.request.RequestStatus``).

    All that come after PREEMPTED have ended.
    """

    WAITING = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    FINISHED_STOPPED = enum.auto()
    FINISHED_LENGTH_CAPPED = enum.auto()
    FINISHED_ABORTED = enum.auto()
    FINISHED_ERROR = enum.auto()

    @property
    def finish_reason(self) -> str | None:
        """The reason that clients see: ``stop``, ``length``, ``abort``, ``error``, or None."""
        return _FINISH_REASONS.get(self)

    @property
    def is_finished(self) -> bool:
        """Whether the request has ended, for whatever reason."""
        return self > RequestStatus.PREEMPTED


_FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH_CAPPED: "length",
    RequestStatus.FINISHED_ABORTED: "abort",
    RequestStatus.FINISHED_ERROR: "error",
}


class Request:
    """One request; the scheduler owns and changes it (``vllm.v1.request.Request``).

    Parameters
    ----------
    request_id : str
        Unique among the requests that have not ended.
    prompt_token_ids : list of int
        At least one token.
    sampling_params : SamplingParams, optional
        Greedy with 16 tokens when left out.
    max_tokens : int, optional
        Short for a ``sampling_params`` with this ``max_tokens``.
    eos_token_id : int, optional
        The model's end-of-sequence token; without it only ``stop_token_ids`` and lengths end the
        request.
    arrival_time : float
        Seconds on the clock of the caller; the scheduler does not read a clock.
    priority : int
        Lower runs first where the policy looks at it.

    Attributes
    ----------
    num_tokens : int
        Tokens known so far, prompt and output.
    num_cached_tokens : int or None
        Tokens of the prefix cache that it began with; None before, and without such a cache.
    num_computed_tokens : int
        Tokens whose cache entries exist, counting those that the current step computes. Drafts
        count as soon as they are scheduled; the rejected ones are taken off again.
    output_token_ids : list of int
        What has been generated; kept when the request is preempted.
    spec_token_ids : list of int
        Draft tokens that the next step is to verify.
    num_output_placeholders : int
        Tokens that steps in flight will sample, drafts among them (asynchronous scheduling).
    num_in_flight_tokens : int
        Scheduled tokens whose step has not been answered yet.
    num_stale_output_tokens : int
        In-flight tokens that were scheduled before the request was preempted. What they bring is
        still delivered, but moves no counter.
    is_prefill_chunk : bool
        Whether the last scheduled step ended before the last known token.
    block_hashes : list of bytes
        One for each full hash block, see :mod:`kimik3_lab.serving.block_hash`.
    shared_prefix_boundary : int
        Where another sequence was seen to leave the prefix that both share, 0 if nowhere: a KDA
        state is worth keeping there (vLLM calls it the Marconi junction).
    cache_salt : str or None
        Part of the hashes: only requests with the same salt share blocks.

    Raises
    ------
    ValueError
        If the prompt is empty or holds something else than token ids.

    Examples
    --------
    >>> request = Request("r0", [5, 6, 7], max_tokens=2)
    >>> request.num_tokens, request.num_computed_tokens, request.status.name
    (3, 0, 'WAITING')
    """

    __slots__ = (
        "_all_token_ids",
        "arrival_time",
        "block_hashes",
        "cache_salt",
        "eos_token_id",
        "is_prefill_chunk",
        "max_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_in_flight_tokens",
        "num_output_placeholders",
        "num_preemptions",
        "num_prompt_tokens",
        "num_stale_output_tokens",
        "num_tokens",
        "priority",
        "request_id",
        "sampling_params",
        "shared_prefix_boundary",
        "spec_token_ids",
        "status",
        "stop_reason",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling_params: SamplingParams | None = None,
        *,
        max_tokens: int | None = None,
        eos_token_id: int | None = None,
        arrival_time: float = 0.0,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> None:
        if not isinstance(request_id, str) or not request_id:
            raise ValueError(f"request_id must be a text that is not empty, got {request_id!r}")
        if type(priority) is not int:
            raise ValueError(f"request {request_id}: priority must be an integer, got {priority!r}")
        require_number(f"request {request_id}: arrival_time", arrival_time)
        params = sampling_params or SamplingParams()
        if max_tokens is not None:
            params = dataclasses.replace(params, max_tokens=max_tokens)
        self.request_id = request_id
        self.sampling_params = params
        self.eos_token_id = eos_token_id
        self.arrival_time = arrival_time
        self.priority = priority
        self.cache_salt = cache_salt
        self.max_tokens = params.max_tokens

        self._all_token_ids = list(checked_token_ids("prompt_token_ids", prompt_token_ids))
        self.num_prompt_tokens = len(self._all_token_ids)
        if not self._all_token_ids:
            raise ValueError(f"request {request_id}: the prompt is empty, it needs one token")
        self.num_tokens = self.num_prompt_tokens
        self.num_cached_tokens: int | None = None
        self.num_computed_tokens = 0
        self.num_preemptions = 0
        self.status = RequestStatus.WAITING
        self.stop_reason: int | None = None

        self.spec_token_ids: list[int] = []
        self.num_output_placeholders = 0
        self.num_in_flight_tokens = 0
        self.num_stale_output_tokens = 0
        self.is_prefill_chunk = False
        self.block_hashes: list[bytes] = []
        self.shared_prefix_boundary = 0

    @property
    def prompt_token_ids(self) -> list[int]:
        """A copy of the prompt."""
        return self._all_token_ids[: self.num_prompt_tokens]

    @property
    def output_token_ids(self) -> list[int]:
        """A copy of the generated tokens."""
        return self._all_token_ids[self.num_prompt_tokens :]

    @property
    def all_token_ids(self) -> list[int]:
        """A copy of prompt and generated tokens."""
        return self._all_token_ids.copy()

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_tokens_with_spec(self) -> int:
        """Tokens known so far and the drafts behind them."""
        return self.num_tokens + len(self.spec_token_ids)

    @property
    def prefill_end(self) -> int:
        """Where prefill ends: behind the prompt, or before the last token when it is resumed.

        A request that lost its cache computes its output tokens anew as if they were a prompt.
        """
        return max(self.num_prompt_tokens, self.num_tokens - 1)

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Tokens ``start`` to ``stop``, a copy."""
        return self._all_token_ids[start:stop]

    @property
    def is_finished(self) -> bool:
        """Whether the request has ended."""
        return self.status.is_finished

    def append_output_token_ids(self, token_ids: Sequence[int], max_model_len: int) -> list[int]:
        """Add sampled tokens up to the one that ends the request, if any; return those added.

        An end token counts before a length: a request that says it is done has not been cut
        (``vllm/v1/core/sched/utils.py``, ``check_stop``).
        """
        params = self.sampling_params
        eos_token_id = None if params.ignore_eos else self.eos_token_id
        limit = min(max_model_len, self.num_prompt_tokens + self.max_tokens)
        if (
            self.num_tokens + len(token_ids) < limit
            and not params.stop_token_ids
            and (eos_token_id is None or eos_token_id not in token_ids)
        ):  # most steps of most requests
            self._all_token_ids += token_ids
            self.num_tokens += len(token_ids)
            return list(token_ids)
        for count, token_id in enumerate(token_ids, start=1):
            self._all_token_ids.append(token_id)
            self.num_tokens += 1
            if token_id == eos_token_id:
                self.status = RequestStatus.FINISHED_STOPPED
            elif token_id in params.stop_token_ids:
                self.status = RequestStatus.FINISHED_STOPPED
                self.stop_reason = token_id
            elif self.num_tokens >= limit:
                self.status = RequestStatus.FINISHED_LENGTH_CAPPED
            else:
                continue
            return list(token_ids[:count])
        return list(token_ids)

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.name}, computed "
            f"{self.num_computed_tokens} of {self.num_prompt_tokens}+{self.num_output_tokens})"
        )

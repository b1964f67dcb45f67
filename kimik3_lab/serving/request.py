"""A request and what the scheduler knows about its progress.

Needs the standard library only. Lessons 08 and 10 follow a request through its states. Names are
vLLM's, see ``vllm/v1/request.py`` and ``vllm/sampling_params.py``.

One number carries the progress: ``num_computed_tokens``. There is no prefill phase and no decode
phase. A request whose ``num_computed_tokens`` is behind ``num_tokens`` needs the difference; that
difference is a whole prompt at first and one token later on.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Request", "RequestStatus", "SamplingParams"]


@dataclass(frozen=True)
class SamplingParams:
    """How output tokens are chosen and when a request ends.

    Parameters
    ----------
    max_tokens : int
        Most output tokens, at least 1.
    temperature : float
        0 takes the most probable token; otherwise logits are divided by it.
    top_p : float
        In (0, 1]: only the smallest set of tokens with at least this probability is drawn from.
    seed : int or None
        Makes the draws repeatable, whatever else is in the batch. In [0, 2**63).
    ignore_eos : bool
        Go on after the end-of-sequence token, for benchmarks of a fixed length.
    stop_token_ids : sequence of int
        Further tokens that end the request; the token itself is kept in the output.

    Raises
    ------
    ValueError
        If a value is out of range.

    Examples
    --------
    >>> SamplingParams(max_tokens=4).greedy
    True
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    ignore_eos: bool = False
    stop_token_ids: Sequence[int] = ()

    def __post_init__(self) -> None:
        if type(self.max_tokens) is not int or self.max_tokens < 1:
            raise ValueError(f"max_tokens must be an integer of at least 1, got {self.max_tokens}")
        if not (math.isfinite(self.temperature) and self.temperature >= 0.0):
            raise ValueError(
                f"temperature must be a number of at least 0 (0 is greedy), got {self.temperature}"
            )
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must lie in (0, 1], got {self.top_p}")
        if self.seed is not None and (type(self.seed) is not int or not 0 <= self.seed < 2**63):
            raise ValueError(f"seed must be None or an integer in [0, 2**63), got {self.seed!r}")
        object.__setattr__(
            self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids)
        )

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is taken and nothing is drawn."""
        return self.temperature == 0.0


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
    num_computed_tokens : int
        Tokens whose cache entries exist, counting those that the current step computes.
    output_token_ids : list of int
        What has been generated; kept when the request is preempted.

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
        "eos_token_id",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "priority",
        "request_id",
        "sampling_params",
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
    ) -> None:
        params = sampling_params or SamplingParams()
        if max_tokens is not None:
            params = dataclasses.replace(params, max_tokens=max_tokens)
        self.request_id = request_id
        self.sampling_params = params
        self.eos_token_id = eos_token_id
        self.arrival_time = arrival_time
        self.priority = priority

        self._all_token_ids = list(_token_ids("prompt_token_ids", prompt_token_ids))
        self.num_prompt_tokens = len(self._all_token_ids)
        if not self._all_token_ids:
            raise ValueError(f"request {request_id}: the prompt is empty, it needs one token")
        self.num_computed_tokens = 0
        self.num_preemptions = 0
        self.status = RequestStatus.WAITING
        self.stop_reason: int | None = None

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
        return len(self._all_token_ids) - self.num_prompt_tokens

    @property
    def num_tokens(self) -> int:
        """Tokens known so far, prompt and output."""
        return len(self._all_token_ids)

    @property
    def max_tokens(self) -> int:
        """Most output tokens."""
        return self.sampling_params.max_tokens

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
        for count, token_id in enumerate(token_ids, start=1):
            self._all_token_ids.append(token_id)
            if token_id == self.eos_token_id and not params.ignore_eos:
                self.status = RequestStatus.FINISHED_STOPPED
            elif token_id in params.stop_token_ids:
                self.status = RequestStatus.FINISHED_STOPPED
                self.stop_reason = token_id
            elif self.num_output_tokens >= params.max_tokens or self.num_tokens >= max_model_len:
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


def _token_ids(name: str, ids: Iterable[int]) -> tuple[int, ...]:
    """Return ``ids`` as a tuple, refusing what cannot be a token id."""
    ids = tuple(ids)
    for token_id in ids:
        if type(token_id) is not int or token_id < 0:
            raise ValueError(f"{name} must be non-negative integers, got {token_id!r}")
    return ids

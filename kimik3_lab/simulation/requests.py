"""What a simulated client asks for: lengths, a time, and what the prompt shares with others.

Needs the standard library and the scheduler. Lessons 11 and 12 feed traces through it.

A simulated request has no text. Its tokens are made up so that the scheduler's own block hashing
decides what is shared: two prompts have equal tokens exactly where their ``hash_ids`` say that
their blocks are equal, and nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kimik3_lab.serving.request import Request, SamplingParams

__all__ = ["SimulationRequest", "in_order", "make_request"]

#: Token ids from here on belong to one request alone; below it they name shared blocks.
_PRIVATE = 1 << 40


@dataclass(frozen=True, slots=True)
class SimulationRequest:
    """One request of a workload.

    Attributes
    ----------
    request_id
        Unique within a run.
    arrival_s
        Seconds from the begin of the run.
    prompt_tokens, output_tokens
        Lengths; the output has exactly that many tokens.
    hash_ids
        A number for each ``hash_block_size`` tokens of the prompt, the last one for what is left.
        Prompts that begin with the same numbers begin with the same tokens (Mooncake's traces).
        None: the prompt shares nothing.
    hash_block_size
        Tokens that one number stands for.

    Raises
    ------
    ValueError
        If a length or the time makes no sense, or the numbers do not cover the prompt.

    Examples
    --------
    >>> SimulationRequest("a", 0.0, 1000, 20, hash_ids=(4, 7)).hash_ids
    (4, 7)
    """

    request_id: str
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] | None = None
    hash_block_size: int = 512

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or self.output_tokens < 1:
            raise ValueError(
                f"request {self.request_id}: prompt and output need at least one token each, got "
                f"{self.prompt_tokens} and {self.output_tokens}"
            )
        if not (math.isfinite(self.arrival_s) and self.arrival_s >= 0.0):
            raise ValueError(
                f"request {self.request_id}: arrival_s must be 0 or more, got {self.arrival_s}"
            )
        if self.hash_ids is None:
            return
        if len(self.hash_ids) * self.hash_block_size < self.prompt_tokens:
            raise ValueError(
                f"request {self.request_id}: {len(self.hash_ids)} hash_ids of "
                f"{self.hash_block_size} tokens do not cover a prompt of {self.prompt_tokens}"
            )
        if min(self.hash_ids) < 0 or max(self.hash_ids) >= _PRIVATE:
            raise ValueError(
                f"request {self.request_id}: hash_ids must lie in [0, {_PRIVATE}), got "
                f"{min(self.hash_ids)} to {max(self.hash_ids)}"
            )


def make_request(asked: SimulationRequest, number: int) -> Request:
    """Make what the scheduler takes; ``number`` tells its private tokens from all others.

    Examples
    --------
    >>> request = make_request(SimulationRequest("a", 0.0, 5, 2, (8, 9), hash_block_size=4), 1)
    >>> request.prompt_token_ids
    [8, 8, 8, 8, 9]
    """
    if asked.hash_ids is None:
        tokens = [_PRIVATE + number] * asked.prompt_tokens
    else:
        tokens = []
        for block in asked.hash_ids[: -(-asked.prompt_tokens // asked.hash_block_size)]:
            tokens += [block] * asked.hash_block_size
        del tokens[asked.prompt_tokens :]
    params = SamplingParams(max_tokens=asked.output_tokens, ignore_eos=True)
    return Request(asked.request_id, tokens, params, arrival_time=asked.arrival_s)


def in_order(requests: Iterable[SimulationRequest]) -> Iterator[SimulationRequest]:
    """Pass requests on one by one; refuse one that came earlier than the one before it.

    Raises
    ------
    ValueError
        If so: the caller must sort them, because a stream cannot be.
    """
    last = 0.0
    for request in requests:
        if request.arrival_s < last:
            raise ValueError(
                f"request {request.request_id} arrives at {request.arrival_s} s, after one that "
                f"arrives at {last} s: sort the requests by arrival_s"
            )
        last = request.arrival_s
        yield request

"""What the engine sends to those who wait for it: the new tokens of a group of requests.

Needs the standard library only. Used by the server (lesson 10).

A reader may be slower than the engine: its network is, or it has stopped reading. The engine does
not wait for it, and what it has not fetched yet is kept as *one* output for each request that grows
by a number for each token. So a reader who never comes back costs a list of at most ``max_tokens``
numbers, and holds up nobody. vLLM does the same in ``RequestOutputCollector``
(``vllm/v1/engine/output_processor.py``).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kimik3_lab.serving.outputs import EngineCoreOutput, TokenLogprobs

__all__ = ["OutputStream", "RequestOutput"]


@dataclass(slots=True)
class RequestOutput:
    """What one step, or several that nobody has fetched yet, made of one request.

    ``logprobs`` has an entry for each token if the request asked for them, otherwise none.
    ``num_cached_tokens`` of the prompt were found in the prefix cache; None without one.
    """

    request_id: str
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_cached_tokens: int | None = None

    @classmethod
    def from_engine(cls, output: EngineCoreOutput) -> RequestOutput:
        """Copy the engine's news."""
        return cls(
            output.request_id,
            list(output.new_token_ids),
            output.finish_reason,
            output.stop_reason,
            list(output.new_logprobs or ()),
            output.num_cached_tokens,
        )

    def extend(self, later: RequestOutput) -> None:
        """Add what came after this."""
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason


class _Submitter(Protocol):
    """Who runs the requests of a stream."""

    def abort(
        self, request_ids: Sequence[str], *, reason: str, num_tokens: int | None = None
    ) -> None:
        """Stop requests early."""

    def forget(self, stream: OutputStream) -> None:
        """Note that nobody reads this stream any more."""


class OutputStream:
    """The outputs of requests that were handed in together, in the order in which they come.

    Iterating ends when all of them have finished, and raises if the engine fails. Everything here
    runs on the event loop.

    With ``text_may_end_first`` an answer is over when its reader says so with :meth:`end`.
    """

    def __init__(
        self,
        submitter: _Submitter,
        request_ids: Sequence[str],
        *,
        text_may_end_first: bool = False,
    ) -> None:
        self.text_may_end_first = text_may_end_first
        self._submitter = submitter
        self._running = set(request_ids)
        self._unended = set(request_ids) if text_may_end_first else set()
        self._unread: dict[str, RequestOutput] = {}
        self._failure: Exception | None = None
        self._arrival = asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        while self._running:
            await self._arrival.wait()
            self._arrival.clear()
            unread, self._unread = self._unread, {}
            for output in unread.values():
                if output.request_id not in self._running:
                    continue  # aborted meanwhile
                if output.finish_reason is not None:
                    self._running.discard(output.request_id)
                yield output
            if self._failure is not None and not self._unread:
                self._running.clear()  # the engine has dropped them already
                raise self._failure

    @property
    def num_unread_tokens(self) -> int:
        """Tokens that wait to be fetched."""
        return sum(len(output.token_ids) for output in self._unread.values())

    def put(self, output: RequestOutput | Exception) -> None:
        """Hand over what the engine made, or its failure, behind all that has come before."""
        if isinstance(output, Exception):
            self._failure = output
        elif (earlier := self._unread.get(output.request_id)) is not None:
            earlier.extend(output)
        else:
            self._unread[output.request_id] = output
        self._arrival.set()

    def end(self, request_id: str, *, reason: str, num_tokens: int) -> None:
        """Note that the text of an answer is complete; no more outputs of it come.

        It may have ended at a stop string, which the engine knows nothing of: then the engine is
        told, and goes on no longer.
        """
        if request_id in self._running or request_id in self._unended:
            self._running.discard(request_id)
            self._unended.discard(request_id)
            self._submitter.abort([request_id], reason=reason, num_tokens=num_tokens)

    def close(self) -> None:
        """Abort whatever still runs. Call this when the outputs are no longer wanted."""
        if left := self._running | self._unended:
            self._submitter.abort(sorted(left), reason="abort")
            self._running.clear()
            self._unended.clear()
        self._unread.clear()
        self._submitter.forget(self)

"""The engine behind an event loop: a thread steps it, coroutines submit requests and read tokens.

Needs the standard library only. Used by the server (lesson 10).

An engine step is a long stretch of computation; run on the event loop it would hold up every other
client. So the engine lives in a thread of its own, and only that thread touches it. The two sides
exchange messages: the event loop puts functions into an inbox that the thread works off between
two steps, and the thread hands each step's tokens back with ``loop.call_soon_threadsafe``.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kimik3_lab.serving.outputs import EngineCoreOutput
    from kimik3_lab.serving.request import Request

__all__ = ["AsyncEngine", "EngineDeadError", "EngineStepError", "OutputStream", "RequestOutput"]

logger = logging.getLogger(__name__)


class EngineDeadError(RuntimeError):
    """The engine takes no more requests: it has stopped, or it could not recover from a failure."""


class EngineStepError(RuntimeError):
    """A step failed while this request was running; the engine itself goes on."""


class SteppedEngine(Protocol):
    """What is asked of an engine; :class:`kimik3_lab.serving.engine.Engine` has it."""

    def add_request(self, request: Request) -> None:
        """Queue a request; ValueError if it can never run."""

    def abort(self, request_id: str) -> None:
        """Drop a request and free what it holds."""

    def step(self) -> list[EngineCoreOutput]:
        """Run the model once and return the new tokens."""

    def has_unfinished_requests(self) -> bool:
        """Whether there is anything to step for."""


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What one step made of one request."""

    request_id: str
    token_ids: Sequence[int]
    finish_reason: str | None = None
    stop_reason: int | None = None


class OutputStream:
    """The outputs of requests that were handed in together, in the order in which they come.

    Iterating ends when all of them have finished, and raises if the engine fails.
    """

    def __init__(self, client: AsyncEngine, request_ids: Sequence[str]) -> None:
        self._client = client
        self._running = set(request_ids)
        self._arrived: asyncio.Queue[RequestOutput | Exception] = asyncio.Queue()

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        while self._running:
            output = await self._arrived.get()
            if isinstance(output, Exception):
                self._running.clear()  # the engine has dropped them already
                raise output
            if output.request_id in self._running:
                if output.finish_reason is not None:
                    self._running.discard(output.request_id)
                yield output

    def abort(self, request_id: str) -> None:
        """Stop one request early; no more outputs of it come."""
        if request_id in self._running:
            self._running.discard(request_id)
            self._client._abort([request_id])

    def close(self) -> None:
        """Abort whatever still runs. Call this when the outputs are no longer wanted."""
        if self._running:
            self._client._abort(list(self._running))
            self._running.clear()
        self._client._open.discard(self)


class AsyncEngine:
    """Serve many coroutines from one engine.

    Examples
    --------
    In an event loop, with an ``engine`` and a ``request`` at hand::

        client = AsyncEngine(engine)
        client.start()
        stream = await client.submit([request])
        async for output in stream:
            print(output.token_ids)
        stream.close()
        await client.stop()
    """

    def __init__(self, engine: SteppedEngine) -> None:
        self._engine = engine
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._error: BaseException | None = None
        # Touched by the event loop only.
        self._open: set[OutputStream] = set()
        self._accepting = True
        # Touched by the engine thread only.
        self._streams: dict[str, OutputStream] = {}
        self._stop_requested = False

    # -- the event loop's side -----------------------------------------------------------------

    def start(self) -> None:
        """Start the engine's thread; call it from the event loop that will read the outputs."""
        if self._thread is None:
            self._loop = asyncio.get_running_loop()
            self._thread = threading.Thread(target=self._run, name="k3lab-engine", daemon=True)
            self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether requests are served."""
        return self._error is None and self._thread is not None and self._thread.is_alive()

    async def submit(self, requests: Sequence[Request]) -> OutputStream:
        """Hand requests to the engine, all or none.

        Raises
        ------
        ValueError
            If the engine refuses one of them because it can never run.
        EngineDeadError
            If the engine has failed, is not started or is about to stop.
        """
        self._check_running()
        stream = OutputStream(self, [request.request_id for request in requests])
        accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._open.add(stream)
        self._inbox.put(lambda: self._add(requests, stream, accepted))
        try:
            # The thread may die with the request still in its inbox; then nobody would answer.
            while not (await asyncio.wait([accepted], timeout=1.0))[0]:
                self._check_running()
            accepted.result()
        except BaseException:
            stream.close()
            raise
        return stream

    async def drain(self, timeout: float = 0.0) -> None:
        """Take no more requests, give running ones ``timeout`` seconds to finish, abort the rest.

        An aborted request ends with the finish reason ``"abort"``.
        """
        self._accepting = False
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        while self._open and self.is_running and loop.time() < deadline:
            await asyncio.sleep(0.02)
        self._inbox.put(self._abort_all)

    async def stop(self) -> None:
        """End the engine's thread, after the step that it may be in."""
        self._accepting = False
        if self._thread is not None:
            self._inbox.put(self._request_stop)
            await asyncio.to_thread(self._thread.join)

    def _check_running(self) -> None:
        if self._error is not None:
            raise EngineDeadError(
                f"the engine has failed and cannot go on ({self._error!r}): restart the server"
            )
        if not self._accepting:
            raise EngineDeadError("the server is shutting down and takes no more requests")
        if not self.is_running:
            raise EngineDeadError("the engine is not running: call start() first")

    def _abort(self, request_ids: Sequence[str]) -> None:
        self._inbox.put(lambda: self._drop(request_ids))

    # -- the engine thread's side --------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stop_requested:
                self._work_off_inbox(wait=not self._engine.has_unfinished_requests())
                if not self._stop_requested and self._engine.has_unfinished_requests():
                    self._step()
        except BaseException as error:  # whatever it is, no client may be left waiting
            logger.exception("the engine has failed and cannot go on")
            self._error = error
            failure = EngineDeadError(f"the engine has failed and cannot go on: {error!r}")
            self._deliver([(stream, failure) for stream in set(self._streams.values())])
            self._streams.clear()

    def _work_off_inbox(self, *, wait: bool) -> None:
        if wait:
            self._inbox.get()()
        while not self._stop_requested:
            try:
                self._inbox.get_nowait()()
            except queue.Empty:
                return

    def _step(self) -> None:
        try:
            outputs = self._engine.step()
        except Exception as error:
            if not self._streams:  # failing with nothing to run: it would fail for ever
                raise
            logger.exception("an engine step failed; its requests are dropped")
            failure = EngineStepError(f"the engine failed while running this request: {error!r}")
            self._deliver([(stream, failure) for stream in set(self._streams.values())])
            self._drop(list(self._streams))  # all: which one is to blame cannot be known
            return
        arrivals: list[tuple[OutputStream, RequestOutput | Exception]] = []
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue  # aborted meanwhile
            if output.finish_reason is not None:
                del self._streams[output.request_id]
            arrivals.append(
                (
                    stream,
                    RequestOutput(output.request_id, output.new_token_ids, output.finish_reason),
                )
            )
        self._deliver(arrivals)

    def _add(
        self, requests: Sequence[Request], stream: OutputStream, accepted: asyncio.Future[None]
    ) -> None:
        refusal: Exception | None = None
        try:
            for request in requests:
                self._engine.add_request(request)
                self._streams[request.request_id] = stream
        except ValueError as error:
            refusal = error
        except Exception as error:
            logger.exception("the engine failed to take a request")
            refusal = EngineStepError(f"the engine failed to take this request: {error!r}")
        if refusal is not None:
            self._drop([request.request_id for request in requests])

        def answer() -> None:
            if accepted.done():  # the client has gone meanwhile
                return
            if refusal is None:
                accepted.set_result(None)
            else:
                accepted.set_exception(refusal)

        self._call_in_loop(answer)

    def _drop(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            if self._streams.pop(request_id, None) is not None:
                self._engine.abort(request_id)

    def _abort_all(self) -> None:
        running = list(self._streams.items())
        self._drop([request_id for request_id, _ in running])
        self._deliver([(stream, RequestOutput(name, (), "abort")) for name, stream in running])

    def _request_stop(self) -> None:
        self._abort_all()
        self._stop_requested = True

    def _deliver(self, arrivals: Sequence[tuple[OutputStream, RequestOutput | Exception]]) -> None:
        """Hand a whole step's outputs over at once: one wake-up of the event loop, not one each."""

        def put() -> None:
            for stream, output in arrivals:
                stream._arrived.put_nowait(output)

        if arrivals:
            self._call_in_loop(put)

    def _call_in_loop(self, function: Callable[[], None]) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:  # the loop has closed: nobody is left to read
            self._stop_requested = True

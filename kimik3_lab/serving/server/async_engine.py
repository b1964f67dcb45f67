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
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from kimik3_lab.serving.server.engine_interface import (
    EngineDeadError,
    EngineObserver,
    EngineStepError,
    EngineStoppingError,
    QueueFullError,
    SteppedEngine,
)
from kimik3_lab.serving.server.output_stream import OutputStream, RequestOutput

if TYPE_CHECKING:
    from kimik3_lab.serving.request import Request

__all__ = ["AsyncEngine"]

logger = logging.getLogger(__name__)

#: Seconds between two looks at whether the engine's thread is done with something.
_POLL = 0.02


class AsyncEngine:
    """Serve many coroutines from one engine.

    Parameters
    ----------
    engine
        Belongs to this object's thread from :meth:`start` on.
    max_num_queued_reqs
        Most requests in flight, waiting and running together; more are refused. None for no limit.
        Name and meaning are vLLM's (``AsyncLLM.check_admission``).

    Attributes
    ----------
    observer : EngineObserver or None
        Set it before :meth:`start`.

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

    def __init__(self, engine: SteppedEngine, *, max_num_queued_reqs: int | None = None) -> None:
        self.max_num_queued_reqs = max_num_queued_reqs
        self.observer: EngineObserver | None = None
        self._engine = engine
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._error: BaseException | None = None
        # Touched by the event loop only.
        self._open: set[OutputStream] = set()
        self._in_flight: set[str] = set()
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
        """Whether requests are computed."""
        return self._error is None and self._thread is not None and self._thread.is_alive()

    @property
    def is_accepting(self) -> bool:
        """Whether new requests are taken."""
        return self._accepting and self.is_running

    @property
    def num_in_flight(self) -> int:
        """Requests that were submitted and have not ended."""
        return len(self._in_flight)

    def check_admission(self, num_requests: int = 1) -> None:
        """Refuse what :meth:`submit` would refuse, before work is spent on it.

        Raises
        ------
        QueueFullError
            If ``num_requests`` more are too many.
        EngineDeadError
            If the engine has failed, is not started or is about to stop.
        """
        self._check_running()
        limit = self.max_num_queued_reqs
        if limit is not None and self.num_in_flight + num_requests > limit:
            if self.observer is not None:
                self.observer.request_rejected(num_requests)
            raise QueueFullError(
                f"{self.num_in_flight} requests are in flight and {num_requests} more would exceed "
                f"max_num_queued_reqs={limit}: try again later"
            )

    async def submit(
        self, requests: Sequence[Request], *, text_may_end_first: bool = False
    ) -> OutputStream:
        """Hand requests to the engine, all or none.

        Parameters
        ----------
        requests
            What to run.
        text_may_end_first
            The reader looks for stop strings: it calls :meth:`.OutputStream.end` for each request,
            and the observer counts it only then.

        Raises
        ------
        ValueError
            If the engine refuses one of them because it can never run.
        QueueFullError, EngineDeadError
            As for :meth:`check_admission`.
        """
        self.check_admission(len(requests))
        names = [request.request_id for request in requests]
        self._in_flight.update(names)
        stream = OutputStream(self, names, text_may_end_first=text_may_end_first)
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
            self._in_flight.difference_update(names)
            raise
        return stream

    async def drain(self, timeout: float = 0.0) -> None:
        """Take no more requests, give running ones ``timeout`` seconds to finish, abort the rest.

        An aborted request ends with the finish reason ``"abort"``; its stream has that news when
        this returns, which is after the step that the engine may be in. Call it again, from another
        coroutine and with 0, to stop waiting for requests.
        """
        self._accepting = False
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        while self._open and self.is_running and loop.time() < deadline:
            await asyncio.sleep(_POLL)
        delivered = asyncio.Event()

        def abort_all() -> None:
            self._abort_all()
            self._call_in_loop(delivered.set)  # behind the news

        self._inbox.put(abort_all)
        while self.is_running and not delivered.is_set():
            await asyncio.sleep(_POLL)

    async def stop(self, timeout: float = math.inf) -> bool:
        """End the engine's thread, after the step that it may be in.

        Returns
        -------
        bool
            Whether it has ended; it has not if that step takes more than ``timeout`` seconds.
        """
        self._accepting = False
        if self._thread is None:
            return True
        self._inbox.put(self._request_stop)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        # Not thread.join in a thread of its own: that one could not be left behind.
        while self._thread.is_alive() and loop.time() < deadline:
            await asyncio.sleep(_POLL)
        return not self._thread.is_alive()

    def _check_running(self) -> None:
        if self._error is not None:
            raise EngineDeadError(
                f"the engine has failed and cannot go on ({self._error!r}): restart the server"
            )
        if not self._accepting:
            raise EngineStoppingError("the server is shutting down and takes no more requests")
        if not self.is_running:
            raise EngineDeadError("the engine is not running: call start() first")

    def abort(
        self, request_ids: Sequence[str], *, reason: str, num_tokens: int | None = None
    ) -> None:
        """Stop requests early; they count as ended for ``reason``, after ``num_tokens`` tokens."""
        self._in_flight.difference_update(request_ids)
        now = time.monotonic()
        self._inbox.put(lambda: self._drop(request_ids, reason, now, num_tokens))

    def forget(self, stream: OutputStream) -> None:
        """Wait for ``stream`` no longer when draining."""
        self._open.discard(stream)

    # -- the engine thread's side --------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._tell_state()
            while not self._stop_requested:
                self._work_off_inbox(wait=not self._engine.has_unfinished_requests())
                if not self._stop_requested and self._engine.has_unfinished_requests():
                    self._step()
                self._tell_state()
        except BaseException as error:  # whatever it is, no client may be left waiting
            logger.exception("the engine has failed and cannot go on")
            self._error = error
            failure = EngineDeadError(f"the engine has failed and cannot go on: {error!r}")
            self._fail(failure)
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
        began = time.monotonic()
        try:
            outputs = self._engine.step()
        except Exception as error:
            if not self._streams:  # failing with nothing to run: it would fail for ever
                raise
            logger.exception("an engine step failed; its requests are dropped")
            self._fail(EngineStepError(f"the engine failed while running this request: {error!r}"))
            self._drop(list(self._streams), "error")  # all: the one to blame cannot be known
            return
        if self.observer is not None:
            self.observer.step_ended(began, time.monotonic(), outputs)
        arrivals: list[tuple[OutputStream, RequestOutput | Exception]] = []
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue  # aborted meanwhile
            if output.finish_reason is not None:
                del self._streams[output.request_id]
            arrivals.append((stream, RequestOutput.from_engine(output)))
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
            self._drop([request.request_id for request in requests], None)
        elif self.observer is not None:
            for request in requests:
                self.observer.request_added(request, text_may_end_first=stream.text_may_end_first)

        def answer() -> None:
            if accepted.done():  # the client has gone meanwhile
                return
            if refusal is None:
                accepted.set_result(None)
            else:
                accepted.set_exception(refusal)

        self._call_in_loop(answer)

    def _drop(
        self,
        request_ids: Sequence[str],
        reason: str | None,
        ended: float | None = None,
        num_tokens: int | None = None,
    ) -> None:
        """Take requests from the engine; without a ``reason`` they never counted as added."""
        for request_id in request_ids:
            if self._streams.pop(request_id, None) is not None:
                self._engine.abort(request_id)
            if reason is not None and self.observer is not None:
                now = time.monotonic() if ended is None else ended
                self.observer.request_ended(request_id, reason, now, num_tokens)

    def _abort_all(self) -> None:
        running = list(self._streams.items())
        self._drop([request_id for request_id, _ in running], "abort")
        self._deliver(
            [(stream, RequestOutput(name, finish_reason="abort")) for name, stream in running]
        )

    def _request_stop(self) -> None:
        self._abort_all()
        self._stop_requested = True

    def _tell_state(self) -> None:
        if self.observer is not None:
            self.observer.state_changed(self._engine)

    def _fail(self, failure: Exception) -> None:
        self._deliver([(stream, failure) for stream in set(self._streams.values())])
        self._call_in_loop(partial(self._in_flight.difference_update, tuple(self._streams)))

    def _deliver(self, arrivals: Sequence[tuple[OutputStream, RequestOutput | Exception]]) -> None:
        """Hand a whole step's outputs over at once: one wake-up of the event loop, not one each."""

        def put() -> None:
            for stream, output in arrivals:
                if isinstance(output, RequestOutput) and output.finish_reason is not None:
                    self._in_flight.discard(output.request_id)
                stream.put(output)

        if arrivals:
            self._call_in_loop(put)

    def _call_in_loop(self, function: Callable[[], None]) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:  # the loop has closed: nobody is left to read
            self._stop_requested = True

"""Answers on their way to a client: whole, or as a stream of chunks.

Needs starlette and sse-starlette. Used by the server (lesson 10).

A stream carries one chunk for every token, even when the token adds no text yet (see
:class:`~kimik3_lab.serving.server.output_text.OutputText`), so that a client which times the chunks
times the tokens. However it ends, its last event is ``[DONE]``; an error comes as the event before,
since the status line is out by then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from sse_starlette import EventSourceResponse
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from kimik3_lab.serving.server.errors import APIError
from kimik3_lab.serving.server.generation import Generation
from kimik3_lab.serving.server.protocol import GenerationFields
from kimik3_lab.serving.server.responses import Answer, to_json, usage

__all__ = ["CLIENT_LEFT", "respond"]

logger = logging.getLogger(__name__)

#: Status of an answer that nobody reads any more; nginx's number.
CLIENT_LEFT = 499

_Result = TypeVar("_Result")


async def respond(
    request: Request, body: GenerationFields, answer: Answer, generation: Generation
) -> Response:
    """Answer in the way that ``body`` asks for.

    Raises
    ------
    APIError
        If the engine fails before a whole answer is there.
    """
    if body.stream:
        return _StreamResponse(body, answer, generation)
    try:
        texts = await _unless_disconnected(request, generation.whole_texts())
    finally:
        generation.stream.close()
    if texts is None:
        return Response(status_code=CLIENT_LEFT)
    choices = [answer.choice(text) for text in texts]
    return JSONResponse(answer.whole(choices, _counts(generation)))


class _StreamResponse(EventSourceResponse):
    """A stream of chunks that frees its requests however it ends."""

    def __init__(self, body: GenerationFields, answer: Answer, generation: Generation) -> None:
        # Lines end in a bare \n: some clients look for "\n\n" between two events.
        super().__init__(_events(body, answer, generation), sep="\n")
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._generation.stream.close()


async def _events(
    body: GenerationFields, answer: Answer, generation: Generation
) -> AsyncIterator[str]:
    begun: set[int] = set()

    try:
        async for delta in generation.deltas():
            choice = answer.choice_chunk(delta, first=delta.index not in begun)
            begun.add(delta.index)
            yield to_json(
                answer.chunk([choice], _counts(generation) if body.continuous_usage else None)
            )
        if body.include_usage:
            yield to_json(answer.chunk([], _counts(generation)))
    except APIError as error:
        yield to_json(error.body())
    except Exception as error:
        logger.exception("a stream failed")
        yield to_json(APIError(500, f"the server failed: {error!r}").body())
    yield "[DONE]"


def _counts(generation: Generation) -> dict[str, Any]:
    return usage(
        generation.num_prompt_tokens,
        generation.num_generated_tokens,
        generation.num_cached_tokens,
    )


async def _unless_disconnected(
    request: Request, work: Coroutine[Any, Any, _Result]
) -> _Result | None:
    """Await ``work``, but give up and return None when the client goes away."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working = asyncio.create_task(work)
    watching = asyncio.create_task(disconnected())
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        await _cancel(working, watching)


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

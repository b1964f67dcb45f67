"""The endpoint itself: routes, answers, streams.

Needs FastAPI and sse-starlette. Used by ``k3lab serve`` (lesson 10).

A stream carries one chunk for every token, even when the token adds no text yet (see
:class:`~kimik3_lab.serving.server.output_text.OutputText`), so that a client which times the chunks
times the tokens.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import ValidationError
from sse_starlette import EventSourceResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from kimik3_lab import __version__
from kimik3_lab.serving.server.async_engine import AsyncEngine
from kimik3_lab.serving.server.errors import APIError, from_validation_error
from kimik3_lab.serving.server.generation import Generation, Generator
from kimik3_lab.serving.server.generation_config import GenerationConfig
from kimik3_lab.serving.server.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationFields,
)
from kimik3_lab.serving.server.responses import (
    Answer,
    ChatAnswer,
    CompletionAnswer,
    to_json,
    usage,
)
from kimik3_lab.serving.server.tokenizer import Tokenizer

__all__ = ["build_app"]

logger = logging.getLogger(__name__)

#: Status of an answer that nobody reads any more; nginx's number.
_CLIENT_LEFT = 499

_Body = TypeVar("_Body", bound=GenerationFields)
_Result = TypeVar("_Result")


def build_app(
    engine_client: AsyncEngine,
    tokenizer: Tokenizer,
    model_name: str,
    max_model_len: int,
    *,
    defaults: GenerationConfig | None = None,
    model_root: str | None = None,
) -> FastAPI:
    """Put an OpenAI-compatible endpoint in front of an engine.

    Parameters
    ----------
    engine_client
        The engine; started and stopped together with the app.
    tokenizer
        Its ``vocab_size`` bounds the token ids that a prompt may hold.
    model_name
        What requests call the model.
    max_model_len
        Most tokens of prompt and answer together.
    defaults
        Sampling settings of requests that leave them out; greedy by default, ended by the
        tokenizer's end token.
    model_root
        Where the model came from, for ``/v1/models``.

    Returns
    -------
    FastAPI
        With ``/health``, ``/v1/models``, ``/v1/completions`` and ``/v1/chat/completions``.
    """
    if defaults is None:
        defaults = GenerationConfig.from_dict({}, eos_token_id=tokenizer.eos_token_id)
    generator = Generator(engine_client, tokenizer, max_model_len, defaults)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        engine_client.start()
        yield
        await engine_client.stop()

    app = FastAPI(title="Kimi K3 Serving Lab", version=__version__, lifespan=lifespan)
    _answer_errors_as_openai_does(app)
    started = int(time.time())

    @app.get("/health")
    async def health() -> Response:
        """Answer 200 while requests are served."""
        if not engine_client.is_running:
            raise APIError(503, "the engine has failed: restart the server")
        return Response(status_code=200)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """List the one model that is served."""
        model = {
            "id": model_name,
            "object": "model",
            "created": started,
            "owned_by": "kimik3-lab",
            "root": model_root or model_name,
            "parent": None,
            "max_model_len": max_model_len,
        }
        return {"object": "list", "data": [model]}

    @app.post("/v1/completions", openapi_extra=_documented(CompletionRequest))
    async def completions(request: Request) -> Response:
        """Continue one prompt or several."""
        body = await _read(request, CompletionRequest, model_name)
        answer = CompletionAnswer(model_name)
        generation = await generator.start_completion(body, answer.id)
        return await _respond(request, body, answer, generation)

    @app.post("/v1/chat/completions", openapi_extra=_documented(ChatCompletionRequest))
    async def chat_completions(request: Request) -> Response:
        """Write the assistant's next turn."""
        body = await _read(request, ChatCompletionRequest, model_name)
        answer = ChatAnswer(model_name)
        generation = await generator.start_chat(body, answer.id)
        return await _respond(request, body, answer, generation)

    return app


# -- requests ----------------------------------------------------------------------------------


async def _read(request: Request, kind: type[_Body], model_name: str) -> _Body:
    """Read and check a body. Its content type does not matter: ``curl -d`` sends another."""
    try:
        body = kind.model_validate_json(await request.body())
    except ValidationError as error:
        raise from_validation_error(error) from error
    if body.model is not None and body.model != model_name:
        raise APIError(
            404,
            f"no model {body.model!a} here, this server has {model_name!a}",
            param="model",
            code="model_not_found",
        )
    if body.ignored_fields:
        logger.debug("fields ignored: %s", ", ".join(map(ascii, body.ignored_fields)))
    return body


def _documented(kind: type[GenerationFields]) -> dict[str, Any]:
    """Describe the body for ``/docs``: the routes read it themselves, so FastAPI cannot."""
    schema = kind.model_json_schema()
    definitions = schema.pop("$defs", {})

    def inline(node: Any) -> Any:
        if isinstance(node, list):
            return [inline(item) for item in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            return inline(definitions[node["$ref"].rpartition("/")[2]])
        return {name: inline(value) for name, value in node.items()}

    content = {"application/json": {"schema": inline(schema)}}
    return {"requestBody": {"content": content, "required": True}}


# -- answers -----------------------------------------------------------------------------------


async def _respond(
    request: Request, body: GenerationFields, answer: Answer, generation: Generation
) -> Response:
    if body.stream:
        return _StreamResponse(body, answer, generation)
    try:
        texts = await _unless_disconnected(request, generation.whole_texts())
    finally:
        generation.stream.close()
    if texts is None:
        return Response(status_code=_CLIENT_LEFT)
    counts = usage(generation.num_prompt_tokens, generation.num_generated_tokens)
    return JSONResponse(answer.whole([answer.choice(text) for text in texts], counts))


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

    def counts() -> dict[str, int]:
        return usage(generation.num_prompt_tokens, generation.num_generated_tokens)

    try:
        async for delta in generation.deltas():
            choice = answer.choice_chunk(delta, first=delta.index not in begun)
            begun.add(delta.index)
            yield to_json(answer.chunk([choice], counts() if body.continuous_usage else None))
        if body.include_usage:
            yield to_json(answer.chunk([], counts()))
    except APIError as error:  # the status line is out already, so the error is an event
        yield to_json(error.body())
    except Exception as error:
        logger.exception("a stream failed")
        yield to_json(APIError(500, f"the server failed: {error!r}").body())
    yield "[DONE]"


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


# -- errors ------------------------------------------------------------------------------------


def _answer_errors_as_openai_does(app: FastAPI) -> None:
    """Give every failure, also an unknown path or a defect, the same JSON shape."""

    @app.exception_handler(APIError)
    async def refused(_: Request, error: APIError) -> JSONResponse:
        return JSONResponse(error.body(), status_code=error.status)

    @app.exception_handler(HTTPException)
    async def not_routed(request: Request, error: HTTPException) -> JSONResponse:
        message = f"{request.method} {request.url.path!a}: {error.detail}"
        body = APIError(error.status_code, message).body()
        return JSONResponse(body, status_code=error.status_code, headers=error.headers)

    @app.exception_handler(ClientDisconnect)
    async def left(_: Request, error: ClientDisconnect) -> Response:  # amid its own request
        return Response(status_code=_CLIENT_LEFT)

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> JSONResponse:
        return JSONResponse(APIError(500, f"the server failed: {error!r}").body(), status_code=500)

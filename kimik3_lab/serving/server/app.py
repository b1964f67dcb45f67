"""The endpoint itself: its routes, and the form of its errors.

Needs FastAPI. Used by ``k3lab serve`` (lesson 10).
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from kimik3_lab import __version__
from kimik3_lab.serving.server.async_engine import AsyncEngine
from kimik3_lab.serving.server.authentication import RequireAPIKey
from kimik3_lab.serving.server.bodies import check_model_name, documented_body, read_body
from kimik3_lab.serving.server.errors import APIError
from kimik3_lab.serving.server.generation import Generator
from kimik3_lab.serving.server.generation_config import GenerationConfig
from kimik3_lab.serving.server.metrics import ServerMetrics
from kimik3_lab.serving.server.options import MAX_REQUEST_BYTES
from kimik3_lab.serving.server.prompts import Prompts
from kimik3_lab.serving.server.protocol import ChatCompletionRequest, CompletionRequest
from kimik3_lab.serving.server.responses import ChatAnswer, CompletionAnswer
from kimik3_lab.serving.server.schemas import API_ERRORS, ERRORS, ROUTE_DOCS
from kimik3_lab.serving.server.streaming import CLIENT_LEFT, respond
from kimik3_lab.serving.server.tokenizer import Tokenizer

__all__ = ["build_app"]

#: Seconds that the engine's thread gets to end the step that it is in.
_STOP_TIMEOUT = 10.0


def build_app(
    engine_client: AsyncEngine,
    tokenizer: Tokenizer,
    model_name: str,
    max_model_len: int,
    *,
    defaults: GenerationConfig | None = None,
    model_root: str | None = None,
    api_key: str | None = None,
    max_request_bytes: int = MAX_REQUEST_BYTES,
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
    api_key
        Asked for by everything under ``/v1``; nothing is asked for without it.
    max_request_bytes
        Longest body that is read.

    Returns
    -------
    FastAPI
        With ``/health``, ``/version``, ``/metrics``, ``/v1/models`` (and one of them by name),
        ``/v1/completions`` and ``/v1/chat/completions``.
    """
    if defaults is None:
        defaults = GenerationConfig.from_dict({}, eos_token_id=tokenizer.eos_token_id)
    metrics = ServerMetrics(model_name, max_model_len)
    engine_client.observer = metrics
    prompts = Prompts(tokenizer, max_model_len)
    generator = Generator(engine_client, prompts, defaults, metrics)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        engine_client.start()
        yield
        await engine_client.stop(_STOP_TIMEOUT)

    app = FastAPI(title="Kimi K3 Serving Lab", version=__version__, lifespan=lifespan)
    _answer_errors_as_openai_does(app)
    if api_key is not None:
        app.add_middleware(RequireAPIKey, api_key=api_key)

    @app.get("/health", response_class=Response, responses={503: ERRORS[503]})
    async def health() -> Response:
        """Answer 200 while requests are taken."""
        if not engine_client.is_running:
            raise APIError(503, "the engine has failed: restart the server")
        if not engine_client.is_accepting:
            raise APIError(503, "the server is shutting down", code="server_shutting_down")
        return Response(status_code=200)

    @app.get("/version")
    async def version() -> dict[str, str]:
        """Tell the version of the lab."""
        return {"version": __version__}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics_text() -> Response:
        """Write the counters for Prometheus."""
        return Response(metrics.text(), headers={"content-type": CONTENT_TYPE_LATEST})

    model_card = {
        "id": model_name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "kimik3-lab",
        "root": model_root or model_name,
        "parent": None,
        "max_model_len": max_model_len,
    }

    @app.get("/v1/models", responses={401: ERRORS[401]})
    async def models() -> dict[str, Any]:
        """List the one model that is served."""
        return {"object": "list", "data": [model_card]}

    @app.get("/v1/models/{name:path}", responses={401: ERRORS[401], 404: ERRORS[404]})
    async def model(name: str) -> dict[str, Any]:
        """Describe a model; a name may have slashes."""
        check_model_name(name, model_name)
        return model_card

    @app.post(
        "/v1/completions",
        openapi_extra=documented_body(CompletionRequest),
        responses=API_ERRORS | ROUTE_DOCS["completions"],
    )
    async def completions(request: Request) -> Response:
        """Continue one prompt or several."""
        body = await read_body(request, CompletionRequest, model_name, max_request_bytes)
        answer = CompletionAnswer(model_name, tokenizer if body.wants_logprobs else None)
        generation = await generator.start_completion(body, answer.id)
        return await respond(request, body, answer, generation)

    @app.post(
        "/v1/chat/completions",
        openapi_extra=documented_body(ChatCompletionRequest),
        responses=API_ERRORS | ROUTE_DOCS["chat"],
    )
    async def chat_completions(request: Request) -> Response:
        """Write the assistant's next turn."""
        body = await read_body(request, ChatCompletionRequest, model_name, max_request_bytes)
        answer = ChatAnswer(model_name, tokenizer if body.wants_logprobs else None)
        generation = await generator.start_chat(body, answer.id)
        return await respond(request, body, answer, generation)

    return app


def _answer_errors_as_openai_does(app: FastAPI) -> None:
    """Give every failure, also an unknown path or a defect, the same JSON shape."""

    @app.exception_handler(APIError)
    async def refused(_: Request, error: APIError) -> JSONResponse:
        return JSONResponse(error.body(), status_code=error.status, headers=error.headers)

    @app.exception_handler(HTTPException)
    async def not_routed(request: Request, error: HTTPException) -> JSONResponse:
        message = f"{request.method} {request.url.path!a}: {error.detail}"
        body = APIError(error.status_code, message).body()
        return JSONResponse(body, status_code=error.status_code, headers=error.headers)

    @app.exception_handler(ClientDisconnect)
    async def left(_: Request, error: ClientDisconnect) -> Response:  # amid its own request
        return Response(status_code=CLIENT_LEFT)

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> JSONResponse:
        return JSONResponse(APIError(500, f"the server failed: {error!r}").body(), status_code=500)

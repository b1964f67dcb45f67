"""Bodies of requests: read within a limit, checked, and described for ``/docs``.

Needs starlette and pydantic. Used by the server (lesson 10).

The routes read their bodies themselves. FastAPI would take a body of any length into memory, insist
on a content type that ``curl -d`` does not send, and answer a mistake in a form of its own.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from kimik3_lab.serving.server.errors import APIError, from_validation_error
from kimik3_lab.serving.server.protocol import GenerationFields

__all__ = ["check_model_name", "documented_body", "inline_schema", "read_body"]

logger = logging.getLogger(__name__)

_Body = TypeVar("_Body", bound=GenerationFields)

#: Bytes behind the limit that are read and thrown away. A client sends its whole body before it
#: looks for an answer; hung up on in between, most report a broken connection and not the 413.
_PATIENCE = 32 * 2**20
#: Bytes from which on a body is checked beside the event loop, so that running streams go on.
_LONG_BODY = 2**16


async def read_body(
    request: Request, kind: type[_Body], model_name: str, max_request_bytes: int
) -> _Body:
    """Read and check a body.

    Raises
    ------
    APIError
        413 if it is longer than ``max_request_bytes``, 400 if it is no such request, 404 if it
        wants another model.
    """
    content = await _read(request, max_request_bytes)
    if len(content) > _LONG_BODY:
        body = await asyncio.to_thread(_check, content, kind)
    else:
        body = _check(content, kind)
    if body.model is not None:
        check_model_name(body.model, model_name)
    if body.ignored_fields:
        logger.debug("fields ignored: %s", ", ".join(map(ascii, body.ignored_fields)))
    return body


def check_model_name(asked: str, model_name: str) -> None:
    """Answer 404 to a request for a model that is not served."""
    if asked != model_name:
        raise APIError(
            404,
            f"no model {asked!a} here, this server has {model_name!a}",
            param="model",
            code="model_not_found",
        )


def _check(content: bytes, kind: type[_Body]) -> _Body:
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        raise from_validation_error(error) from error


async def _read(request: Request, limit: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size <= limit:
            parts.append(part)
            continue
        parts.clear()
        if size > limit + _PATIENCE:
            break
    if size > limit:
        raise APIError(
            413,
            f"the body has over {limit} bytes, the most that this server takes: send less, or "
            "start the server with a larger --max-request-bytes",
            code="request_too_large",
            headers={"Connection": "close"},
        )
    return b"".join(parts)


def documented_body(kind: type[BaseModel]) -> dict[str, Any]:
    """Describe the body of a route that reads it itself."""
    content = {"application/json": {"schema": inline_schema(kind)}}
    return {"requestBody": {"content": content, "required": True}}


def inline_schema(kind: type[BaseModel]) -> dict[str, Any]:
    """Return a JSON schema in one piece, without references to definitions elsewhere."""
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

    result: dict[str, Any] = inline(schema)
    return result

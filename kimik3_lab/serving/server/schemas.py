"""What the answers look like, as JSON schemas for ``/openapi.json``.

Needs the standard library only. Used by the server (lesson 10); a test sends the endpoint thousands
of requests made up from the schemas and holds the answers against these.
"""

from __future__ import annotations

from typing import Any

__all__ = ["API_ERRORS", "ERRORS", "ROUTE_DOCS"]

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_NUMBER: Schema = {"type": "number", "maximum": 0}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _object(**properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _one_of(*values: str) -> Schema:
    return {"type": "string", "enum": list(values)}


_ERROR = _object(
    error=_object(message=_TEXT, type=_TEXT, param=_or_null(_TEXT), code=_or_null(_TEXT))
)


def _error(description: str) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": _ERROR}}}


#: Each failure with its meaning.
ERRORS: dict[int, dict[str, Any]] = {
    400: _error("The request is wrong; the message says what to change."),
    401: _error("An API key is asked for, and this is not it."),
    404: _error("The model is another one."),
    413: _error("The body is too long."),
    429: _error("Too many requests are in flight; try again after Retry-After seconds."),
    500: _error("The engine failed on this request."),
    503: _error("The server is shutting down, or its engine has failed."),
}
#: Those of a route that generates.
API_ERRORS: dict[int | str, dict[str, Any]] = dict(ERRORS.items())

_CHAT_TOKEN = _object(token=_TEXT, logprob=_NUMBER, bytes=_list(_COUNT))
_CHAT_LOGPROBS = _object(
    content=_list(
        {
            **_CHAT_TOKEN,
            "properties": {**_CHAT_TOKEN["properties"], "top_logprobs": _list(_CHAT_TOKEN)},
        }
    )
)
_COMPLETION_LOGPROBS = _object(
    text_offset=_list(_COUNT),
    token_logprobs=_list(_NUMBER),
    tokens=_list(_TEXT),
    top_logprobs=_list({"type": "object", "additionalProperties": _NUMBER}),
)


def _answer(kind: str, content: Schema, logprobs: Schema) -> dict[str, Any]:
    choice = _object(
        index=_COUNT,
        logprobs=_or_null(logprobs),
        finish_reason=_one_of("stop", "length"),
        stop_reason={"anyOf": [_TEXT, {"type": "integer"}, {"type": "null"}]},
        **content,
    )
    counts = _object(prompt_tokens=_COUNT, completion_tokens=_COUNT, total_tokens=_COUNT)
    schema = _object(
        id=_TEXT, object=_one_of(kind), created=_COUNT, model=_TEXT, choices=_list(choice),
        usage=counts,
    )  # fmt: skip
    return {
        "description": "The answer, or with stream=true its chunks and then [DONE].",
        "content": {
            "application/json": {"schema": schema},
            "text/event-stream": {"schema": _TEXT},
        },
    }


#: What a route answers if all goes well.
ROUTE_DOCS: dict[str, dict[int | str, dict[str, Any]]] = {
    "completions": {200: _answer("text_completion", {"text": _TEXT}, _COMPLETION_LOGPROBS)},
    "chat": {
        200: _answer(
            "chat.completion",
            {"message": _object(role=_one_of("assistant"), content=_TEXT)},
            _CHAT_LOGPROBS,
        )
    },
}

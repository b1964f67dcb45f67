"""Failures in the shape of OpenAI's API: ``{"error": {"message", "type", "param", "code"}}``.

Needs pydantic. Used by the server (lesson 10).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

__all__ = ["APIError", "from_validation_error"]

_JSON_TYPES = {
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
}


#: Findings about one body that are written down: a list may be wrong in each of its thousands.
_MOST_FINDINGS = 10

#: What OpenAI calls a failure; all others are ``server_error`` or ``invalid_request_error``.
_TYPES = {401: "authentication_error", 429: "rate_limit_error"}


class APIError(Exception):
    """A request that is answered with an error.

    Parameters
    ----------
    status
        HTTP status.
    message
        What was got, what was expected, how to mend it.
    param
        Field of the request that is to blame, if it is one.
    code
        Short name of the kind of failure, for programs; many have none.
    headers
        Further headers of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """Return the JSON body of the answer."""
        kind = _TYPES.get(self.status) or (
            "server_error" if self.status >= 500 else "invalid_request_error"
        )
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }


def from_validation_error(error: ValidationError) -> APIError:
    """Turn pydantic's findings about a body into one answer that names each field.

    Examples
    --------
    >>> from kimik3_lab.serving.server.protocol import CompletionRequest
    >>> try:
    ...     CompletionRequest.model_validate_json('{"prompt": "hi", "max_tokens": "many"}')
    ... except ValidationError as error:
    ...     print(from_validation_error(error).message)
    max_tokens should be a valid integer, got "many" (a string)
    """
    findings = error.errors(include_url=False, include_context=False)
    shown = findings[:_MOST_FINDINGS]
    fields = [_field_name(finding["loc"]) for finding in shown]
    messages = [_describe(*pair) for pair in zip(fields, shown, strict=True)]
    if more := len(findings) - len(shown):
        messages.append(f"and {more} more")
    return APIError(400, "; ".join(messages), param=fields[0] or None)


def _field_name(loc: Sequence[int | str]) -> str:
    name = ""
    for step in loc:
        name += f"[{step}]" if isinstance(step, int) else f".{step}" if name else step
    return name


def _describe(field: str, finding: Any) -> str:
    kind, message = finding["type"], finding["msg"].removeprefix("Value error, ")
    if kind == "json_invalid":
        return f"the body is not valid JSON: {message.removeprefix('Invalid JSON: ')}"
    if kind == "missing":
        return f"{field} is missing"
    if kind == "value_error" and not field:
        return str(message)  # about the request as a whole: there is no one value to show
    if message.startswith("Input should be "):
        message = f"{field or 'the body'} should be {message.removeprefix('Input should be ')}"
    else:
        message = f"{field or 'the body'}: {message}"
    return f"{message}, got {_show(finding['input'])}"


def _show(value: object) -> str:
    """Show a value as JSON: ASCII only and short, so that any answer that holds it can be sent."""
    start = value[:100] if isinstance(value, str | list) else value  # it is cut below anyway
    text = json.dumps(start, default=repr)
    if len(text) > 80:
        text = text[:77] + "..."
    kind = _JSON_TYPES.get(type(value))
    return f"{text} ({kind})" if kind else text

"""The API key: who may ask for tokens.

Needs starlette. Used by the server (lesson 10).

Everything under ``/v1`` is guarded and nothing else, as in vLLM: a load balancer that asks for
``/health`` and a Prometheus that reads ``/metrics`` have no key.
"""

from __future__ import annotations

import hashlib
import hmac

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from kimik3_lab.serving.server.errors import APIError

__all__ = ["RequireAPIKey"]

_GUARDED = "/v1"


class RequireAPIKey:
    """Answers 401 to whoever does not send ``Authorization: Bearer KEY``.

    Parameters
    ----------
    app
        What is guarded.
    api_key
        Only its digest is kept.
    """

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._digest = _digest(api_key)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer it."""
        if scope["type"] == "http" and scope["path"].startswith(_GUARDED):
            authorization = Headers(scope=scope).get("authorization", "")
            if not self._is_right(authorization):
                await self._refuse(scope, receive, send, missing=not authorization)
                return
        await self._app(scope, receive, send)

    def _is_right(self, authorization: str) -> bool:
        scheme, _, key = authorization.partition(" ")
        # Digests are of one length and compared in constant time, so that neither the length of the
        # key nor its first letters show in how long the answer takes.
        return hmac.compare_digest(_digest(key), self._digest) and scheme.lower() == "bearer"

    @staticmethod
    async def _refuse(scope: Scope, receive: Receive, send: Send, *, missing: bool) -> None:
        error = APIError(
            401,
            "this server asks for an API key: send the header 'Authorization: Bearer KEY'"
            if missing
            else "the API key is wrong: expected the header 'Authorization: Bearer KEY' with the "
            "key that the server was started with",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        response = JSONResponse(error.body(), status_code=error.status, headers=error.headers)
        await response(scope, receive, send)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()

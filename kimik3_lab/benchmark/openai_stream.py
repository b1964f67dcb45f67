"""One streamed request to an OpenAI-compatible server, with the arrival time of every token.

Needs aiohttp. Used by :mod:`kimik3_lab.benchmark.client`; lesson 12 reads it.

Why aiohttp: the client shares the reader's two cores with the server it measures, and any delay of
its own shows up as the server's. On 16 streams of 250 tokens a second each (2 cores, Python 3.11)
aiohttp 3.14 spent 53 us of CPU on a token, against 144 us for httpx 0.28 with httpx-sse; flat out
it read 100,000 against 36,000 tokens a second. Its HTTP parser is compiled, httpx's is in Python.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import aiohttp

from kimik3_lab.benchmark.config import BenchmarkConfig
from kimik3_lab.benchmark.records import RequestRecord
from kimik3_lab.benchmark.workloads import PromptRequest

__all__ = ["Endpoint", "EndpointError", "SSEParser"]

_DONE = b"[DONE]"
_HEADERS = {"Accept": "text/event-stream", "Content-Type": "application/json"}


class EndpointError(RuntimeError):
    """The endpoint cannot be measured at all: it is down, refuses the key, lacks the model."""


class _RequestFailed(Exception):
    """One request went wrong; the text becomes its record's error."""


class SSEParser:
    r"""Cuts a byte stream into server-sent events and returns the data of each.

    Examples
    --------
    >>> parser = SSEParser()
    >>> parser.feed(b'data: {"a": 1}\n\nda'), parser.feed(b"ta: [DONE]\n\n")
    ([b'{"a": 1}'], [b'[DONE]'])
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._after_cr = False

    def feed(self, chunk: bytes) -> list[bytes]:
        """Take the next bytes of the stream; return the data of events that they complete."""
        if self._after_cr and chunk.startswith(b"\n"):
            chunk = chunk[1:]  # second half of a CRLF that was cut in two
        buffer = self._rest + chunk
        self._after_cr = buffer.endswith(b"\r")
        lines = buffer.splitlines()  # for bytes: CR, LF and CRLF, as the standard says
        self._rest = b"" if buffer.endswith((b"\n", b"\r")) or not lines else lines.pop()
        events = []
        for line in lines:
            if not line:
                if self._data:
                    events.append(b"\n".join(self._data))
                    self._data.clear()
            elif line.startswith(b"data:"):
                self._data.append(line[6:] if line.startswith(b"data: ") else line[5:])
        return events

    def close(self) -> list[bytes]:
        """Return what is left at the end of the stream; some servers omit the last blank line."""
        return self.feed(b"\n\n")


class Endpoint:
    """An OpenAI-compatible server.

    Use as ``async with Endpoint(config) as endpoint``. Proxy settings of the environment are not
    read: a proxy between client and server would be part of the measurement.
    """

    def __init__(self, config: BenchmarkConfig) -> None:
        self.config = config
        self.model = config.model or ""
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Endpoint:
        headers = {}
        if self.config.api_key:
            headers["Authorization"] = f"Bearer {self.config.api_key}"
        self._session = aiohttp.ClientSession(
            headers=headers,
            connector=aiohttp.TCPConnector(limit=0),  # never queue inside the client
            timeout=aiohttp.ClientTimeout(total=self.config.timeout),
            read_bufsize=2**18,
        )
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def check(self) -> None:
        """Ask for ``/v1/models`` before any load and settle the model name.

        Raises
        ------
        EndpointError
            If nothing answers, the key is refused, or the model is not served.
        """
        assert self._session is not None
        url = self.config.server_url + "/v1/models"
        try:
            async with self._session.get(url, timeout=aiohttp.ClientTimeout(total=30)) as response:
                status, text = response.status, await response.text(errors="replace")
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise EndpointError(
                f"no answer from {url} ({_describe(error)}): is the server up, and is the "
                "base URL right?"
            ) from error
        if status in (401, 403):
            raise EndpointError(
                f"{url} refuses the API key (HTTP {status}): give one with --api-key or "
                "OPENAI_API_KEY"
            )
        if status >= 500:
            raise EndpointError(f"{url} answers HTTP {status}: {_shorten(text)}")
        served = _model_names(text) if status == 200 else []
        if self.model:
            if served and self.model not in served:
                raise EndpointError(
                    f"{self.config.server_url} does not serve {self.model!r}; it serves "
                    + ", ".join(map(repr, served))
                )
        elif served:
            self.model = served[0]
        else:
            raise EndpointError(
                f"{url} names no model (HTTP {status}): give the model name yourself"
            )

    def body(self, request: PromptRequest) -> bytes:
        """Return the JSON body of a request."""
        fields: dict[str, Any] = {
            "model": self.model,
            "max_tokens": request.output_tokens,
            "temperature": self.config.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.config.endpoint == "chat":
            fields["messages"] = [{"role": "user", "content": request.prompt}]
            fields["max_completion_tokens"] = request.output_tokens
        else:
            fields["prompt"] = request.prompt
        if self.config.ignore_eos:
            fields["ignore_eos"] = True
        fields.update(self.config.extra_body)
        return json.dumps({k: v for k, v in fields.items() if v is not None}).encode()

    async def stream(self, body: bytes, record: RequestRecord, origin: float) -> None:
        """Send ``body`` and fill ``record``; a failure ends up in ``record.error``.

        Parameters
        ----------
        body
            From :meth:`body`.
        record
            Its ``start`` is set here, just before sending.
        origin
            ``time.perf_counter()`` when the cell began.

        Raises
        ------
        asyncio.CancelledError
            When the cell ends first; the record then keeps the tokens that came.
        """
        assert self._session is not None
        done = finished = False
        record.start = time.perf_counter() - origin
        try:
            async with self._session.post(self.config.url, data=body, headers=_HEADERS) as response:
                if response.status != 200:
                    raise _RequestFailed(
                        f"HTTP {response.status}: {_shorten(await response.text(errors='replace'))}"
                    )
                if response.content_type in ("application/json", "text/html"):
                    raise _RequestFailed(
                        f"answer is {response.content_type}, not an event stream: the server "
                        "must support stream=true"
                    )
                parser = SSEParser()
                # One clock reading for each read from the socket, before any parsing.
                async for chunk in response.content.iter_any():
                    moment = time.perf_counter() - origin
                    for data in parser.feed(chunk):
                        done = done or data == _DONE
                        finished = _take(data, record, moment) or finished
                moment = time.perf_counter() - origin
                for data in parser.close():
                    done = done or data == _DONE
                    finished = _take(data, record, moment) or finished
            if not (done or finished):
                raise _RequestFailed("the stream ended without finish_reason or [DONE]")
            if not record.token_times and not record.output_tokens:
                raise _RequestFailed("the stream ended without a token")
            record.status = "completed"
        except asyncio.CancelledError:
            record.status = "cancelled"
            raise
        except TimeoutError:
            record.status = "failed"
            record.error = f"no complete answer within {self.config.timeout:g} s"
        except (aiohttp.ClientError, OSError, _RequestFailed) as error:
            record.status, record.error = "failed", _describe(error)
        finally:
            if record.output_tokens_from == "chunks":
                record.output_tokens = len(record.token_times)
            completed = record.status == "completed" and record.token_times
            record.end = record.token_times[-1] if completed else time.perf_counter() - origin


def _take(data: bytes, record: RequestRecord, moment: float) -> bool:
    """Enter one event into the record; return whether it carries a finish reason."""
    if data == _DONE:
        return False
    try:
        event = json.loads(data)
    except ValueError as error:
        raise _RequestFailed(
            f"event is not JSON: {_shorten(data.decode('utf-8', 'replace'))}"
        ) from (error)
    if not isinstance(event, dict):
        raise _RequestFailed(f"event is not a JSON object: {_shorten(str(event))}")
    if event.get("error"):
        raise _RequestFailed(f"error in the stream: {_shorten(json.dumps(event['error']))}")
    try:
        if usage := event.get("usage"):
            _take_usage(usage, record)
        finished = False
        for choice in event.get("choices") or ():
            if _has_content(choice):
                record.token_times.append(moment)
            if choice.get("finish_reason"):
                record.finish_reason = choice["finish_reason"]
                finished = True
    except (AttributeError, TypeError):
        raise _RequestFailed(f"event has an unknown form: {_shorten(json.dumps(event))}") from None
    return finished


#: No context is near this long; a larger count is a fault of the server, not a measurement.
_MOST_TOKENS = 10**8


def _take_usage(usage: dict[str, Any], record: RequestRecord) -> None:
    """Keep the newest usage; servers send it once at the end or with every chunk."""
    for name in ("prompt_tokens", "completion_tokens"):
        count = usage.get(name)
        if isinstance(count, int) and not 0 <= count <= _MOST_TOKENS:
            raise _RequestFailed(f"the server reports {name}={count} in usage, which cannot be")
    if isinstance(usage.get("prompt_tokens"), int):
        record.prompt_tokens = usage["prompt_tokens"]
    if isinstance(usage.get("completion_tokens"), int):
        record.output_tokens = usage["completion_tokens"]
        record.output_tokens_from = "usage"
    details = usage.get("prompt_tokens_details") or {}
    if isinstance(details.get("cached_tokens"), int):
        record.cached_tokens = details["cached_tokens"]


def _has_content(choice: dict[str, Any]) -> bool:
    """Whether a choice carries anything the model generated.

    A reasoning model sends its first tokens as ``reasoning`` (older servers:
    ``reasoning_content``). A client that waits for ``content`` reports the end of thinking as the
    first token (guidellm issue 737). The role chunk at the start carries nothing generated.
    """
    delta = choice.get("delta") or {}
    return bool(
        choice.get("text")
        or delta.get("content")
        or delta.get("reasoning")
        or delta.get("reasoning_content")
        or delta.get("tool_calls")
    )


def _model_names(text: str) -> list[str]:
    try:
        return [str(model["id"]) for model in json.loads(text)["data"]]
    except (ValueError, KeyError, TypeError):
        return []


def _shorten(text: str, limit: int = 200) -> str:
    text = " ".join(text.split()) or "(no text)"
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _describe(error: BaseException) -> str:
    if isinstance(error, _RequestFailed):
        return str(error)
    if isinstance(error, TimeoutError):
        return "timed out"
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__

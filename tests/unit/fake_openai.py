"""A scripted OpenAI-compatible server: tests decide when each token leaves and so know the truth.

Standard library only; shares nothing with the lab's own server. It writes down the moment each
request arrived and each token was written, on the clock that the client uses too.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Reply:
    """How to answer one request; times in seconds."""

    ttft: float = 0.02
    gap: float = 0.005
    tokens: int | None = None  # None: as many as the request asks for
    per_chunk: int = 1
    reasoning: int = 0  # so many chunks carry thoughts before the content begins
    reasoning_field: str = "reasoning"
    role_chunk: bool = True  # chat: an empty chunk with the role, at once
    usage: str = "final"  # final | none | every
    prompt_tokens: int = 7
    cached_tokens: int | None = None
    finish: bool = True
    done: bool = True
    linger: float = 0.0  # wait between the last token and the end of the stream
    status: int = 200
    body: str = '{"error": {"message": "scripted failure"}}'
    content_type: str = "text/event-stream"
    error_after: int | None = None  # an error event after so many chunks
    insert: tuple[int, str] | None = None  # an event with this data after so many chunks
    drop_after: int | None = None  # the connection breaks after so many chunks
    newline: str = "\n"
    split: bool = False  # write every event in two pieces
    plain_json: bool = False


@dataclass
class Seen:
    """One request as the server saw it."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    arrived: float
    sent: list[float] = field(default_factory=list)


class FakeOpenAI:
    """``with FakeOpenAI(reply) as server``; reply may be a function of (body, request number)."""

    def __init__(
        self,
        reply: Reply | Callable[[dict[str, Any], int], Reply] | None = None,
        *,
        models: tuple[str, ...] | None = ("fake-model",),
        api_key: str | None = None,
    ) -> None:
        self.reply = reply or Reply()
        self.models = models
        self.api_key = api_key
        self.seen: list[Seen] = []

    def __enter__(self) -> FakeOpenAI:
        ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main(ready)), daemon=True)
        self._thread.start()
        assert ready.wait(10)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)
        assert not self._thread.is_alive()

    async def _main(self, ready: threading.Event) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        ready.set()
        await self._stop.wait()
        server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while await self._request(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.split("\r\n")
        method, path, _ = first.split()
        headers = {k.lower(): v.strip() for k, _, v in (x.partition(":") for x in lines if x)}
        raw = await reader.readexactly(int(headers.get("content-length", 0)))
        if self.api_key and headers.get("authorization") != f"Bearer {self.api_key}":
            self._plain(writer, 401, '{"error": "bad key"}')
            return True
        if method == "GET":
            if self.models is None:
                self._plain(writer, 404, "not found")
            else:
                self._plain(writer, 200, json.dumps({"data": [{"id": m} for m in self.models]}))
            return True
        seen = Seen(path, headers, json.loads(raw), time.perf_counter())
        self.seen.append(seen)
        reply = self.reply(seen.body, len(self.seen) - 1) if callable(self.reply) else self.reply
        if reply.status != 200 or reply.plain_json:
            self._plain(writer, reply.status, reply.body)
            return True
        return await self._stream(writer, seen, reply)

    def _plain(self, writer: asyncio.StreamWriter, status: int, text: str) -> None:
        writer.write(
            f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(text.encode())}\r\n\r\n{text}".encode()
        )

    async def _stream(self, writer: asyncio.StreamWriter, seen: Seen, reply: Reply) -> bool:
        body, chat = seen.body, seen.path.endswith("/chat/completions")
        tokens = reply.tokens if reply.tokens is not None else body["max_tokens"]
        writer.write(
            f"HTTP/1.1 200 OK\r\nContent-Type: {reply.content_type}\r\n"
            "Transfer-Encoding: chunked\r\n\r\n".encode()
        )

        async def event(data: str) -> None:
            raw = f"data: {data}{reply.newline * 2}".encode()
            pieces = [raw[: len(raw) // 2], raw[len(raw) // 2 :]] if reply.split else [raw]
            for number, piece in enumerate(pieces):
                if number:
                    await asyncio.sleep(0.001)
                writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                await writer.drain()  # ends the answer if the client has gone

        def usage(count: int) -> dict[str, Any]:
            fields: dict[str, Any] = {
                "prompt_tokens": reply.prompt_tokens, "completion_tokens": count,
            }  # fmt: skip
            if reply.cached_tokens is not None:
                fields["prompt_tokens_details"] = {"cached_tokens": reply.cached_tokens}
            return fields

        if chat and reply.role_chunk:
            await event(json.dumps({"choices": [{"delta": {"role": "assistant", "content": ""}}]}))
        chunks = -(-tokens // reply.per_chunk)
        for number in range(chunks):
            # Absolute times: one late wake-up does not push back all later tokens.
            due = seen.arrived + reply.ttft + number * reply.gap
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            if number == reply.drop_after:
                return False
            if reply.insert and number == reply.insert[0]:
                await event(reply.insert[1])
            if number == reply.error_after:
                await event('{"error": {"message": "out of blocks"}}')
            name = reply.reasoning_field if number < reply.reasoning else "content"
            choice: dict[str, Any] = {"delta": {name: "word "}} if chat else {"text": "word "}
            if reply.finish and number == chunks - 1:
                choice["finish_reason"] = "length"
            data: dict[str, Any] = {"choices": [{"index": 0, "finish_reason": None, **choice}]}
            if reply.usage == "every":
                data["usage"] = usage(min(tokens, (number + 1) * reply.per_chunk))
            seen.sent.append(time.perf_counter())
            await event(json.dumps(data))
        await asyncio.sleep(reply.linger)
        if reply.usage == "final":
            await event(json.dumps({"choices": [], "usage": usage(tokens)}))
        if reply.done:
            await event("[DONE]")
        writer.write(b"0\r\n\r\n")
        return True

"""What the endpoint's tests share: a server on a real socket, clients for it, odd executors."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import uvicorn
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families
from server_support import EchoExecutor, byte_tokenizer

from kimik3_lab.serving import (
    CacheConfig,
    Engine,
    ModelRunnerOutput,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
)
from kimik3_lab.serving.outputs import TokenLogprobs
from kimik3_lab.serving.server import AsyncEngine, build_app

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@dataclass
class Endpoint:
    """An app with what is behind it, and where it listens once it does."""

    app: FastAPI
    engine: Engine
    client: AsyncEngine
    executor: Any
    url: str = ""

    def metrics(self, text: str) -> dict[str, float]:
        """Read ``/metrics``: the value of each sample, labels other than the server's joined on."""
        values = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                rest = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
                values[":".join([sample.name, *rest.values()])] = sample.value
        return values

    def assert_nothing_is_left(self) -> None:
        """Every request has gone, and every block is free again."""
        stats = self.engine.stats().scheduler
        assert (stats.num_running_reqs, stats.num_waiting_reqs) == (0, 0)
        assert stats.kv_cache_usage == 0
        assert not self.engine.scheduler.requests
        assert self.client.num_in_flight == 0
        assert not self.client._open and not self.client._streams


def endpoint(
    executor: Any = None,
    *,
    max_model_len: int = 256,
    max_num_seqs: int = 64,
    num_blocks: int | None = None,
    max_num_queued_reqs: int | None = None,
    **settings: Any,
) -> Endpoint:
    """Put an app in front of an echo: the answer to "abc" is "abcabc..."."""
    executor = EchoExecutor() if executor is None else executor
    blocks = num_blocks or max_num_seqs * max_model_len // 16 + 1
    scheduler = Scheduler(SchedulerConfig(max_num_seqs, 256, max_model_len), CacheConfig(blocks))
    engine = Engine(scheduler, executor)
    client = AsyncEngine(engine, max_num_queued_reqs=max_num_queued_reqs)
    app = build_app(client, byte_tokenizer(), "echo", max_model_len, **settings)
    return Endpoint(app, engine, client, executor)


@contextlib.contextmanager
def listening(end: Endpoint, *, send_buffer: int | None = None) -> Iterator[str]:
    """Serve on a port of this machine, from a thread; yields the address.

    ``send_buffer`` limits what the system takes from the server before a client reads it.
    """
    listener = socket.socket()
    if send_buffer is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(end.app, log_level="error", timeout_graceful_shutdown=5)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        deadline = time.monotonic() + 20
        while not server.started:
            assert time.monotonic() < deadline and thread.is_alive(), "the server did not start"
            time.sleep(0.01)
        end.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        yield end.url
    finally:
        server.should_exit = True
        thread.join(20)
        listener.close()
    assert not thread.is_alive()


@contextlib.asynccontextmanager
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    """Open a client with as many connections as there are requests."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=170)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as opened:
        yield opened


def talk(coroutine: Any, timeout: float = 180) -> Any:
    """Run a conversation."""
    return asyncio.run(asyncio.wait_for(coroutine, timeout))


@dataclass
class Streamed:
    """What came of one stream."""

    status: int = 0
    chunks: list[dict[str, Any]] = field(default_factory=list)
    usage: dict[str, int] | None = None
    error: dict[str, Any] | None = None
    done: bool = False

    @property
    def texts(self) -> dict[int, str]:
        """Text of each answer."""
        texts: dict[int, str] = {}
        for chunk in self.chunks:
            for choice in chunk["choices"]:
                piece = choice["text"] if "text" in choice else choice["delta"]["content"]
                texts[choice["index"]] = texts.get(choice["index"], "") + piece
        return texts

    @property
    def text(self) -> str:
        """Text of the only answer."""
        assert len(self.texts) <= 1
        return "".join(self.texts.values())

    @property
    def finish_reason(self) -> str | None:
        """Reason of the last chunk."""
        return self.chunks[-1]["choices"][0]["finish_reason"] if self.chunks else None

    def read(self, line: str) -> None:
        """Take one line of the stream."""
        if not line or line.startswith(":"):
            return
        assert not self.done, f"{line!r} behind [DONE]"
        assert line.startswith("data: "), line
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            self.done = True
            return
        body = json.loads(data)
        if "error" in body:
            assert self.error is None
            self.error = body["error"]
        elif body["choices"]:
            assert self.error is None and self.usage is None
            self.chunks.append(body)
        else:
            self.usage = body["usage"]


async def stream(
    client: aiohttp.ClientSession, url: str, body: dict[str, Any], path: str = COMPLETIONS
) -> Streamed:
    """Send a request and read its stream to the end."""
    result = Streamed()
    options = {"include_usage": True}
    async with client.post(
        url + path, json={**body, "stream": True, "stream_options": options}
    ) as response:
        result.status = response.status
        if response.status != 200:
            result.error = (await response.json())["error"]
            return result
        async for line in response.content:
            result.read(line.decode().rstrip("\n"))
    return result


async def settle(end: Endpoint) -> None:
    """Wait until the engine has dropped what nobody wants any more."""
    for _ in range(500):
        if not end.engine.has_unfinished_requests() and not end.client._open:
            return
        await asyncio.sleep(0.01)


def echoed(prompt: str, num_tokens: int) -> str:
    """What the echo answers."""
    token_ids = byte_tokenizer().encode(prompt)
    return byte_tokenizer().decode((token_ids * num_tokens)[:num_tokens])


# -- executors -----------------------------------------------------------------------------------


class LogprobsExecutor(EchoExecutor):
    """Reports probabilities that can be told from token and place, if asked to."""

    def execute_model(self, output: SchedulerOutput) -> ModelRunnerOutput:
        wanted = getattr(self, "wanted", None)
        if wanted is None:
            wanted = self.wanted = {}
        for new in output.scheduled_new_reqs:
            wanted[new.req_id] = new.sampling_params.logprobs
        result = super().execute_model(output)
        result.logprobs = [
            [self.entry(token_id, wanted[name]) for token_id in token_ids]
            if wanted[name] is not None
            else []
            for name, token_ids in zip(result.req_ids, result.sampled_token_ids, strict=True)
        ]
        return result

    @staticmethod
    def entry(token_id: int, num_top: int) -> TokenLogprobs:
        """The token is second, behind its neighbour."""
        others = [((token_id + n) % 258, -0.25 * n) for n in range(1, num_top + 1)]
        return TokenLogprobs(token_id, -0.001 * token_id, 2, tuple(others))


class SeededExecutor(EchoExecutor):
    """Draws letters at random from the request's seed, as a sampling model would."""

    def execute_model(self, output: SchedulerOutput) -> ModelRunnerOutput:
        seeds = self.__dict__.setdefault("seeds", {})
        for new in output.scheduled_new_reqs:
            seeds[new.req_id] = random.Random(new.sampling_params.seed)
        result = super().execute_model(output)
        for name, token_ids in zip(result.req_ids, result.sampled_token_ids, strict=True):
            if token_ids:
                token_ids[0] = byte_tokenizer().encode(chr(seeds[name].randrange(97, 123)))[0]
        return result


class FailingExecutor(EchoExecutor):
    """Throws in some steps, before or after it has done its work."""

    def __init__(self, seed: int, probability: float) -> None:
        super().__init__()
        self.probability = probability
        self.num_failures = 0
        self._random = random.Random(seed)

    def execute_model(self, output: SchedulerOutput) -> ModelRunnerOutput:
        fails, late = self._random.random() < self.probability, self._random.random() < 0.5
        if fails and not late:
            self.num_failures += 1
            raise RuntimeError("a random failure")
        result = super().execute_model(output)
        if fails:
            self.num_failures += 1
            raise RuntimeError("a random failure after the work")
        return result

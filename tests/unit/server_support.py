"""What the server's tests share: an engine whose every token is known, and ways to call the app."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
from fastapi import FastAPI
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from kimik3_lab.serving import (
    CacheConfig,
    Engine,
    ModelRunnerOutput,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
)
from kimik3_lab.serving.server import AsyncEngine, Tokenizer, build_app

BOS, EOS = "<bos>", "<eos>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'robot' %}{{ raise_exception('no robots') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def byte_tokenizer(*, adds_bos: bool = False) -> Tokenizer:
    """One token for each byte, so é is two tokens and an emoji four; ids 0 and 1 are special."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {BOS: 0, EOS: 1, **{letter: n for n, letter in enumerate(letters, start=2)}}
    backend = Backend(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(BOS), AddedToken(EOS)])
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, 0)]
        )
    config = {"bos_token": BOS, "eos_token": {"content": EOS}, "chat_template": CHAT_TEMPLATE}
    return Tokenizer(backend, config)


class EchoExecutor:
    """Generates the prompt over and over: the answer to "abc" is "abcabc...".

    ``gate`` lets a test hold the engine inside a step; a prompt with ``poison`` in it makes the
    step fail.
    """

    def __init__(self, poison: int | None = None) -> None:
        self.poison = poison
        self.gate = threading.Event()
        self.gate.set()
        self.steps: list[dict[str, int]] = []
        self.finished: set[str] = set()
        self._tokens: dict[str, list[int]] = {}
        self._prompt_len: dict[str, int] = {}
        self._computed: dict[str, int] = {}

    def execute_model(self, output: SchedulerOutput) -> ModelRunnerOutput:
        assert self.gate.wait(timeout=30)
        self.steps.append(dict(output.num_scheduled_tokens))
        self.finished |= output.finished_req_ids
        for new in output.scheduled_new_reqs:
            self._tokens[new.req_id] = list(new.prompt_token_ids)
            self._prompt_len[new.req_id] = len(new.prompt_token_ids)
            self._computed[new.req_id] = new.num_computed_tokens  # found in the prefix cache
        for known in output.scheduled_cached_reqs:
            if known.resumed_from_preemption:
                self._computed[known.req_id] = 0
        sampled = []
        for request_id, count in output.num_scheduled_tokens.items():
            tokens, prompt_len = self._tokens[request_id], self._prompt_len[request_id]
            if self.poison in tokens:
                raise RuntimeError("poisoned")
            self._computed[request_id] += count
            if self._computed[request_id] < len(tokens):
                sampled.append([])
                continue
            tokens.append(tokens[len(tokens) - prompt_len])
            sampled.append(tokens[-1:])
        return ModelRunnerOutput(list(output.num_scheduled_tokens), sampled)


class SlowExecutor(EchoExecutor):
    """Takes a hundredth of a second for a step, as a model would."""

    def execute_model(self, output: SchedulerOutput) -> ModelRunnerOutput:
        time.sleep(0.01)
        return super().execute_model(output)


def echo_engine(executor: EchoExecutor | None = None, *, max_model_len: int = 256) -> Engine:
    config = SchedulerConfig(64, 256, max_model_len)
    return Engine(
        Scheduler(config, CacheConfig(64 * max_model_len // 16 + 1)), executor or EchoExecutor()
    )


def echo_app(
    executor: EchoExecutor | None = None, *, max_model_len: int = 256, **settings: Any
) -> FastAPI:
    client = AsyncEngine(echo_engine(executor, max_model_len=max_model_len))
    tokenizer = settings.pop("tokenizer", None) or byte_tokenizer()
    return build_app(client, tokenizer, "echo", max_model_len, **settings)


@asynccontextmanager
async def http(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    """Start the app and talk to it without a network."""
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://test", timeout=30) as client,
    ):
        yield client


def run(app: FastAPI, talk: Callable[[httpx.AsyncClient], Awaitable[Any]]) -> Any:
    """Run one conversation with the app, at most 30 seconds long."""

    async def conversation() -> Any:
        async with http(app) as client:
            return await talk(client)

    return asyncio.run(asyncio.wait_for(conversation(), 30))


def post(app: FastAPI, path: str, body: Any) -> httpx.Response:
    """Send one request."""
    return run(app, lambda client: client.post(path, json=body))


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """Return the chunks of a stream, after a look at its form."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    assert "\r" not in response.text
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    assert blocks.pop() == "data: [DONE]"
    return [json.loads(block.removeprefix("data: ")) for block in blocks]

"""OpenAI's own Python client, unmodified, on ``k3lab serve`` with the trained tiny K3."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from kimik3_lab.serving.server import RunningServer, start_in_background

MODEL = Path(__file__).resolve().parents[2] / "data" / "tiny-k3"
MESSAGES: Any = [
    {"role": "system", "content": "You are terse."},
    {"role": "user", "content": [{"type": "text", "text": "How many experts has Kimi K3?"}]},
]
KEY = "a key"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with start_in_background(MODEL, threads=1, api_key=KEY, max_num_queued_reqs=40) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.base_url}/v1", api_key=KEY, max_retries=0)


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny-k3"]


def test_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="tiny-k3", prompt="def main():\n", max_tokens=8, logprobs=2, n=2, seed=1,
        temperature=1.0, extra_body={"ignore_eos": True},
    )  # fmt: skip
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.usage is not None and answer.usage.completion_tokens == 16
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens is not None
    assert len(logprobs.tokens) == len(logprobs.token_logprobs or ()) == 8
    assert all(2 <= len(top) <= 3 for top in logprobs.top_logprobs or ())


def test_streamed_completion_equals_the_whole(client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny-k3", "prompt": "class Foo:\n", "max_tokens": 12}
    whole = client.completions.create(**asked)
    chunks = list(client.completions.create(**asked, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny-k3", messages=MESSAGES, max_completion_tokens=6, logprobs=True, top_logprobs=2
    )
    (choice,) = answer.choices
    assert choice.message.role == "assistant" and choice.logprobs is not None
    content = choice.logprobs.content or []
    assert answer.usage is not None and len(content) == answer.usage.completion_tokens
    assert all(len(entry.top_logprobs) == 2 and entry.logprob <= 0 for entry in content)
    text = b"".join(bytes(entry.bytes or ()) for entry in content).decode()
    assert text.removesuffix("<|eos|>") == choice.message.content


def test_streamed_chat_with_usage(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="tiny-k3", messages=MESSAGES, max_completion_tokens=6, stream=True,
            stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
        )
    )  # fmt: skip
    *tokens, last = chunks
    assert last.choices == [] and last.usage is not None
    assert last.usage.completion_tokens == len(tokens) == 6
    assert tokens[0].choices[0].delta.role == "assistant"
    assert tokens[-1].choices[0].finish_reason == "length"


def test_the_helper_for_streams(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="tiny-k3",
        messages=MESSAGES,
        max_completion_tokens=5,
        extra_body={"ignore_eos": True},
    ) as events:
        kinds = [event.type for event in events]
        snapshot = events.current_completion_snapshot
    assert kinds.count("content.delta") == 5 and kinds[-1] == "content.done"
    assert snapshot.choices[0].message.content and snapshot.choices[0].finish_reason == "length"


def test_errors_have_their_own_classes(client: openai.OpenAI) -> None:
    ask: Any = client.completions.create
    with pytest.raises(openai.BadRequestError, match="max_tokens") as bad:
        ask(model="tiny-k3", prompt="x", max_tokens=-1)
    assert bad.value.param == "max_tokens"
    with pytest.raises(openai.NotFoundError) as missing:
        ask(model="gpt-4", prompt="x")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    with pytest.raises(openai.APIStatusError) as large:
        ask(model="tiny-k3", prompt="x" * 5_000_000)
    assert large.value.status_code == 413


def test_many_at_once_and_one_too_many(server: RunningServer) -> None:
    async def conversation() -> None:
        async with openai.AsyncOpenAI(
            base_url=f"{server.base_url}/v1", api_key=KEY, max_retries=0
        ) as client:

            async def ask(number: int) -> int:
                stream = await client.completions.create(
                    model="tiny-k3", prompt=f"item {number} of", max_tokens=10 + number % 7,
                    stream=True, extra_body={"ignore_eos": True},
                )  # fmt: skip
                return len([chunk async for chunk in stream])

            asked = [asyncio.create_task(ask(number)) for number in range(40)]
            await asyncio.sleep(1.0)
            with pytest.raises(openai.RateLimitError) as full:
                await client.completions.create(model="tiny-k3", prompt="x", n=40)
            assert full.value.response.headers["retry-after"] == "1"
            assert await asyncio.gather(*asked) == [10 + n % 7 for n in range(40)]

    asyncio.run(conversation())


def test_a_client_that_retries_gets_through(server: RunningServer) -> None:
    """The client waits as long as ``Retry-After`` says, all by itself."""

    async def conversation() -> None:
        async with openai.AsyncOpenAI(
            base_url=f"{server.base_url}/v1", api_key=KEY, max_retries=20
        ) as client:
            asked = (
                client.completions.create(model="tiny-k3", prompt=f"{n}", n=15, max_tokens=4)
                for n in range(5)
            )
            for answer in await asyncio.gather(*asked):
                assert len(answer.choices) == 15

    asyncio.run(conversation())

"""Streams: one chunk a token, the same text as without, and what happens when something goes."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from server_support import (
    EchoExecutor,
    SlowExecutor,
    byte_tokenizer,
    echo_app,
    events,
    http,
    post,
    run,
)

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def texts(chunks: list[dict[str, Any]]) -> list[str]:
    """Return the text of each chunk with a choice."""
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    return [c["text"] if "text" in c else c["delta"]["content"] for c in choices]


# -- form ----------------------------------------------------------------------------------------


def test_one_chunk_for_each_token_also_inside_a_character() -> None:
    chunks = events(
        post(echo_app(), COMPLETIONS, {"prompt": "é€", "max_tokens": 8, "stream": True})
    )
    assert texts(chunks) == ["", "é", "", "", "€", "", "é", "\ufffd"]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * 7 + ["length"]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}


def test_the_role_comes_with_the_first_token_and_the_reason_with_the_last() -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "stream": True}
    chunks = events(post(echo_app(), CHAT, body))
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},  # the begin token of the template has no text
        {"content": "u"},
        {"content": "s"},
        {"content": "e"},
    ]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_usage_is_a_last_chunk_without_choices(path: str) -> None:
    messages = [{"role": "user", "content": "abc"}]
    body = {"prompt": "abc", "messages": messages, "max_tokens": 5, "stream": True}
    plain = events(post(echo_app(), path, body))
    assert len(plain) == 5
    assert not any("usage" in chunk for chunk in plain)

    body["stream_options"] = {"include_usage": True}
    *tokens, last = events(post(echo_app(), path, body))
    assert len(tokens) == 5
    assert not any("usage" in chunk for chunk in tokens)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 5
    assert (
        last["usage"]
        == post(echo_app(), path, {**body, "stream": None, "stream_options": None}).json()["usage"]
    )

    body["stream_options"]["continuous_usage_stats"] = True
    *tokens, last = events(post(echo_app(), path, body))
    assert [chunk["usage"]["completion_tokens"] for chunk in tokens] == [1, 2, 3, 4, 5]


def test_a_stream_is_ascii_so_that_no_client_splits_it_at_a_line_end_of_unicode() -> None:
    prompt = "a\u2028b\u0085c\n\r\x0b\x1c"
    body = {"prompt": prompt, "max_tokens": len(prompt.encode()), "stream": True}
    response = post(echo_app(), COMPLETIONS, body)
    assert response.text.isascii()
    assert "".join(texts(events(response))) == prompt


def test_several_prompts_share_a_stream() -> None:
    body = {"prompt": ["ab", "cde", "f"], "max_tokens": 6, "stream": True}
    together: dict[int, str] = {}
    for chunk in events(post(echo_app(), COMPLETIONS, body)):
        (choice,) = chunk["choices"]
        together[choice["index"]] = together.get(choice["index"], "") + choice["text"]
    assert together == {0: "ababab", 1: "cdecde", 2: "ffffff"}


PROMPTS = [
    "plain",
    "naïve — “quotes” 😀",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467",
    "tab\tnl\n",
]


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("max_tokens", [1, 7, 50])
@pytest.mark.parametrize("stop", [None, ["no such text"], ["ai", "😀", "l\n"]])
def test_streamed_text_equals_the_whole_text(
    prompt: str, max_tokens: int, stop: list[str] | None
) -> None:
    body = {"prompt": prompt, "max_tokens": max_tokens, "stop": stop}

    async def talk(client: httpx.AsyncClient) -> None:
        whole = (await client.post(COMPLETIONS, json=body)).json()["choices"][0]
        chunks = events(await client.post(COMPLETIONS, json={**body, "stream": True}))
        assert "".join(texts(chunks)) == whole["text"]
        last = chunks[-1]["choices"][0]
        assert last["finish_reason"] == whole["finish_reason"]
        assert last["stop_reason"] == whole["stop_reason"]
        if stop is None:
            token_ids = (byte_tokenizer().encode(prompt) * 50)[:max_tokens]
            assert whole["text"] == byte_tokenizer().decode(token_ids)

    run(echo_app(), talk)


# -- stop strings --------------------------------------------------------------------------------


def test_a_stop_string_ends_the_text_before_it() -> None:
    executor = SlowExecutor()
    body = {"prompt": "one two three ", "max_tokens": 200, "stop": ["xyz", "two t"]}
    answer = post(echo_app(executor), COMPLETIONS, body).json()
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (
        "one ",
        "stop",
        "two t",
    )
    assert answer["usage"]["completion_tokens"] == len("one two t")
    assert len(executor.steps) < 40  # the engine was told: it did not run to max_tokens


def test_what_may_become_a_stop_string_is_held_back() -> None:
    body = {"prompt": "aab!", "max_tokens": 8, "stop": "ab?", "stream": True}
    chunks = events(post(echo_app(), COMPLETIONS, body))
    assert texts(chunks) == ["", "a", "", "ab!", "", "a", "", "ab!"]


def test_a_held_back_beginning_comes_out_at_the_end() -> None:
    body = {"prompt": "aab", "max_tokens": 3, "stop": "ab?", "stream": True}
    assert texts(events(post(echo_app(), COMPLETIONS, body))) == ["", "a", "ab"]


def test_the_first_stop_string_in_the_text_counts() -> None:
    body = {"prompt": "abcdef", "max_tokens": 6, "stop": ["ef", "bc", "c"]}
    choice = post(echo_app(), COMPLETIONS, body).json()["choices"][0]
    assert (choice["text"], choice["stop_reason"]) == ("a", "bc")


# -- many at once --------------------------------------------------------------------------------


def test_fifty_streams_are_neither_mixed_nor_cut() -> None:
    async def one(client: httpx.AsyncClient, number: int) -> None:
        prompt = f"<{number:02d} é>"
        body = {"prompt": prompt, "max_tokens": 40 + number, "stream": True}
        body["stream_options"] = {"include_usage": True}
        *chunks, last = events(await client.post(COMPLETIONS, json=body))
        token_ids = (byte_tokenizer().encode(prompt) * 20)[: 40 + number]
        assert "".join(texts(chunks)) == byte_tokenizer().decode(token_ids)
        assert len(chunks) == last["usage"]["completion_tokens"] == 40 + number

    async def talk(client: httpx.AsyncClient) -> None:
        await asyncio.gather(*(one(client, number) for number in range(50)))

    executor = EchoExecutor()
    run(echo_app(executor), talk)
    assert max(map(len, executor.steps)) > 10  # they did run together


# -- clients that leave --------------------------------------------------------------------------


async def leave_after(
    app: FastAPI, body: dict[str, Any], num_messages: int, *, cut: bool = False
) -> list[dict[str, Any]]:
    """Send a request and disconnect once the server has sent ``num_messages`` ASGI messages.

    ``cut`` sends only a part of the request. Returns what the server sent.
    """
    content = json.dumps(body).encode()[: 5 if cut else None]
    sent: list[dict[str, Any]] = []
    enough = asyncio.Event()
    incoming = [{"type": "http.request", "body": content, "more_body": cut}]

    async def receive() -> dict[str, Any]:
        if incoming:
            return incoming.pop()
        await enough.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)
        if len(sent) >= num_messages:
            enough.set()

    if not num_messages:
        asyncio.get_running_loop().call_later(0.1, enough.set)
    scope = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1",
        "method": "POST", "path": COMPLETIONS, "raw_path": COMPLETIONS.encode(),
        "query_string": b"", "headers": [], "scheme": "http", "root_path": "",
        "client": ("test", 1), "server": ("test", 80),
    }  # fmt: skip
    await asyncio.wait_for(app(scope, receive, send), 20)
    return sent


@pytest.mark.parametrize(("stream", "num_messages"), [(True, 1), (True, 5), (False, 0)])
def test_a_client_that_leaves_frees_its_request(stream: bool, num_messages: int) -> None:
    executor = SlowExecutor()
    app = echo_app(executor, max_model_len=4096)
    body = {"prompt": ["ab", "cd"], "max_tokens": 4000, "stream": stream}

    async def conversation() -> None:
        async with http(app) as client:
            await leave_after(app, body, num_messages)
            num_steps = len(executor.steps)
            good = await client.post(COMPLETIONS, json={"prompt": "xyz", "max_tokens": 4})
            assert good.json()["choices"][0]["text"] == "xyzx"
            assert len(executor.steps) - num_steps < 10
            # The executor has been told to drop both requests, and nothing of them runs any more.
            assert len(executor.finished) >= 2
            assert len(executor.steps[-1]) == 1

    asyncio.run(conversation())


def test_a_client_that_leaves_while_its_request_waits_for_a_step() -> None:
    executor = EchoExecutor()
    executor.gate.clear()
    app = echo_app(executor)

    async def conversation() -> None:
        async with http(app) as client:
            first = asyncio.create_task(client.post(COMPLETIONS, json={"prompt": "a"}))
            await asyncio.sleep(0.05)
            asyncio.get_running_loop().call_later(0.2, executor.gate.set)
            await leave_after(app, {"prompt": "b", "max_tokens": 200}, 0)
            assert (await first).json()["choices"][0]["text"] == "a" * 16

    asyncio.run(asyncio.wait_for(conversation(), 20))


def test_a_client_that_leaves_amid_its_request_is_no_failure() -> None:
    app = echo_app()

    async def conversation() -> None:
        async with http(app) as client:
            start, *_ = await leave_after(app, {"prompt": "abc"}, 0, cut=True)
            assert start["status"] == 499
            assert (await client.get("/health")).status_code == 200

    asyncio.run(conversation())


# -- an engine that fails ------------------------------------------------------------------------


def test_a_failed_step_is_an_answer_500_and_the_server_goes_on() -> None:
    poison = byte_tokenizer().encode("!")[0]

    async def talk(client: httpx.AsyncClient) -> None:
        bad = await client.post(COMPLETIONS, json={"prompt": "a!"})
        assert bad.status_code == 500
        assert bad.json()["error"]["type"] == "server_error"
        assert "failed" in bad.json()["error"]["message"]
        good = await client.post(COMPLETIONS, json={"prompt": "abc", "max_tokens": 4})
        assert good.json()["choices"][0]["text"] == "abca"
        assert (await client.get("/health")).status_code == 200

    run(echo_app(EchoExecutor(poison)), talk)


def test_a_failed_step_ends_a_stream_with_an_error_event() -> None:
    poison = byte_tokenizer().encode("!")[0]
    body = {"prompt": "a!", "stream": True, "stream_options": {"include_usage": True}}
    (event,) = events(post(echo_app(EchoExecutor(poison)), COMPLETIONS, body))
    assert event["error"]["type"] == "server_error"


@pytest.mark.parametrize("stream", [True, False])
def test_a_defect_of_the_server_itself_is_told_too(
    monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    def broken(self: object, token_id: int) -> str:
        raise ZeroDivisionError("defect")

    monkeypatch.setattr("kimik3_lab.serving.server.tokenizer.Detokenizer.step", broken)
    response = post(echo_app(), COMPLETIONS, {"prompt": "abc", "stream": stream})
    assert response.status_code == (200 if stream else 500)
    error = events(response)[0]["error"] if stream else response.json()["error"]
    assert error["type"] == "server_error"
    assert "defect" in error["message"]

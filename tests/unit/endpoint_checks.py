"""What the endpoint promises, each promise a check that a wrong server fails.

``test_endpoint_*.py`` run them on the server as it is; ``test_endpoint_mistakes.py`` runs them on
servers that are wrong on purpose.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import socket
from typing import Any

import httpx
from endpoint_support import (
    CHAT,
    COMPLETIONS,
    Endpoint,
    FailingExecutor,
    LogprobsExecutor,
    SeededExecutor,
    Streamed,
    echoed,
    endpoint,
    listening,
    session,
    settle,
    stream,
    talk,
)
from server_support import EchoExecutor, SlowExecutor, byte_tokenizer, http

from kimik3_lab.serving.server.output_stream import RequestOutput


def ask(end: Endpoint, *bodies: dict[str, Any], path: str = COMPLETIONS) -> list[httpx.Response]:
    """Send requests one after the other."""

    async def conversation() -> list[httpx.Response]:
        async with http(end.app) as client:
            return [await client.post(path, json=body) for body in bodies]

    return talk(conversation())


def check_whole_stream(result: Streamed, prompt: str, num_tokens: int) -> None:
    """One stream: nothing lost, nothing twice, nothing of another."""
    assert result.status == 200, result.error
    assert result.error is None and result.done
    assert result.text == echoed(prompt, num_tokens)
    assert len(result.chunks) == num_tokens
    assert result.finish_reason == "length"
    assert [c["choices"][0]["finish_reason"] for c in result.chunks[:-1]] == [None] * (
        num_tokens - 1
    )
    assert len({chunk["id"] for chunk in result.chunks}) == 1
    prompt_tokens = len(byte_tokenizer().encode(prompt))
    assert result.usage == {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": num_tokens,
        "total_tokens": prompt_tokens + num_tokens,
    }


def check_many_streams(num_streams: int = 24) -> None:
    """Streams at the same time are neither lost, mixed nor cut."""
    end = endpoint()

    async def one(client: Any, number: int) -> str:
        prompt, num_tokens = f"<{number:03d} é>", 8 + number % 13
        result = await stream(client, end.url, {"prompt": prompt, "max_tokens": num_tokens})
        check_whole_stream(result, prompt, num_tokens)
        return result.chunks[0]["id"]

    async def conversation() -> None:
        async with session() as client:
            ids = await asyncio.gather(*(one(client, n) for n in range(num_streams)))
            assert len(set(ids)) == num_streams
            await settle(end)

    with listening(end):
        talk(conversation())
    end.assert_nothing_is_left()
    assert max(map(len, end.executor.steps)) > min(10, num_streams // 2)  # they ran together


def check_clients_that_vanish(num_clients: int = 24) -> None:
    """Clients hang up before, amid and near the end of a stream; others are served on."""
    end = endpoint(SlowExecutor(), max_model_len=1024)

    async def vanish(number: int) -> None:
        host, port = end.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = json.dumps({"prompt": ["ab", "cd"], "max_tokens": 1000, "stream": True}).encode()
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        for _ in range(number % 6 * 3):
            await reader.readline()
        writer.transport.abort()

    async def conversation() -> None:
        async with session() as client:
            good = [
                stream(client, end.url, {"prompt": f"good {n}", "max_tokens": 30}) for n in range(6)
            ]
            (*_,) = await asyncio.gather(*map(vanish, range(num_clients)))
            for number, result in enumerate(await asyncio.gather(*good)):
                check_whole_stream(result, f"good {number}", 30)
            await settle(end)
            num_steps = len(end.executor.steps)
            last = await stream(client, end.url, {"prompt": "last", "max_tokens": 5})
            check_whole_stream(last, "last", 5)
            assert len(end.executor.steps) - num_steps < 10  # nothing of the others runs on
            await settle(end)
            await asyncio.sleep(0.1)  # the gauges follow the last token
            async with client.get(end.url + "/metrics") as response:
                values = end.metrics(await response.text())
            assert values["vllm:request_success_total:abort"] == 2 * num_clients
            assert values["vllm:num_requests_running"] == 0
            assert values["vllm:kv_cache_usage_perc"] == 0

    with listening(end):
        talk(conversation())
        end.assert_nothing_is_left()


def check_random_failures(seed: int = 0) -> None:
    """Steps throw: their requests fail and say so, all others are right, the server lives."""
    end = endpoint(FailingExecutor(seed, 0.02))

    async def one(client: Any, number: int) -> str:
        prompt, num_tokens = f"{number:02d}!", 10 + number
        body = {"prompt": prompt, "max_tokens": num_tokens}
        if number % 2:
            result = await stream(client, end.url, body)
            if result.error is None:
                check_whole_stream(result, prompt, num_tokens)
                return "good"
            assert result.error["type"] == "server_error"
            assert result.status == 500 or result.done
            assert echoed(prompt, num_tokens).startswith("".join(result.texts.values()))
            return "bad"
        async with client.post(end.url + COMPLETIONS, json=body) as response:
            answer = await response.json()
            if response.status == 200:
                assert answer["choices"][0]["text"] == echoed(prompt, num_tokens)
                return "good"
            assert response.status == 500 and answer["error"]["type"] == "server_error"
            return "bad"

    async def conversation() -> None:
        async with session() as client:
            outcomes = []
            for first in range(0, 60, 12):  # waves, so that some meet a failure and some do not
                wave = (one(client, number) for number in range(first, first + 12))
                outcomes += await asyncio.gather(*wave)
            assert end.executor.num_failures and "bad" in outcomes
            assert "good" in outcomes
            end.executor.probability = 0
            last = await stream(client, end.url, {"prompt": "last", "max_tokens": 5})
            check_whole_stream(last, "last", 5)
            async with client.get(end.url + "/metrics") as response:
                values = end.metrics(await response.text())
            assert values["vllm:request_success_total:error"] == outcomes.count("bad")
            assert values["vllm:request_success_total:length"] == outcomes.count("good") + 1
            await settle(end)

    with listening(end):
        talk(conversation())
        end.assert_nothing_is_left()


def check_slow_readers(num_readers: int = 3, num_tokens: int = 2000) -> None:
    """Clients that do not read cost a list of numbers each, and nobody waits for them."""

    def num_outputs() -> int:
        gc.collect()
        return sum(isinstance(thing, RequestOutput) for thing in gc.get_objects())

    before = num_outputs()
    end = endpoint(max_model_len=8192)
    body = {"prompt": "slow", "max_tokens": num_tokens, "stream": True}

    async def open_and_do_not_read() -> socket.socket:
        host, port = end.url.removeprefix("http://").split(":")
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(connection, (host, int(port)))
        content = json.dumps(body).encode()
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
        await loop.sock_sendall(connection, head.encode() + content)
        return connection

    async def read_to_the_end(connection: socket.socket) -> Streamed:
        reader, writer = await asyncio.open_connection(sock=connection, limit=2**24)
        result = Streamed(status=200)
        while not result.done:
            line = (await reader.readline()).decode().rstrip("\r\n")
            if line.startswith("data: "):
                result.read(line)
        writer.close()
        return result

    async def conversation() -> None:
        end.executor.gate.clear()  # nobody is through before all are there
        slow = [await open_and_do_not_read() for _ in range(num_readers)]
        async with session() as client, contextlib.AsyncExitStack() as stack:
            for connection in slow:
                stack.callback(connection.close)
            while end.client.num_in_flight != num_readers:
                await asyncio.sleep(0.01)
            streams = set(end.client._open)
            end.executor.gate.set()
            fast = await stream(client, end.url, {"prompt": "fast", "max_tokens": 50})
            check_whole_stream(fast, "fast", 50)
            while end.engine.has_unfinished_requests():
                await asyncio.sleep(0.05)
            # The engine has done its part, and their blocks are free, though nobody has read.
            assert end.engine.stats().scheduler.kv_cache_usage == 0
            # None is through. Where its tokens wait depends on who was quicker: unread, or in the
            # hands of the stream, which takes all that is there at once.
            assert streams <= end.client._open
            kept = num_outputs() - before
            assert kept <= 3 * num_readers, f"{kept} outputs are kept"
            for connection in slow:
                result = await read_to_the_end(connection)
                assert result.text == echoed("slow", num_tokens)
                assert len(result.chunks) == num_tokens and result.finish_reason == "length"

    with listening(end, send_buffer=16_384):
        talk(conversation())
    end.assert_nothing_is_left()


def check_seeds_of_answers() -> None:
    """Each of n answers has a seed of its own, the first that of the request."""
    body = {"prompt": ["ab", "xyz"], "max_tokens": 12, "n": 3, "seed": 40, "temperature": 1}
    together, *alone = ask(
        endpoint(SeededExecutor()),
        body,
        *({"prompt": "ab", "max_tokens": 12, "seed": 40 + n, "temperature": 1} for n in range(3)),
    )
    choices = together.json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(6))
    texts = [choice["text"] for choice in choices]
    assert texts[:3] == [answer.json()["choices"][0]["text"] for answer in alone]
    assert len(set(texts[:3])) == 3 and texts[:3] == texts[3:]
    # A prompt counts once, however many answers it has.
    assert together.json()["usage"] == {
        "prompt_tokens": 5, "completion_tokens": 72, "total_tokens": 77,
    }  # fmt: skip


def check_logprobs() -> None:
    """Completions: parallel lists, offsets in the text, the chosen token among the alternatives."""
    tokenizer = byte_tokenizer()
    token_ids = (tokenizer.encode("aé") * 2)[:5]
    end = endpoint(LogprobsExecutor())
    whole, none, zero = ask(
        end,
        {"prompt": "aé", "max_tokens": 5, "logprobs": 2},
        {"prompt": "aé", "max_tokens": 5},
        {"prompt": "aé", "max_tokens": 5, "logprobs": 0},
    )
    logprobs = whole.json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9", "a", "bytes:\\xc3"]
    assert logprobs["token_logprobs"] == [-0.001 * i for i in token_ids]
    assert logprobs["text_offset"] == [0, 1, 1, 2, 3]
    first = logprobs["top_logprobs"][0]
    assert first == {"a": -0.001 * token_ids[0], "b": -0.25, "c": -0.5}
    assert none.json()["choices"][0]["logprobs"] is None
    assert zero.json()["choices"][0]["logprobs"]["top_logprobs"][0] == {"a": -0.001 * token_ids[0]}


def check_chat_logprobs() -> None:
    """Chats: an entry for each token, with its bytes and as many alternatives as asked for."""
    messages = [{"role": "user", "content": "é"}]
    body = {"messages": messages, "max_completion_tokens": 9, "logprobs": True, "top_logprobs": 1}
    (response,) = ask(endpoint(LogprobsExecutor()), body, path=CHAT)
    content = response.json()["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [
        "<bos>", "u", "s", "e", "r", ":", " ", "bytes:\\xc3", "bytes:\\xa9",
    ]  # fmt: skip
    assert content[1]["bytes"] == [ord("u")] and content[7]["bytes"] == [0xC3]
    assert content[1]["top_logprobs"] == [{"token": "v", "logprob": -0.25, "bytes": [ord("v")]}]
    assert b"".join(bytes(entry["bytes"]) for entry in content[1:]).decode() == "user: é"


def check_streamed_logprobs() -> None:
    """A chunk has the probabilities of its own token; together they are those of a whole answer."""
    body = {"prompt": "aé", "max_tokens": 7, "logprobs": 2}
    end = endpoint(LogprobsExecutor())

    async def conversation() -> Streamed:
        async with session() as client:
            return await stream(client, end.url, body)

    with listening(end):
        result = talk(conversation())
    (whole,) = ask(endpoint(LogprobsExecutor()), body)
    expected = whole.json()["choices"][0]["logprobs"]
    parts = [chunk["choices"][0]["logprobs"] for chunk in result.chunks]
    assert all(len(part["tokens"]) == 1 for part in parts)
    for name, values in expected.items():
        assert [part[name][0] for part in parts] == values


def check_queue_limit() -> None:
    """The queue is bounded; who is turned away is told when to try again, and is counted."""
    executor = EchoExecutor()
    executor.gate.clear()
    end = endpoint(executor, max_num_queued_reqs=4, max_num_seqs=2)

    async def conversation() -> None:
        async with http(end.app) as client:
            body = {"prompt": "ab", "max_tokens": 4}
            running = [asyncio.create_task(client.post(COMPLETIONS, json=body)) for _ in range(3)]
            while end.client.num_in_flight < 3:
                await asyncio.sleep(0.01)
            for streamed in (False, True):
                attempt = client.post(COMPLETIONS, json={**body, "n": 2, "stream": streamed})
                refused = await asyncio.wait_for(attempt, 5)
                assert refused.status_code == 429, refused.text
                assert int(refused.headers["retry-after"]) >= 1
                assert refused.json()["error"]["code"] == "queue_full"
                assert refused.json()["error"]["type"] == "rate_limit_error"
            never = await client.post(COMPLETIONS, json={**body, "n": 5})
            assert never.status_code == 400 and "at most 4 in flight" in never.text
            running.append(asyncio.create_task(client.post(COMPLETIONS, json=body)))  # the fourth
            await asyncio.sleep(0.05)
            assert (await client.get("/health")).status_code == 200
            executor.gate.set()
            for answer in await asyncio.gather(*running):
                assert answer.json()["choices"][0]["text"] == "abab"
            again = await client.post(COMPLETIONS, json={**body, "n": 4})
            assert again.status_code == 200
            values = end.metrics((await client.get("/metrics")).text)
            assert values["vllm:admission_rejections_total:max_num_queued_reqs"] == 2

    talk(conversation())
    end.assert_nothing_is_left()


def check_api_key() -> None:
    """Nobody gets a token without the key, and those who need none are not asked."""
    end = endpoint(api_key="right key")

    async def conversation() -> None:
        async with http(end.app) as client:
            for authorization, words in (
                (None, "asks for an API key"),
                ("Bearer wrong key", "wrong"),
                ("Bearer right ke", "wrong"),
                ("Bearer right keys", "wrong"),
                ("Bearer ", "wrong"),
                ("Basic right key", "wrong"),
                ("right key", "wrong"),
            ):
                headers = {} if authorization is None else {"authorization": authorization}
                for method, path in (
                    ("POST", COMPLETIONS), ("POST", CHAT), ("GET", "/v1/models"), ("GET", "/v1/x"),
                ):  # fmt: skip
                    refused = await client.request(method, path, headers=headers, json={})
                    assert refused.status_code == 401, (authorization, path)
                    assert refused.headers["www-authenticate"] == "Bearer"
                    assert refused.json()["error"]["code"] == "invalid_api_key"
                    assert words in refused.json()["error"]["message"]
                    assert "right key" not in refused.text
            for path in ("/health", "/metrics", "/version"):
                assert (await client.get(path)).status_code == 200
            for scheme in ("Bearer", "bearer"):
                headers = {"authorization": f"{scheme} right key"}
                body = {"prompt": "ab", "max_tokens": 4}
                good = await client.post(COMPLETIONS, json=body, headers=headers)
                assert good.json()["choices"][0]["text"] == "abab"

    talk(conversation())


def check_body_limit() -> None:
    """A body over the limit is answered, whether its length was told or not, and not kept."""
    end = endpoint(max_request_bytes=10_000)

    async def conversation() -> None:
        async with session() as client:

            async def parts() -> Any:
                for _ in range(100):
                    yield b" " * 1000

            for data in (b" " * 10_001, b" " * 3_000_000, parts()):
                async with client.post(end.url + COMPLETIONS, data=data) as response:
                    assert response.status == 413
                    error = (await response.json())["error"]
                    assert (
                        error["code"] == "request_too_large" and "10000 bytes" in error["message"]
                    )
            body = json.dumps({"prompt": "ab", "max_tokens": 4}).encode()
            data = body + b" " * (10_000 - len(body))
            async with client.post(end.url + COMPLETIONS, data=data) as response:
                assert (await response.json())["choices"][0]["text"] == "abab"

    with listening(end):
        talk(conversation())


def check_shutdown() -> None:
    """Draining: the quick finish, the long are ended by an error event, new ones are refused."""
    executor = SlowExecutor()
    executor.gate.clear()  # nothing is computed before the shutdown begins
    end = endpoint(executor, max_model_len=4096)

    async def conversation() -> None:
        async with http(end.app) as client:

            def start(max_tokens: int, streamed: bool) -> asyncio.Task[httpx.Response]:
                body = {"prompt": "ab", "max_tokens": max_tokens, "stream": streamed}
                return asyncio.create_task(client.post(COMPLETIONS, json=body))

            quick, long, whole = start(10, True), start(4000, True), start(4000, False)
            while end.client.num_in_flight < 3:
                await asyncio.sleep(0.01)
            draining = asyncio.create_task(end.client.drain(1.5))
            await asyncio.sleep(0.05)
            executor.gate.set()
            late = await client.post(COMPLETIONS, json={"prompt": "ab"})
            assert late.status_code == 503 and late.headers["retry-after"]
            assert late.json()["error"]["code"] == "server_shutting_down"
            assert (await client.get("/health")).status_code == 503
            await draining

            def read(response: httpx.Response) -> Streamed:
                result = Streamed(response.status_code)
                for line in response.text.split("\n"):
                    result.read(line)
                return result

            finished = read(await quick)
            assert finished.text == echoed("ab", 10) and finished.done and finished.error is None
            ended = read(await long)
            assert ended.done and ended.error is not None
            assert ended.error["code"] == "server_shutting_down"
            assert ended.text and echoed("ab", 4000).startswith(ended.text)
            assert ended.finish_reason is None  # nothing that looks like a complete answer
            answer = await whole
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "server_shutting_down"

    talk(conversation())
    end.assert_nothing_is_left()

"""The engine's thread: hand-over, failures of every kind, and the end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from server_support import EchoExecutor, SlowExecutor, byte_tokenizer, echo_engine, http

from kimik3_lab.serving import EngineCoreOutput, Request, SamplingParams
from kimik3_lab.serving.server import AsyncEngine, build_app
from kimik3_lab.serving.server.async_engine import EngineDeadError, EngineStepError


def request(name: str, prompt: list[int] | None = None, max_tokens: int = 4) -> Request:
    return Request(name, prompt or [5, 6], SamplingParams(max_tokens=max_tokens))


def with_engine(engine: Any, talk: Callable[[AsyncEngine], Awaitable[None]]) -> None:
    """Run ``talk`` with a started engine and see that its thread ends."""

    async def conversation() -> None:
        client = AsyncEngine(engine)
        client.start()
        try:
            await talk(client)
        finally:
            await client.stop()
            assert not client.is_running

    asyncio.run(asyncio.wait_for(conversation(), 20))


async def collect(client: AsyncEngine, *requests: Request) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {r.request_id: [] for r in requests}
    stream = await client.submit(requests)
    async for output in stream:
        tokens[output.request_id] += output.token_ids
    stream.close()
    return tokens


def test_requests_of_many_coroutines_share_steps() -> None:
    executor = EchoExecutor()

    async def talk(client: AsyncEngine) -> None:
        groups = [[request(f"{g}-{i}", [g, i + 50], 8) for i in range(3)] for g in range(2, 12)]
        for group in await asyncio.gather(*(collect(client, *group) for group in groups)):
            for name, tokens in group.items():
                g, i = map(int, name.split("-"))
                assert tokens == [g, i + 50] * 4

    with_engine(echo_engine(executor), talk)
    assert len(executor.steps) < 30 * 8


def test_one_refused_request_refuses_all_of_its_group() -> None:
    executor = EchoExecutor()
    engine = echo_engine(executor)

    async def talk(client: AsyncEngine) -> None:
        with pytest.raises(ValueError, match="exceed max_model_len=256"):
            await client.submit([request("first"), request("long", [5] * 300)])
        assert await collect(client, request("good")) == {"good": [5, 6, 5, 6]}

    with_engine(engine, talk)
    assert not engine.has_unfinished_requests()
    assert not any("first" in step for step in executor.steps)


def test_a_closed_stream_frees_what_it_held() -> None:
    engine = echo_engine(max_model_len=40_000)  # more than any machine does until the stream closes
    many = 30_000

    async def talk(client: AsyncEngine) -> None:
        stream = await client.submit([request(name, max_tokens=many) for name in ("a", "b")])
        async for output in stream:
            if output.request_id == "b":
                break
        stream.close()
        stream.close()  # twice does no harm
        assert await collect(client, request("c")) == {"c": [5, 6, 5, 6]}

    with_engine(engine, talk)
    assert engine.stats().scheduler.kv_cache_usage == 0
    assert engine.stats().num_generated_tokens < many


class Fake:
    """An engine that does what a test tells it to, where the real one is too well behaved."""

    def __init__(self) -> None:
        self.running: list[str] = []
        self.fail_step: BaseException | None = None
        self.fail_abort: Exception | None = None
        self.fail_add: Exception | None = None
        self.aborted: list[str] = []

    def add_request(self, request: Request) -> None:
        if self.fail_add:
            raise self.fail_add
        self.running.append(request.request_id)

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        if self.fail_abort:
            raise self.fail_abort
        self.running.remove(request_id)

    def has_unfinished_requests(self) -> bool:
        return bool(self.running)

    def step(self) -> list[EngineCoreOutput]:
        if self.fail_step:
            raise self.fail_step
        done, self.running = self.running, []
        return [EngineCoreOutput(name, [7], "length") for name in [*done, "stranger"]]


def test_a_step_that_raises_ends_its_requests_and_no_others() -> None:
    engine = Fake()

    async def talk(client: AsyncEngine) -> None:
        engine.fail_step = RuntimeError("out of luck")
        results = await asyncio.gather(
            collect(client, request("a")), collect(client, request("b"), request("c")),
            return_exceptions=True,
        )  # fmt: skip
        assert all(isinstance(result, EngineStepError) for result in results)
        assert all("out of luck" in str(result) for result in results)
        engine.fail_step = None
        assert client.is_running
        assert await collect(client, request("d")) == {"d": [7]}

    with_engine(engine, talk)
    assert sorted(engine.aborted) == ["a", "b", "c"]


@pytest.mark.parametrize("fatal", ["abort", "exit"])
def test_an_engine_that_cannot_recover_leaves_nobody_waiting(fatal: str) -> None:
    engine = Fake()

    async def talk(client: AsyncEngine) -> None:
        if fatal == "abort":
            engine.fail_step, engine.fail_abort = RuntimeError("first"), RuntimeError("worse")
        else:
            engine.fail_step = SystemExit(3)
        with pytest.raises((EngineDeadError, EngineStepError)):
            await collect(client, request("a"), request("b"))
        while client.is_running:
            await asyncio.sleep(0.01)
        with pytest.raises(EngineDeadError, match="restart the server"):
            await client.submit([request("c")])

    with_engine(engine, talk)


def test_an_engine_that_fails_with_nothing_to_run_dies_instead_of_spinning() -> None:
    engine = Fake()

    async def talk(client: AsyncEngine) -> None:
        engine.fail_step = RuntimeError("again")
        engine.abort = lambda name: None  # so it still claims to have work
        with pytest.raises(EngineStepError):
            await collect(client, request("a"))
        while client.is_running:
            await asyncio.sleep(0.01)

    with_engine(engine, talk)


def test_an_engine_that_fails_to_take_a_request() -> None:
    engine = Fake()
    engine.fail_add = KeyError("surprise")

    async def talk(client: AsyncEngine) -> None:
        with pytest.raises(EngineStepError, match="surprise"):
            await collect(client, request("a"))
        engine.fail_add = None
        assert await collect(client, request("b")) == {"b": [7]}

    with_engine(engine, talk)


def test_it_must_be_started() -> None:
    with pytest.raises(EngineDeadError, match="start"):
        asyncio.run(AsyncEngine(Fake()).submit([request("a")]))


def test_drain_aborts_what_does_not_finish_in_time() -> None:
    executor = SlowExecutor()

    async def talk(client: AsyncEngine) -> None:
        stream = await client.submit([request("long", max_tokens=250)])
        await client.drain(0.1)
        outputs = [output async for output in stream]
        assert outputs[-1].finish_reason == "abort"
        assert 2 < sum(len(output.token_ids) for output in outputs) < 100
        with pytest.raises(EngineDeadError, match="shutting down"):
            await client.submit([request("late")])

    with_engine(echo_engine(executor), talk)


def test_drain_waits_for_those_that_finish() -> None:
    async def talk(client: AsyncEngine) -> None:
        answer = asyncio.create_task(collect(client, request("a", max_tokens=100)))
        await asyncio.sleep(0)
        await client.drain(10.0)
        assert answer.done() and len(answer.result()["a"]) == 100

    with_engine(echo_engine(), talk)


# -- seen through the endpoint -------------------------------------------------------------------


def test_a_dead_engine_is_told_by_health_and_by_every_answer() -> None:
    engine = Fake()
    app = build_app(AsyncEngine(engine), byte_tokenizer(), "fake", 64)

    async def conversation() -> None:
        async with http(app) as client:
            engine.fail_step = SystemExit(3)
            first = await client.post("/v1/completions", json={"prompt": "a"})
            while (health := await client.get("/health")).status_code == 200:
                await asyncio.sleep(0.01)
            second = await client.post("/v1/completions", json={"prompt": "a", "stream": True})
            for response in (first, health, second):
                assert response.status_code == 503
                assert response.json()["error"]["type"] == "server_error"

    asyncio.run(asyncio.wait_for(conversation(), 20))


def test_a_step_that_raises_is_a_500_or_an_error_event() -> None:
    engine = Fake()
    app = build_app(AsyncEngine(engine), byte_tokenizer(), "fake", 64)

    async def conversation() -> None:
        async with http(app) as client:
            engine.fail_step = RuntimeError("out of luck")
            whole = await client.post("/v1/completions", json={"prompt": "a"})
            stream = await client.post("/v1/completions", json={"prompt": "a", "stream": True})
            assert whole.status_code == 500 and "out of luck" in whole.json()["error"]["message"]
            assert stream.status_code == 200
            assert "out of luck" in stream.text and stream.text.endswith("data: [DONE]\n\n")
            engine.fail_step = None
            good: httpx.Response = await client.post("/v1/completions", json={"prompt": "a"})
            assert good.status_code == 200

    asyncio.run(asyncio.wait_for(conversation(), 20))

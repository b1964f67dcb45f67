"""What the endpoint adds to a plain answer: several of them, seeds, probabilities."""

from __future__ import annotations

from typing import Any

import endpoint_checks as checks
import pytest
from endpoint_support import CHAT, Endpoint, LogprobsExecutor, echoed, endpoint
from server_support import EchoExecutor


def test_each_answer_has_a_seed_of_its_own() -> None:
    checks.check_seeds_of_answers()


def test_logprobs_of_a_completion() -> None:
    checks.check_logprobs()


def test_logprobs_of_a_chat() -> None:
    checks.check_chat_logprobs()


def test_logprobs_of_a_stream() -> None:
    checks.check_streamed_logprobs()


def test_logprobs_end_with_the_text_at_a_stop_string() -> None:
    (response,) = checks.ask(
        endpoint(LogprobsExecutor()),
        {"prompt": "one two ", "max_tokens": 30, "stop": "two", "logprobs": 0},
    )
    choice, usage = response.json()["choices"][0], response.json()["usage"]
    assert choice["text"] == "one "
    assert choice["logprobs"]["tokens"] == list("one two")  # all tokens that were generated
    assert usage["completion_tokens"] == 7


@pytest.mark.parametrize("streamed", [False, True])
def test_an_executor_that_computes_no_logprobs(streamed: bool) -> None:
    body = {"prompt": "ab", "logprobs": 1, "stream": streamed}
    (response,) = checks.ask(endpoint(EchoExecutor()), body)
    assert response.status_code == (200 if streamed else 500)
    assert "computes no logprobs" in response.text


def test_several_answers_to_a_chat() -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "n": 3, "max_tokens": 8}
    (response,) = checks.ask(endpoint(), body, path=CHAT)
    choices = response.json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert len({choice["message"]["content"] for choice in choices}) == 1  # greedy: all the same


def test_several_answers_share_a_stream() -> None:
    from endpoint_support import listening, session, stream, talk

    end = endpoint()
    body = {"prompt": ["ab", "xyz"], "n": 2, "max_tokens": 6}

    async def conversation() -> Any:
        async with session() as client:
            return await stream(client, end.url, body)

    with listening(end):
        result = talk(conversation())
    assert result.texts == {0: "ababab", 1: "ababab", 2: "xyzxyz", 3: "xyzxyz"}
    assert result.usage == {"prompt_tokens": 5, "completion_tokens": 24, "total_tokens": 29}


def test_what_a_request_asks_for_reaches_the_engine() -> None:
    seen: list[Any] = []

    class Recording(EchoExecutor):
        def execute_model(self, output: Any) -> Any:
            seen.extend(new.sampling_params for new in output.scheduled_new_reqs)
            return super().execute_model(output)

    asked = {"top_k": 5, "min_p": 0.25, "seed": 2**63 - 1, "n": 2}
    end = endpoint(Recording())
    checks.ask(end, {"prompt": "a", **asked}, {"prompt": "a", "top_k": -1})
    first, second, third = seen
    assert (first.top_k, first.min_p, first.seed) == (5, 0.25, 2**63 - 1)
    assert second.seed == 0  # the next one, and the largest is followed by the smallest
    assert (third.top_k, third.min_p, third.seed, third.logprobs) == (0, 0.0, None, None)


def test_a_priority_decides_who_is_next() -> None:
    import asyncio

    from server_support import byte_tokenizer, http

    from kimik3_lab.serving import CacheConfig, Engine, Scheduler, SchedulerConfig
    from kimik3_lab.serving.server import AsyncEngine, build_app

    executor = EchoExecutor()
    executor.gate.clear()
    config = SchedulerConfig(1, 256, 64, policy="priority")
    client = AsyncEngine(Engine(Scheduler(config, CacheConfig(99)), executor))
    app = build_app(client, byte_tokenizer(), "echo", 64)

    async def conversation() -> None:
        async with http(app) as http_client:

            async def ask(name: str, priority: int) -> None:
                body = {"prompt": name, "max_tokens": 3, "priority": priority}
                answer = await http_client.post("/v1/completions", json=body)
                assert answer.json()["choices"][0]["text"] == echoed(name, 3)

            first = asyncio.create_task(ask("first", 0))
            while not executor._tokens and client.num_in_flight < 1:
                await asyncio.sleep(0.01)
            rest = []
            for name, priority in (("low", 5), ("high", -5)):
                rest.append(asyncio.create_task(ask(name, priority)))
                while client.num_in_flight < 1 + len(rest):
                    await asyncio.sleep(0.01)
            executor.gate.set()
            await asyncio.gather(first, *rest)

    checks.talk(conversation())
    # In the order in which they had the only seat.
    names = [
        byte_tokenizer().decode(executor._tokens[i][:3]) for step in executor.steps for i in step
    ]
    assert names == ["fir"] * 3 + ["hig"] * 3 + ["low"] * 3


def test_usage_tells_what_the_prefix_cache_had() -> None:
    """Nothing of a new prompt, whole blocks of one seen before, and not twice for two answers."""
    from server_support import byte_tokenizer

    from kimik3_lab.serving import CacheConfig, Engine, Scheduler, SchedulerConfig
    from kimik3_lab.serving.server import AsyncEngine, build_app

    cache = CacheConfig(99, block_size=16, enable_prefix_caching=True)
    client = AsyncEngine(Engine(Scheduler(SchedulerConfig(4, 256, 256), cache), EchoExecutor()))
    end = Endpoint(build_app(client, byte_tokenizer(), "echo", 256), None, client, None)
    long, short = "x" * 40, "y" * 20
    bodies = [
        {"prompt": prompt, "max_tokens": 4, "n": n}
        for prompt, n in ((long, 1), (long, 1), ([long, short], 2), (short, 2))
    ]
    answers = checks.ask(end, *bodies)
    cached = [a.json()["usage"]["prompt_tokens_details"]["cached_tokens"] for a in answers]
    assert cached == [0, 32, 32, 16]
    (plain,) = checks.ask(endpoint(), bodies[0])
    assert "prompt_tokens_details" not in plain.json()["usage"]

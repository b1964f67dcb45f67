"""Large but legal bodies: they cost time, and nobody else's."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import httpx
import pytest
from endpoint_support import CHAT, COMPLETIONS, endpoint, talk
from server_support import http, post

from kimik3_lab.paths import default_model_dir
from kimik3_lab.serving.server import Tokenizer, bodies

#: Short texts, many of them; and many short messages.
MANY_PROMPTS = {"prompt": ["ab" * 50] * 100, "max_tokens": 1}
MANY_MESSAGES = {"messages": [{"role": "user", "content": "a"}] * 40, "max_tokens": 1}
#: What the server does not know goes to the template, and may be as long as the body.
LONG_EXTRA = {"messages": [{"role": "user", "content": "a", "notes": [["x"] * 9] * 9}]}


def threads_of(
    patch: pytest.MonkeyPatch, path: str, body: dict[str, Any], *, slow: float = 0.0
) -> tuple[set[bool], float]:
    """Send a body; whether its work was done by the event loop, and how long that was held up."""
    end = endpoint(max_model_len=1024)
    on_loop: set[bool] = set()
    loop_thread = 0

    def watched(function: Any) -> Any:
        def call(*arguments: Any, **settings: Any) -> Any:
            on_loop.add(threading.get_ident() == loop_thread)
            time.sleep(slow)
            return function(*arguments, **settings)

        return call

    for name in ("encode", "apply_chat_template"):
        patch.setattr(Tokenizer, name, watched(getattr(Tokenizer, name)))

    async def conversation() -> float:
        nonlocal loop_thread
        loop_thread = threading.get_ident()
        async with http(end.app) as client:
            asking = asyncio.create_task(client.post(path, json=body))
            longest, before = 0.0, time.monotonic()
            while not asking.done():
                await asyncio.sleep(0.005)
                longest = max(longest, time.monotonic() - before)
                before = time.monotonic()
            assert asking.result().status_code == 200, asking.result().text
            return longest

    return on_loop, talk(conversation(), 60)


@pytest.mark.parametrize(
    ("path", "body"), [(COMPLETIONS, MANY_PROMPTS), (CHAT, MANY_MESSAGES), (CHAT, LONG_EXTRA)]
)
def test_much_text_is_tokenized_beside_the_event_loop(
    monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    assert threads_of(monkeypatch, path, body)[0] == {False}


@pytest.mark.parametrize(
    ("path", "body"),
    [(COMPLETIONS, {"prompt": ["ab"] * 3}), (CHAT, {"messages": MANY_MESSAGES["messages"][:2]})],
)
def test_a_little_text_costs_no_thread(
    monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    assert threads_of(monkeypatch, path, body)[0] == {True}


def test_others_are_served_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompts take two seconds together."""
    _, longest = threads_of(monkeypatch, COMPLETIONS, MANY_PROMPTS, slow=0.02)
    assert longest < 1.0


def test_a_long_body_is_checked_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    checked_by: list[int] = []
    original = bodies._check

    def check(*arguments: Any) -> Any:
        checked_by.append(threading.get_ident())
        return original(*arguments)

    monkeypatch.setattr(bodies, "_check", check)
    for length in (10, 100_000):
        body = {"prompt": "a", "note": "x" * length}
        assert post(endpoint().app, COMPLETIONS, body).status_code == 200
    assert checked_by[0] == threading.get_ident() != checked_by[1]


def test_the_library_lets_other_threads_run_and_says_the_same() -> None:
    tokenizer = Tokenizer.load(default_model_dir())
    for text in ("def f(x):\n    return x\n" * 500, "\u00e9\u2603 <|im_end|>", ""):
        for special in (True, False):
            expected = tokenizer.encode(text, add_special_tokens=special)
            beside = tokenizer.encode(text, add_special_tokens=special, release_gil=True)
            assert beside == expected


def refusal(path: str, body: dict[str, Any]) -> dict[str, Any]:
    response: httpx.Response = post(endpoint(max_model_len=64).app, path, body)
    assert response.status_code == 400
    error: dict[str, Any] = response.json()["error"]
    assert len(error["message"]) < 1500
    return error


def test_too_many_messages() -> None:
    error = refusal(CHAT, {"messages": [{"role": "user", "content": ""}] * 2049})
    assert error["param"] == "messages" and "2049 messages are more than 2048" in error["message"]


def test_not_every_wrong_message_is_told() -> None:
    error = refusal(CHAT, {"messages": [{"role": 5, "content": "a"}] * 2000})
    assert error["param"] == "messages[0].role" and error["message"].endswith("; and 1990 more")


def test_what_costs_little_is_looked_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """No prompt is tokenized if a later one cannot be served."""
    monkeypatch.setattr(Tokenizer, "encode", lambda *_, **__: pytest.fail("tokenized"))
    wrong: list[list[int] | str] = [[999_999], [5] * 64, "a" * 5000]
    for prompt in wrong:
        assert refusal(COMPLETIONS, {"prompt": ["good", prompt]})["param"] == "prompt"

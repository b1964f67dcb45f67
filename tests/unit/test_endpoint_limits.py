"""Whom the endpoint turns away, and how."""

from __future__ import annotations

import endpoint_checks as checks
import pytest
from endpoint_support import COMPLETIONS, endpoint


def test_the_queue_is_bounded() -> None:
    checks.check_queue_limit()


def test_an_api_key() -> None:
    checks.check_api_key()


def test_a_body_that_is_too_long() -> None:
    checks.check_body_limit()


def test_a_shutdown_finishes_or_cleanly_ends_every_answer() -> None:
    checks.check_shutdown()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt": ["a"] * 1025}, "1025 prompts are more than 1024, got"),
        ({"stop": ["x"] * 33}, "33 stop strings are more than 32, got"),
        ({"n": 129}, "less than or equal to 128"),
        ({"logprobs": 21}, "less than or equal to 20"),
        ({"top_k": -2}, "greater than or equal to -1"),
        ({"min_p": 1.5}, "less than or equal to 1"),
        ({"priority": 2**31}, "less than"),
    ],
)
def test_a_request_that_asks_for_too_much(fields: dict[str, object], words: str) -> None:
    bad, good = checks.ask(endpoint(), {"prompt": "ab", **fields}, {"prompt": "ab"})
    assert bad.status_code == 400 and words in bad.json()["error"]["message"]
    assert good.status_code == 200
    assert COMPLETIONS


def test_top_logprobs_need_logprobs() -> None:
    messages = [{"role": "user", "content": "hi"}]
    (bad,) = checks.ask(
        endpoint(), {"messages": messages, "top_logprobs": 3}, path="/v1/chat/completions"
    )
    assert bad.status_code == 400 and "together with logprobs=true" in bad.text


def test_it_is_heard_on_this_machine_only_unless_told_otherwise() -> None:
    from kimik3_lab.serving.server import ServeOptions

    assert ServeOptions(model="m").host == "127.0.0.1"

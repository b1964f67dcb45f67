"""Every request that the server must refuse, and that it answers the next one."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from server_support import BOS, CHAT_TEMPLATE, EchoExecutor, byte_tokenizer, echo_app, post, run

from kimik3_lab.serving import CacheConfig, Engine, Scheduler, SchedulerConfig
from kimik3_lab.serving.server import AsyncEngine, Tokenizer, build_app
from kimik3_lab.serving.server.generation_config import GenerationConfig

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GOOD = {"model": "echo", "prompt": "abc", "max_tokens": 4}
HELLO = [{"role": "user", "content": "hello"}]


def refuse(path: str, body: Any, *, status: int = 400, param: str | None = ...) -> str:
    """Send a bad body; check the error's form and a good request after it; return the message."""

    async def talk(client: httpx.AsyncClient) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        bad = await client.post(path, content=content, headers=headers)
        good = await client.post(COMPLETIONS, json=GOOD)
        assert good.json()["choices"][0]["text"] == "abca"
        return bad

    response = run(echo_app(max_model_len=64), talk)
    assert response.status_code == status, response.text
    assert list(response.json()) == ["error"]
    error = response.json()["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert error["type"] == "invalid_request_error"
    if param is not ...:
        assert error["param"] == param
    return error["message"]


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("max_tokens", "many", 'valid integer, got "many" (a string)'),
        ("max_tokens", "16", 'valid integer, got "16" (a string)'),
        ("max_tokens", True, "valid integer, got true (a boolean)"),
        ("max_tokens", 1.5, "valid integer, got 1.5 (a number)"),
        ("max_tokens", 0, "greater than or equal to 1, got 0 (an integer)"),
        ("max_tokens", -3, "greater than or equal to 1, got -3 (an integer)"),
        ("max_completion_tokens", 0, "greater than or equal to 1, got 0 (an integer)"),
        ("temperature", "hot", 'valid number, got "hot" (a string)'),
        ("temperature", -0.1, "greater than or equal to 0, got -0.1 (a number)"),
        ("top_p", 0, "greater than 0, got 0"),
        ("top_p", 1.01, "less than or equal to 1, got 1.01"),
        ("seed", "lucky", 'valid integer, got "lucky"'),
        ("seed", -1, "greater than or equal to 0, got -1"),
        ("seed", 2**63, "less than 9223372036854775808"),
        ("stream", "yes", 'valid boolean, got "yes" (a string)'),
        ("ignore_eos", 1, "valid boolean, got 1 (an integer)"),
        ("stop", 5, "a string or a list of strings, got 5 (an integer)"),
        ("stop", ["a", 5], 'a string or a list of strings, got ["a", 5] (a list)'),
        ("stop", "", 'must not be empty, got "" (a string)'),
        ("n", 0, "greater than or equal to 1, got 0 (an integer)"),
        ("n", 129, "less than or equal to 128, got 129 (an integer)"),
        ("n", "1", 'valid integer, got "1" (a string)'),
        ("best_of", 3, "supports only 1 or null, got 3"),
        ("echo", True, "supports only false or null, got true"),
        ("logprobs", 21, "less than or equal to 20, got 21"),
        ("logprobs", True, "valid integer, got true (a boolean)"),
        ("model", 7, "valid string, got 7 (an integer)"),
        ("prompt", "", 'must not be empty, got "" (a string)'),
        ("prompt", [], "must not be empty, got [] (a list)"),
        ("prompt", ["a", ""], "must not be empty"),
        ("prompt", [[]], "must not be empty"),
        ("prompt", None, "a list of token ids, or a list of strings or of token-id lists"),
        ("prompt", 5, "got 5 (an integer)"),
        ("prompt", {"text": "hi"}, "(an object)"),
        ("prompt", [1, "a"], 'got [1, "a"] (a list)'),
        ("prompt", [True], "got [true] (a list)"),
        ("prompt", [0, 258], "token id 258 lies outside the vocabulary of 258 tokens (0 to 257)"),
        ("prompt", [-1], "token id -1 lies outside"),
    ],
)
def test_a_wrong_value_is_named(field: str, value: object, words: str) -> None:
    message = refuse(COMPLETIONS, {**GOOD, field: value}, param=field)
    assert words in message
    assert field in message or "token id" in message


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "at least 1 item"),
        ("hi", 'valid array, got "hi" (a string)'),
        ([5], "messages[0] should be an object, got 5 (an integer)"),
        ([{"content": "hi"}], "messages[0].role is missing"),
        ([*HELLO, {"role": "user", "content": 5}], "messages[1].content: expected a string or"),
        ([{"role": "user", "content": ["hi"]}], "text only"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "takes text only",
        ),
        ([{"role": "robot", "content": "hi"}], "no robots"),
    ],
)
def test_wrong_messages_are_named(messages: object, words: str) -> None:
    assert words in refuse(CHAT, {"messages": messages})


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "EOF"),
        (b"{", "EOF while parsing an object"),
        (b'{"prompt": "abc"', "EOF while parsing an object"),
        (b"prompt=abc", "expected value at line 1 column 1"),
        (b'"abc"', 'the body should be an object, got "abc" (a string)'),
        (b"[1]", "the body should be an object, got [1] (a list)"),
        (b"null", "the body should be an object, got null"),
        (b'{"prompt": "\xff"}', "invalid unicode"),
        (b'{"prompt": "\\ud800"}', "hex escape"),
        (b'{"prompt": ' + b"[" * 10_000, "recursion"),
        (b'{"prompt": "a", "temperature": NaN}', "finite number"),
        (b'{"max_tokens": 4}', "prompt is missing"),
    ],
)
def test_a_body_that_is_no_request(content: bytes, words: str) -> None:
    assert words in refuse(COMPLETIONS, content)


def test_every_wrong_field_is_told_at_once() -> None:
    message = refuse(COMPLETIONS, {"max_tokens": "x", "stream": 3})
    assert all(field in message for field in ("max_tokens", "stream", "prompt"))


def test_a_long_wrong_value_is_cut() -> None:
    assert len(refuse(COMPLETIONS, {**GOOD, "seed": "9" * 10_000})) < 200


def test_stream_options_without_a_stream() -> None:
    body = {**GOOD, "stream_options": {"include_usage": True}}
    assert "only together with stream=true" in refuse(COMPLETIONS, body)


@pytest.mark.parametrize("model", ["gpt-4", "", "\U0001f600"])
def test_another_model(model: str) -> None:
    message = refuse(COMPLETIONS, {**GOOD, "model": model}, status=404, param="model")
    assert "this server has 'echo'" in message


def test_a_prompt_longer_than_the_context() -> None:
    message = refuse(COMPLETIONS, {"prompt": "a" * 70}, param="prompt")
    assert "70 tokens" in message and "holds 64" in message and "at most 63" in message
    long_chat = [{"role": "user", "content": "a" * 70}]
    assert "holds 64" in refuse(CHAT, {"messages": long_chat}, param="messages")


def test_a_huge_prompt_is_refused_too() -> None:
    # Before it is encoded: that would hold up every other stream for seconds.
    assert "400000 characters" in refuse(COMPLETIONS, {"prompt": "ab" * 200_000})


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("wanted", [61, 10**30])
def test_more_tokens_than_the_context_has_room_for(field: str, wanted: int) -> None:
    message = refuse(COMPLETIONS, {"prompt": "abcd", field: wanted}, param=field)
    assert f"{field}={wanted}" in message and "at most 60" in message


def test_what_only_the_engine_can_refuse() -> None:
    """A cache too small for the request; the engine's own message reaches the client."""
    scheduler = Scheduler(SchedulerConfig(4, 64, 64), CacheConfig(num_blocks=3))
    app = build_app(AsyncEngine(Engine(scheduler, EchoExecutor())), byte_tokenizer(), "echo", 64)
    response = post(app, COMPLETIONS, {"prompt": ["abc", "a" * 50]})
    assert response.status_code == 400
    error = response.json()["error"]
    assert "need 4 blocks" in error["message"] and "cmpl-" not in error["message"]
    assert (error["param"], error["code"]) == ("max_tokens", "context_length_exceeded")
    assert not scheduler.requests  # the first prompt of the refused request is gone as well


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/v1", 404), ("GET", CHAT, 405)])
def test_an_unknown_path_or_method(method: str, path: str, status: int) -> None:
    response = run(echo_app(), lambda client: client.request(method, path))
    assert response.status_code == status
    assert path in response.json()["error"]["message"]


# -- what it accepts -----------------------------------------------------------------------------


def test_fields_it_does_not_know_are_ignored() -> None:
    extra = {"user": "me", "top_k": 5, "service_tier": "auto", "store": {"deep": [1]}}
    response = post(echo_app(), COMPLETIONS, {**GOOD, **extra})
    assert response.json()["choices"][0]["text"] == "abca"


UNSUPPORTED = {
    "logit_bias": ([{}], {"5": 100}),
    "presence_penalty": ([0, 0.0], 0.5),
    "frequency_penalty": ([0, 0.0], -0.5),
    "suffix": ([""], "end"),
    "response_format": ([{"type": "text"}], {"type": "json_object"}),
    "tool_choice": (["none", "auto"], "required"),
    "repetition_penalty": ([1, 1.0], 1.1),  # 1.0 comes with all of ``vllm bench serve``
    "min_tokens": ([0], 4),
    "stop_token_ids": ([[]], [5]),
    "bad_words": ([[]], ["no"]),
    "allowed_token_ids": ([], [5]),
    "structured_outputs": ([], {"regex": "a*"}),
}


@pytest.mark.parametrize("field", UNSUPPORTED)
def test_what_would_change_the_answer_is_refused_and_what_asks_for_nothing_is_not(
    field: str,
) -> None:
    neutral, value = UNSUPPORTED[field]
    message = refuse(COMPLETIONS, {**GOOD, field: value}, param=field)
    assert message.startswith(f"{field}: this server supports only ")
    assert field in refuse(CHAT, {"messages": HELLO, field: value}, param=field)
    for nothing in [*neutral, None]:
        assert post(echo_app(), COMPLETIONS, {**GOOD, field: nothing}).status_code == 200


def test_null_means_left_out() -> None:
    names = ("model", "max_completion_tokens", "temperature", "top_p", "seed", "stop", "n",
             "stream", "stream_options", "ignore_eos", "echo", "logprobs", "best_of")  # fmt: skip
    response = post(echo_app(), COMPLETIONS, {**GOOD, **dict.fromkeys(names)})
    assert response.json()["choices"][0]["text"] == "abca"


def test_the_content_type_does_not_matter() -> None:
    form = {"content-type": "application/x-www-form-urlencoded"}  # what curl -d sends
    content = json.dumps(GOOD).encode()
    response = run(echo_app(), lambda c: c.post(COMPLETIONS, content=content, headers=form))
    assert response.json()["choices"][0]["text"] == "abca"


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("ab", ["abab"]),
        (["ab", "cde"], ["abab", "cdec"]),
        ([2, 3], None),
        ([[2, 3], [4]], None),
        (["ab", [2, 3]], None),
    ],
)
def test_forms_of_a_prompt(prompt: Any, texts: list[str] | None) -> None:
    answer = post(echo_app(), COMPLETIONS, {"prompt": prompt, "max_tokens": 4}).json()
    assert answer["object"] == "text_completion"
    many = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(many)))
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    if texts is not None:
        assert [choice["text"] for choice in answer["choices"]] == texts
    prompt_tokens, completion_tokens = sum(map(len, many)), 4 * len(many)
    assert answer["usage"] == {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def test_chat_content_as_text_parts_and_limits() -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    body = {"messages": [{"role": "user", "content": parts}], "max_completion_tokens": 24}
    answer = post(echo_app(), CHAT, body).json()
    assert answer["object"] == "chat.completion"
    (choice,) = answer["choices"]
    # The template's text comes back, without the special token at its beginning.
    assert choice["message"] == {"role": "assistant", "content": "user: hel\nlo\nassistant:"}
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["prompt_tokens"] == 1 + len("user: hel\nlo\nassistant:")
    assert answer["usage"]["completion_tokens"] == 24


def test_a_chat_without_a_limit_fills_the_context_and_a_completion_takes_16() -> None:
    chat = post(echo_app(max_model_len=64), CHAT, {"messages": HELLO}).json()
    assert chat["usage"]["total_tokens"] == 64
    completion = post(echo_app(max_model_len=64), COMPLETIONS, {"prompt": "abc"}).json()
    assert completion["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize(
    ("template", "role"),
    [(CHAT_TEMPLATE, "system"), (CHAT_TEMPLATE + "{# developer #}", "developer")],
)
def test_a_developer_is_the_system_unless_the_template_knows_better(
    template: str, role: str
) -> None:
    tokenizer = Tokenizer(byte_tokenizer()._backend, {"chat_template": template})
    messages = [{"role": "developer", "content": "be brief"}, *HELLO]
    body = {"messages": messages, "max_tokens": len(role)}
    answer = post(echo_app(tokenizer=tokenizer), CHAT, body).json()
    assert answer["choices"][0]["message"]["content"] == role


def test_a_model_without_a_chat_template() -> None:
    app = echo_app(tokenizer=Tokenizer(byte_tokenizer()._backend, {}))
    response = post(app, CHAT, {"messages": HELLO})
    assert response.status_code == 400
    assert "no chat template" in response.json()["error"]["message"]


def test_health_models_and_documentation() -> None:
    async def talk(client: httpx.AsyncClient) -> None:
        assert (await client.get("/health")).status_code == 200
        (model,) = (await client.get("/v1/models")).json()["data"]
        assert (model["id"], model["root"], model["max_model_len"]) == ("echo", "here", 256)
        assert (await client.get("/v1/models/echo")).json() == model
        other = await client.get("/v1/models/org/other")
        assert (other.status_code, other.json()["error"]["code"]) == (404, "model_not_found")
        paths = (await client.get("/openapi.json")).json()["paths"]
        assert "$ref" not in json.dumps(paths[CHAT]["post"]["requestBody"])

    run(echo_app(model_root="here"), talk)


def test_end_tokens_and_ignore_eos() -> None:
    body = {"prompt": f"ab{'<eos>'}c", "max_tokens": 8}
    stopped = post(echo_app(), COMPLETIONS, body).json()
    assert stopped["choices"][0]["text"] == "ab"
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert stopped["usage"]["completion_tokens"] == 3
    further = post(echo_app(), COMPLETIONS, {**body, "ignore_eos": True}).json()
    assert further["choices"][0]["text"] == "abcabc"  # eight tokens, two of them the end token
    assert further["choices"][0]["finish_reason"] == "length"
    assert BOS not in further["choices"][0]["text"]


def test_sampling_settings_reach_the_engine() -> None:
    seen = []

    class Recording(EchoExecutor):
        def execute_model(self, output):
            seen.extend(new.sampling_params for new in output.scheduled_new_reqs)
            return super().execute_model(output)

    defaults = GenerationConfig(eos_token_ids=(1, 9), temperature=0.7, top_p=0.9)
    app = echo_app(Recording(), defaults=defaults)
    post(app, COMPLETIONS, {"prompt": "a"})
    asked = {"temperature": 0, "top_p": 1, "seed": 3, "max_tokens": 5, "ignore_eos": True}
    post(echo_app(Recording(), defaults=defaults), COMPLETIONS, {"prompt": "a", **asked})
    first, second = seen
    assert (first.temperature, first.top_p, first.stop_token_ids) == (0.7, 0.9, (9,))
    assert (second.temperature, second.top_p, second.seed, second.max_tokens) == (0, 1, 3, 5)
    assert second.ignore_eos and second.stop_token_ids == ()

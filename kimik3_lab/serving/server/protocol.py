"""The requests and answers of OpenAI's API, as far as this server speaks it.

Needs pydantic. Used by the server (lesson 10).

Types are strict: ``"16"`` is no number. Fields that this server does not know are accepted and
ignored, as vLLM does, because clients send many (``user``, ``store``, ``top_k`` ...). Fields that
ask for something in the answer that it cannot give (``n``, ``best_of``, ``echo``, ``logprobs``)
are refused unless they ask for nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    model_validator,
)

__all__ = [
    "ChatCompletionRequest",
    "ChatMessage",
    "CompletionRequest",
    "GenerationFields",
    "StreamOptions",
]

Positive = Annotated[int, Field(ge=1)]
FiniteFloat = Annotated[float, Field(allow_inf_nan=False)]


def _only(*allowed: object) -> BeforeValidator:
    """Refuse a field that asks for what this server cannot give."""

    def check(value: object) -> object:
        if type(value) not in {type(a) for a in allowed} or value not in allowed:
            raise ValueError(f"this server supports only {' or '.join(map(json.dumps, allowed))}")
        return value

    return BeforeValidator(check)


def _stop_strings(value: object) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if texts is None:
        return []
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError("expected a string or a list of strings")
    if not all(texts):
        raise ValueError("a stop string must not be empty")
    return texts


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def _prompts(value: object) -> list[str | list[int]]:
    """Bring the four forms of a prompt to a list of texts or token-id lists."""
    if isinstance(value, str) or (value and _is_ids(value)):
        value = [value]
    if not isinstance(value, list) or not all(isinstance(p, str) or _is_ids(p) for p in value):
        raise ValueError(
            "expected a string, a list of token ids, or a list of strings or of token-id lists"
        )
    if not value or not all(value):
        raise ValueError("a prompt must not be empty")
    return value


def _message_text(value: object) -> str:
    """Bring the forms of a message's content to one text."""
    if value is None:  # an assistant turn that only called tools
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("expected a string or a list of text parts")
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(
                'expected parts like {"type": "text", "text": "..."}: this server takes text only'
            )
        texts.append(part["text"])
    return "\n".join(texts)


class StreamOptions(BaseModel):
    """What a stream carries besides the text."""

    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationFields(BaseModel):
    """The fields that both kinds of request share."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    temperature: Annotated[FiniteFloat, Field(ge=0)] | None = None
    top_p: Annotated[FiniteFloat, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    stop: Annotated[list[str], BeforeValidator(_stop_strings)] = Field(default_factory=list)
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int | None, _only(1, None)] = None

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> GenerationFields:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options may be set only together with stream=true")
        return self

    @property
    def wanted_tokens(self) -> int | None:
        """Most tokens to generate, if the request says; the newer name wins."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with a chunk of token counts."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk carries the token counts so far."""
        options = self.stream_options
        return bool(self.include_usage and options and options.continuous_usage_stats)

    @property
    def ignored_fields(self) -> Mapping[str, Any]:
        """What the client sent and this server does not know."""
        return self.__pydantic_extra__ or {}


class CompletionRequest(GenerationFields):
    """Body of ``POST /v1/completions``."""

    prompt: Annotated[list[str | list[int]], BeforeValidator(_prompts)]
    best_of: Annotated[int | None, _only(1, None)] = None
    echo: Annotated[StrictBool | None, _only(False, None)] = None
    logprobs: Annotated[None, _only(None)] = None


class ChatMessage(BaseModel):
    """One turn of a chat; parts of its content are joined to one text."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Annotated[str, Field(min_length=1)]
    content: Annotated[str, BeforeValidator(_message_text)] = ""


class ChatCompletionRequest(GenerationFields):
    """Body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    logprobs: Annotated[StrictBool | None, _only(False, None)] = None

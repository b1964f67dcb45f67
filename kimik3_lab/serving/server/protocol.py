"""The requests and answers of OpenAI's API, as far as this server speaks it.

Needs pydantic. Used by the server (lesson 10).

Types are strict: ``"16"`` is no number. Fields that this server does not know are accepted and
ignored, as vLLM does, because clients send many (``user``, ``store``, ``tools`` ...). Fields that
ask for something in the answer that it cannot give (``best_of``, ``echo``, and those of
:mod:`~kimik3_lab.serving.server.unsupported`) are refused unless they ask for nothing.

Limits keep one request from taking the server away from all others: each answer of ``n`` is a
sequence of its own, stop strings are looked for after every token, and the engine sorts the
vocabulary for ``logprobs``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    WithJsonSchema,
    model_validator,
)

from kimik3_lab.serving.server.unsupported import UnsupportedFields, only

__all__ = [
    "ChatCompletionRequest",
    "ChatMessage",
    "CompletionRequest",
    "GenerationFields",
    "StreamOptions",
]

#: Most answers to a prompt (OpenAI's limit), prompts in a request, stop strings, messages of a
#: chat, and alternatives reported for a token (vLLM's default for ``--max-logprobs``, and OpenAI's
#: limit for chats).
MAX_ANSWERS = 128
MAX_PROMPTS = 1024
MAX_STOP_STRINGS = 32
MAX_MESSAGES = 2048
MAX_LOGPROBS = 20

Positive = Annotated[int, Field(ge=1)]
FiniteFloat = Annotated[float, Field(allow_inf_nan=False)]


def _stop_strings(value: object) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if texts is None:
        return []
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError("expected a string or a list of strings")
    if not all(texts):
        raise ValueError("a stop string must not be empty")
    if len(texts) > MAX_STOP_STRINGS:
        raise ValueError(f"{len(texts)} stop strings are more than {MAX_STOP_STRINGS}")
    return texts


#: How the forms look that a validator brings to one, for ``/openapi.json``.
_STRING = {"type": "string", "minLength": 1}
_IDS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
_STOP_SCHEMA = WithJsonSchema(
    {
        "anyOf": [
            _STRING,
            {"type": "array", "maxItems": MAX_STOP_STRINGS, "items": _STRING},
            {"type": "null"},
        ]
    }
)
_PROMPT_SCHEMA = WithJsonSchema(
    {
        "anyOf": [
            _STRING,
            _IDS,
            {
                "type": "array",
                "minItems": 1,
                "maxItems": MAX_PROMPTS,
                "items": {"anyOf": [_STRING, _IDS]},
            },
        ]
    }
)
_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"type": "string", "enum": ["text"]}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_CONTENT_SCHEMA = WithJsonSchema(
    {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART}, {"type": "null"}]}
)


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
    if len(value) > MAX_PROMPTS:
        raise ValueError(f"{len(value)} prompts are more than {MAX_PROMPTS}")
    return value


def _not_too_many_messages(value: object) -> object:
    if isinstance(value, list) and len(value) > MAX_MESSAGES:  # before each of them is looked at
        raise ValueError(f"{len(value)} messages are more than {MAX_MESSAGES}")
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


class GenerationFields(UnsupportedFields):
    """The fields that both kinds of request share."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    temperature: Annotated[FiniteFloat, Field(ge=0)] | None = None
    top_p: Annotated[FiniteFloat, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[FiniteFloat, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    stop: Annotated[list[str], BeforeValidator(_stop_strings), _STOP_SCHEMA] = Field(
        default_factory=list
    )
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_ANSWERS)] | None = None

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
    def limit_field(self) -> str:
        """Name of the field that limits the answer."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def num_answers(self) -> int:
        """Answers to each prompt."""
        return self.n or 1

    @property
    def num_top_logprobs(self) -> int | None:
        """How many alternatives to report for each token; None to report no probabilities."""
        raise NotImplementedError

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer says how likely its tokens were."""
        return self.num_top_logprobs is not None

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

    prompt: Annotated[list[str | list[int]], BeforeValidator(_prompts), _PROMPT_SCHEMA]
    best_of: Annotated[int | None, only(1, None)] = None
    echo: Annotated[StrictBool | None, only(False, None)] = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @property
    def num_top_logprobs(self) -> int | None:
        """How many alternatives to report for each token; None to report no probabilities."""
        return self.logprobs


class ChatMessage(BaseModel):
    """One turn of a chat; parts of its content are joined to one text."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Annotated[str, Field(min_length=1)]
    content: Annotated[str, BeforeValidator(_message_text), _CONTENT_SCHEMA] = ""


class ChatCompletionRequest(GenerationFields):
    """Body of ``POST /v1/chat/completions``."""

    messages: Annotated[
        list[ChatMessage],
        Field(min_length=1, max_length=MAX_MESSAGES),
        BeforeValidator(_not_too_many_messages),
    ]
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> ChatCompletionRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs may be set only together with logprobs=true")
        return self

    @property
    def num_top_logprobs(self) -> int | None:
        """How many alternatives to report for each token; None to report no probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

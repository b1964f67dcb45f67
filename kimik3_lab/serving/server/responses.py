"""The JSON that answers consist of, whole or in chunks.

Needs the standard library only. Used by the server (lesson 10).
"""

from __future__ import annotations

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kimik3_lab.serving.server.logprobs import chat_logprobs, completion_logprobs
from kimik3_lab.serving.server.output_text import Delta
from kimik3_lab.serving.server.tokenizer import Tokenizer

__all__ = ["Answer", "ChatAnswer", "CompletionAnswer", "to_json", "usage"]


def to_json(body: dict[str, Any]) -> str:
    """Write one event of a stream.

    ASCII only: some clients split a stream at every character that Unicode counts as a line end,
    and a model may well generate one.
    """
    return json.dumps(body, separators=(",", ":"))


def usage(
    prompt_tokens: int, completion_tokens: int, cached_tokens: int | None = None
) -> dict[str, Any]:
    """Token counts of a request.

    ``cached_tokens`` of the prompt came from the prefix cache; without one nothing is said of it.
    """
    counts: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
    if cached_tokens is not None:
        counts["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
    return counts


@dataclass
class Answer(ABC):
    """One answer of the server: its id and time, and how it writes what is generated.

    Parameters
    ----------
    model
        Name of the model.
    tokenizer
        Writes the tokens whose probabilities were asked for; None if they were not.
    """

    model: str
    tokenizer: Tokenizer | None = None
    id: str = field(init=False)
    created: int = field(init=False)

    #: Beginning of the id, and the ``object`` of a whole answer and of a chunk.
    id_prefix = ""
    whole_object = ""
    chunk_object = ""

    def __post_init__(self) -> None:
        self.id = f"{self.id_prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())

    def whole(self, choices: Sequence[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        """Write the answer to a request that does not stream."""
        return {**self._envelope(self.whole_object), "choices": list(choices), "usage": usage}

    def chunk(
        self, choices: Sequence[dict[str, Any]], usage: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Write one chunk of a stream."""
        body = {**self._envelope(self.chunk_object), "choices": list(choices)}
        return body if usage is None else {**body, "usage": usage}

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _choice(self, delta: Delta, content: dict[str, Any]) -> dict[str, Any]:
        return {
            "index": delta.index,
            **content,
            "logprobs": None if self.tokenizer is None else self._logprobs(delta, self.tokenizer),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }

    @abstractmethod
    def _logprobs(self, delta: Delta, tokenizer: Tokenizer) -> dict[str, Any]:
        """Write the probabilities of ``delta``."""

    @abstractmethod
    def choice(self, delta: Delta) -> dict[str, Any]:
        """Write a choice of a whole answer; ``delta`` holds all of its text."""

    @abstractmethod
    def choice_chunk(self, delta: Delta, *, first: bool) -> dict[str, Any]:
        """Write a choice of a chunk; ``first`` is the first of this choice."""


class CompletionAnswer(Answer):
    """Answer of ``/v1/completions``."""

    id_prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def choice(self, delta: Delta) -> dict[str, Any]:
        """Write a choice of a whole answer."""
        return self._choice(delta, {"text": delta.text})

    def choice_chunk(self, delta: Delta, *, first: bool) -> dict[str, Any]:
        """Write a choice of a chunk."""
        return self._choice(delta, {"text": delta.text})

    def _logprobs(self, delta: Delta, tokenizer: Tokenizer) -> dict[str, Any]:
        return completion_logprobs(delta.logprobs, tokenizer)


class ChatAnswer(Answer):
    """Answer of ``/v1/chat/completions``."""

    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def choice(self, delta: Delta) -> dict[str, Any]:
        """Write a choice of a whole answer."""
        return self._choice(delta, {"message": {"role": "assistant", "content": delta.text}})

    def choice_chunk(self, delta: Delta, *, first: bool) -> dict[str, Any]:
        """Write a choice of a chunk; the role comes with the first token, not before it.

        Benchmark clients take the first chunk with a choice for the first token.
        """
        role = {"role": "assistant"} if first else {}
        return self._choice(delta, {"delta": {**role, "content": delta.text}})

    def _logprobs(self, delta: Delta, tokenizer: Tokenizer) -> dict[str, Any]:
        return chat_logprobs(delta.logprobs, tokenizer)

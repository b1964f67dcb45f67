r"""How likely the tokens of an answer were, in the two forms of OpenAI's API.

Needs the standard library only. Used by the server (lesson 10).

A token is written as its text. One that is no whole character, which byte-level tokenizers have
many of, is written ``bytes:\xe2\x82`` as OpenAI's completions did, since as text all of them
would be the same U+FFFD; chats have its bytes besides. JSON has no minus infinity, so -9999 stands
for it, as in vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kimik3_lab.serving.server.output_text import PlacedLogprobs
from kimik3_lab.serving.server.tokenizer import Tokenizer

__all__ = ["chat_logprobs", "completion_logprobs"]

_LEAST = -9999.0


def completion_logprobs(entries: Sequence[PlacedLogprobs], tokenizer: Tokenizer) -> dict[str, Any]:
    """Write the ``logprobs`` of a choice of ``/v1/completions``.

    The chosen token is always among its alternatives, so there may be one more than asked for.
    """
    tokens = [_text(tokenizer.token_bytes(entry.token_id)) for entry, _ in entries]
    alternatives = []
    for token, (entry, _) in zip(tokens, entries, strict=True):
        top = {_text(tokenizer.token_bytes(i)): _number(logprob) for i, logprob in entry.top}
        alternatives.append({token: _number(entry.logprob)} | top)
    return {
        "text_offset": [offset for _, offset in entries],
        "token_logprobs": [_number(entry.logprob) for entry, _ in entries],
        "tokens": tokens,
        "top_logprobs": alternatives,
    }


def chat_logprobs(entries: Iterable[PlacedLogprobs], tokenizer: Tokenizer) -> dict[str, Any]:
    """Write the ``logprobs`` of a choice of ``/v1/chat/completions``."""

    def write(token_id: int, logprob: float) -> dict[str, Any]:
        content = tokenizer.token_bytes(token_id)
        return {"token": _text(content), "logprob": _number(logprob), "bytes": list(content)}

    return {
        "content": [
            {
                **write(entry.token_id, entry.logprob),
                "top_logprobs": [write(*alternative) for alternative in entry.top],
            }
            for entry, _ in entries
        ]
    }


def _text(content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


def _number(logprob: float) -> float:
    return logprob if logprob > _LEAST else _LEAST  # also for NaN

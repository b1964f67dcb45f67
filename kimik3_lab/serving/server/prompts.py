"""Prompts of a request: their tokens, and whether they fit.

Needs the standard library only, pydantic for the types. Used by the server (lesson 10).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kimik3_lab.serving.server.errors import APIError
from kimik3_lab.serving.server.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationFields,
)
from kimik3_lab.serving.server.tokenizer import Tokenizer, TokenizerError

__all__ = ["Prompts"]

_Result = TypeVar("_Result")

#: Characters in all from which on texts are tokenized beside the event loop, and messages from
#: which on a chat is written there, so that running streams go on.
_LONG_TEXT = 4096
_LONG_CHAT = 32


@dataclass(frozen=True)
class Prompts:
    """Turns prompts into tokens that the engine can take, or refuses them.

    All methods raise :class:`.errors.APIError` for what the client has to change.
    """

    tokenizer: Tokenizer
    max_model_len: int

    async def of_completion(self, body: CompletionRequest) -> list[list[int]]:
        """Return the tokens of each prompt."""
        texts = [prompt for prompt in body.prompt if isinstance(prompt, str)]
        for prompt in body.prompt:  # what costs little first: one of a thousand may be wrong
            if isinstance(prompt, str):
                self._check_characters(prompt, param="prompt")
            else:
                self._check(prompt, param="prompt")

        is_long = sum(map(len, texts)) > _LONG_TEXT

        def encode() -> list[list[int]]:
            return [
                self._encode(prompt, param="prompt", release_gil=is_long)
                if isinstance(prompt, str)
                else prompt
                for prompt in body.prompt
            ]

        return await _beside_loop(encode, is_long=is_long)

    async def of_chat(self, body: ChatCompletionRequest) -> list[int]:
        """Return the tokens of the chat up to the assistant's next turn."""
        is_long = (
            len(body.messages) > _LONG_CHAT
            or sum(len(message.content) for message in body.messages) > _LONG_TEXT
            or any(message.model_extra for message in body.messages)
        )

        def encode() -> list[int]:
            # What the server does not know of a message may matter to the template.
            messages = [message.model_dump() for message in body.messages]
            if "developer" not in (self.tokenizer.chat_template or ""):
                # OpenAI's newer name for the role; a template that has it makes a difference.
                for message in messages:
                    if message["role"] == "developer":
                        message["role"] = "system"
            try:
                text = self.tokenizer.apply_chat_template(messages)
            except TokenizerError as error:
                raise APIError(400, str(error), param="messages") from error
            self._check_characters(text, param="messages")
            return self._encode(
                text, param="messages", add_special_tokens=False, release_gil=is_long
            )

        return await _beside_loop(encode, is_long=is_long)

    def max_tokens(self, body: GenerationFields, prompt_len: int, default: int | None) -> int:
        """Return the most tokens to generate; without a ``default`` all that fit."""
        room = self.max_model_len - prompt_len
        wanted = body.wanted_tokens
        if wanted is None:
            return room if default is None else min(default, room)
        if wanted > room:
            param = body.limit_field
            raise APIError(
                400,
                f"{param}={wanted} and a prompt of {prompt_len} tokens make "
                f"{prompt_len + wanted}, but the context holds {self.max_model_len}: ask for at "
                f"most {room}",
                param=param,
                code="context_length_exceeded",
            )
        return wanted

    def _check_characters(self, text: str, *, param: str) -> None:
        """Refuse a text that is too long in whatever tokens, before time is spent on it."""
        if len(text) > self.max_model_len * self.tokenizer.longest_token:
            raise APIError(
                400,
                f"{param} has {len(text)} characters: even in the longest tokens that is more than "
                f"the {self.max_model_len} tokens that the context holds",
                param=param,
                code="context_length_exceeded",
            )

    def _encode(self, text: str, *, param: str, **how: bool) -> list[int]:
        try:
            token_ids = self.tokenizer.encode(text, **how)
        except TokenizerError as error:
            raise APIError(400, str(error), param=param) from error
        self._check(token_ids, param=param)
        return token_ids

    def _check(self, token_ids: Sequence[int], *, param: str) -> None:
        vocab_size = self.tokenizer.vocab_size
        if not token_ids:
            raise APIError(400, f"{param} has no tokens", param=param)
        if len(token_ids) >= self.max_model_len:
            raise APIError(
                400,
                f"the prompt has {len(token_ids)} tokens, but the context holds "
                f"{self.max_model_len}, prompt and answer together: shorten the prompt to at most "
                f"{self.max_model_len - 1} tokens",
                param=param,
                code="context_length_exceeded",
            )
        least, most = min(token_ids), max(token_ids)
        if least < 0 or most >= vocab_size:
            raise APIError(
                400,
                f"token id {least if least < 0 else most} lies outside the vocabulary of "
                f"{vocab_size} tokens (0 to {vocab_size - 1})",
                param=param,
            )


async def _beside_loop(work: Callable[[], _Result], *, is_long: bool) -> _Result:
    """Do short work at once, and long work in a thread, while the event loop serves others."""
    return await asyncio.to_thread(work) if is_long else work()

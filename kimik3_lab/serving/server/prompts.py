"""Prompts of a request: their tokens, and whether they fit.

Needs the standard library only, pydantic for the types. Used by the server (lesson 10).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from kimik3_lab.serving.server.errors import APIError
from kimik3_lab.serving.server.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationFields,
)
from kimik3_lab.serving.server.tokenizer import Tokenizer, TokenizerError

__all__ = ["Prompts"]

#: Texts longer than this are tokenized beside the event loop, so that running streams go on.
_LONG_TEXT = 4096


@dataclass(frozen=True)
class Prompts:
    """Turns prompts into tokens that the engine can take, or refuses them.

    All methods raise :class:`.errors.APIError` for what the client has to change.
    """

    tokenizer: Tokenizer
    max_model_len: int

    async def of_completion(self, body: CompletionRequest) -> list[list[int]]:
        """Return the tokens of each prompt."""
        prompts = []
        for prompt in body.prompt:
            token_ids = await self._encode(prompt) if isinstance(prompt, str) else prompt
            self._check(token_ids, param="prompt")
            prompts.append(token_ids)
        return prompts

    async def of_chat(self, body: ChatCompletionRequest) -> list[int]:
        """Return the tokens of the chat up to the assistant's next turn."""
        # What the server does not know of a message may matter to the template.
        messages = [message.model_dump() for message in body.messages]
        try:
            text = self.tokenizer.apply_chat_template(messages)
        except TokenizerError as error:
            raise APIError(400, str(error), param="messages") from error
        token_ids = await self._encode(text, add_special_tokens=False, param="messages")
        self._check(token_ids, param="messages")
        return token_ids

    def max_tokens(self, body: GenerationFields, prompt_len: int, default: int | None) -> int:
        """Return the most tokens to generate; without a ``default`` all that fit."""
        room = self.max_model_len - prompt_len
        wanted = body.wanted_tokens
        if wanted is None:
            return room if default is None else min(default, room)
        if wanted > room:
            param = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
            raise APIError(
                400,
                f"{param}={wanted} and a prompt of {prompt_len} tokens make "
                f"{prompt_len + wanted}, but the context holds {self.max_model_len}: ask for at "
                f"most {room}",
                param=param,
                code="context_length_exceeded",
            )
        return wanted

    async def _encode(
        self, text: str, *, add_special_tokens: bool = True, param: str = "prompt"
    ) -> list[int]:
        # Encoding holds the interpreter for seconds per megabyte, and every stream with it.
        most = self.max_model_len * self.tokenizer.longest_token
        if len(text) > most:
            raise APIError(
                400,
                f"{param} has {len(text)} characters: even in the longest tokens that is more than "
                f"the {self.max_model_len} tokens that the context holds",
                param=param,
                code="context_length_exceeded",
            )
        try:
            if len(text) <= _LONG_TEXT:
                return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
            return await asyncio.to_thread(
                self.tokenizer.encode, text, add_special_tokens=add_special_tokens
            )
        except TokenizerError as error:
            raise APIError(400, str(error), param=param) from error

    def _check(self, token_ids: Sequence[int], *, param: str) -> None:
        vocab_size = self.tokenizer.vocab_size
        if not token_ids:
            raise APIError(400, f"{param} has no tokens", param=param)
        for token_id in token_ids:
            if not 0 <= token_id < vocab_size:
                raise APIError(
                    400,
                    f"token id {token_id} lies outside the vocabulary of {vocab_size} tokens "
                    f"(0 to {vocab_size - 1})",
                    param=param,
                )
        if len(token_ids) >= self.max_model_len:
            raise APIError(
                400,
                f"the prompt has {len(token_ids)} tokens, but the context holds "
                f"{self.max_model_len}, prompt and answer together: shorten the prompt to at most "
                f"{self.max_model_len - 1} tokens",
                param=param,
                code="context_length_exceeded",
            )

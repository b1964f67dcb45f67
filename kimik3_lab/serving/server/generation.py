"""From a checked request to engine requests, and from their tokens to pieces of text.

Needs the standard library only, pydantic for the types. Used by the server (lesson 10).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from kimik3_lab.serving.request import Request, SamplingParams
from kimik3_lab.serving.server.async_engine import (
    AsyncEngine,
    EngineDeadError,
    EngineStepError,
    OutputStream,
)
from kimik3_lab.serving.server.errors import APIError
from kimik3_lab.serving.server.generation_config import GenerationConfig
from kimik3_lab.serving.server.output_text import Delta, OutputText
from kimik3_lab.serving.server.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationFields,
)
from kimik3_lab.serving.server.tokenizer import Detokenizer, Tokenizer, TokenizerError

__all__ = ["Generation", "Generator"]

#: Tokens of an answer when a completion does not say (OpenAI's default, and vLLM's).
_DEFAULT_MAX_TOKENS = 16
#: Texts longer than this are tokenized beside the event loop, so that running streams go on.
_LONG_TEXT = 4096


@dataclass
class Generation:
    """A request in the engine: its outputs turned into pieces of text."""

    stream: OutputStream
    texts: dict[str, OutputText]
    num_prompt_tokens: int

    @property
    def num_generated_tokens(self) -> int:
        """Tokens generated so far, all answers together."""
        return sum(text.num_tokens for text in self.texts.values())

    async def deltas(self) -> AsyncIterator[Delta]:
        """Yield what each token adds, in the order in which the engine makes them.

        Raises
        ------
        APIError
            If the engine fails.
        """
        try:
            async for output in self.stream:
                text = self.texts[output.request_id]
                for delta in text.add(output):
                    if delta.finish_reason == "error":
                        raise APIError(500, "the engine failed on this request")
                    if delta.finish_reason is not None:
                        # A stop string ends the text before the engine knows of it.
                        self.stream.abort(output.request_id)
                    yield delta
        except EngineStepError as error:
            raise APIError(500, str(error)) from error
        except EngineDeadError as error:
            raise APIError(503, str(error)) from error

    async def whole_texts(self) -> list[Delta]:
        """Wait for the end and return each answer in one piece."""
        pieces: dict[int, list[str]] = {text.index: [] for text in self.texts.values()}
        last: dict[int, Delta] = {}
        async for delta in self.deltas():
            pieces[delta.index].append(delta.text)
            last[delta.index] = delta
        return [
            Delta(index, "".join(parts), last[index].finish_reason, last[index].stop_reason)
            for index, parts in sorted(pieces.items())
        ]


@dataclass(frozen=True)
class Generator:
    """Starts requests: tokenizes, checks lengths, fills in defaults, hands over to the engine."""

    engine_client: AsyncEngine
    tokenizer: Tokenizer
    max_model_len: int
    defaults: GenerationConfig

    async def start_completion(self, body: CompletionRequest, answer_id: str) -> Generation:
        """Start one engine request for each prompt of ``body``."""
        prompts = []
        for prompt in body.prompt:
            token_ids = await self._encode(prompt) if isinstance(prompt, str) else prompt
            self._check_prompt(token_ids, param="prompt")
            prompts.append(token_ids)
        return await self._start(body, prompts, answer_id, default=_DEFAULT_MAX_TOKENS)

    async def start_chat(self, body: ChatCompletionRequest, answer_id: str) -> Generation:
        """Start the engine request for the assistant's next turn."""
        # What the server does not know of a message may matter to the template.
        messages = [message.model_dump() for message in body.messages]
        try:
            text = self.tokenizer.apply_chat_template(messages)
        except TokenizerError as error:
            raise APIError(400, str(error), param="messages") from error
        token_ids = await self._encode(text, add_special_tokens=False, param="messages")
        self._check_prompt(token_ids, param="messages")
        return await self._start(body, [token_ids], answer_id, default=None)

    async def _start(
        self,
        body: GenerationFields,
        prompts: Sequence[list[int]],
        answer_id: str,
        *,
        default: int | None,
    ) -> Generation:
        eos_token_id, *further_ends = self.defaults.eos_token_ids or (None,)
        requests = [
            Request(
                f"{answer_id}-{index}",
                token_ids,
                SamplingParams(
                    max_tokens=self._max_tokens(body, len(token_ids), default),
                    temperature=_first_given(body.temperature, self.defaults.temperature),
                    top_p=_first_given(body.top_p, self.defaults.top_p),
                    seed=body.seed,
                    ignore_eos=bool(body.ignore_eos),
                    stop_token_ids=() if body.ignore_eos else further_ends,
                ),
                eos_token_id=eos_token_id,
                arrival_time=time.monotonic(),
            )
            for index, token_ids in enumerate(prompts)
        ]
        try:
            stream = await self.engine_client.submit(requests)
        except ValueError as error:
            raise APIError(400, str(error)) from error
        except EngineStepError as error:
            raise APIError(500, str(error)) from error
        except EngineDeadError as error:
            raise APIError(503, str(error)) from error
        texts = {
            request.request_id: OutputText(index, Detokenizer(self.tokenizer), body.stop)
            for index, request in enumerate(requests)
        }
        return Generation(stream, texts, sum(map(len, prompts)))

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

    def _check_prompt(self, token_ids: Sequence[int], *, param: str) -> None:
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

    def _max_tokens(self, body: GenerationFields, prompt_len: int, default: int | None) -> int:
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


def _first_given(asked: float | None, default: float) -> float:
    return default if asked is None else asked

"""From a checked request to engine requests, and from their tokens to pieces of text.

Needs the standard library only, pydantic for the types. Used by the server (lesson 10).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from kimik3_lab.serving.request import Request, SamplingParams
from kimik3_lab.serving.server.async_engine import AsyncEngine
from kimik3_lab.serving.server.engine_interface import (
    EngineDeadError,
    EngineStepError,
    EngineStoppingError,
    QueueFullError,
)
from kimik3_lab.serving.server.errors import APIError
from kimik3_lab.serving.server.generation_config import GenerationConfig
from kimik3_lab.serving.server.metrics import ServerMetrics
from kimik3_lab.serving.server.output_stream import OutputStream
from kimik3_lab.serving.server.output_text import Delta, OutputText
from kimik3_lab.serving.server.prompts import Prompts
from kimik3_lab.serving.server.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationFields,
)
from kimik3_lab.serving.server.tokenizer import Detokenizer

__all__ = ["Generation", "Generator"]

#: Tokens of an answer when a completion does not say (OpenAI's default, and vLLM's).
_DEFAULT_MAX_TOKENS = 16
#: Tokens of one answer that are written without a look at the other streams.
_BURST = 32
#: Seconds after which a client that was turned away may try again.
_RETRY_AFTER = {"Retry-After": "1"}


@dataclass
class Generation:
    """A request in the engine: its outputs turned into pieces of text."""

    stream: OutputStream
    texts: dict[str, OutputText]
    num_prompt_tokens: int
    wants_logprobs: bool = False
    #: Of each request that began: tokens of its prompt that the prefix cache had.
    cached: dict[str, int] = field(default_factory=dict)
    #: Answers to each prompt, whose requests follow one another.
    num_answers: int = 1

    @property
    def num_generated_tokens(self) -> int:
        """Tokens generated so far, all answers together."""
        return sum(text.num_tokens for text in self.texts.values())

    @property
    def num_cached_tokens(self) -> int | None:
        """Prompt tokens that the prefix cache had, None without one.

        A prompt counts once, by its first answer: those after it may find what that one left.
        """
        if not self.cached:
            return None
        first = list(self.texts)[:: self.num_answers]
        return sum(self.cached.get(request_id, 0) for request_id in first)

    async def deltas(self) -> AsyncIterator[Delta]:
        """Yield what each token adds, in the order in which the engine makes them.

        Raises
        ------
        APIError
            If the engine fails, or stops before the answer is complete.
        """
        try:
            async for output in self.stream:
                if self.wants_logprobs and len(output.logprobs) != len(output.token_ids):
                    raise APIError(500, "this server's executor computes no logprobs")
                if output.num_cached_tokens is not None:
                    self.cached[output.request_id] = output.num_cached_tokens
                text = self.texts[output.request_id]
                for count, delta in enumerate(text.add(output), start=1):
                    _check_end(delta)
                    if delta.finish_reason is not None:
                        self.stream.end(
                            output.request_id,
                            reason=delta.finish_reason,
                            num_tokens=text.num_tokens,
                        )
                    yield delta
                    if count % _BURST == 0:  # a reader who was slow has many to catch up with
                        await asyncio.sleep(0)
        except (EngineStepError, EngineDeadError) as error:
            raise _refusal(error) from error

    async def whole_texts(self) -> list[Delta]:
        """Wait for the end and return each answer in one piece."""
        pieces: dict[int, list[Delta]] = {text.index: [] for text in self.texts.values()}
        async for delta in self.deltas():
            pieces[delta.index].append(delta)
        return [
            Delta(
                index,
                "".join(delta.text for delta in deltas),
                deltas[-1].finish_reason,
                deltas[-1].stop_reason,
                tuple(entry for delta in deltas for entry in delta.logprobs),
            )
            for index, deltas in sorted(pieces.items())
        ]


def _check_end(delta: Delta) -> None:
    """Refuse to pass off as an answer what is none."""
    if delta.finish_reason == "error":
        raise APIError(500, "the engine failed on this request")
    if delta.finish_reason == "abort":
        raise APIError(
            503,
            "the server is shutting down and has ended this answer before it was complete",
            code="server_shutting_down",
            headers=_RETRY_AFTER,
        )


def _refusal(error: Exception) -> APIError:
    """Say to the client why the engine did not take or finish its request."""
    if isinstance(error, QueueFullError):
        return APIError(429, str(error), code="queue_full", headers=_RETRY_AFTER)
    if isinstance(error, EngineStoppingError):
        return APIError(503, str(error), code="server_shutting_down", headers=_RETRY_AFTER)
    return APIError(503 if isinstance(error, EngineDeadError) else 500, str(error))


@dataclass(frozen=True)
class Generator:
    """Starts requests: tokenizes, checks lengths, fills in defaults, hands over to the engine."""

    engine_client: AsyncEngine
    prompts: Prompts
    defaults: GenerationConfig
    metrics: ServerMetrics

    async def start_completion(self, body: CompletionRequest, answer_id: str) -> Generation:
        """Start the engine requests for the answers to each prompt of ``body``."""
        arrival_time = time.monotonic()
        self._check_admission(len(body.prompt) * body.num_answers)
        prompts = await self.prompts.of_completion(body)
        return await self._start(body, prompts, answer_id, arrival_time, _DEFAULT_MAX_TOKENS)

    async def start_chat(self, body: ChatCompletionRequest, answer_id: str) -> Generation:
        """Start the engine requests for the assistant's next turn."""
        arrival_time = time.monotonic()
        self._check_admission(body.num_answers)
        prompt = await self.prompts.of_chat(body)
        return await self._start(body, [prompt], answer_id, arrival_time, None)

    def _check_admission(self, num_requests: int) -> None:
        """Refuse before anything is tokenized what would be refused in the end."""
        limit = self.engine_client.max_num_queued_reqs
        if limit is not None and num_requests > limit:
            raise APIError(
                400,
                f"the request asks for {num_requests} answers, prompts times n, and this server "
                f"has at most {limit} in flight: ask for fewer at a time",
            )
        try:
            self.engine_client.check_admission(num_requests)
        except (QueueFullError, EngineDeadError) as error:
            raise _refusal(error) from error

    async def _start(
        self,
        body: GenerationFields,
        prompts: Sequence[list[int]],
        answer_id: str,
        arrival_time: float,
        default_max_tokens: int | None,
    ) -> Generation:
        eos_token_id, *further_ends = self.defaults.eos_token_ids or (None,)
        requests = [
            Request(
                f"{answer_id}-{place * body.num_answers + number}",
                token_ids,
                SamplingParams(
                    max_tokens=self.prompts.max_tokens(body, len(token_ids), default_max_tokens),
                    temperature=_first_given(body.temperature, self.defaults.temperature),
                    top_p=_first_given(body.top_p, self.defaults.top_p),
                    top_k=max(body.top_k or 0, 0),  # -1 means all, too
                    min_p=body.min_p or 0.0,
                    seed=_seed(body.seed, number),
                    ignore_eos=bool(body.ignore_eos),
                    stop_token_ids=() if body.ignore_eos else further_ends,
                    logprobs=body.num_top_logprobs,
                ),
                eos_token_id=eos_token_id,
                arrival_time=arrival_time,
                priority=body.priority or 0,
            )
            for place, token_ids in enumerate(prompts)
            for number in range(body.num_answers)
        ]
        try:
            stream = await self.engine_client.submit(requests, text_may_end_first=bool(body.stop))
        except ValueError as error:  # more than the cache holds, even if it were alone
            message = str(error)
            for request in requests:  # its name means nothing to the client
                message = message.removeprefix(f"request {request.request_id}: ")
            raise APIError(
                400, message, param=body.limit_field, code="context_length_exceeded"
            ) from error
        except (QueueFullError, EngineStepError, EngineDeadError) as error:
            raise _refusal(error) from error
        for _ in prompts:
            self.metrics.answers_asked(body.num_answers)
        texts = {
            request.request_id: OutputText(index, Detokenizer(self.prompts.tokenizer), body.stop)
            for index, request in enumerate(requests)
        }
        num_prompt_tokens = sum(map(len, prompts))
        return Generation(
            stream, texts, num_prompt_tokens, body.wants_logprobs, num_answers=body.num_answers
        )


def _seed(seed: int | None, number: int) -> int | None:
    """Seed of an answer: each has its own, as in vLLM (``vllm/v1/engine/parallel_sampling.py``)."""
    return None if seed is None else (seed + number) % 2**63


def _first_given(asked: float | None, default: float) -> float:
    return default if asked is None else asked

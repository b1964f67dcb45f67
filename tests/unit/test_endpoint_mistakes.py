"""Servers that are wrong on purpose, each in one place, and the check that tells."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import aiohttp
import endpoint_checks as checks
import pytest
from sse_starlette import EventSourceResponse
from starlette.requests import Request

from kimik3_lab.serving.server import (
    async_engine,
    authentication,
    bodies,
    generation,
    logprobs,
    metrics,
    output_stream,
    output_text,
    streaming,
)

Patch = pytest.MonkeyPatch
AsyncEngine = async_engine.AsyncEngine
OutputStream = output_stream.OutputStream


class Mistake(NamedTuple):
    make: Callable[[Patch], None]
    check: Callable[[], None]


MISTAKES: list[Mistake] = []


def mistake(check: Callable[[], None]) -> Callable[[Callable[[Patch], None]], None]:
    """Register a wrong server and the check that must fail on it."""
    return lambda make: MISTAKES.append(Mistake(make, check))


@mistake(checks.check_many_streams)
def what_is_unread_is_lost(patch: Patch) -> None:
    patch.setattr(
        output_stream.RequestOutput,
        "extend",
        lambda self, later: setattr(self, "finish_reason", later.finish_reason),
    )


@mistake(checks.check_many_streams)
def what_is_unread_comes_twice(patch: Patch) -> None:
    original = output_stream.RequestOutput.extend

    def extend(self: Any, later: Any) -> None:
        later.token_ids += later.token_ids[-1:]
        original(self, later)

    patch.setattr(output_stream.RequestOutput, "extend", extend)


@mistake(checks.check_many_streams)
def streams_are_mixed(patch: Patch) -> None:
    """Somebody caches a text under the number of its answer."""
    cache: dict[int, Any] = {}

    def shared(index: int, *rest: Any) -> Any:
        return cache.setdefault(index, output_text.OutputText(index, *rest))

    patch.setattr(generation, "OutputText", shared)


@mistake(checks.check_slow_readers)
def every_unread_output_is_kept_by_itself(patch: Patch) -> None:
    numbers = itertools.count()

    def put(self: Any, output: Any) -> None:
        self._unread[next(numbers)] = output
        self._arrival.set()

    patch.setattr(OutputStream, "put", put)


@mistake(checks.check_clients_that_vanish)
def a_client_that_leaves_is_not_noticed(patch: Patch) -> None:
    patch.setattr(streaming._StreamResponse, "__call__", EventSourceResponse.__call__)


@mistake(checks.check_clients_that_vanish)
def aborted_requests_are_not_counted(patch: Patch) -> None:
    patch.setattr(
        metrics.ServerMetrics,
        "request_ended",
        lambda self, name, *_: self._progress.pop(name, None),
    )


@mistake(checks.check_random_failures)
def a_failed_answer_looks_complete(patch: Patch) -> None:
    patch.setattr(generation, "_check_end", lambda delta: None)


@mistake(checks.check_random_failures)
def a_failed_stream_just_stops(patch: Patch) -> None:
    async def events(*arguments: Any) -> Any:
        async for event in original(*arguments):
            yield event
            if '"error"' in event:
                return

    original = streaming._events
    patch.setattr(streaming, "_events", events)


@mistake(checks.check_shutdown)
def a_shutdown_passes_a_part_off_as_the_whole(patch: Patch) -> None:
    patch.setattr(generation, "_check_end", lambda delta: None)


@mistake(checks.check_shutdown)
def a_shutdown_waits_for_nobody(patch: Patch) -> None:
    original = AsyncEngine.drain
    patch.setattr(AsyncEngine, "drain", lambda self, timeout=0.0: original(self, 0.0))


@mistake(checks.check_shutdown)
def a_server_that_shuts_down_takes_more(patch: Patch) -> None:
    patch.setattr(AsyncEngine, "_check_running", lambda self: None)


@mistake(checks.check_seeds_of_answers)
def all_answers_have_one_seed(patch: Patch) -> None:
    patch.setattr(generation, "_seed", lambda seed, number: seed)


@mistake(checks.check_seeds_of_answers)
def a_prompt_counts_for_each_answer(patch: Patch) -> None:
    original = streaming.usage
    patch.setattr(streaming, "usage", lambda prompt, *rest: original(3 * prompt, *rest))


@mistake(checks.check_logprobs)
def offsets_count_tokens(patch: Patch) -> None:
    original = output_text.OutputText.add

    def add(self: Any, output: Any) -> Any:
        for number, delta in enumerate(original(self, output)):
            entries = tuple((entry, number) for entry, _ in delta.logprobs)
            yield output_text.Delta(delta.index, delta.text, delta.finish_reason, None, entries)

    patch.setattr(output_text.OutputText, "add", add)


@mistake(checks.check_logprobs)
def half_a_character_is_a_question_mark(patch: Patch) -> None:
    patch.setattr(logprobs, "_text", lambda content: content.decode(errors="replace"))


@mistake(checks.check_streamed_logprobs)
def a_chunk_has_all_probabilities_so_far(patch: Patch) -> None:
    def add(self: Any, output: Any) -> Any:
        seen = self.__dict__.setdefault("seen", [])
        for delta in original(self, output):
            seen += delta.logprobs
            yield output_text.Delta(delta.index, delta.text, delta.finish_reason, None, tuple(seen))

    original = output_text.OutputText.add
    patch.setattr(output_text.OutputText, "add", add)


@mistake(checks.check_queue_limit)
def a_request_counts_once_however_many_answers_it_has(patch: Patch) -> None:
    original = AsyncEngine.check_admission
    patch.setattr(AsyncEngine, "check_admission", lambda self, num_requests=1: original(self, 1))


@mistake(checks.check_queue_limit)
def ended_requests_count_for_ever(patch: Patch) -> None:
    class OnlyGrows(set):  # type: ignore[type-arg]
        def discard(self, name: str) -> None: ...

    original = AsyncEngine.__init__

    def init(self: Any, *arguments: Any, **settings: Any) -> None:
        original(self, *arguments, **settings)
        self._in_flight = OnlyGrows()

    patch.setattr(AsyncEngine, "__init__", init)


@mistake(checks.check_api_key)
def the_beginning_of_a_key_will_do(patch: Patch) -> None:
    original = authentication.RequireAPIKey.__init__

    def init(self: Any, app: Any, api_key: str) -> None:
        original(self, app, api_key)
        self.key = api_key

    def is_right(self: Any, authorization: str) -> bool:
        scheme, _, key = authorization.partition(" ")
        return scheme.lower() == "bearer" and bool(key) and self.key.startswith(key)

    patch.setattr(authentication.RequireAPIKey, "__init__", init)
    patch.setattr(authentication.RequireAPIKey, "_is_right", is_right)


@mistake(checks.check_api_key)
def only_the_generating_routes_are_guarded(patch: Patch) -> None:
    patch.setattr(authentication, "_GUARDED", "/v1/c")


@mistake(checks.check_body_limit)
def only_the_told_length_is_looked_at(patch: Patch) -> None:
    async def read(request: Request, limit: int) -> bytes:
        if int(request.headers.get("content-length", 0)) > limit:
            return await original(request, limit)
        return await request.body()

    original = bodies._read
    patch.setattr(bodies, "_read", read)


@pytest.mark.parametrize("wrong", MISTAKES, ids=lambda wrong: wrong.make.__name__)
def test_the_check_tells(wrong: Mistake, monkeypatch: Patch) -> None:
    wrong.make(monkeypatch)
    with pytest.raises((AssertionError, TimeoutError, aiohttp.ClientError)):
        wrong.check()

"""Requests that nobody thought of, made up by schemathesis from the endpoint's own description.

Whatever comes, the answer is one that ``/openapi.json`` describes, never a 5xx, and what the schema
forbids is refused. Afterwards nothing is left behind.
"""

from __future__ import annotations

import collections
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from endpoint_support import COMPLETIONS, Endpoint, LogprobsExecutor, echoed, endpoint, listening
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

GENERATING = ("/v1/completions", "/v1/chat/completions")


@pytest.fixture(scope="module")
def end() -> Iterator[Endpoint]:
    end = endpoint(LogprobsExecutor(), max_model_len=64, max_num_queued_reqs=256)
    with listening(end):
        yield end
        answer = httpx.post(end.url + COMPLETIONS, json={"prompt": "abc", "max_tokens": 4})
        assert answer.json()["choices"][0]["text"] == echoed("abc", 4)
    end.assert_nothing_is_left()


@pytest.fixture(scope="module")
def schema(end: Endpoint) -> Any:
    return schemathesis.openapi.from_url(end.url + "/openapi.json")


def explore(operation: Any, mode: GenerationMode, num_examples: int) -> dict[int, int]:
    """Send made-up requests; count the answers by status."""
    seen: dict[int, int] = collections.Counter()

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=num_examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    def send(case: Any) -> None:
        response = case.call()
        seen[response.status_code] += 1
        # That a context holds 64 tokens of 258 kinds is more than a schema can say, so requests
        # that it allows may still be refused.
        case.validate_response(response, excluded_checks=[positive_data_acceptance])

    send()
    return seen


@pytest.mark.parametrize("path", GENERATING)
def test_requests_that_the_schema_allows(schema: Any, path: str) -> None:
    seen = explore(schema[path]["POST"], GenerationMode.POSITIVE, 60)
    assert seen.keys() <= {200, 400, 404} and seen[200] > 5, seen


@pytest.mark.parametrize("path", GENERATING)
def test_requests_that_the_schema_forbids(schema: Any, path: str) -> None:
    seen = explore(schema[path]["POST"], GenerationMode.NEGATIVE, 60)
    assert seen.keys() <= {400, 404}, seen


@pytest.mark.parametrize("path", ["/health", "/version", "/metrics", "/v1/models"])
def test_what_only_tells(schema: Any, path: str) -> None:
    assert explore(schema[path]["GET"], GenerationMode.POSITIVE, 3).keys() == {200}


def test_the_description_is_whole_and_valid(end: Endpoint) -> None:
    description = httpx.get(end.url + "/openapi.json").json()
    assert set(description["paths"]) == {*GENERATING, "/health", "/version", "/metrics",
                                         "/v1/models", "/v1/models/{name}"}  # fmt: skip
    text = json.dumps(description["paths"]["/v1/completions"]["post"])
    for status in (200, 400, 401, 404, 413, 429, 500, 503):
        assert f'"{status}"' in text

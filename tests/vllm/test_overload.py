"""What vLLM says to one request too many: lesson 13 tells how it differs from the lab's server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.exceptions import MaxQueuedTokensError, QueueOverflowError
from vllm.v1.engine.async_llm import AsyncLLM


def house(*, requests: int, tokens: int, **bounds: int) -> Any:
    """As much of an engine's front as looks at its bounds; it notes which one refused."""
    refused: list[str] = []
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(
            **({"max_num_queued_reqs": None, "max_num_queued_tokens": None} | bounds)
        ),
        admission_stats=None,
        get_num_unfinished_requests=lambda: requests,
        get_num_queued_tokens=lambda: tokens,
        _record_admission_rejection=refused.append,
        refused=refused,
    )


def test_the_bound_counts_all_that_are_in_the_house() -> None:
    """Unfinished ones, so also those that run; a request is refused if it would be one too many."""
    full = house(requests=4, tokens=0, max_num_queued_reqs=4)
    with pytest.raises(QueueOverflowError) as refusal:
        AsyncLLM.check_admission(full)
    assert refusal.value.http_status == 503
    assert full.refused == ["max_num_queued_reqs"]
    AsyncLLM.check_admission(house(requests=3, tokens=0, max_num_queued_reqs=4))


def test_the_other_bound_counts_prompts_that_are_not_done() -> None:
    with pytest.raises(MaxQueuedTokensError) as refusal:
        AsyncLLM.check_admission(house(requests=2, tokens=8000, max_num_queued_tokens=8000))
    assert refusal.value.http_status == 503
    AsyncLLM.check_admission(house(requests=2, tokens=7999, max_num_queued_tokens=8000))


def test_without_a_bound_nobody_is_refused() -> None:
    AsyncLLM.check_admission(house(requests=10**6, tokens=10**9))

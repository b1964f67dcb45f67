"""Settings that cannot work are refused when they are made, and the message names the knobs."""

from __future__ import annotations

import re
from typing import Any

import pytest

from kimik3_lab.serving import CacheConfig, Request, SamplingParams, Scheduler, SchedulerConfig
from kimik3_lab.serving.block_hash import BlockHasher
from kimik3_lab.serving.kv_cache_capacity import capacity_in_tokens
from kimik3_lab.serving.outputs import ModelRunnerOutput

GOOD: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 256}
DRAFTER = {"speculative_method": "dspark", "num_speculative_tokens": 4}
HYBRID = {"num_kda_groups": 1, "enable_prefix_caching": True}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"max_num_batched_tokens": -1}, ["max_num_batched_tokens"]),
        ({"max_num_batched_tokens": 0}, ["max_num_batched_tokens"]),
        ({"max_num_batched_tokens": 64.0}, ["max_num_batched_tokens"]),
        ({"max_num_seqs": 0}, ["max_num_seqs"]),
        ({"max_model_len": 1}, ["max_model_len"]),
        ({"max_num_scheduled_tokens": 0}, ["max_num_scheduled_tokens"]),
        ({"max_num_active_seqs": 5}, ["max_num_active_seqs", "max_num_seqs"]),
        ({"long_prefill_token_threshold": -3}, ["long_prefill_token_threshold"]),
        ({"prefill_schedule_interval": 0}, ["prefill_schedule_interval"]),
        ({"watermark": 1.0}, ["watermark"]),
        ({"watermark": -0.1}, ["watermark"]),
        ({"watermark": float("nan")}, ["watermark"]),
        ({"policy": "lifo"}, ["policy", "priority"]),
        ({"batching": "dynamic"}, ["batching", "continuous"]),
        ({"token_budget": "generous"}, ["token_budget", "adaptive"]),
        ({"num_speculative_tokens": 4}, ["num_speculative_tokens", "speculative_method"]),
        ({"speculative_method": "dspark"}, ["num_speculative_tokens", "speculative_method"]),
        ({**DRAFTER, "speculative_method": "oracle"}, ["speculative_method", "dspark"]),
        # K too large: for all seats at start-up, for one request, for a step that verifies.
        (
            {**DRAFTER, "num_speculative_tokens": 17, "token_budget": "static"},
            ["max_num_batched_tokens", "max_num_seqs", "num_speculative_tokens"],
        ),
        (
            {**DRAFTER, "num_speculative_tokens": 65, "token_budget": "adaptive"},
            ["max_num_batched_tokens", "num_speculative_tokens"],
        ),
        (
            {**DRAFTER, "num_speculative_tokens": 64},
            ["max_num_batched_tokens", "num_speculative_tokens"],
        ),
        (
            {**DRAFTER, "num_speculative_tokens": 40, "token_budget": "adaptive"},
            ["max_num_batched_tokens", "num_speculative_tokens"],
        ),
        (
            {**DRAFTER, "long_prefill_token_threshold": 3},
            ["long_prefill_token_threshold", "num_speculative_tokens"],
        ),
    ],
)
def test_scheduler_settings(change: dict[str, Any], named: list[str]) -> None:
    SchedulerConfig(**GOOD)
    with pytest.raises(ValueError, match=named[0]) as refusal:
        SchedulerConfig(**GOOD | change)
    for knob in named:
        assert re.search(rf"\b{knob}\b", str(refusal.value)), (knob, str(refusal.value))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_blocks": 1}, ["num_blocks"]),
        ({"num_blocks": -5}, ["num_blocks"]),
        ({"block_size": 0}, ["block_size"]),
        ({"num_kda_groups": -1}, ["num_kda_groups"]),
        ({"num_attention_groups": 0}, ["num_attention_groups"]),
        ({"dcp_world_size": 0}, ["dcp_world_size"]),
        ({**HYBRID, "prefix_match_unit": 5}, ["prefix_match_unit", "block_size"]),
        ({**HYBRID, "prefix_match_unit": 32}, ["prefix_match_unit", "block_size"]),
        ({**HYBRID, "prefix_match_unit": 0}, ["prefix_match_unit"]),
        ({"enable_prefix_caching": True, "prefix_match_unit": 8}, ["prefix_match_unit"]),
        ({**HYBRID, "retention_interval": 24}, ["retention_interval", "block_size"]),
        ({**HYBRID, "retention_interval": -16}, ["retention_interval"]),
        (
            {**HYBRID, "dcp_world_size": 4, "retention_interval": 16},
            ["retention_interval", "dcp_world_size"],
        ),
        ({"prefill_checkpoints": "internal"}, ["prefill_checkpoints", "num_kda_groups"]),
        ({**HYBRID, "prefill_checkpoints": "inside"}, ["prefill_checkpoints", "split"]),
        ({**HYBRID, "checkpoint_alignment": 0}, ["checkpoint_alignment"]),
        ({**HYBRID, "speculative_states": "ring"}, ["speculative_states", "records"]),
    ],
)
def test_cache_settings(change: dict[str, Any], named: list[str]) -> None:
    with pytest.raises(ValueError, match=named[0]) as refusal:
        CacheConfig(**{"num_blocks": 100, "block_size": 16} | change)
    for knob in named:
        assert re.search(rf"\b{knob}\b", str(refusal.value)), (knob, str(refusal.value))


@pytest.mark.parametrize(
    ("scheduler", "cache", "named"),
    [
        # A block fits the budget, but not beside the request's own draft slots.
        (
            {"speculative_method": "pard", "num_speculative_tokens": 8, "token_budget": "adaptive",
             "max_num_batched_tokens": 64},
            {**HYBRID, "block_size": 64},
            ["max_num_batched_tokens", "block_size"],
        ),
        # RecoverSSM writes at most one boundary state for a step: K + 1 tokens must fit a block.
        (
            {"speculative_method": "dspark", "num_speculative_tokens": 8},
            {**HYBRID, "block_size": 8, "speculative_states": "records"},
            ["num_speculative_tokens", "block_size"],
        ),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_together(
    scheduler: dict[str, Any], cache: dict[str, Any], named: list[str]
) -> None:
    config = SchedulerConfig(**GOOD | scheduler)
    with pytest.raises(ValueError, match=named[0]) as refusal:
        Scheduler(config, CacheConfig(**{"num_blocks": 400} | cache))
    for knob in named:
        assert re.search(rf"\b{knob}\b", str(refusal.value)), (knob, str(refusal.value))


@pytest.mark.parametrize(
    "cache",
    [
        {},
        {"num_attention_groups": 2},
        {**HYBRID, "num_kda_groups": 3},
        {"num_kda_groups": 3},
        {**HYBRID, "dcp_world_size": 4, "block_size": 4},
    ],
)
def test_a_request_is_accepted_exactly_if_it_can_be_computed_alone(cache: dict[str, Any]) -> None:
    """Neither refused though it fits, nor taken in to wait for ever."""
    from known_bugs_support import finish, prefix, request

    taken = set()
    for num_blocks in range(2, 60):
        one = Scheduler(
            SchedulerConfig(2, 32, 256), CacheConfig(**{"num_blocks": num_blocks} | cache)
        )
        try:
            one.add_request(request("a", prefix(0, 40), max_tokens=30))
        except ValueError as refusal:
            assert "num_blocks" in str(refusal)
            taken.add(False)
        else:
            finish(one)  # comes to its end, and is never preempted: it is alone
            taken.add(True)
    assert taken == {True, False}


def test_a_prompt_that_leaves_no_room_for_output_is_refused() -> None:
    one = Scheduler(SchedulerConfig(**GOOD), CacheConfig(100))
    with pytest.raises(ValueError, match="max_model_len=256"):
        one.add_request(Request("a", [5] * 256))
    one.add_request(Request("b", [5] * 255))


@pytest.mark.parametrize("value", [None, "x", float("nan"), True])
def test_a_watermark_is_a_number(value: Any) -> None:
    with pytest.raises(ValueError, match="watermark must be a number"):
        SchedulerConfig(4, 64, 64, watermark=value)


def test_a_switch_is_true_or_false() -> None:
    with pytest.raises(ValueError, match="async_scheduling must be True or False, got 1"):
        SchedulerConfig(4, 64, 64, async_scheduling=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="enable_prefix_caching must be True or False, got 'no'"):
        CacheConfig(9, enable_prefix_caching="no")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p"])
@pytest.mark.parametrize("value", [None, "1", float("nan"), False])
def test_a_sampling_parameter_is_a_number(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} must be a number"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("value", [None, 7, "seven"])
def test_token_ids_come_in_a_sequence(value: Any) -> None:
    with pytest.raises(ValueError, match="stop_token_ids must be a sequence of token ids"):
        SamplingParams(stop_token_ids=value)
    with pytest.raises(ValueError, match="prompt_token_ids must be a sequence of token ids"):
        Request("r", value)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"request_id": None}, "request_id"),
        ({"request_id": ""}, "request_id"),
        ({"priority": "high"}, "priority"),
        ({"arrival_time": float("nan")}, "arrival_time"),
    ],
)
def test_a_request_says_what_is_wrong_with_it(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Request(**{"request_id": "r", "prompt_token_ids": [5], **fields})


def test_more_drafts_than_there_is_room_for_are_refused() -> None:
    config = SchedulerConfig(4, 64, 64, speculative_method="ngram", num_speculative_tokens=2)
    scheduler = Scheduler(config, CacheConfig(9))
    scheduler.add_request(Request("a", [5, 6]))
    scheduler.update_from_output(scheduler.schedule(), ModelRunnerOutput(["a"], [[7]]))
    with pytest.raises(ValueError, match="a: 50 drafts, but num_speculative_tokens is 2"):
        scheduler.update_draft_token_ids({"a": [1] * 50})


def test_sizes_of_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="max_model_len must be at least 1"):
        capacity_in_tokens(CacheConfig(9), 0)
    with pytest.raises(ValueError, match="hash_block_size must be at least 1"):
        BlockHasher(0)

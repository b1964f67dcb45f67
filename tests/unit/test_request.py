"""Requests, sampling parameters and the knobs: what is accepted, refused and remembered."""

from __future__ import annotations

import pytest

from kimik3_lab.serving import CacheConfig, Request, RequestStatus, SamplingParams, SchedulerConfig


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", float("nan")),
        ("seed", -1),
        ("seed", 2**63),
        ("seed", 0.5),
        ("stop_token_ids", (3, -1)),
    ],
)
def test_sampling_params_out_of_range_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: value})


def test_sampling_params_accept_the_borders() -> None:
    params = SamplingParams(max_tokens=1, top_p=1.0, seed=0, stop_token_ids=[3, 4])
    assert params.greedy
    assert params.stop_token_ids == (3, 4)
    assert hash(params) == hash(SamplingParams(max_tokens=1, seed=0, stop_token_ids=(3, 4)))
    assert not SamplingParams(temperature=0.7).greedy


@pytest.mark.parametrize("prompt", [[], [-1], [1.0], [True], ["a"]])
def test_a_prompt_must_hold_token_ids(prompt: list[object]) -> None:
    with pytest.raises(ValueError, match="prompt"):
        Request("r", prompt)


def test_max_tokens_overrides_the_sampling_params_and_is_checked() -> None:
    params = SamplingParams(max_tokens=5, temperature=0.5)
    request = Request("r", [1], params, max_tokens=2)
    assert request.max_tokens == 2
    assert request.sampling_params.temperature == 0.5
    assert params.max_tokens == 5
    with pytest.raises(ValueError, match="max_tokens"):
        Request("r", [1], max_tokens=0)


def test_the_caller_keeps_its_prompt() -> None:
    prompt = [1, 2]
    request = Request("r", prompt)
    request.append_output_token_ids([7], max_model_len=10)
    request.prompt_token_ids.append(9)
    assert prompt == [1, 2]
    assert request.prompt_token_ids == [1, 2]
    assert request.output_token_ids == [7]
    assert request.all_token_ids == [1, 2, 7]
    assert (request.num_prompt_tokens, request.num_output_tokens, request.num_tokens) == (2, 1, 3)


@pytest.mark.parametrize(
    ("params", "tokens", "kept", "status", "stop_reason"),
    [
        (SamplingParams(max_tokens=9), [5, 6], [5, 6], RequestStatus.WAITING, None),
        (SamplingParams(max_tokens=2), [5, 6, 7], [5, 6], "FINISHED_LENGTH_CAPPED", None),
        (SamplingParams(max_tokens=9), [5, 1, 7], [5, 1], "FINISHED_STOPPED", None),
        (SamplingParams(max_tokens=9, ignore_eos=True), [1], [1], RequestStatus.WAITING, None),
        (SamplingParams(max_tokens=9, stop_token_ids=(8,)), [8, 5], [8], "FINISHED_STOPPED", 8),
        # An end token counts before a length, and a stop token is heard in spite of ignore_eos.
        (SamplingParams(max_tokens=1), [1], [1], "FINISHED_STOPPED", None),
        (
            SamplingParams(max_tokens=9, ignore_eos=True, stop_token_ids=(1,)),
            [1],
            [1],
            "FINISHED_STOPPED",
            1,
        ),
        # The prompt has three tokens and max_model_len is 8.
        (
            SamplingParams(max_tokens=99),
            [5, 5, 5, 5, 5, 5],
            [5, 5, 5, 5, 5],
            "FINISHED_LENGTH_CAPPED",
            None,
        ),
    ],
)
def test_how_a_request_ends(
    params: SamplingParams,
    tokens: list[int],
    kept: list[int],
    status: RequestStatus | str,
    stop_reason: int | None,
) -> None:
    request = Request("r", [2, 3, 4], params, eos_token_id=1)
    assert request.append_output_token_ids(tokens, max_model_len=8) == kept
    assert request.output_token_ids == kept
    assert request.status is (RequestStatus[status] if isinstance(status, str) else status)
    assert request.stop_reason == stop_reason


def test_finish_reasons_are_what_clients_expect() -> None:
    reasons = {status.name: status.finish_reason for status in RequestStatus if status.is_finished}
    assert reasons == {
        "FINISHED_STOPPED": "stop",
        "FINISHED_LENGTH_CAPPED": "length",
        "FINISHED_ABORTED": "abort",
        "FINISHED_ERROR": "error",
    }
    assert RequestStatus.PREEMPTED.finish_reason is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", 0),
        # 2048 - 15 * 256: a budget that a sum of other knobs has made negative.
        ("max_num_batched_tokens", -1792),
        ("max_num_batched_tokens", 512.0),
        ("max_model_len", 1),
        ("long_prefill_token_threshold", -1),
        ("batching", "dynamic"),
    ],
)
def test_scheduler_config_names_the_bad_knob(field: str, value: object) -> None:
    good = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 128}
    with pytest.raises(ValueError, match=f"{field}.*{value}"):
        SchedulerConfig(**{**good, field: value})


@pytest.mark.parametrize(
    ("field", "value"), [("num_blocks", 1), ("num_blocks", -4), ("block_size", 0)]
)
def test_cache_config_names_the_bad_knob(field: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{field}.*{value}"):
        CacheConfig(**{"num_blocks": 8, "block_size": 16, field: value})


def test_the_null_block_holds_nothing() -> None:
    assert CacheConfig(num_blocks=3, block_size=4).num_usable_tokens == 8

"""``/metrics``: vLLM's names, and numbers that add up."""

from __future__ import annotations

import asyncio
import re
import threading
from types import SimpleNamespace
from typing import Any

import endpoint_checks as checks
import pytest
from endpoint_support import COMPLETIONS, endpoint, talk
from server_support import EchoExecutor, SlowExecutor, http

from kimik3_lab.serving.engine import EngineStats
from kimik3_lab.serving.outputs import EngineCoreOutput, SchedulerStats
from kimik3_lab.serving.request import Request, RequestStatus, SamplingParams
from kimik3_lab.serving.server.metrics import ServerMetrics
from kimik3_lab.serving.spec_decode import SpecDecodingStats

#: Read in vLLM 0.27.1, ``vllm/v1/metrics/loggers.py``; with the suffix that Prometheus adds.
NAMES = {
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
    "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total", "vllm:num_preemptions_total",
    "vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:request_success_total",
    "vllm:request_prompt_tokens", "vllm:request_generation_tokens",
    "vllm:request_params_max_tokens", "vllm:request_params_n", "vllm:iteration_tokens_total",
    "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds",
    "vllm:request_time_per_output_token_seconds", "vllm:e2e_request_latency_seconds",
    "vllm:request_queue_time_seconds", "vllm:request_inference_time_seconds",
    "vllm:request_prefill_time_seconds", "vllm:request_decode_time_seconds",
    "vllm:admission_rejections_total",  # 0.33
}  # fmt: skip


class Turnstile:
    """In place of an executor's gate: lets a number of steps pass."""

    def __init__(self) -> None:
        self._steps = threading.Semaphore(0)

    def wait(self, timeout: float) -> bool:
        return self._steps.acquire(timeout=timeout)

    def let_pass(self, num_steps: int) -> None:
        self._steps.release(num_steps)


async def all_in_flight(end: Any, number: int) -> None:
    while end.client.num_in_flight < number:
        await asyncio.sleep(0.01)


def scrape(
    end: Any, *bodies: dict[str, Any], turnstile: Turnstile | None = None
) -> dict[str, float]:
    """Send requests, then read the metrics; with a turnstile, nothing runs before all are there."""

    async def conversation() -> dict[str, float]:
        async with http(end.app) as client:
            asked = [asyncio.create_task(client.post(COMPLETIONS, json=body)) for body in bodies]
            if turnstile is not None:
                await all_in_flight(end, len(bodies))
                turnstile.let_pass(10_000)
            answers = await asyncio.gather(*asked)
            assert all(answer.status_code == 200 for answer in answers)
            await asyncio.sleep(0.05)  # the engine's thread tells after the answer is out
            response = await client.get("/metrics")
            assert response.headers["content-type"].startswith("text/plain; version=")
            return end.metrics(response.text)

    return talk(conversation())


def test_names_and_labels() -> None:
    text = ServerMetrics("tiny", 64).text()
    families = set(re.findall(r"^# TYPE (vllm:\w+) ", text, flags=re.MULTILINE))
    families -= {name for name in families if name.endswith("_created")}
    assert families == NAMES
    for line in text.splitlines():
        if line.startswith("vllm:") and "admission" not in line:
            assert 'engine="0"' in line and 'model_name="tiny"' in line


def test_counts_of_a_known_load() -> None:
    values = scrape(
        endpoint(),
        {"prompt": "abc", "max_tokens": 5},
        {"prompt": ["a", "bcde"], "max_tokens": 9, "n": 2},
        {"prompt": "xy", "max_tokens": 50, "stop": "xyx"},
    )
    assert values["vllm:prompt_tokens_total"] == 3 + 2 * (1 + 4) + 2
    stopped = values["vllm:generation_tokens_total"] - 5 - 4 * 9
    assert 3 <= stopped <= 50  # the engine goes on until it hears of the stop string
    assert values["vllm:request_success_total:length"] == 1 + 4
    assert values["vllm:request_success_total:stop"] == 1
    assert values["vllm:request_params_n_sum"] == 1 + 2 + 2 + 1
    assert values["vllm:request_params_n_count"] == 4
    assert values["vllm:request_params_max_tokens_sum"] == 5 + 4 * 9 + 50
    assert values["vllm:time_to_first_token_seconds_count"] == 6
    assert values["vllm:iteration_tokens_total_sum"] == (
        values["vllm:prompt_tokens_total"] + values["vllm:generation_tokens_total"]
    )
    assert values["vllm:num_requests_running"] == values["vllm:num_requests_waiting"] == 0
    assert values["k3lab:scheduled_tokens_total"] > 0


@pytest.mark.parametrize("max_tokens", [2000, 4])
def test_a_stop_string_counts_as_the_client_is_told(max_tokens: int) -> None:
    """Whether the engine runs on for long when the text ends, or ends by length at once."""
    end = endpoint(SlowExecutor(), max_model_len=2048)
    body = {"prompt": "abc", "max_tokens": max_tokens, "stop": "ca"}

    async def conversation() -> tuple[dict[str, int], dict[str, float]]:
        async with http(end.app) as client:
            answer = (await client.post(COMPLETIONS, json=body)).json()
            assert answer["choices"][0]["text"] == "ab"
            assert answer["choices"][0]["finish_reason"] == "stop"
            while not (values := end.metrics((await client.get("/metrics")).text))[
                "vllm:request_success_total:stop"
            ]:
                await asyncio.sleep(0.01)
            return answer["usage"], values

    usage, values = talk(conversation(), 20)
    assert usage["completion_tokens"] == 4
    assert values["vllm:request_success_total:length"] == 0
    assert values["vllm:request_success_total:abort"] == 0
    assert values["vllm:request_prompt_tokens_sum"] == 3
    assert values["vllm:request_generation_tokens_sum"] == 4
    for name in ("e2e_request_latency", "request_queue_time", "request_inference_time",
                 "request_prefill_time", "request_decode_time",
                 "request_time_per_output_token"):  # fmt: skip
        assert values[f"vllm:{name}_seconds_count"] == 1, name
    decode = values["vllm:request_decode_time_seconds_sum"]
    assert 3 * 0.01 <= decode <= values["vllm:e2e_request_latency_seconds_sum"]


def test_a_client_that_leaves_a_finished_answer_unread_counts_as_the_engine_ended_it() -> None:
    metrics = ServerMetrics("tiny", 64)
    for name, told in (("a", True), ("b", False)):
        request = Request(name, [5, 6], SamplingParams(max_tokens=1), arrival_time=1.0)
        metrics.request_added(request, text_may_end_first=True)
        request.status = RequestStatus.RUNNING
        metrics.step_ended(2.0, 3.0, [EngineCoreOutput(name, [7], "length")])
        if told:
            metrics.request_ended(name, "length", 3.5, 1)
        metrics.request_ended(name, "abort", 9.0)  # twice does no harm
    values = checks.Endpoint.metrics(None, metrics.text())
    assert values["vllm:request_success_total:length"] == 2
    assert values["vllm:request_success_total:abort"] == 0
    assert values["vllm:e2e_request_latency_seconds_sum"] == 2 * (3.0 - 1.0)
    assert values["vllm:request_generation_tokens_sum"] == 2


def test_times_add_up() -> None:
    """One seat, three requests: who waits is told apart from who is computed."""
    end = endpoint(SlowExecutor(), max_num_seqs=1)
    values = scrape(end, *({"prompt": "abcd", "max_tokens": 11} for _ in range(3)))

    def total(name: str) -> float:
        assert values[f"vllm:{name}_seconds_count"] == 3
        return values[f"vllm:{name}_seconds_sum"]

    queue, prefill = total("request_queue_time"), total("request_prefill_time")
    decode, inference = total("request_decode_time"), total("request_inference_time")
    assert abs(prefill + decode - inference) < 1e-6
    assert abs(queue + inference - total("e2e_request_latency")) < 1e-6
    assert abs(queue + prefill - total("time_to_first_token")) < 1e-6
    assert queue > 0.9 * (1 + 2) * 11 * 0.01  # the second waits for one, the third for two
    assert prefill >= 3 * 0.01 and decode >= 3 * 10 * 0.01
    assert values["vllm:inter_token_latency_seconds_count"] == 3 * 10
    assert abs(values["vllm:inter_token_latency_seconds_sum"] - decode) < 1e-6
    assert abs(total("request_time_per_output_token") - decode / 10) < 1e-6


def test_gauges_while_requests_wait() -> None:
    executor, turnstile = EchoExecutor(), Turnstile()
    executor.gate = turnstile  # type: ignore[assignment]
    end = endpoint(executor, max_num_seqs=2, max_model_len=64)

    async def conversation() -> None:
        async with http(end.app) as client:

            async def values() -> dict[str, float]:
                return end.metrics((await client.get("/metrics")).text)

            bodies = [{"prompt": "a" * 20, "max_tokens": 40}] * 5
            asked = [asyncio.create_task(client.post(COMPLETIONS, json=body)) for body in bodies]
            await all_in_flight(end, 5)
            turnstile.let_pass(10)
            seen = await values()
            while seen["vllm:num_requests_running"] < 2 or not seen["vllm:num_requests_waiting"]:
                await asyncio.sleep(0.01)
                seen = await values()
            assert seen["vllm:num_requests_running"] == 2
            assert seen["vllm:num_requests_waiting"] == 3
            assert seen["vllm:kv_cache_usage_perc"] > 0.2
            turnstile.let_pass(10_000)
            await asyncio.gather(*asked)
            assert all(task.result().status_code == 200 for task in asked)

    talk(conversation())


def test_preemptions() -> None:
    # Room for one request of 64 tokens and a half: both start, and one has to give way.
    executor, turnstile = EchoExecutor(), Turnstile()
    executor.gate = turnstile  # type: ignore[assignment]
    end = endpoint(executor, max_model_len=64, num_blocks=7)
    bodies = [{"prompt": "ab" * 10, "max_tokens": 44}] * 2
    values = scrape(end, *bodies, turnstile=turnstile)
    assert values["vllm:num_preemptions_total"] >= 1
    # A request that starts again is not counted again, and has no second first token.
    assert values["vllm:prompt_tokens_total"] == 40
    assert values["vllm:generation_tokens_total"] == 88
    assert values["vllm:time_to_first_token_seconds_count"] == 2


def test_drafts_as_vllm_bench_serve_reads_them() -> None:
    drafts = SpecDecodingStats(3, 10, 30, 12, (7, 4, 1))
    scheduler = SchedulerStats(1, 2, 0.5, 3, 40, 16, spec_decoding_stats=drafts)
    metrics = ServerMetrics("tiny", 64)
    metrics.state_changed(SimpleNamespace(stats=lambda: EngineStats(9, 0, 99, 33, scheduler)))
    found: dict[str, float] = {}
    for line in metrics.text().split("\n"):
        name, _, value = line.partition(" ")
        if name.startswith("vllm:spec_decode"):
            found[name.replace('engine="0",model_name="tiny"', "")] = float(value)
    assert found == {
        "vllm:spec_decode_num_drafts_total{}": 10,
        "vllm:spec_decode_num_draft_tokens_total{}": 30,
        "vllm:spec_decode_num_accepted_tokens_total{}": 12,
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{,position="0"}': 7,
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{,position="1"}': 4,
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{,position="2"}': 1,
    }
    values = checks.Endpoint.metrics(None, metrics.text())
    assert values["vllm:prefix_cache_queries_total"] == 40
    assert values["vllm:prefix_cache_hits_total"] == 16
    assert values["vllm:num_requests_waiting"] == 2
    assert values["k3lab:engine_steps_total"] == 9


def test_two_servers_in_a_process_do_not_mix() -> None:
    one, other = endpoint(), endpoint()
    assert scrape(one, {"prompt": "abc", "max_tokens": 5})["vllm:prompt_tokens_total"] == 3
    assert scrape(other)["vllm:prompt_tokens_total"] == 0

"""The whole server on the tiny K3: sampling, probabilities, every switch, SIGTERM under load."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import time
from collections.abc import Iterator
from typing import Any

import aiohttp
import httpx
import pytest
import torch
from endpoint_support import COMPLETIONS, Streamed, session, stream, talk

from kimik3_lab.paths import default_model_dir
from kimik3_lab.reference import checkpoint
from kimik3_lab.reference.state import SequenceMixer
from kimik3_lab.serving import SamplingParams
from kimik3_lab.serving.executors.execution import ExecutionConfig
from kimik3_lab.serving.presets import LADDER, MAIN_2026_09_13
from kimik3_lab.serving.server import (
    RunningServer,
    ServeOptions,
    ServerStartError,
    Tokenizer,
    build_engine,
    start_in_background,
)
from kimik3_lab.serving.server.build_executor import _execution
from kimik3_lab.serving.server.engine_settings import EngineSettings, find_preset, preset_names

MODEL = default_model_dir()
#: Longer than a block, so that it can be found in the prefix cache.
PROMPT = "def main(argv):\n    parser = argparse.ArgumentParser()\n    parser.add_argument("


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    settings: dict[str, Any] = {"enable_prefix_caching": True, "num_speculative_tokens": 5}
    with start_in_background(
        MODEL, dtype="float64", threads=1, max_num_seqs=8, api_key="open sesame", **settings
    ) as running:
        yield running
    assert running.process.returncode == 0, running.log_tail()


@pytest.fixture
def client(server: RunningServer) -> Iterator[httpx.Client]:
    headers = {"authorization": "Bearer open sesame"}
    with httpx.Client(
        base_url=server.base_url, timeout=60, trust_env=False, headers=headers
    ) as opened:
        yield opened


def choices(client: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    response = client.post(COMPLETIONS, json={"prompt": PROMPT, "max_tokens": 10, **body})
    assert response.status_code == 200, response.text
    return list(response.json()["choices"])


def test_the_key_is_not_on_the_command_line(server: RunningServer) -> None:
    assert "sesame" not in " ".join(map(str, server.process.args))
    assert httpx.get(f"{server.base_url}/v1/models", trust_env=False).status_code == 401


def test_greedy_text_and_its_probabilities_are_the_models(client: httpx.Client) -> None:
    (choice,) = choices(client, logprobs=3)
    tokenizer = Tokenizer.load(MODEL)
    model = checkpoint.load(MODEL, dtype=torch.float64)
    prompt_ids = tokenizer.encode(PROMPT)
    token_ids = model.generate(prompt_ids, 10, stop_token_ids=())
    assert choice["text"] == tokenizer.decode(token_ids)
    with torch.inference_mode():
        logits = model(torch.tensor(prompt_ids + token_ids), SequenceMixer(model.new_state()))
    expected = logits[len(prompt_ids) - 1 : -1].log_softmax(-1)
    logprobs = choice["logprobs"]
    for place, token_id in enumerate(token_ids):
        assert abs(logprobs["token_logprobs"][place] - float(expected[place, token_id])) < 1e-6
        top = sorted(logprobs["top_logprobs"][place].values(), reverse=True)
        wanted = expected[place].topk(3).values.tolist()
        assert max(abs(a - b) for a, b in zip(top, wanted, strict=True)) < 1e-6
    assert "".join(logprobs["tokens"]) == choice["text"]


def test_answers_have_seeds_of_their_own_and_repeat(client: httpx.Client) -> None:
    sampled = {"temperature": 1.0, "top_p": 0.95}
    together = [c["text"] for c in choices(client, n=3, seed=7, **sampled)]
    alone = [choices(client, seed=7 + n, **sampled)[0]["text"] for n in range(3)]
    assert together == alone
    assert len(set(together)) > 1


def test_what_it_counts(client: httpx.Client) -> None:
    text = client.get("/metrics").text

    def value(name: str) -> float:
        return float(re.search(rf"^{name}{{[^}}]*}} (\S+)$", text, flags=re.MULTILINE)[1])

    assert value("vllm:spec_decode_num_drafts_total") > 0
    assert value("vllm:spec_decode_num_accepted_tokens_total") > 0
    assert value("vllm:prefix_cache_hits_total") > 0  # the same prompt more than once
    assert value("k3lab:executor_forwards_total") > 0
    assert value("k3lab:executor_drafter_forwards_total") > 0
    assert value("vllm:generation_tokens_total") >= 10


# -- SIGTERM under load --------------------------------------------------------------------------


def test_sigterm_under_load_ends_every_stream_cleanly() -> None:
    server = start_in_background(MODEL, threads=1, max_num_seqs=4, shutdown_timeout=1.0)
    url = server.base_url
    refused: list[int | str] = []

    async def knock(client: aiohttp.ClientSession) -> None:
        """Ask for more after the signal: a clean refusal, or nobody listens any more."""
        while True:
            try:
                async with client.post(url + COMPLETIONS, json={"prompt": "x"}) as response:
                    assert response.status == 503, await response.text()
                    refused.append((await response.json())["error"]["code"])
            except aiohttp.ClientConnectionError:
                refused.append("nobody")
                return
            await asyncio.sleep(0.05)

    async def conversation() -> list[Streamed]:
        async with session() as client:
            lengths = [3, 1500] * 5  # most of them wait: there are four seats
            bodies = [{"prompt": "x", "max_tokens": n, "ignore_eos": True} for n in lengths]
            asked = [asyncio.create_task(stream(client, url, body)) for body in bodies]
            while True:  # until all have been taken
                text = await (await client.get(url + "/metrics")).text()
                taken = re.search(r"vllm:request_params_n_sum{[^}]*} (\S+)", text)
                if taken and float(taken[1]) == len(bodies):
                    break
                await asyncio.sleep(0.02)
            server.process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.3)
            results = await asyncio.gather(*asked)
            await knock(client)
            return results

    began = time.monotonic()
    results = talk(conversation())
    server.process.wait(20)
    assert server.process.returncode == 0, server.log_tail()
    assert time.monotonic() - began < 30
    assert "Traceback" not in server.log_tail(1000)
    ended = 0
    for result, wanted in zip(results, [3, 1500] * 5, strict=True):
        assert result.status == 200 and result.done, result
        if result.error is None:
            assert result.finish_reason == "length" and len(result.chunks) == wanted
        else:
            ended += 1
            assert result.error["code"] == "server_shutting_down"
            assert result.finish_reason is None
    assert ended >= 5  # no long one came to its end
    assert refused[-1] == "nobody"
    server.stop()


# -- switches ------------------------------------------------------------------------------------


def settings(**switches: Any) -> EngineSettings:
    return EngineSettings.from_options(
        ServeOptions(model=MODEL, **switches),
        max_model_len=2048,
        num_layers={"mla": 4, "kda": 9},
        most_draft_tokens=7,
    )


@pytest.mark.parametrize("name", preset_names()[:-1])
def test_every_preset_can_be_served(name: str) -> None:
    preset = find_preset(name)
    made = settings(preset=name)
    for field, value in preset.cache.items():
        if field not in ("block_size", "num_kda_groups"):
            assert getattr(made.cache, field) == value
    for field, value in preset.scheduler.items():
        if field not in ("max_num_seqs", "num_speculative_tokens"):
            assert getattr(made.scheduler, field) == value
    assert made.scheduler.num_speculative_tokens == 7  # the published 8, but the drafter has 7
    assert made.cache.num_kda_groups == 3
    execution = _execution(ServeOptions(model=MODEL, preset=name), made)
    assert execution == ExecutionConfig.from_preset(preset)


def test_presets_that_cannot_be_served() -> None:
    with pytest.raises(ValueError, match="8 ranks, and this server is one"):
        settings(preset=LADDER[-1].name)
    with pytest.raises(ValueError, match=r"preset must be one of v0\.27\.1, batch-of-16384"):
        settings(preset="fastest")
    assert find_preset("main-2026-09-13") is find_preset("Main 2026-09-13") is MAIN_2026_09_13


@pytest.mark.parametrize(
    ("switch", "value", "where"),
    [
        ("policy", "priority", "scheduler.policy"),
        ("token_budget", "static", "scheduler.token_budget"),
        ("long_prefill_token_threshold", 64, "scheduler.long_prefill_token_threshold"),
        ("max_num_batched_tokens", 33, "scheduler.max_num_batched_tokens"),
        ("batching", "static", "scheduler.batching"),
        ("num_speculative_tokens", 4, "scheduler.num_speculative_tokens"),
        ("enable_prefix_caching", True, "cache.enable_prefix_caching"),
        ("prefix_match_unit", 8, "cache.prefix_match_unit"),
        ("prefill_checkpoints", "internal", "cache.prefill_checkpoints"),
        ("prefix_cache_retention_interval", 32, "cache.retention_interval"),
        ("speculative_states", "records", "cache.speculative_states"),
        ("num_blocks", 77, "cache.num_blocks"),
        ("block_size", 32, "cache.block_size"),
    ],
)
def test_a_switch_reaches_the_engine(switch: str, value: object, where: str) -> None:
    part, _, field = where.partition(".")
    needed = {} if part == "scheduler" else {"enable_prefix_caching": True}
    before = settings(**needed) if switch != "enable_prefix_caching" else settings()
    after = settings(**{**needed, switch: value})
    assert getattr(getattr(after, part), field) == value
    assert getattr(getattr(before, part), field) != value
    # With a preset beneath, it still counts.
    preset = settings(preset="recovery-records", **{switch: value})
    assert getattr(getattr(preset, part), field) == value


def test_switches_that_contradict_each_other() -> None:
    with pytest.raises(ValueError, match="drafter makes 7 at a time"):
        settings(num_speculative_tokens=8)
    with pytest.raises(ValueError, match=r"prefill_checkpoints='internal'"):
        settings(prefill_checkpoints="internal")
    assert settings(preset="v0.27.1", num_speculative_tokens=0).scheduler.speculative_method is None
    no_drafter = EngineSettings.from_options(
        ServeOptions(model=MODEL, preset="v0.27.1"),
        max_model_len=64,
        num_layers={"mla": 1, "kda": 3},
        most_draft_tokens=0,
    )
    assert no_drafter.scheduler.num_speculative_tokens == 0


def test_a_cache_made_for_the_switches_holds_every_sequence() -> None:
    """By default nothing is ever preempted, whatever is switched on."""
    for switches in (
        {},
        {"enable_prefix_caching": True},
        {"num_speculative_tokens": 7},
        {"preset": "recovery-records", "prefix_match_unit": 8},
    ):
        served = build_engine(
            ServeOptions(model=MODEL, max_num_seqs=2, max_model_len=48, threads=1, **switches)
        )
        prompts = [list(range(5, 45)), list(range(45, 85))]
        params = SamplingParams(max_tokens=8, ignore_eos=True)
        results = served.engine.generate(prompts, params, progress=False)
        assert [len(result.token_ids) for result in results] == [8, 8]
        assert served.engine.stats().scheduler.num_preemptions == 0


def test_a_drafter_that_cannot_be_read(tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ServerStartError, match=r"config\.json"):
        build_engine(ServeOptions(model=MODEL, drafter=tmp_path, num_speculative_tokens=3))

"""``vllm serve`` over HTTP: the same tokens, and a server that the lab's own client can measure."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from agreement import compare
from vllm_engine import Answer

from kimik3_lab.benchmark import load_result
from kimik3_lab.reference import checkpoint
from kimik3_lab.reference.model import K3ForCausalLM
from kimik3_lab.serving.server import Tokenizer

FOLDER = Path(__file__).resolve().parents[2] / "data" / "tiny-k3"
SCRIPTS = Path(sys.executable).parent
OPTIONS = (
    "--dtype", "float32", "--enforce-eager", "--no-enable-prefix-caching",
    "--attention-backend", "CPU_MLA", "--max-model-len", "512", "--max-num-seqs", "8",
    "--served-model-name", "tiny-k3", "--host", "127.0.0.1",
)  # fmt: skip
#: Seconds until it answers; a machine that is busy with other work needs most of them.
START_LIMIT = 600
GREEDY = {"model": "tiny-k3", "temperature": 0, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def base_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start ``vllm serve`` as a reader would, with several processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    log = tmp_path_factory.mktemp("server") / "log"
    environment = os.environ | {"VLLM_LOGGING_LEVEL": "INFO"}
    del environment["VLLM_ENABLE_V1_MULTIPROCESSING"]
    with log.open("w") as output:
        process = subprocess.Popen(
            [SCRIPTS / "vllm", "serve", FOLDER, "--port", str(port), *OPTIONS],
            stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + START_LIMIT
        while not _healthy(url):
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"vllm serve did not start:\n{log.read_text()[-4000:]}")
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with suppress(ProcessLookupError):  # engine and worker would outlive a server that hangs
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2).is_success
    except httpx.TransportError:
        return False


@pytest.fixture(scope="module")
def model() -> K3ForCausalLM:
    return checkpoint.load(FOLDER)


def _post(url: str, **body: Any) -> dict[str, Any]:
    response = httpx.post(url, json=GREEDY | body, timeout=120)
    assert response.is_success, response.text
    return response.json()


def _check(model: K3ForCausalLM, answer: Answer) -> None:
    agreement = compare(model, [answer])
    assert agreement.holds, agreement
    assert agreement.close_calls == 0, "choose another prompt: rounding may change this one"
    assert model.generate(answer.prompt, 24, stop_token_ids=()) == answer.tokens


def test_completion(base_url: str, model: K3ForCausalLM) -> None:
    text = "def main(argv):\n    return"
    body = _post(f"{base_url}/v1/completions", prompt=text, max_tokens=24, logprobs=1)
    (choice,) = body["choices"]
    assert choice["prompt_token_ids"] == Tokenizer.load(FOLDER).encode(text)
    logprobs = choice["logprobs"]["token_logprobs"]
    _check(model, Answer(choice["prompt_token_ids"], choice["token_ids"], [], logprobs))


def test_chat(base_url: str, model: K3ForCausalLM) -> None:
    messages = [
        {"role": "system", "content": "You are terse."},
        {"role": "user", "content": "How many experts has Kimi K3?"},
    ]
    url = f"{base_url}/v1/chat/completions"
    body = _post(url, messages=messages, max_completion_tokens=24, logprobs=True)
    (choice,) = body["choices"]
    tokenizer = Tokenizer.load(FOLDER)
    expected = tokenizer.encode(tokenizer.apply_chat_template(messages), add_special_tokens=False)
    assert body["prompt_token_ids"] == expected
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    _check(model, Answer(expected, choice["token_ids"], [], logprobs))


def test_the_lab_measures_it(base_url: str, tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    command = [
        SCRIPTS / "k3lab", "bench", "--base-url", base_url, "--tokenizer", FOLDER,
        "--concurrency", "2", "--num-requests", "6", "--warmup-requests", "1",
        "--prompt-tokens", "24", "--output-tokens", "8", "--output", output,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (cell,) = load_result(output).cells
    assert (cell.summary.completed, cell.summary.failed) == (6, 0)
    for record in cell.records:
        assert (record.output_tokens, record.output_tokens_from) == (8, "usage")
        # A token that ends within a character is held back and comes with the next one.
        assert 1 < len(record.token_times) <= 8
        assert record.ttft > 0
    # A client that is not let run for a while reads all chunks of an answer at once.
    assert any(record.tpot > 0 for record in cell.records)

"""The whole server: the tiny K3 in a process of its own, and every way not to start."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import httpx
import psutil
import pytest

from kimik3_lab.paths import default_model_dir
from kimik3_lab.serving import Request, SamplingParams
from kimik3_lab.serving.server import (
    RunningServer,
    ServeOptions,
    ServerStartError,
    Tokenizer,
    run,
    start_in_background,
)
from kimik3_lab.serving.server.launch import ServedModel, build_engine

MODEL = default_model_dir()
SERVE = [sys.executable, "-c", "from kimik3_lab.cli import main; main()", "serve"]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with start_in_background(MODEL, dtype="float64", threads=1, max_num_seqs=8) as running:
        yield running
    assert not running.is_running
    assert running.process.returncode == 0, running.log_tail()


@pytest.fixture
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.base_url, timeout=60, trust_env=False) as http:
        yield http


def stream_texts(response: httpx.Response) -> tuple[list[str], str | None]:
    """Read a stream of completions: its texts and the last reason to end."""
    texts, reason = [], None
    for line in response.iter_lines():
        if line.startswith("data: {"):
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                texts.append(choice["text"])
                reason = choice["finish_reason"]
    return texts, reason


def test_a_wrong_preset_is_told_before_anything_is_loaded() -> None:
    ended = subprocess.run(
        [*SERVE, "--preset", "nope"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "preset must be one of v0.27.1, " in ended.stderr


def test_what_a_killed_notebook_left_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernel ran nothing at its exit; the next one that starts a server clears up."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    left = tmp_path / f"k3lab-serve-{ended.pid}-abc"
    others = [tmp_path / "k3lab-serve-notes", tmp_path / f"k3lab-serve-{psutil.Process().ppid()}-x"]
    for folder in (left, *others):
        folder.mkdir()
        (folder / "server.log").write_text("loading", encoding="utf-8")
    with pytest.raises(ServerStartError, match="status 3"):
        start_in_background(MODEL, command=[sys.executable, "-c", "raise SystemExit(3)"])
    assert not left.exists()
    assert all((folder / "server.log").exists() for folder in others)


# -- a running server ----------------------------------------------------------------------------


def test_the_answer_is_what_the_model_generates(client: httpx.Client) -> None:
    import torch

    from kimik3_lab.reference import checkpoint

    tokenizer = Tokenizer.load(MODEL)
    prompt_ids = tokenizer.encode("def main():\n")
    model = checkpoint.load(MODEL, dtype=torch.float64)
    expected = tokenizer.decode(model.generate(prompt_ids, 12))
    body = {"prompt": prompt_ids, "max_tokens": 12}
    assert client.post("/v1/completions", json=body).json()["choices"][0]["text"] == expected
    with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        texts, _ = stream_texts(response)
    assert "".join(texts) == expected


def test_streams_at_the_same_time_give_what_each_gives_alone(client: httpx.Client) -> None:
    bodies = [{"prompt": f"item {n} of", "max_tokens": 6 + n, "ignore_eos": True} for n in range(8)]
    alone = [client.post("/v1/completions", json=b).json()["choices"][0]["text"] for b in bodies]
    together: dict[int, tuple[list[str], str | None]] = {}

    def read(number: int) -> None:
        body = {**bodies[number], "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as response:
            together[number] = stream_texts(response)

    threads = [threading.Thread(target=read, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, text in enumerate(alone):
        texts, reason = together[number]
        assert "".join(texts) == text
        assert (len(texts), reason) == (6 + number, "length")


def test_a_chat(client: httpx.Client) -> None:
    parts = [{"type": "text", "text": "hello"}]
    body = {"messages": [{"role": "user", "content": parts}], "max_completion_tokens": 3}
    answer = client.post("/v1/chat/completions", json=body).json()
    assert answer["model"] == "tiny-k3"
    assert answer["choices"][0]["message"]["role"] == "assistant"
    assert 1 <= answer["usage"]["completion_tokens"] <= 3


def test_a_bad_request_and_a_client_that_leaves(client: httpx.Client) -> None:
    assert client.post("/v1/completions", json={"prompt": 5}).status_code == 400
    long = {"prompt": "x", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    with client.stream("POST", "/v1/completions", json=long) as response:
        next(response.iter_lines())
    good = client.post("/v1/completions", json={"prompt": "x", "max_tokens": 2})
    assert good.status_code == 200
    assert client.get("/health").status_code == 200


def test_stopping_ends_a_running_stream_cleanly() -> None:
    server = start_in_background(MODEL, threads=1, max_num_seqs=2, port=free_port())
    long = {"prompt": "x", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    url = f"{server.base_url}/v1/completions"
    with httpx.stream("POST", url, json=long, timeout=60, trust_env=False) as response:
        lines = response.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGINT)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    error = json.loads(rest[-2].removeprefix("data: "))["error"]
    assert (error["type"], error["code"]) == ("server_error", "server_shutting_down")
    server.stop()
    assert server.process.returncode == 0, server.log_tail()
    assert "Traceback" not in server.log_tail(1000)
    server.stop()  # twice does no harm


@pytest.mark.slow
def test_a_server_does_not_outlive_the_process_that_started_it() -> None:
    code = (
        "import time; from kimik3_lab.serving.server import start_in_background;"
        "print(start_in_background(threads=1).pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 20
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the server outlived its parent"
        time.sleep(0.1)


# -- servers that do not start -------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def copy_of_model(folder: Path) -> Path:
    return Path(shutil.copytree(MODEL, folder / "model"))


def refusal(model: Path, **settings: object) -> str:
    """Return the one line that a server which cannot start gives; see that no port is open."""
    port = free_port()
    with pytest.raises(ServerStartError) as raised:
        run(ServeOptions(model=model, port=port, **settings))
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_a_missing_folder(tmp_path) -> None:
    assert "no model folder at" in refusal(tmp_path / "nothing")


def test_a_broken_config(tmp_path) -> None:
    model = copy_of_model(tmp_path)
    (model / "config.json").write_text('{"vocab_size": ')
    assert "config.json is not valid JSON" in refusal(model)
    (model / "config.json").unlink()
    assert "has no config.json" in refusal(model)


def test_a_broken_generation_config(tmp_path) -> None:
    model = copy_of_model(tmp_path)
    (model / "generation_config.json").write_text('{"temperature": "warm"}')
    assert "temperature must be a number, got 'warm'" in refusal(model)


def test_a_broken_tokenizer(tmp_path) -> None:
    model = copy_of_model(tmp_path)
    (model / "tokenizer.json").unlink()
    assert "no tokenizer at" in refusal(model)


def test_a_tokenizer_of_another_model(tmp_path) -> None:
    model = copy_of_model(tmp_path)
    file = model / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "vocab_size": 1000}))
    assert "do not belong together" in refusal(model)


@pytest.mark.parametrize("damage", ["cut", "gone", "garbage"])
def test_broken_weights(tmp_path, damage: str) -> None:
    model = copy_of_model(tmp_path)
    file = model / "model-00002-of-00002.safetensors"
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-1000])
    elif damage == "gone":
        file.unlink()
    else:
        file.write_bytes(b"not a checkpoint")
    message = refusal(model)
    assert "weights" in message and str(model) in message


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_model_len": 4096}, "more than the model's max_position_embeddings=2048"),
        ({"num_blocks": 1}, "num_blocks must be at least 2"),
        ({"host": "no.such.host.invalid"}, "cannot listen on host"),
        ({"host": "192.0.2.1"}, "This machine has no such address: leave --host out"),
        ({"device": "nope"}, "--device 'nope' is no device of PyTorch: expected cpu, cuda or"),
        ({"device": "meta"}, "--device 'meta' cannot be used here"),
        (
            {"max_model_len": 2048, "num_blocks": 65},
            "lower max_model_len to at most 1025, or raise",
        ),
        ({"num_blocks": 2, "enable_prefix_caching": True}, "cannot hold even two tokens: raise"),
        ({"num_blocks": 10**9}, "lower num_blocks"),
    ],
)
def test_settings_that_do_not_fit(settings: dict[str, object], words: str) -> None:
    assert words in refusal(MODEL, **settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"batching": "dynamic"}, "batching must be one of continuous, static, got 'dynamic'"),
        ({"port": 70000}, "port must lie between 0 and 65535"),
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1, got 0"),
        ({"shutdown_timeout": -1.0}, "shutdown_timeout must be 0 or more"),
        ({"api_key": "schlüssel"}, "api_key must be printable ASCII"),
        ({"api_key": "two\nlines"}, "api_key must be printable ASCII"),
        ({"api_key": "key "}, "without a blank at either end"),
    ],
)
def test_settings_out_of_range(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ServeOptions(model=MODEL, **settings)


def test_a_device_that_this_machine_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def zeros(*_: object, device: torch.device) -> torch.Tensor:
        raise AssertionError("Torch not compiled with CUDA enabled\nmore")

    monkeypatch.setattr(torch, "zeros", zeros)
    message = refusal(MODEL, device="cuda")
    assert "--device 'cuda' cannot be used here: Torch not compiled with CUDA enabled." in message


def test_a_small_cache_is_served_as_far_as_it_goes(caplog: pytest.LogCaptureFixture) -> None:
    """Whoever asks for no length gets what the blocks hold, and is told."""
    served = build_engine(ServeOptions(model=MODEL, num_blocks=65, max_num_seqs=2, threads=1))
    assert served.max_model_len == 64 * 16 + 1  # the last token is not computed, so not kept
    assert "max_model_len is 1025 and not 2048" in caplog.text
    assert "raise num_blocks to at least 129" in caplog.text
    served.engine.add_request(Request("longest", [5] * 1000, SamplingParams(max_tokens=25)))
    caplog.clear()
    served = build_engine(ServeOptions(model=MODEL, num_blocks=129, max_num_seqs=2, threads=1))
    assert served.max_model_len == 2048 and not caplog.text


def test_a_port_in_use_is_one_line_and_status_1() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = subprocess.run([*SERVE, "--port", str(port)], capture_output=True, text=True)
        assert ended.returncode == 1
        assert ended.stderr.count("\n") == 1, ended.stderr
        assert f"port {port}" in ended.stderr and "--port" in ended.stderr


def test_a_port_that_is_taken_while_the_model_loads() -> None:
    """Two servers may have reserved it: whoever is ready first gets it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", port))

        def build(options: ServeOptions) -> ServedModel:
            served = build_engine(options)
            other.listen()
            return served

        with pytest.raises(ServerStartError, match=f"port {port}: .*with --port"):
            run(ServeOptions(model=MODEL, port=port), build=build)


def test_the_background_start_tells_why_the_server_died(tmp_path) -> None:
    begin = time.monotonic()
    with pytest.raises(ServerStartError, match="no model folder at"):
        start_in_background(tmp_path / "nothing")
    assert time.monotonic() - begin < 30


def test_every_option_reaches_the_command_line() -> None:
    options = ServeOptions(
        model="m", host="::1", port=0, served_model_name="k", api_key="secret",
        max_num_queued_reqs=9, max_request_bytes=10, preset="v0.27.1", batching="static",
        policy="priority", token_budget="static", long_prefill_token_threshold=11,
        async_scheduling=True, max_num_seqs=2, max_num_batched_tokens=3, max_model_len=4,
        num_blocks=5, block_size=6,
        enable_prefix_caching=True, prefix_match_unit=12, prefill_checkpoints="internal",
        prefix_cache_retention_interval=13, speculative_states="records", num_speculative_tokens=14,
        drafter="d", draft_sample_method="probabilistic", rejection_sample_method="block",
        backend="triton", mixed_batch="gather", deferred_finalize=False, cuda_graphs=True,
        dtype="bfloat16", device="cuda", threads=7, log_level="error", shutdown_timeout=8.5,
    )  # fmt: skip
    unchanged = [f.name for f in fields(options) if getattr(options, f.name) == f.default]
    assert not unchanged, "give this test a value for them"
    words = options.command_line()
    assert "secret" not in "".join(words) + repr(options)
    usage = subprocess.run(
        [*SERVE, "--help"], capture_output=True, text=True, env={"COLUMNS": "300"}
    )
    flags = [word for word in words if word.startswith("--")]
    assert len(flags) == len(fields(options)) - 1  # all but the key
    assert all(flag in usage.stdout for flag in flags)
    assert "--no-deferred-finalize" in flags and "--cuda-graphs" in flags

"""The client against a scripted server: are its times and counts the true ones?"""

from __future__ import annotations

import asyncio
import io
import json
import socket
import statistics
import threading
import time
from itertools import accumulate, pairwise

import pytest
from fake_openai import FakeOpenAI, Reply

from kimik3_lab.benchmark import (
    BenchmarkConfig,
    BenchmarkResult,
    EndpointError,
    Window,
    Workload,
    run_benchmark,
    summarise,
)


@pytest.fixture(autouse=True)
def quick_provenance(monkeypatch):
    """Asking git for every run takes longer than the runs; test_bench_report keeps the real one."""
    monkeypatch.setattr("kimik3_lab.benchmark.client.provenance", lambda **options: {})


def run(server: FakeOpenAI, *, tokens: int = 8, **options: object) -> BenchmarkResult:
    defaults: dict = {"concurrency": (1,), "max_requests": 6, "timeout": 10}
    if "request_rate" in options:
        defaults.pop("concurrency")
    if "max_duration" in options:
        defaults.pop("max_requests")
    workload = options.pop("workload", None) or Workload.synthetic(5, tokens, seed=3)
    return run_benchmark(
        BenchmarkConfig(server.url, workload, **{**defaults, **options}), progress=False
    )


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_times_match_the_script(endpoint):
    reply = Reply(ttft=0.04, gap=0.01)
    with FakeOpenAI(reply) as server:
        result = run(server, endpoint=endpoint, max_requests=8)
    (cell,) = result.cells
    assert [r.status for r in cell.records] == ["completed"] * 8
    truth = []
    for record, seen in zip(cell.records, server.seen, strict=True):
        assert len(record.token_times) == 8
        ttft, e2e = seen.sent[0] - seen.arrived, seen.sent[-1] - seen.arrived
        # No token can be seen before it leaves, nor leaves before the script says.
        assert record.ttft >= ttft >= 0.04 and record.e2e >= e2e >= 0.11
        assert record.tpot == pytest.approx((record.e2e - record.ttft) / 7)
        truth.append((ttft, (e2e - ttft) / 7, e2e))
    # What the client adds is the way to the server and back. The server's own clock is the truth,
    # and medians hide the hiccups of a busy test machine.
    ttft, tpot, e2e = (statistics.median(column) for column in zip(*truth, strict=True))
    summary = summarise(cell.records, Window(0.0, cell.elapsed))
    assert summary.ttft_ms.median == pytest.approx(ttft * 1e3, abs=10)
    assert summary.tpot_ms.median == pytest.approx(tpot * 1e3, abs=1.5)
    assert summary.itl_ms.mean == pytest.approx(tpot * 1e3, rel=0.2)
    assert summary.e2e_s.median == pytest.approx(e2e, abs=0.01)
    assert server.seen[0].path == f"/v1/{'chat/' if endpoint == 'chat' else ''}completions"


def test_token_gaps_follow_the_server_clock():
    with FakeOpenAI(Reply(ttft=0.02, gap=0.02)) as server:
        result = run(server, max_requests=3, tokens=10)
    errors = []
    for record, seen in zip(result.cells[0].records, server.seen, strict=True):
        true = [b - a for a, b in pairwise(seen.sent)]
        errors += [abs(a - b) for a, b in zip(record.itl, true, strict=True)]
    assert len(errors) == 27
    assert statistics.median(errors) < 0.002


def test_ttft_is_the_first_thought_not_the_role_nor_the_first_content():
    for field in ("reasoning", "reasoning_content"):
        reply = Reply(ttft=0.06, gap=0.05, reasoning=5, reasoning_field=field)
        with FakeOpenAI(reply) as server:
            result = run(server, max_requests=2)
        for record in result.cells[0].records:
            # The role chunk comes at 0 ms, the first thought at 60, the first content at 310.
            assert 0.06 <= record.ttft < 0.25
            assert len(record.token_times) == record.output_tokens == 8


def test_trailing_wait_is_not_a_token():
    with FakeOpenAI(Reply(ttft=0.02, gap=0.01, linger=0.4)) as server:
        result = run(server, max_requests=2)
    for record in result.cells[0].records:
        assert record.e2e < 0.4
        assert record.tpot < 0.05


def test_usage_decides_and_chunks_stand_in():
    with FakeOpenAI(Reply(per_chunk=4, prompt_tokens=31)) as server:
        spoken = run(server).cells[0]
    assert {r.output_tokens for r in spoken.records} == {8}
    assert {len(r.token_times) for r in spoken.records} == {2}
    assert {r.prompt_tokens for r in spoken.records} == {31}
    assert spoken.summary.output_tokens_from == "usage"
    assert spoken.summary.tokens_per_chunk == 4
    assert any("4.00 tokens a chunk" in w for w in spoken.warnings)
    # TPOT stays a time a token: 5 ms between two chunks, 7 tokens after the first.
    assert [r.tpot for r in spoken.records] == pytest.approx([r.itl[0] / 7 for r in spoken.records])

    with FakeOpenAI(Reply(usage="none")) as server:
        silent = run(server).cells[0]
    assert {r.output_tokens for r in silent.records} == {8}
    assert silent.summary.output_tokens_from == "chunks"
    assert silent.summary.prompt_tokens is None
    assert any("counted chunks" in w for w in silent.warnings)

    with FakeOpenAI(Reply(usage="every")) as server:
        assert {r.output_tokens for r in run(server).cells[0].records} == {8}


@pytest.mark.parametrize(
    "reply",
    [
        Reply(done=False),
        Reply(finish=False),
        Reply(newline="\r\n"),
        Reply(split=True),
        Reply(role_chunk=False, usage="none"),
    ],
    ids=["no-done", "no-finish-reason", "crlf", "split-events", "bare"],
)
def test_dialects_of_the_stream(reply):
    with FakeOpenAI(reply) as server:
        records = run(server, max_requests=2).cells[0].records
    assert [(r.status, r.output_tokens) for r in records] == [("completed", 8)] * 2


def test_request_body():
    with FakeOpenAI() as server:
        run(
            server,
            temperature=1.0,
            extra_body={"top_p": 0.95, "max_completion_tokens": None},
            max_requests=1,
        )
        run(server, endpoint="completions", ignore_eos=False, max_requests=1)
    chat, plain = (seen.body for seen in server.seen)
    assert chat["messages"] == [{"role": "user", "content": chat["messages"][0]["content"]}]
    assert chat["max_tokens"] == 8 and chat["ignore_eos"] is True and chat["stream"] is True
    assert chat["stream_options"] == {"include_usage": True}
    assert chat["temperature"] == 1.0 and chat["top_p"] == 0.95
    assert "max_completion_tokens" not in chat
    assert plain["prompt"] == chat["messages"][0]["content"]  # same seed, same cell, same prompt
    assert "ignore_eos" not in plain and plain["model"] == "fake-model"


def test_closed_loop_keeps_its_streams_busy_and_counts():
    with FakeOpenAI(Reply(ttft=0.03, gap=0.005)) as server:
        result = run(server, concurrency=(4,), max_requests=20, tokens=5)
    (cell,) = result.cells
    assert cell.stop_reason == "max_requests" and len(server.seen) == 20
    events = sorted(
        [(r.start, 1) for r in cell.records] + [(r.end, -1) for r in cell.records],
    )
    active = list(accumulate(step for _, step in events))
    assert max(active) == 4
    assert 0.25 <= cell.elapsed < 0.75  # five rounds of 50 ms
    assert cell.summary.throughput.mean_concurrency == pytest.approx(4, abs=0.6)


def test_cell_of_a_set_duration():
    with FakeOpenAI(Reply(ttft=0.02, gap=0.01)) as server:
        result = run(server, concurrency=(3,), max_duration=1.5, tokens=4)
    (cell,) = result.cells
    summary = cell.summary
    assert cell.stop_reason == "max_duration"
    assert 1.5 <= cell.elapsed < 1.9
    assert (summary.window.open, summary.window.close) == pytest.approx((0.15, 1.35))
    assert summary.cancelled <= 3  # those in flight when time was up
    assert summary.attempted == summary.completed + summary.cancelled
    # The server's log, on the client's clock, says what left inside the window.
    offset = statistics.median(
        seen.arrived - record.start for record, seen in zip(cell.records, server.seen, strict=True)
    )
    left = [[moment - offset for moment in seen.sent] for seen in server.seen]
    ended = sum(len(times) == 4 and summary.window.contains(times[-1]) for times in left)
    tokens = sum(summary.window.contains(moment) for times in left for moment in times)
    rate = summary.throughput
    assert ended > 20
    assert rate.completed == pytest.approx(ended, abs=3)
    assert rate.requests_per_s == pytest.approx(rate.completed / 1.2)
    assert rate.output_tokens_per_s == pytest.approx(4 * rate.completed / 1.2)
    assert rate.observed_tokens_per_s == pytest.approx(tokens / 1.2, abs=6)
    assert rate.completed_by_littles_law == pytest.approx(rate.completed, rel=0.15)


def test_cells_and_warm_up_have_prompts_of_their_own():
    with FakeOpenAI(Reply(ttft=0.001, gap=0)) as server:
        result = run(server, concurrency=(1, 2), max_requests=4, warmup_requests=2, tokens=1)
    prompts = [seen.body["messages"][0]["content"] for seen in server.seen]
    assert len(prompts) == 12 == len(set(prompts))
    assert [cell.summary.attempted for cell in result.cells] == [4, 4]


def test_open_loop_does_not_wait_for_answers():
    # Answers take 400 ms, arrivals come every 20 ms: a closed loop could not send them in time.
    with FakeOpenAI(Reply(ttft=0.4, gap=0)) as server:
        result = run(server, request_rate=(50,), arrival="constant", max_requests=20, tokens=1)
    (cell,) = result.cells
    assert [r.scheduled for r in cell.records] == pytest.approx([i / 50 for i in range(20)])
    assert statistics.median(r.start - r.scheduled for r in cell.records) < 0.03
    assert all(r.start >= r.scheduled for r in cell.records)
    assert 19 / 50 + 0.4 <= cell.elapsed < 1.5
    assert cell.health.send_delay_max_ms is not None


def test_many_fast_streams_do_not_swamp_the_client():
    # 16 streams of 100 tokens a second; the server thread shares this process, which is harder
    # on the client than a real server.
    with FakeOpenAI(Reply(ttft=0.02, gap=0.01)) as server:
        result = run(server, concurrency=(16,), max_requests=32, tokens=40)
    (cell,) = result.cells
    assert {r.output_tokens for r in cell.records} == {40} and cell.summary.failed == 0
    assert cell.health.cpu_fraction < 0.7
    true = [b - a for seen in server.seen for a, b in pairwise(seen.sent)]
    assert cell.summary.itl_ms.median == pytest.approx(statistics.median(true) * 1e3, rel=0.1)
    assert cell.summary.itl_ms.mean == pytest.approx(statistics.mean(true) * 1e3, rel=0.1)


def test_failures_are_counted_and_listed():
    def reply(body, number):
        return Reply(status=500) if number % 3 == 1 else Reply()

    with FakeOpenAI(reply) as server:
        result = run(server, max_requests=9)
    summary = result.cells[0].summary
    assert (summary.attempted, summary.completed, summary.failed) == (9, 6, 3)
    assert not result.stopped_early
    ((text, count),) = result.errors.items()
    assert count == 3 and "HTTP 500" in text and "scripted failure" in text


@pytest.mark.parametrize(
    ("reply", "message", "tokens"),
    [
        (Reply(drop_after=3), "Payload", 3),
        (Reply(finish=False, done=False), "without finish_reason", 8),
        (Reply(error_after=2), "out of blocks", 2),
        (Reply(plain_json=True), "must support stream", 0),
        (Reply(insert=(4, '{"choices": ["word"]}')), "unknown form", 4),
        (Reply(insert=(1, '{"choices": ')), "not JSON", 1),
        (Reply(insert=(0, "[]")), "not a JSON object", 0),
        (Reply(insert=(2, '{"usage": {"prompt_tokens": -5}}')), "prompt_tokens=-5 in usage", 2),
        (Reply(insert=(2, '{"usage": {"completion_tokens": 1000000000000}}')), "cannot be", 2),
    ],
    ids=[
        "truncated",
        "silent-end",
        "error-event",
        "not-a-stream",
        "odd-choice",
        "cut-json",
        "list",
        "negative-usage",
        "absurd-usage",
    ],
)
def test_broken_streams_fail_with_a_reason(reply, message, tokens):
    with FakeOpenAI(reply) as server:
        records = run(server, max_requests=2).cells[0].records
    for record in records:
        assert record.status == "failed" and message in record.error
        assert len(record.token_times) == tokens


def test_timeout_is_a_failure():
    with FakeOpenAI(Reply(ttft=5)) as server:
        (record,) = run(server, max_requests=1, timeout=0.2).cells[0].records
    assert record.status == "failed" and "within 0.2 s" in record.error
    assert 0.2 <= record.e2e < 1


def test_max_errors_ends_the_run():
    with FakeOpenAI(Reply(status=503)) as server:
        result = run(server, concurrency=(2, 4), max_requests=100, max_errors=5)
    assert result.stopped_early and len(result.cells) == 1
    assert result.cells[0].stop_reason == "max_errors"
    assert 5 <= result.cells[0].summary.failed <= 6  # the other stream may fail meanwhile
    assert len(server.seen) <= 7
    with FakeOpenAI(Reply(status=503)) as server:
        run(server, max_requests=100, max_errors=3)
    assert len(server.seen) == 3
    assert any("stopped early" in warning for warning in result.cells[0].warnings)


def test_cached_tokens_are_called_out():
    with FakeOpenAI(Reply(prompt_tokens=40, cached_tokens=32)) as server:
        cell = run(server).cells[0]
    assert cell.summary.cached_tokens == 6 * 32
    assert any("192 prompt tokens (80% of all) from its prefix cache" in w for w in cell.warnings)
    with FakeOpenAI(Reply(cached_tokens=0)) as server:
        cell = run(server).cells[0]
    assert cell.summary.cached_tokens == 0
    assert not any("prefix cache" in warning for warning in cell.warnings)


def test_wrong_answer_length_is_called_out():
    with FakeOpenAI(Reply(tokens=3)) as server:
        cell = run(server).cells[0]
    assert any("6 of 6 answers do not have the length" in warning for warning in cell.warnings)


def test_endpoint_that_is_down_is_named_before_any_load():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = BenchmarkConfig(
        f"http://127.0.0.1:{port}/v1/", Workload.synthetic(4, 4), concurrency=(1,), max_requests=1
    )
    began = time.perf_counter()
    with pytest.raises(EndpointError, match=f"no answer from http://127.0.0.1:{port}/v1/models"):
        run_benchmark(config)
    assert time.perf_counter() - began < 5


@pytest.mark.parametrize(
    "ending", ["", "/", "/v1", "/v1/", "/v1/chat/completions", "/v1/completions"]
)
def test_base_url_as_people_paste_it(ending):
    config = BenchmarkConfig(
        f"http://host:1/prefix{ending}", Workload.synthetic(4, 4), concurrency=(1,), max_requests=1
    )
    assert config.url == "http://host:1/prefix/v1/chat/completions"


def test_model_and_key_are_settled_before_any_load():
    with FakeOpenAI(models=("one", "two"), api_key="secret") as server:
        with pytest.raises(EndpointError, match=r"refuses the API key \(HTTP 401\)"):
            run(server)
        with pytest.raises(EndpointError, match="does not serve 'three'; it serves 'one', 'two'"):
            run(server, api_key="secret", model="three")
        assert not server.seen
        result = run(server, api_key="secret", max_requests=1)
        assert result.model == "one" and "secret" not in json.dumps(result.configuration)
    with FakeOpenAI(models=None) as server:
        with pytest.raises(EndpointError, match="give the model name"):
            run(server)
        assert run(server, model="mine", max_requests=1).model == "mine"


def test_runs_inside_a_running_event_loop():
    async def cell_of_a_notebook(server):
        return run(server, max_requests=2)  # a plain call, as in Jupyter

    with FakeOpenAI() as server:
        result = asyncio.run(cell_of_a_notebook(server))
    assert result.cells[0].summary.completed == 2


@pytest.mark.parametrize("end", [{"max_requests": 8}, {"max_duration": 0.4}], ids=["count", "time"])
def test_progress_bar_on_a_terminal_only(monkeypatch, end):
    class Stream(io.StringIO):
        terminal = True

        def isatty(self):
            return self.terminal

    for terminal in (True, False):
        stream = Stream()
        stream.terminal = terminal
        monkeypatch.setattr("sys.stderr", stream)
        with FakeOpenAI(Reply(ttft=0.05, gap=0)) as server:
            workload = Workload.synthetic(4, 1, seed=1)
            run_benchmark(BenchmarkConfig(server.url, workload, concurrency=(1,), **end))
        text = stream.getvalue()
        assert ("c=1" in text and "failed=0" in text) if terminal else text == ""


def test_interrupt_ends_the_load(monkeypatch):
    def press_ctrl_c(*args):
        time.sleep(0.2)
        raise KeyboardInterrupt

    monkeypatch.setattr("kimik3_lab.benchmark.client._show_until_done", press_ctrl_c)
    with FakeOpenAI(Reply(ttft=0.01, gap=0)) as server:
        with pytest.raises(KeyboardInterrupt):
            run(server, max_duration=60)
        sent = len(server.seen)
        assert sent > 0
        time.sleep(0.2)
        assert len(server.seen) == sent
    assert not any(thread.name == "benchmark" for thread in threading.enumerate())


def test_fault_in_making_prompts_surfaces_as_itself(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with (
        FakeOpenAI() as server,
        pytest.raises(ValueError, match="is not a tokenizer"),
    ):
        run(server, workload=Workload.synthetic(5, 5, tmp_path))
    assert not server.seen


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"base_url": "localhost:8000"}, "must look like http"),
        ({"concurrency": ()}, "either concurrency"),
        ({"request_rate": (1.0,)}, "either concurrency"),
        ({"concurrency": (0,)}, "concurrency must be a whole number"),
        ({"concurrency": (), "request_rate": (0.0,)}, "request_rate must be a positive"),
        ({"max_requests": None}, "a cell needs an end"),
        ({"max_requests": 3, "concurrency": (1, 4)}, "cannot fill 4 streams"),
        ({"max_duration": float("nan")}, "max_duration must be a positive"),
        ({"warmup": 0.6, "cooldown": 0.4}, "must leave a window"),
        ({"endpoint": "embeddings"}, "endpoint must be"),
        ({"arrival": "bursty"}, "arrival must be"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": float("nan")}, "temperature must be a finite"),
        ({"warmup": float("nan")}, "warmup must be a finite"),
        ({"base_url": "http://me:secret@h"}, "must not hold a name or password"),
        ({"max_errors": 0}, "max_errors"),
    ],
)
def test_bad_configuration_says_what_is_wrong(options, message):
    defaults: dict = {
        "base_url": "http://h", "workload": Workload.synthetic(4, 4), "concurrency": (1,),
        "max_requests": 10,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        BenchmarkConfig(**{**defaults, **options})

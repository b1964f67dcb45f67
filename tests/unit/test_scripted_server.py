"""The scripted server: tokens at the times that were set, and nothing else different."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from kimik3_lab.serving import Request
from kimik3_lab.serving.server import ScriptedEngine, scripted, start_scripted


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A clock that stands still unless somebody sleeps."""
    state = SimpleNamespace(now=100.0)

    def sleep(seconds: float) -> None:
        state.now += seconds

    fake = SimpleNamespace(monotonic=lambda: state.now, sleep=sleep)
    monkeypatch.setattr(scripted, "time", fake)
    return state


def run(engine: ScriptedEngine, clock: Any) -> dict[str, list[float]]:
    """Step to the end; note when each token came, counted from the start."""
    times: dict[str, list[float]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert output.new_token_ids == [7]
            times.setdefault(output.request_id, []).append(clock.now - 100.0)
            assert output.finished == (output.finish_reason == "length")
    return times


def request(name: str, max_tokens: int, arrival_time: float = 100.0) -> Request:
    return Request(name, [1, 2, 3], max_tokens=max_tokens, arrival_time=arrival_time)


def test_tokens_come_when_the_script_says(clock: Any) -> None:
    engine = ScriptedEngine([0.5, 1.0], 0.25, token_id=7)
    for name, max_tokens in (("a", 3), ("b", 2), ("c", 1)):
        engine.add_request(request(name, max_tokens))
    times = run(engine, clock)
    # The third takes the first's turn again; that others run changes nothing.
    expected = {"a": [0.5, 0.75, 1.0], "b": [1.0, 1.25], "c": [0.5]}
    assert times.keys() == expected.keys()
    for name, moments in expected.items():
        assert times[name] == pytest.approx(moments, abs=1e-9)


def test_being_late_does_not_add_up(clock: Any) -> None:
    engine = ScriptedEngine([0.1], 0.1, token_id=7)
    engine.add_request(request("a", 5))
    clock.now += 0.25  # somebody held the interpreter
    assert run(engine, clock)["a"] == pytest.approx([0.25, 0.25, 0.3, 0.4, 0.5], abs=1e-9)


def test_the_clock_of_a_request_runs_from_its_arrival(clock: Any) -> None:
    engine = ScriptedEngine([0.5], 0.1, token_id=7)
    engine.add_request(request("a", 1, arrival_time=99.9))
    assert run(engine, clock)["a"] == pytest.approx([0.4], abs=1e-9)


def test_an_aborted_request_is_silent(clock: Any) -> None:
    engine = ScriptedEngine([0.1], 0.1, token_id=7)
    engine.add_request(request("a", 100))
    engine.add_request(request("b", 2))
    engine.abort("a")
    engine.abort("nobody")
    assert run(engine, clock).keys() == {"b"}


@pytest.mark.parametrize(("ttft", "tpot"), [([], 0.1), ([-0.1], 0.1), ([0.1], -0.1)])
def test_times_that_cannot_be(ttft: list[float], tpot: float) -> None:
    with pytest.raises(ValueError, match="times of at least 0 s"):
        ScriptedEngine(ttft, tpot, token_id=7)


def test_it_is_served_by_the_real_endpoint() -> None:
    with start_scripted([0.0], 0.0, host="0.0.0.0") as server:
        body = {"prompt": "x", "max_tokens": 6, "n": 2}
        answer = httpx.post(f"{server.base_url}/v1/completions", json=body, trust_env=False)
        assert [choice["text"] for choice in answer.json()["choices"]] == ["aaaaaa"] * 2
        assert "set an API key in K3LAB_API_KEY" in server.log_tail()
    assert server.process.returncode == 0


def test_a_script_that_makes_no_sense_is_a_message() -> None:
    command = [sys.executable, "-m", scripted.__name__, "--ttft", "soon", "--tpot", "0.1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "could not convert" in done.stderr
    assert "Traceback" not in done.stderr

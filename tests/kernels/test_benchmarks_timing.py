"""The timer, on a make-believe GPU with a clock of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from benchmarks import timing


class Gpu:
    """Runs calls at once, or notes them while a graph is recorded; every action moves the clock."""

    def __init__(self) -> None:
        self.now_us = 0.0
        self.recording: list[float] | None = None
        self.log: list[tuple[str, Any]] = []

    def kernel(self, name: str, us: float) -> Callable[[int], None]:
        def call(index: int) -> None:
            if self.recording is not None:
                self.recording.append(us)
                self.log.append((f"record {name}", index))
            else:
                self.now_us += us

        return call

    def synchronous(self, us: float) -> Callable[[int], None]:
        def call(index: int) -> None:
            if self.recording is not None:
                raise RuntimeError("operation not permitted when stream is capturing")
            self.now_us += us

        return call

    def torch(self) -> SimpleNamespace:
        gpu = self

        class Event:
            def __init__(self, **_: bool) -> None:
                self.at = 0.0

            def record(self) -> None:
                self.at = gpu.now_us

            def synchronize(self) -> None: ...

            def elapsed_time(self, end: Event) -> float:
                return (end.at - self.at) / 1e3

        class Graph:
            def __init__(self) -> None:
                self.kernels: list[float] = []

            def replay(self) -> None:
                gpu.log.append(("replay", self.kernels[0]))
                gpu.now_us += sum(self.kernels)

        @contextlib.contextmanager
        def record(graph: Graph) -> Iterator[None]:
            gpu.recording = graph.kernels
            try:
                yield
            finally:
                gpu.recording = None

        class Buffer:
            def sum(self) -> None:
                gpu.log.append(("flush", None))
                gpu.now_us += 80.0

        def ones(count: int, **_: object) -> Buffer:
            gpu.log.append(("buffer", 4 * count))
            return Buffer()

        stream = SimpleNamespace(wait_stream=lambda other: None)
        cuda = SimpleNamespace(
            Event=Event, CUDAGraph=Graph, graph=record, Stream=lambda: stream,
            current_stream=lambda: stream, stream=lambda s: contextlib.nullcontext(),
            synchronize=lambda: None, is_available=lambda: False,
        )  # fmt: skip
        return SimpleNamespace(cuda=cuda, ones=ones, float32="float32")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()
    monkeypatch.setattr(timing, "torch", gpu.torch())
    return gpu


def test_times_are_a_calls_own_and_taken_in_turns(gpu: Gpu) -> None:
    calls = {"a": gpu.kernel("a", 5.0), "b": gpu.kernel("b", 20.0)}
    result = timing.time_side_by_side(calls, sets=256)
    assert result["a"].median_us == pytest.approx(5.0) and result["a"].graph
    assert result["b"].median_us == pytest.approx(20.0)
    assert result["a"].calls_per_replay == 256
    assert [index for what, index in gpu.log if what == "record b"] == list(range(256))
    replays = [us for what, us in gpu.log if what == "replay"]
    assert replays == [5.0, 20.0] * (len(replays) // 2), "in turns"
    few = timing.time_side_by_side({"a": gpu.kernel("a", 5.0)}, sets=2)["a"]
    assert few.calls_per_replay == 64, "a graph's start must cost little per call"


def test_the_cache_is_emptied_before_every_replay_and_not_timed(gpu: Gpu) -> None:
    timing.time_side_by_side({"a": gpu.kernel("a", 5.0)}, sets=8)
    after = [what for what, _ in gpu.log if what in ("flush", "replay")]
    assert after == ["flush", "replay"] * (len(after) // 2) and len(after) > 14
    (buffer,) = [size for what, size in gpu.log if what == "buffer"]
    assert buffer == timing.CACHE_MULTIPLE * 60 * 2**20


def test_long_calls_are_replayed_seven_times(gpu: Gpu) -> None:
    result = timing.time_side_by_side({"a": gpu.kernel("a", 4e3)}, sets=2)["a"]
    assert result.calls_per_replay == 2 and result.replays == 18
    longer = timing.time_side_by_side({"a": gpu.kernel("a", 4e5)}, sets=2)["a"]
    assert longer.replays == 7 and longer.median_us == pytest.approx(4e5)


def test_what_cannot_be_recorded_is_timed_without_a_graph(gpu: Gpu) -> None:
    calls = {"a": gpu.kernel("a", 5.0), "waits": gpu.synchronous(50.0)}
    result = timing.time_side_by_side(calls, sets=4)
    assert result["waits"].median_us == pytest.approx(50.0) and not result["waits"].graph
    assert result["a"].graph


def test_another_error_is_not_hidden(gpu: Gpu) -> None:
    def broken(index: int) -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        timing.time_side_by_side({"a": broken}, sets=2)

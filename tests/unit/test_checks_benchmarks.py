"""The checks of lesson 12 accept right answers, written in more than one way, and no wrong one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kimik3_lab.benchmark import RequestRecord, Window
from kimik3_lab.teaching import checks_benchmarks

Requests = list[tuple[float, float]]

# -- exercise 2 (exercise 1 is in test_published.py) -----------------------------------------------


def by_rule(requests: Requests, opens: float, closes: float, **wrong: bool) -> tuple[float, float]:
    """Apply the window's rule, with switches that each make one mistake."""
    touching = [(s, e) for s, e in requests if e >= opens and s <= closes]
    if "ended_inside" in wrong:
        touching = [(s, e) for s, e in requests if opens <= e <= closes]
    if "whole_inside" in wrong:
        touching = [(s, e) for s, e in requests if opens <= s and e <= closes]
    if "began_inside" in wrong:
        touching = [(s, e) for s, e in requests if opens <= s <= closes]
    if "all" in wrong:
        touching = requests
    if "open_edges" in wrong:
        touching = [(s, e) for s, e in requests if e > opens and s < closes]
    latencies = [e - s for s, e in touching] or [0.0]
    if "clipped" in wrong:
        latencies = [min(e, closes) - max(s, opens) for s, e in touching]
    ended = [e for _, e in requests if opens <= e <= closes]
    if "open_edges" in wrong:
        ended = [e for _, e in requests if opens < e < closes]
    if "count_touching" in wrong:
        ended = [e for _, e in touching]
    if "count_starts" in wrong:
        ended = [s for s, _ in requests if opens <= s <= closes]
    length = closes - opens
    if "whole_run" in wrong:
        length = max(e for _, e in requests)
    if "until_close" in wrong:
        length = closes
    mean = sum(latencies) / len(latencies)
    if "median" in wrong:
        mean = sorted(latencies)[len(latencies) // 2]
    return mean, len(ended) if "count" in wrong else len(ended) / length


def by_window_class(requests: Requests, opens: float, closes: float) -> tuple[float, float]:
    window = Window(opens, closes)
    records = [RequestRecord(i, start=s, end=e) for i, (s, e) in enumerate(requests)]
    latencies = [r.e2e for r in records if window.touches(r)]
    rate = sum(window.contains(r.end) for r in records) / window.duration
    return sum(latencies) / len(latencies), rate


@pytest.mark.parametrize("answer", [by_rule, by_window_class])
def test_a_right_window_passes(
    answer: Callable[..., tuple[float, float]], capsys: pytest.CaptureFixture[str]
) -> None:
    checks_benchmarks.check_2(answer)
    assert capsys.readouterr().out == "exercise 2: right on 12 windows\n"


@pytest.mark.parametrize(
    "mistake",
    [
        "ended_inside", "whole_inside", "began_inside", "all", "open_edges", "clipped",
        "count_touching", "count_starts", "whole_run", "until_close", "median", "count",
    ],
)  # fmt: skip
def test_a_wrong_window_fails(mistake: str) -> None:
    with pytest.raises(AssertionError, match="should be"):
        checks_benchmarks.check_2(lambda *window: by_rule(*window, **{mistake: True}))


def test_one_number_is_not_enough() -> None:
    with pytest.raises(AssertionError, match="all inside: expected mean latency and requests"):
        checks_benchmarks.check_2(lambda *window: by_rule(*window)[:1])  # type: ignore[arg-type]


# -- exercise 3 ------------------------------------------------------------------------------------


def waiting(scheduled: list[float], service: list[float], **wrong: bool) -> list[float]:
    """Serve one after the other, with switches that each make one mistake."""
    free, latencies = 0.0, []
    for due, seconds in zip(scheduled, service, strict=True):
        begin = max(free, due)
        if "never_idle" in wrong:
            begin = free
        if "never_waits" in wrong:
            begin = due
        free = begin + seconds
        start = due
        if "from_sending" in wrong:
            start = begin
        if "wait_only" in wrong:
            start = due + seconds
        latencies.append(free - start)
    if "not_the_last" in wrong:
        latencies.pop()
    if "sorted" in wrong:
        latencies.sort()
    return latencies


def test_a_right_schedule_passes(capsys: pytest.CaptureFixture[str]) -> None:
    checks_benchmarks.check_3(waiting)
    checks_benchmarks.check_3(lambda due, service: tuple(waiting(due, service)))
    assert capsys.readouterr().out == 2 * "exercise 3: right on 9 schedules\n"


@pytest.mark.parametrize(
    "mistake",
    ["never_idle", "never_waits", "from_sending", "wait_only", "not_the_last", "sorted"],
)
def test_a_wrong_schedule_fails(mistake: str) -> None:
    with pytest.raises(AssertionError):
        checks_benchmarks.check_3(lambda due, service: waiting(due, service, **{mistake: True}))


def test_the_message_names_the_request() -> None:
    with pytest.raises(AssertionError, match="one stall, and the queue behind it: request 1, due"):
        checks_benchmarks.check_3(lambda due, service: waiting(due, service, from_sending=True))

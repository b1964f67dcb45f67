"""The check of lesson 11's exercise on exchanges accepts right answers and no wrong one."""

from __future__ import annotations

from collections.abc import Sequence
from math import log10

import numpy as np
import pytest

from kimik3_lab.teaching import checks_collectives
from kimik3_lab.teaching.plots_collectives import exchange_times, prediction_errors, share_bars

MISTAKES = (
    "absolute errors", "logarithms", "ends only", "smallest is the latency", "seconds a byte",
    "milliseconds", "no latency", "weights once",
)  # fmt: skip


def alpha_beta(
    sizes: Sequence[float], seconds: Sequence[float], mistake: str = ""
) -> tuple[float, float]:
    """Exercise 4 by normal equations, with switches for mistakes."""
    x, y = np.asarray(sizes, float), np.asarray(seconds, float)
    weight = np.ones_like(y) if mistake == "absolute errors" else 1 / y
    if mistake == "weights once":
        weight = np.sqrt(weight)
    if mistake == "ends only":
        keep = [int(x.argmin()), int(x.argmax())]
        x, y, weight = x[keep], y[keep], weight[keep]
    if mistake == "logarithms":
        slope, start = np.polyfit(np.log(x), np.log(y), 1)
        return float(np.exp(start)), float(1 / slope)
    if mistake == "smallest is the latency":
        latency = float(y.min())
        return latency, float(x.max() / (y.max() - latency))
    columns = np.stack([0 * weight if mistake == "no latency" else weight, x * weight], 1)
    (latency, slope), *_ = np.linalg.lstsq(columns, y * weight, rcond=None)
    if mistake == "seconds a byte":
        return float(latency), float(slope)
    return float(latency) * (1e3 if mistake == "milliseconds" else 1), float(1 / slope)


def test_check_4_accepts_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    checks_collectives.check_4(alpha_beta)
    assert "exercise 4: right in" in capsys.readouterr().out


@pytest.mark.parametrize("mistake", MISTAKES)
def test_check_4_refuses(mistake: str) -> None:
    with pytest.raises(AssertionError, match=r"should be .* got|smaller relative errors"):
        checks_collectives.check_4(lambda x, y: alpha_beta(x, y, mistake))


@pytest.mark.parametrize("answer", [None, 3.0, (1.0,), "ab", (1e-5, 0.0), (1e-5, -1.0)])
def test_check_4_says_what_it_wants(answer: object) -> None:
    with pytest.raises(AssertionError, match="expected"):
        checks_collectives.check_4(lambda x, y: answer)  # type: ignore[arg-type,return-value]


# -- figures -------------------------------------------------------------------------------------


def test_exchange_times_draws_the_line_that_it_is_given() -> None:
    figure = exchange_times(
        {"graph": {4096: 13.0, 1 << 28: 900.0}, "eager": {4096: 47.0, 8192: 80.0, 1 << 28: 927.0}},
        ("line", 20.0, 3e5), {7168: "one token"}, title="t",
    )  # fmt: skip
    graph, eager, line = figure.data
    assert (graph.name, eager.name, line.name) == ("graph", "eager", "line")
    assert line.y[0] == pytest.approx(20.0 + 4096 / 3e5)
    assert line.y[-1] == pytest.approx(20.0 + (1 << 28) / 3e5)
    texts = [note.text for note in figure.layout.annotations]
    heights = {note.text: note.y for note in figure.layout.annotations}
    assert heights["eager"] > log10(80.0)  # above the times beside it
    assert heights["graph"] < log10(13.0)
    assert sum("one token" in text for text in texts) == 1
    assert graph.line.dash != eager.line.dash != line.line.dash  # readable without colour


def test_prediction_errors_keeps_the_two_columns_apart() -> None:
    figure = prediction_errors(
        [("a", [("even", 1.0, 2.0), ("skewed", 3.0, 4.0)]), ("b", [("even", -20.0, -5.0)])],
        ("before", "after"), title="t",
    )  # fmt: skip
    before, after = figure.data
    assert list(before.y) == [1.0, 3.0, -20.0]
    assert list(after.y) == [2.0, 4.0, -5.0]
    assert list(before.text) == list(after.text) == ["a, even", "a, skewed", "b, even"]
    assert all("%{text}" in trace.hovertemplate for trace in figure.data)
    assert max(before.x[:2]) < min(after.x[:2])
    assert len({*before.x, *after.x}) == 6
    assert before.marker.symbol != after.marker.symbol


def test_share_bars_write_the_share_on_each() -> None:
    figure = share_bars([1, 4096], {"TP2": [11.83, 3.46], "EP2": [10.61, 4.05]}, title="t")
    assert list(figure.data[0].x) == ["1", "4,096"]
    assert list(figure.data[0].text) == ["11.8", "3.5"]
    assert list(figure.data[1].text) == ["10.6", "4.0"]
    assert figure.data[0].marker.pattern.shape != figure.data[1].marker.pattern.shape

"""Two servers side by side: the comparison can fail, and the figure shows what the table says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kimik3_lab.serving.server import start_in_background
from kimik3_lab.teaching.plots_side_by_side import side_by_side
from kimik3_lab.vllm_cpu.side_by_side import TOLERANCE, Answer, SideBySide, ask, compare_servers

ANSWER = Answer("a prompt", ("x", "y"), (-0.5, -1.0), seconds=0.5, first_token_s=0.25)


def both(second: Answer) -> SideBySide:
    return SideBySide({"one": (ANSWER,), "two": (second,)}, {"one": {}, "two": {}})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": ("x", "z")}, "other tokens from number 1 on"),
        ({"tokens": ("x",), "logprobs": (-0.5,)}, "other tokens from number 1 on"),
        ({"logprobs": (-0.5, -1.0 - 2 * TOLERANCE)}, "log-probabilities are up to 2.0e-03 apart"),
    ],
)
def test_a_difference_is_named(change: dict[str, object], message: str) -> None:
    assert both(ANSWER).differences() == []
    (found,) = both(replace(ANSWER, **change)).differences()  # type: ignore[arg-type]
    assert message in found and "one and two on 'a prompt'" in found


def test_rows_are_means_over_the_answers() -> None:
    slow = replace(ANSWER, seconds=1.5, first_token_s=0.75)
    counted = {"vllm:prompt_tokens_total": 12.0}
    (row,) = SideBySide({"one": (ANSWER, slow)}, {"one": counted}).rows()
    assert (row["first_token_ms"], row["token_ms"], row["seconds"]) == (500, 500, 1.0)
    assert (row["counted_prompt_tokens"], row["counted_output_tokens"]) == (12, None)


def test_the_figure_has_a_bar_for_each_server_in_each_panel() -> None:
    rows = both(replace(ANSWER, seconds=2.0)).rows()
    figure = side_by_side(rows)
    assert [(bar.x[0], bar.y[0]) for bar in figure.data[2::3]] == [("one", 0.5), ("two", 2.0)]
    assert len({bar.marker.pattern.shape for bar in figure.data}) == 2
    with pytest.raises(ValueError, match="no server to draw"):
        side_by_side([])


def test_our_own_engine_with_and_without_drafts() -> None:
    with (
        start_in_background(threads=1, max_model_len=256) as plain,
        start_in_background(threads=1, max_model_len=256, num_speculative_tokens=4) as drafting,
    ):
        servers = {"plain": plain.base_url, "drafting": drafting.base_url}
        found = compare_servers(servers, ["def f():\n", "import "], max_tokens=8, concurrency=2)
        assert found.differences() == []
        rows = found.rows()
        assert [row["counted_output_tokens"] for row in rows] == [16, 16]
        assert found.counters["drafting"]["vllm:spec_decode_num_drafts_total"] > 0
        with pytest.raises(RuntimeError, match=r"refused: .*max_tokens"):
            ask(plain.base_url, "x", max_tokens=-1)

from __future__ import annotations

import json

import plotly.graph_objects as go
import pytest

from kimik3_lab.teaching import widgets_moe

IDS = [[3, 0], [0, 1], [3, 1]]
WEIGHTS = [[0.75, 0.25], [0.5, 0.5], [0.9, 0.1]]
NAMES = ["a", "b", "c"]
BY_EXPERT = [1, 2, 3, 5, 0, 4]  # pairs sorted by expert, in a stable way


def step(number: int, token: int = 0) -> go.Figure:
    return widgets_moe.dispatch_step(IDS, WEIGHTS, NAMES, step=number, token=token)


def rows(figure: go.Figure) -> go.Scatter:
    return figure.data[2]


def row_texts(figure: go.Figure) -> list[str]:
    return [text.strip() for text in rows(figure).text]


def ends(trace: go.Scatter) -> list[tuple[float, float]]:
    """Token end and row end of each line."""
    return list(zip(trace.y[0::3], trace.y[1::3], strict=True))


def test_rows_stand_in_token_order_first_and_in_expert_order_then() -> None:
    experts = [expert for row in IDS for expert in row]
    for number, order in ((0, range(6)), (1, BY_EXPERT), (2, BY_EXPERT), (3, BY_EXPERT)):
        shown = [(data[0], data[2], data[3]) for data in rows(step(number)).customdata]
        want = [(NAMES[p // 2], experts[p], WEIGHTS[p // 2][p % 2]) for p in order]
        assert shown == want, widgets_moe.STEPS[number]


def test_thick_lines_are_those_of_the_followed_token() -> None:
    thin, thick = step(1, token=2).data[:2]
    assert ends(thick) == [(4.5, 3), (4.5, 5)]  # pairs 5 and 4, in rows 3 and 5
    assert len(ends(thin)) == 4
    assert thick.line.width > thin.line.width
    filled = [
        place for place, s in enumerate(rows(step(1, token=2)).marker.symbol) if s == "circle"
    ]
    assert filled == [3, 5]


def test_lines_start_at_the_tokens_and_return_to_them_at_the_end() -> None:
    assert [set(step(n).data[1].x) - {None} for n in range(4)] == [{0, 1}] * 3 + [{1, 2}]
    assert len(step(2).data) == 4 and len(step(3).data) == 5  # tokens again, on the right


def test_each_step_says_what_is_new() -> None:
    assert row_texts(step(0)) == [f"expert {e}" for row in IDS for e in row]
    assert row_texts(step(1)) == ["expert 0", "", "expert 1", "", "expert 3", ""]
    boxes = step(2).layout.shapes
    assert [(box.y0, box.y1) for box in boxes] == [(-0.48, 1.48), (1.52, 3.48), (3.52, 5.48)]
    assert [note.text for note in step(2).layout.annotations] == ["2 rows"] * 3
    assert not step(1).layout.shapes and not step(3).layout.shapes
    weighed = ["0.25 × expert 0", "", "", "", "0.75 × expert 3", ""]
    assert row_texts(step(3)) == weighed
    assert [step(n).layout.title.text[0] for n in range(4)] == ["1", "2", "3", "4"]
    assert "3 experts" in step(2).layout.title.text


def test_a_single_row_is_not_plural() -> None:
    figure = widgets_moe.dispatch_step([[5]], [[1.0]], ["a"], step=2)
    assert figure.layout.annotations[0].text == "1 row"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": 4}, "step must be 0 to 3, got 4"),
        ({"step": -1}, "step must be 0 to 3, got -1"),
        ({"token": 3}, "token must be 0 to 2, got 3"),
        ({"names": ["a"]}, "got 3, 3 and 1"),
        ({"weights": [[1.0]] * 3}, "rows of unequal length"),
        ({"expert_ids": [[1], [1, 2], [3, 4]], "weights": [[1], [1, 1], [1, 1]]}, "equally many"),
        ({"expert_ids": [], "weights": [], "names": []}, "at least one"),
    ],
)
def test_refusals_say_what_is_wrong(change: dict[str, object], message: str) -> None:
    arguments = {"expert_ids": IDS, "weights": WEIGHTS, "names": NAMES} | change
    with pytest.raises(ValueError, match=message):
        widgets_moe.dispatch_step(**arguments)


def test_without_widgets_the_explorer_is_the_figure() -> None:
    figure = widgets_moe.dispatch_explorer(IDS, WEIGHTS, NAMES, step=2, token=1, widgets=False)
    assert figure == step(2, token=1)


def shown(box) -> dict[str, object]:
    (output,) = box.children[2].outputs
    assert json.dumps(output)  # goes to the browser as JSON
    return output["data"]["application/vnd.plotly.v1+json"]


def as_json(figure: go.Figure) -> dict[str, object]:
    return json.loads(figure.to_json())


def test_explorer_redraws_when_a_control_moves() -> None:
    box = widgets_moe.dispatch_explorer(IDS, WEIGHTS, NAMES, step=1, token=0)
    steps, tokens, _ = box.children
    assert [name for name, _ in steps.options] == list(widgets_moe.STEPS)
    assert [name for name, _ in tokens.options] == ["0: a", "1: b", "2: c"]
    assert shown(box) == as_json(step(1))
    steps.value = 3
    assert shown(box) == as_json(step(3))
    tokens.value = 2
    assert shown(box) == as_json(step(3, token=2))

"""The README's picture of the rank ladder is drawn from the record as it is now."""

from __future__ import annotations

import importlib.util
import re
from types import ModuleType
from xml.etree import ElementTree

import pytest

from kimik3_lab.paths import repository_dir
from kimik3_lab.performance.published import compare, load_points
from kimik3_lab.teaching.rank_record import FIRST, SEPTEMBER, RankRecord

TOOL = repository_dir() / "tools" / "draw_rank_ladder.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location(TOOL.stem, TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_picture_is_up_to_date(tool: ModuleType) -> None:
    there = tool.OUTPUT.read_text(encoding="utf-8")
    assert there == tool.current(), "draw it again: python tools/draw_rank_ladder.py"
    assert len(there) < 20_000


def test_the_picture_says_what_it_shows(tool: ModuleType) -> None:
    root = ElementTree.fromstring(tool.current())
    words = [item.text or "" for item in root.iter("{http://www.w3.org/2000/svg}text")]
    record, said = RankRecord.read(), " | ".join(words)
    for label in (
        "Miniature, Measured", "Published", "no collectives", "floor",
        "Bars are shares of the floor, group by group", "this lab's, and PyTorch's matrix products",
        "again, on a machine started anew",
    ):  # fmt: skip
        assert label in said
    view = [float(x) for x in root.attrib["viewBox"].split()]
    below = [float(t.attrib["y"]) for t in root.iter("{http://www.w3.org/2000/svg}text")]
    assert max(below) + 6 < view[3]
    for point in compare(load_points()):
        c = point.concurrency
        first, last = (record.need(rung, c)["output_tokens_per_s"] for rung in (FIRST, SEPTEMBER))
        assert record.again is not None
        others = [record.again.need(rung, c)["output_tokens_per_s"] for rung in (FIRST, SEPTEMBER)]
        shown = [
            f"first rung {first:,.0f}",
            f"September {last:,.0f}",
            *(f"again {rate:,.0f}" for rate in others),
            f"{last / first:.2f}x",
            f"again {others[1] / others[0]:.2f}x",
        ]
        shown += [f"{record.floor_rate(c):,.0f}", f"{point.throughput_ratio:.2f}x"]
        assert all(text in words for text in shown), shown


def test_bars_are_shares_of_the_floor(tool: ModuleType) -> None:
    record = RankRecord.read()
    drawn = [float(w) for w in re.findall(r'<rect x="112" [^>]*width="([\d.]+)"', tool.current())]
    rates = [
        record.need(rung, c)["output_tokens_per_s"] / record.floor_rate(c)
        for c in record.concurrencies
        for rung in (FIRST, SEPTEMBER)
    ]
    assert drawn == pytest.approx([rate * (600 - 112) for rate in rates], abs=0.06)


def test_the_second_run_is_marked_where_its_rate_is(tool: ModuleType) -> None:
    record = RankRecord.read()
    assert record.again is not None
    marks = re.findall(r'<path d="M([\d.]+) [\d.]+H([\d.]+)M', tool.current())
    shares = [
        [
            run.need(rung, c)["output_tokens_per_s"] / record.floor_rate(c)
            for run in (record, record.again)
        ]
        for c in record.concurrencies
        for rung in (FIRST, SEPTEMBER)
    ]
    for mark, share in zip(marks, shares, strict=True):
        assert [float(x) for x in mark] == pytest.approx(
            [112 + s * (600 - 112) for s in share], abs=0.06
        )


def test_one_run_is_drawn_without_marks(tool: ModuleType) -> None:
    body = {key: part for key, part in RankRecord.read().body.items() if key != "again"}
    drawn = tool.picture(RankRecord(body), {1: 2.0, 4: 2.0, 16: 2.0})
    assert "<path" not in drawn and "again" not in drawn and "Dark marks" not in drawn


def test_the_readme_shows_it_with_its_labels() -> None:
    readme = " ".join((repository_dir() / "README.md").read_text(encoding="utf-8").split())
    assert "](docs/images/rank-ladder.svg)" in readme
    assert (
        "Lesson 10: one rank of eight at true width (Miniature, Measured), beside the published "
        "gain (Published). Drawn by `.venv/bin/python tools/draw_rank_ladder.py`"
    ) in readme
    record = RankRecord.read()
    assert "At most two thirds of the floor are reached" in readme
    for c in record.concurrencies:
        assert record.need(SEPTEMBER, c)["output_tokens_per_s"] < 2 / 3 * record.floor_rate(c)

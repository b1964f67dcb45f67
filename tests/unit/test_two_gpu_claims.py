"""What lessons 02, 11 and 13 say in words about two H200s is what the record holds.

The figures themselves are held in ``test_layer_record.py``; here are the sentences they stand in.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from kimik3_lab.paths import repository_dir
from kimik3_lab.performance.layer_record import LayerRow, TwoGpus

RECORD = TwoGpus.load()


def cells(name: str) -> list[dict[str, Any]]:
    path = repository_dir() / "notebooks" / name
    return json.loads(path.read_text(encoding="utf-8"))["cells"]  # type: ignore[no-any-return]


def prose(name: str) -> str:
    return "\n".join("".join(c["source"]) for c in cells(name) if c["cell_type"] == "markdown")


def one(**wanted: object) -> LayerRow:
    (row,) = RECORD.rows(**wanted)
    return row


def saved(rows: list[dict[str, Any]], *tokens: int) -> list[int]:
    found = [r["us"] - r["us_overlap"] for r in rows if "us_overlap" in r and r["T"] in tokens]
    return [round(min(found)), round(max(found))]


def test_lesson_02_dealing_out() -> None:
    text, gained, foreseen, off = prose("02_routing.ipynb"), [], [], []
    for tokens in (16, 64, 256, 4096):
        skewed, placed = (
            one(layer="moe", parallel="ep", routing=load, tokens=tokens)
            for load in ("skewed", "placed")
        )
        gained.append(round(100 * (1 - placed.us / skewed.us)))
        foreseen.append(round(100 * (1 - placed.tiles_us / skewed.tiles_us)))
    assert 18 <= gained[1] <= gained[0] <= 22
    assert (
        f"about a fifth less time at 16 and 64 tokens, {gained[2]} % less at 256 and {gained[3]} % "
        "less at 4,096" in text
    )
    assert foreseen[3] == 2 * gained[3]
    assert (
        "from 16 to 256 tokens, as {}, {} and {} %, but as {} % at 4,096, twice what it was"
    ).format(*foreseen) in text
    for load in ("skewed", "placed"):
        off += [row.tiles_error for row in RECORD.rows(layer="moe", parallel="ep", routing=load)]
    assert (len(off), sum(abs(x) <= 0.1 for x in off)) == (10, 8) and max(off) < 0
    assert (
        "Eight of ten are right to 10 %, all are too quick, and the worst by "
        f"{-100 * min(off):.0f} %: 4,096 tokens, dealt out" in text
    )


def test_lesson_02_real_choices_in_time() -> None:
    """From what the lesson itself printed and drew."""
    text = prose("02_routing.ipynb")
    (cell,) = (c for c in cells("02_routing.ipynb") if c["id"] == "rt-47-8")
    printed = "".join(cell["outputs"][0]["text"])
    rows = {
        int(r[0]): r[1:] for r in re.findall(r"^(\d+) +(\d+) +(\d+) +(\d+) +(\d+)$", printed, re.M)
    }
    us = {tokens: [int(value) for value in values] for tokens, values in rows.items()}
    order, _, load, copied = us[4096]
    assert f"a step of 4,096 tokens takes {100 * (1 - load / order):.0f} % less" in text
    order, _, load, copied = us[16]
    assert order == load
    assert f"which costs a small step {100 * (copied / load - 1):.0f} %" in text
    assert 0 < 1 - us[256][2] / us[256][0] < 0.04
    figure = cell["outputs"][1]["data"]["application/vnd.plotly.v1+json"]
    before, _, after, _ = (trace["y"] for trace in figure["data"])
    gains = [1 - new / old for old, new in zip(before, after, strict=True)]
    assert f"gain most, up to {100 * max(gains):.0f} %" in text
    assert sum(gain < 0 for gain in gains) == 2


def test_lesson_11_overlap() -> None:
    text = prose("11_b300_model.ipynb").replace("−", "-")
    now, then = RECORD.body["layers"], RECORD.body["earlier_run"]["layers"]
    (a, b), (c, d), (e, f), (g, h) = (saved(r, n) for n in (1, 16) for r in (now, then))
    assert (
        f"saves {a} to {b} µs, with 16 tokens {e} to {f} (in the earlier run {c} to {d}, and "
        f"{g} to {h})" in text
    )
    low, high = saved(now, 64)
    assert f"it goes from {-low} µs lost to {high} saved" in text
    low, high = saved(now, 256, 4096)
    assert f"From 256 on it saves {low} to {high} µs" in text
    assert f"five of seven had become *slower*, by up to {-saved(then, 256, 4096)[0]} µs" in text
    left = [r.us_overlap - r.us_compute for r in RECORD.rows(layer="moe", tokens=1)]
    assert (
        f"only {min(left):.0f} to {max(left):.0f} µs longer than with both exchanges left out"
        in text
    )


def test_lesson_11_exchanges_alone_and_in_the_layer() -> None:
    text = prose("11_b300_model.ipynb")
    latent, row = (1e6 * RECORD.table().seconds("all_reduce", 2 * n) for n in (3584, 7168))
    whole = [one(layer="whole", parallel=k, routing="uniform", tokens=1) for k in ("ep", "tp")]
    moe = [one(layer="moe", parallel=k, routing="uniform", tokens=1) for k in ("ep", "tp")]
    added = [r.us - r.us_compute for r in whole]
    assert (
        f"take {latent + 2 * row:.0f} µs alone and add {added[0]:.0f} to {added[1]:.0f} to the"
        in text
    )
    shares = [100 * r.exchanged for r in moe]
    alone = [100 * (latent + row) / r.us for r in moe]
    assert f"are {shares[0]:.0f} to {shares[1]:.0f} % of it by difference" in text
    assert f"would be {alone[0]:.0f} to {alone[1]:.0f} % as timed alone" in text
    missed = {k: whole[0].parts_us[k] - whole[0].before_parts_us[k] for k in ("experts", "kda")}
    assert (
        f"its experts take {missed['experts']:.0f} µs more than priced, KDA {-missed['kda']:.0f} "
        "less" in text
    )
    uneven = [
        100 * r.exchanged
        for r in RECORD.rows(layer="moe")
        if r.tokens > 1 and r.routing != "uniform"
    ]
    assert f"other choices give {min(uneven):.1f} to {max(uneven):.1f} % from 16 tokens on" in text


def test_lesson_11_launched_by_the_host() -> None:
    text = prose("11_b300_model.ipynb")
    graph, eager = RECORD.sizes("all_reduce"), RECORD.sizes("all_reduce", "eager")
    small = [us for size, us in eager.items() if size <= 1 << 20]
    middle = [us for size, us in eager.items() if 1 << 20 < size <= 8 << 20]
    assert f"takes {min(small):.0f} to {max(small):.0f} µs up to 1 MiB" in text
    assert f"{min(middle):.0f} to {max(middle):.0f} from 2 to 8 MiB" in text
    quicker = {n: 1 - eager[n << 20] / graph[n << 20] for n in (8, 16)}
    assert quicker[8] == pytest.approx(0.2, abs=0.02)
    assert f"by a fifth, at 16 by {100 * quicker[16]:.0f} %" in text
    slope = 100 * RECORD.table().line("all_reduce", 64 << 20).bandwidth / 450e9
    assert f"(the slope alone, below, is {slope:.0f} %)" in text


def test_lesson_11_says_which_runs_they_are() -> None:
    text = prose("11_b300_model.ipynb")
    now, then = RECORD.body["provenance"], RECORD.body["earlier_run"]["provenance"]
    assert "the earlier one had changes that were not committed" in text
    assert then["git_commit"].endswith("-dirty") and not now["git_commit"].endswith("-dirty")
    assert "--first" in now["command"] and "--first" not in then["command"]


def test_lesson_13_one_token() -> None:
    text = prose("13_deploy_on_vllm.ipynb")
    whole, sliced = (
        one(layer="whole", parallel=k, routing="uniform", tokens=1) for k in ("ep", "tp")
    )
    alone = [row.parts_us["experts"] for row in (whole, sliced)]
    priced = whole.before_parts_us["experts"] - sliced.before_parts_us["experts"]
    assert (
        f"alone, they take {alone[0]:.0f} µs where slices take {alone[1]:.0f}, and only "
        f"{priced:.0f} of these {alone[0] - alone[1]:.0f} µs were foreseen" in text
    )


@pytest.mark.parametrize(
    ("name", "sentences"),
    [
        ("02_routing.ipynb", ("no token was sent", "copies have not run on GPUs")),
        ("11_b300_model.ipynb", ("no token is sent", "no MLA layer and no context parallelism")),
        (
            "13_deploy_on_vllm.ipynb",
            ("no token is sent", "has not run on GPUs", "did not run on two GPUs"),
        ),
    ],
)
def test_what_did_not_run_is_said(name: str, sentences: tuple[str, ...]) -> None:
    """All measured layers are KDA layers whose ranks have all tokens, in order or dealt out."""
    assert {row.routing for row in RECORD.layers} == {"uniform", "skewed", "placed"}
    assert all(sentence in prose(name) for sentence in sentences)


def test_the_readme_on_collectives() -> None:
    text = (repository_dir() / "README.md").read_text(encoding="utf-8")
    most = max(row.exchanged for row in RECORD.layers)
    assert f"without its collectives is up to {100 * most:.0f} % quicker" in text
    parts = max(abs(row.summed_us / row.us - 1) for row in RECORD.layers if row.parts_us)
    assert f"parts timed alone make a layer to {100 * parts:.0f} %" in text

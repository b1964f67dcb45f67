"""What lesson 11 says in words about its recorded runs is what they are."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kimik3_lab.paths import data_dir, repository_dir
from kimik3_lab.performance.layer_record import TwoGpus
from kimik3_lab.performance.published import BASELINE, IMPROVED
from kimik3_lab.simulation.aiconfigurator import best_settings

NOTEBOOK = repository_dir() / "notebooks" / "11_b300_model.ipynb"


def record(name: str) -> Any:
    path = data_dir() / "results" / "simulated" / name
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def prose() -> str:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")


def test_other_seeds(prose: str) -> None:
    body = record("six_points.json")
    errors = [of_seed["latency"] for of_seed in body["mean_errors_by_seed"]]
    assert min(errors) == errors[0]
    assert f"from {min(errors):.1f} to {max(errors):.1f} %, and this one is the luckiest" in prose
    assert f"and to {max(errors):.1f} % in latency with an unlucky seed" in prose


def test_aiconfigurator(prose: str) -> None:
    best = best_settings()
    before, after = best[BASELINE, "tables"], best[IMPROVED, "tables"]
    assert f"by {before.latency:.0f} and {after.latency:.0f} % in latency" in prose
    assert f"by {before.ttft:.0f} and {after.ttft:.0f} % in TTFT" in prose
    quick = best[IMPROVED, "latency"]
    assert (
        f"{quick.latency:.1f} % in latency with a TTFT that is off by {quick.ttft:.0f} %" in prose
    )
    counts = best[IMPROVED, "throughput"].throughput
    ours = record("six_points.json")["mean_errors_by_version"][IMPROVED]["throughput"]
    assert counts < ours
    assert f"{counts:.1f} % in September's counts, less than the simulator's {ours:.1f}" in prose
    assert " SOL " in best[IMPROVED, "together"].setting
    assert best[IMPROVED, "together"].setting.endswith(" 0.75")


def test_the_budget_claim(prose: str) -> None:
    recorded = record("six_points.json")["budget_alone"]
    gains = {g["concurrency"]: g for g in recorded if g["prefix_caching"]}
    one, four, sixteen = (gains[c]["ttft_gain"] for c in (1, 4, 16))
    assert f"by {one:.0f}, {four:.1f} and {sixteen:.0f} % where 55 to 65 are claimed" in prose
    assert 54.25 < four < 54.75 and f"exceed it by {sixteen - 65:.1f}" in prose
    low, high = gains[16]["ttft_range"]
    assert f"from {low:.0f} to {high:.0f} % between seeds" in prose
    assert 55 <= gains[4]["ttft_mean_gain"] <= 65
    assert gains[16]["ttft_mean_gain"] == pytest.approx(68.5, abs=0.1)
    assert f"grows by up to {gains[16]['throughput_gain']:.0f} % where 41.5 are claimed" in prose


def test_the_hour(prose: str) -> None:
    cases = {case["name"]: case for case in record("conversation_hour.json")["cases"]}
    one, three = cases["one node"], cases["three nodes, prefix-aware"]
    assert f"wait longer than {one['ttft_median_s']:.0f} s for their first token" in prose
    assert f"finds {one['cached_share']:.1%} of them".replace("%", " %") in prose
    assert f"{round(one['prompt_tokens_per_s'], -2):,.0f} prompt tokens come in a second" in prose
    assert f"with a median wait of {three['ttft_median_s']:.1f} s" in prose
    spread = cases["one node, rows spread over its GPUs (DCP8)"]["cached_share"]
    assert 1 / 7 < spread < 1 / 5.5  # "a sixth"
    assert max(case["cpu_s"] for case in cases.values()) < 30  # "half a minute of one core"


def test_two_gpus(prose: str) -> None:
    two = TwoGpus.load()

    def hits(which: str, *tokens: int) -> int:
        rows = [row for row in two.layers if row.tokens in tokens]
        return sum(abs(getattr(row, which)) <= 0.1 for row in rows)

    small, large, every = (1, 16, 64), (256, 4096), (1, 16, 64, 256, 4096)
    assert len(two.layers) == 45 and "Forty-five cases" in prose
    assert f"{hits('before_error', *small)} of 27 cases within 10 %" in prose
    assert f"That is {hits('before_error', *every)} of 45." in prose
    assert f"Over all it is {hits('tiles_error', *every)} of 45" in prose
    assert (hits("tiles_error", 256), hits("tiles_error", 4096)) == (1, 4)
    assert f"to 10 %, and {hits('before_error', *large)} of 18 beyond" in prose
    assert f"in the model, {hits('tiles_error', *large)} of 18" in prose
    before, tiles = (
        [abs(getattr(row, which)) for row in two.foretold]
        for which in ("before_error", "tiles_error")
    )
    assert (sum(x <= 0.1 for x in before), sum(x <= 0.1 for x in tiles)) == (0, 2)
    assert (
        f"by {100 * min(before):.0f} to {100 * max(before):.0f} and by "
        f"{100 * min(tiles):.0f} to {100 * max(tiles):.0f} %" in prose
    )
    assert "none of five within 10 % by experts and pairs, two by tiles" in prose
    slower = [
        row.us / row.earlier_us
        for row in two.layers
        if row.tokens in (16, 64, 256) and row.earlier_us
    ]
    low, high = (round(100 * x - 100) for x in (min(slower), max(slower)))
    assert f"is {low} to {high} % slower in all {len(slower)} cases" in prose

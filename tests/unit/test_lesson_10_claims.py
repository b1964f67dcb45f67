"""What lesson 10 says in words about the rank ladder is what the recorded file says.

Numbers in its tables and figures are computed from the file. Its sentences are chosen to survive
another run; where one does not, its test fails and names it.
"""

from __future__ import annotations

import json
import math
import re

import pytest

from kimik3_lab.config import K3Config
from kimik3_lab.drafter_config import DSparkConfig
from kimik3_lab.paths import repository_dir
from kimik3_lab.performance.hardware import ACCELERATORS
from kimik3_lab.performance.published import Comparison, compare, load_points
from kimik3_lab.rank.step_floor import BANDWIDTH, FLOP_RATE, Rows, StepFloor
from kimik3_lab.teaching.rank_record import FIRST, SEPTEMBER, RankRecord

NOTEBOOK = repository_dir() / "notebooks" / "10_serving_engine.ipynb"
BATCH, ADAPTIVE = "batch of 16,384", "adaptive budget"


@pytest.fixture(scope="module")
def record() -> RankRecord:
    return RankRecord.read()


@pytest.fixture(scope="module")
def points() -> dict[int, Comparison]:
    return {c.concurrency: c for c in compare(load_points())}


@pytest.fixture(scope="module")
def prose() -> str:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    texts = ["".join(c["source"]) for c in cells if c["cell_type"] == "markdown"]
    return re.sub(r"\s+", " ", " ".join(texts).replace("*", ""))


def says(prose: str, *sentences: str) -> None:
    """Hold the lesson to its words: a claim that is checked here must stand there."""
    for sentence in sentences:
        assert sentence in prose, f"the lesson no longer says: {sentence}"


def test_what_is_compared_with_what(record: RankRecord, prose: str) -> None:
    work, config = record.body["workload"], K3Config.rank_slice()
    assert work["layers"] == config.num_hidden_layers == 24
    says(prose, f"24 of them: {len(config.kda_layer_ids)} KDA, {len(config.mla_layer_ids)} MLA")
    says(prose, f"keeps {work['tokens_per_verify']} tokens a verification")
    sizes = [work[key] for key in ("prompt_tokens", "output_tokens", "num_drafts")]
    assert sizes == [8000, 1000, 8]
    old, new = ACCELERATORS["H200"], ACCELERATORS["B300"]
    says(prose, f"eight B300, {new.bandwidth / 1e12:.0f} TB/s each")
    says(prose, f"one H200, {old.bandwidth / 1e12:.1f} TB/s")
    says(prose, f"on a chip with {new.bandwidth / old.bandwidth:.1f} times the bandwidth")
    assert old.bf16_flops < 0.5 * new.bf16_flops
    says(prose, "the H200 has less than half of a B300's")
    says(prose, f"{BANDWIDTH / 1e12:.1f} TB/s and {FLOP_RATE / 1e12:.0f} TFLOP/s")


def test_the_published_numbers(points: dict[int, Comparison], prose: str) -> None:
    rates = [f"{points[c].throughput_ratio:.1f}" for c in (1, 4, 16)]
    says(prose, f"The published ones are {rates[0]}, {rates[1]} and {rates[2]}.")
    one = points[1]
    says(prose, f"On the B300s it was {one.ttft_share:.0%}".replace("%", " %"))
    only_first = one.before.latency_s - (one.before.ttft_ms - one.after.ttft_ms) / 1e3
    says(prose, f"gained a factor of {one.before.latency_s / only_first:.2f}")
    says(prose, f"The rest of its {one.latency_ratio:.2f} is a decode that became twice as fast")
    assert 1.9 < one.ms_per_token_ratio < 2.2
    assert 5.9 < one.ttft_ratio < 6.1
    says(prose, "the first token came six times sooner there and not even three times here")


def test_no_operator_of_the_first_rung_is_slower_than_its_peer(
    record: RankRecord, prose: str
) -> None:
    says(prose, "each operator is faster than its best peer")
    assert len(record.body["operators"]) > 15
    for row in record.body["operators"]:
        name = f"{row['operator']} {row['case']}"
        assert row["ours_us"] < row["best_peer_us"], f"{name} is slower than {row['best_peer']}"
        assert row["ours_us"] / row["best_peer_us"] == pytest.approx(
            row["ours_over_peer"], abs=1e-3
        )


def test_little_for_one_and_much_for_sixteen(
    record: RankRecord, points: dict[int, Comparison], prose: str
) -> None:
    says(prose, "One request gains little on the published ladder, four about twice, sixteen more")
    gains = {c: record.gain(c) for c in (1, 4, 16)}
    assert 1.02 < gains[1] < 1.4
    assert 1.7 < gains[4] < 2.3
    assert gains[16] > 2.05
    says(prose, "each less than on the B300s", "most of the published gain is there")
    for c, gain in gains.items():
        assert gain < points[c].throughput_ratio
        share = (gain - 1) / (points[c].throughput_ratio - 1)
        assert share > 0.5 if c > 1 else share < 0.4


def test_most_of_it_comes_with_the_first_two_rungs(record: RankRecord, prose: str) -> None:
    says(prose, "Most of it comes with the first two rungs")
    for c in (4, 16):
        rates = {r: record.need(r, c)["output_tokens_per_s"] for r in (FIRST, BATCH, ADAPTIVE)}
        assert math.log(rates[ADAPTIVE] / rates[FIRST]) > 0.6 * math.log(record.gain(c))
        says(prose, "whichever comes first gets most of it")
        assert rates[BATCH] / rates[FIRST] > 3 * (rates[ADAPTIVE] / rates[BATCH] - 1) + 1


def test_passes_that_need_not_happen(record: RankRecord, prose: str) -> None:
    passes = {
        (rung, c): record.need(rung, c)["forwards"] for rung in (FIRST, SEPTEMBER) for c in (1, 16)
    }
    says(
        prose,
        f"For one request {passes[FIRST, 1]} passes over the model became {passes[SEPTEMBER, 1]}, "
        f"for sixteen {passes[FIRST, 16]} became {passes[SEPTEMBER, 16]}",
    )
    says(prose, "take fewer launches than its prompt does")
    for rung in (FIRST, SEPTEMBER):
        row = record.need(rung, 1)
        replays = row["drafter_forwards"] - 1
        assert replays < row["launches"] - replays
    says(prose, "Copied are rows gathered and states moved that no answer needs")
    for c in (4, 16):
        first, last = (record.need(rung, c) for rung in (FIRST, SEPTEMBER))
        for key in ("gather_bytes", "kda_state_bytes_copied"):
            assert first[key] > 0 == last[key]
    says(prose, "and still it is further away")
    for c in (1, 4, 16):
        first, last = (record.need(r, c)["fraction_of_floor"] for r in (FIRST, SEPTEMBER))
        assert first < last


def test_equal_steps_are_not_equally_long(record: RankRecord, prose: str) -> None:
    says(prose, "times that lie several percent apart")
    assert all(len(record.alike(c)) >= 3 for c in (1, 4, 16))
    assert 0.02 < max(record.noise(c) for c in (1, 4, 16)) < 0.2
    says(prose, "What the first rungs bring at 4 and 16 requests is many times the spread")
    for c in (4, 16):
        rates = [record.need(rung, c)["output_tokens_per_s"] for rung in (FIRST, BATCH)]
        assert rates[1] / rates[0] - 1 > 5 * record.noise(c)
    says(prose, "together change a lone request's step by less than the spread")
    last = record.need(SEPTEMBER, 1)["decode_step_ms"]
    assert abs(last / record.need(FIRST, 1)["decode_step_ms"] - 1) < record.noise(1)


def test_the_floor_is_experts(record: RankRecord, prose: str) -> None:
    config = K3Config.rank_slice(layers=24)
    chosen = {int(row["rows"]): row for row in record.body["distinct_experts"]}
    says(prose, "a formula gives the same number within two percent")
    for row in chosen.values():
        assert row["measured"] == pytest.approx(row["expected"], rel=0.02)
    drafter = DSparkConfig.rank_slice(config)
    floor = StepFloor(config, lambda n: chosen[n]["expected"], drafter=drafter, records=True)
    share: dict[int, float] = {}
    for c in (1, 4, 16):
        rows = [Rows(8000, 9, 8)] * c
        parts = {p.name: p.seconds for p in [*floor.target(rows), floor.draft(rows)[0]]}
        whole = sum(parts.values())
        assert 1e3 * whole == pytest.approx(record.step_parts(c)["model, floor"], rel=1e-6)
        share[c] = parts["experts"] / whole
        assert max(parts["KDA"], parts["MLA"]) < 0.05 * whole
    says(prose, "Experts are half of a lone request's floor and four fifths of it at sixteen")
    assert 0.45 < share[1] < 0.55 and 0.77 < share[16] < 0.84
    nine, many = (round(chosen[n]["expected"]) for n in (9, 144))
    says(prose, f"nine rows choose {nine} of 896 experts in a layer, 144 rows choose {many}")
    says(prose, "are below a twentieth each")


def test_where_a_step_goes(record: RankRecord, prose: str) -> None:
    says(prose, "About half of a lone request's step is floor, and some three fifths at 4 and 16")
    for c in (1, 4, 16):
        parts = record.step_parts(c)
        whole = sum(parts.values())
        floor = (parts["model, floor"] + parts["drafter, floor"]) / whole
        assert 0.4 < floor < 0.6 if c == 1 else 0.54 < floor < 0.7
        above = parts["model, above its floor"] + parts["drafter, above its floor"]
        assert above > 0.5 * whole * (1 - floor)
        assert parts["host and the rest"] < 0.14 * whole
        drafter = parts["drafter, floor"] + parts["drafter, above its floor"]
        assert drafter > 2.5 * parts["drafter, floor"]
    says(prose, "What lies above the floor is the larger part of the rest")
    says(prose, "What is left for the host and all else is about a tenth or less")
    says(prose, "it needs several times its floor")
    says(prose, "A verification of nine rows takes about twice its floor")


def test_other_peoples_prompts(record: RankRecord, prose: str) -> None:
    says(prose, "the steps themselves are nearly as long on the September rung as on the first")
    for c in (1, 4, 16):
        assert 0.85 < record.own_ms(SEPTEMBER, c) / record.own_ms(FIRST, c) < 1.08
    says(prose, "more than half of a token's time goes into steps that carry somebody's prompt")
    says(prose, "on the September rung it is less than a third")
    waits = [1 - record.own_ms(r, 16) / record.need(r, 16)["tpot_ms"] for r in (FIRST, SEPTEMBER)]
    assert waits[0] > 0.5 and waits[1] < 1 / 3


def test_context_and_company(record: RankRecord, prose: str) -> None:
    curves = record.body["curves"]
    ms = {(r["requests"], r["context"]): r["target_ms"] for r in curves["decode"]}
    says(prose, "64 requests take about five times as long as one")
    assert 4.3 < ms[64, 1000] / ms[1, 1000] < 5.8
    says(prose, "a tenth longer for one request and a third longer for sixteen")
    assert 1.05 < ms[1, 64000] / ms[1, 1000] < 1.16
    assert 1.25 < ms[16, 64000] / ms[16, 1000] < 1.42
    fresh = {r["tokens"]: r for r in curves["prefill"] if r["start"] == 0}
    says(prose, "the line is nearly flat up to 2,048 tokens and far above its floor")
    assert 0.8 < fresh[2048]["ms"] / fresh[1024]["ms"] < 1.5
    assert fresh[1024]["fraction_of_floor"] < 0.5
    says(prose, "more than half of their time is floor")
    assert min(fresh[8000]["fraction_of_floor"], fresh[16000]["fraction_of_floor"]) > 0.5


def test_one_request_gains_what_the_scheduler_gives(
    record: RankRecord, points: dict[int, Comparison], prose: str
) -> None:
    one = points[1]
    says(prose, "1.18 is left; the rank's whole gain is about that")
    only_first = one.before.latency_s - (one.before.ttft_ms - one.after.ttft_ms) / 1e3
    assert record.gain(1, "latency_s") == pytest.approx(one.before.latency_s / only_first, abs=0.1)
    says(prose, "on the B300s a token came in half the time, here in nearly the same")
    assert record.gain(1, "tpot_ms") < 1.12
    says(prose, "with 4 and 16 requests the others came sooner here, too")
    assert min(record.gain(c, "tpot_ms") for c in (4, 16)) > 1.3
    assert min(record.gain(c, "ttft_ms") for c in (1, 4, 16)) > 2
    assert record.saved_before_first_token(1) > 0.5 > one.ttft_share
    assert 2 < record.gain(1, "ttft_ms") < 3


def test_a_layer_there_and_here(
    record: RankRecord, points: dict[int, Comparison], prose: str
) -> None:
    one = points[1]
    there = {"chunk": one.before.ttft_ms / 8 / 93, "prompt": one.after.ttft_ms / 93}
    here = {"chunk": record.need(FIRST, 1)["ttft_ms"] / 8 / 24,
            "prompt": record.need(SEPTEMBER, 1)["ttft_ms"] / 24}  # fmt: skip
    says(prose, "it takes nearly twice as long a layer")
    assert 1.5 < here["prompt"] / there["prompt"] < 2
    says(prose, "on the better chip it took longer than here")
    assert there["chunk"] > 1.1 * here["chunk"]
    says(prose, "The two factors together are the whole difference")
    factors = there["chunk"] / here["chunk"] * here["prompt"] / there["prompt"]
    assert factors == pytest.approx(one.ttft_ratio / record.gain(1, "ttft_ms"))
    says(prose, "a step of the published first version took longer a layer than ours")
    steps = [3.4 * end.ms_per_token / 93 for end in (one.before, one.after)]
    ours = [record.need(rung, 1)["decode_step_ms"] / 24 for rung in (FIRST, SEPTEMBER)]
    assert steps[0] > 1.05 * ours[0]
    says(prose, "the September version takes clearly less than ours")
    assert steps[1] < 0.85 * ours[1]

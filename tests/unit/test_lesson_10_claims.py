"""What lesson 10 says in words about the rank ladder is what the recorded file says.

Numbers in its tables and figures are computed from the file. Its sentences are chosen to survive
another run; where one does not, its test fails and names it.
"""

from __future__ import annotations

import ast
import json
import math
import re
from datetime import datetime
from itertools import pairwise

import pytest

from kimik3_lab.config import K3Config
from kimik3_lab.drafter_config import DSparkConfig
from kimik3_lab.paths import repository_dir
from kimik3_lab.performance.hardware import ACCELERATORS
from kimik3_lab.performance.published import Comparison, compare, load_points
from kimik3_lab.rank.step_floor import BANDWIDTH, FLOP_RATE, Rows, StepFloor
from kimik3_lab.serving.presets import LADDER
from kimik3_lab.teaching.rank_record import FIRST, SEPTEMBER, RankRecord

NOTEBOOK = repository_dir() / "notebooks" / "10_serving_engine.ipynb"
BATCH, ADAPTIVE = "batch of 16,384", "adaptive budget"
PREFILL, FINALIZE, OTHER = "KDA prefill", "deferred finalize", "other step changes"
CACHING, RECORDS = "prefix caching", "recovery records"
SKINNY = "skinny GEMM"
SLOW = (ADAPTIVE, PREFILL, SKINNY, FINALIZE)  # measured one after another in the second run


@pytest.fixture(scope="module")
def record() -> RankRecord:
    return RankRecord.read()


@pytest.fixture(scope="module")
def again(record: RankRecord) -> RankRecord:
    assert record.again is not None
    return record.again


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


def test_what_is_left_out_above_september(record: RankRecord, prose: str) -> None:
    measured = {rung.name for rung in record.rungs}
    places = [place for place, rung in enumerate(LADDER) if rung.name not in measured]
    assert len(places) == 4 and all(LADDER[place].beyond_published for place in places)
    assert sum(rung.beyond_published for rung in LADDER) == 8
    says(prose, "Of the eight rungs above September four have no bar of their own")
    *alike, last = (LADDER[place].name for place in places)
    one, two, three = alike
    says(prose, f"{one.capitalize()}, {two} and {three} show only where prompts begin alike")
    says(prose, f"{last} needs several GPUs")
    contained = 0
    for place in places:
        below, rung, *above = LADDER[place - 1 : place + 2]
        new = [getattr(rung, kind).items() - getattr(below, kind).items()
               for kind in ("scheduler", "cache")]  # fmt: skip
        assert any(new)
        if above and above[0].name in measured:
            assert new[0] <= above[0].scheduler.items() and new[1] <= above[0].cache.items()
            contained += 1
    assert contained == 3
    says(prose, "the first three are on from the next rung that is measured; the last is nowhere")


def test_why_drafts_save_only_five_passes(prose: str) -> None:
    """From outputs that each run of the notebook is compared with."""
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    shown = {c["id"]: c for c in cells if "nbval-check-output" in c["metadata"].get("tags", [])}
    drafts, records = (
        ast.literal_eval("".join(shown[name]["outputs"][0]["data"]["text/plain"]))
        for name in ("eng-16", "eng-18")
    )
    without, passes = drafts["forwards"]
    assert without - passes == 5
    says(prose, "Only five passes fewer", "ten verifications for the 15 tokens that follow")
    assert (without - 1, passes - 1) == (15, 10)  # one pass computes the prompts
    verifications = records["recovery_commits"][1]
    says(prose, f"The four together make {verifications}", "gets 1.5 tokens from each")
    mean = 4 * 15 / verifications
    says(prose, f"A verification brings {mean:.1f} tokens on average here", f"15 / {mean:.1f}")
    assert math.ceil(15 / mean) == 7


def test_what_is_known_of_the_second_run(record: RankRecord, again: RankRecord, prose: str) -> None:
    first, second = (
        datetime.fromisoformat(run.body["provenance"]["date_utc"]) for run in (record, again)
    )
    assert round((second - first).total_seconds() / 60) == 11
    says(prose, "is the same ladder eleven minutes later")
    says(prose, "each run found one that had just started bare, so it may have been the same")
    assert "on another machine" in again.body["what"]
    says(prose, "The note says another machine")
    assert record.body["provenance"]["device"] == again.body["provenance"]["device"]
    assert "prompts of every cell were rehearsed" in again.body["what"]
    says(prose, "the second run rehearsed more", "All counts are the same in both")
    counts = ("forwards", "drafter_forwards", "launches", "gather_bytes", "kda_state_writes",
              "kda_state_bytes_copied", "bytes", "output_tokens")  # fmt: skip
    for rung in record.rungs:
        for c in record.concurrencies:
            one, other = (run.need(rung.name, c) for run in (record, again))
            assert [one[key] for key in counts] == [other[key] for key in counts]


def test_five_operators_of_the_first_rung_are_faster_than_their_peers(
    record: RankRecord, prose: str
) -> None:
    says(prose, "So here are five operators of a rank", "each of the five is faster than its best")
    assert len({row["operator"] for row in record.body["operators"]}) == 5
    assert len(record.body["operators"]) == 21
    first = record.need(FIRST, 1)
    replays = first["drafter_forwards"] - 1
    says(prose, f"{replays} of a lone request's {first['forwards']} passes")
    says(prose, "nothing about four things: KDA that verifies nine rows at once")
    names = " ".join(row["operator"] for row in record.body["operators"])
    assert not any(word in names for word in ("mla", "recover", "drafter", "dense"))
    for row in record.body["operators"]:
        name = f"{row['operator']} {row['case']}"
        assert row["ours_us"] < row["best_peer_us"], f"{name} is slower than {row['best_peer']}"
        assert row["ours_us"] / row["best_peer_us"] == pytest.approx(
            row["ours_over_peer"], abs=1e-3
        )


def test_the_gains_and_how_far_they_are_from_the_published(
    record: RankRecord, again: RankRecord, points: dict[int, Comparison], prose: str
) -> None:
    ones, others = ([f"{run.gain(c):.2f}" for c in (1, 4, 16)] for run in (record, again))
    says(
        prose,
        f"gains {ones[0]}, {ones[1]} and {ones[2]} at 1, 4 and 16 requests; measured again "
        f"{others[0]}, {others[1]} and {others[2]}. Each is less than on the B300s",
    )
    assert record.concurrencies == (1, 4, 16) and not record.missing
    for c in (1, 4, 16):
        published = points[c].throughput_ratio
        assert max(record.gain(c), again.gain(c)) < published
    says(
        prose,
        "a fifth more tokens a second to one request, a third to a half more to four, and three to "
        "four fifths more to sixteen",
    )
    for c, least, most in ((1, 1.18, 1.21), (4, 1.3, 1.55), (16, 1.58, 1.84)):
        assert least < record.gain(c) <= again.gain(c) < most


def test_where_the_published_gain_would_be(
    record: RankRecord, again: RankRecord, points: dict[int, Comparison], prose: str
) -> None:
    beyond = {
        (name, c): points[c].throughput_ratio * run.need(FIRST, c)["output_tokens_per_s"]
        / record.floor_rate(c) - 1
        for name, run in (("recorded", record), ("again", again))
        for c in (1, 4, 16)
    }  # fmt: skip
    shares = [f"{100 * beyond['recorded', c]:.0f} %" for c in (4, 16)]
    says(
        prose,
        "At 4 and 16 requests those of the recorded run lie beyond that line, by "
        f"{shares[0]} and {shares[1]}",
        "From the second run's slower first rung they lie on it, within a percent",
        "beyond its floor in the recorded run, and at its floor in the second",
    )
    assert min(beyond["recorded", c] for c in (4, 16)) > 0.1
    assert max(abs(beyond["again", c]) for c in (4, 16)) < 0.01
    assert max(beyond["recorded", 1], beyond["again", 1]) < -0.05
    for c in (4, 16):  # what the published first version can have been of its floor, at the most
        assert (
            again.need(FIRST, c)["output_tokens_per_s"]
            < record.need(FIRST, c)["output_tokens_per_s"]
        )
        # September's published rung below 99 % of its floor: then its first is below ours.
        ours = again.need(FIRST, c)["output_tokens_per_s"] / record.floor_rate(c)
        assert 0.99 / points[c].throughput_ratio < ours


def test_nearly_all_of_it_comes_with_the_second_rung(
    record: RankRecord, again: RankRecord, prose: str
) -> None:
    says(prose, "The line climbs once, from the first rung to the second, and then nearly stands")
    says(prose, "whichever comes first gets most of it")
    for run in (record, again):
        for c in (4, 16):
            rates = {r: run.need(r, c)["output_tokens_per_s"] for r in (FIRST, BATCH, ADAPTIVE)}
            assert math.log(rates[BATCH] / rates[FIRST]) > 0.75 * math.log(run.gain(c))
            assert rates[BATCH] / rates[FIRST] > 3 * (rates[ADAPTIVE] / rates[BATCH] - 1) + 1


def test_what_else_is_the_same_in_both_runs(
    record: RankRecord, again: RankRecord, prose: str
) -> None:
    names = [rung.name for rung in record.rungs]
    worth = {
        rung: [
            run.need(rung, c)["output_tokens_per_s"] / run.need(below, c)["output_tokens_per_s"]
            for run in (record, again)
            for c in (1, 4, 16)
        ]
        for below, rung in pairwise(names)
    }
    says(prose, "One more rung gains at all concurrencies in both runs: other step changes")
    assert [rung for rung in names[1:] if min(worth[rung]) > 1] == [BATCH, OTHER]
    says(prose, f"Two rungs lose in all six cells: {FINALIZE} and {RECORDS}")
    assert [rung for rung in names[1:] if max(worth[rung]) < 1] == [FINALIZE, RECORDS]
    saved = [
        [run.need(FINALIZE, c)["decode_step_ms"] - run.need(OTHER, c)["decode_step_ms"]
         for c in (1, 4)]
        for run in (record, again)
    ]  # fmt: skip
    says(prose, "about half a millisecond a step with one and four requests")
    assert saved[0] == pytest.approx([0.5, 0.5], abs=0.06)
    says(prose, f"The second run says {saved[1][0]:.1f} and {saved[1][1]:.1f} ms")
    verify = {c: record.apart(c, "decode_step_ms") for c in (1, 4, 16)}
    most = max(verify[c][rung] for c in verify for rung in SLOW)
    says(prose, f"on the four rungs below, verifications took up to {100 * most:.0f} % longer")
    says(prose, "on the rung measured before those, and on this one, at most 3 %")
    assert 0.02 < max(verify[c][rung] for c in verify for rung in (BATCH, OTHER)) < 0.03
    assert all(max(verify[c][rung] for c in verify) > 0.065 for rung in SLOW)
    starts = sorted((again.need(name, 1)["date_utc"], name) for name in names)
    order = [name for _, name in starts]
    assert order[order.index(BATCH) :][:6] == [BATCH, *SLOW, OTHER]
    below = dict(pairwise(reversed(names)))
    jumps = {
        (rung, c, i): abs(run.need(rung, c)["output_tokens_per_s"]
                          / run.need(below[rung], c)["output_tokens_per_s"] - 1)
        for i, run in enumerate((record, again))
        for rung in names[names.index(SEPTEMBER) + 1 :]
        for c in (1, 4, 16)
    }  # fmt: skip
    says(prose, "The four largest numbers above September are two stalls")
    largest = sorted(jumps, key=lambda key: jumps[key])[-4:]
    after = {lower: rung for rung, lower in below.items()}
    stalled = {  # the run in which the step was long, on the stalled rung and on the next one up
        (name, c, int(longest[1] > longest[0]))
        for (rung, c), longest in record.stalls().items()
        for name in (rung, after[rung])
    }
    assert set(largest) == stalled


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
    later = [rung.name for rung in record.rungs if not rung.beyond_published][2:]
    says(prose, "Above adaptive budget no rung of the published ladder saves a pass")
    assert all(len({record.need(r, c)["forwards"] for r in later}) == 1 for c in (1, 4, 16))
    gathered = record.need(OTHER, 16)["gather_bytes"]
    says(prose, f"at sixteen requests {gathered / 1e9:.0f} GB become 0")
    says(prose, "less than a fiftieth of a second (Derived)")
    assert 2 * gathered / BANDWIDTH < 1 / 50
    says(prose, f"in a run of {record.need(SEPTEMBER, 16)['elapsed_s']:.1f} s")
    says(prose, "Recovery records write a ninth of the states and need more launches for it")
    for c in (1, 4, 16):
        kept, slots = record.need(RECORDS, c), record.need("internal checkpoints", c)
        assert slots["kda_state_writes"] / kept["kda_state_writes"] == pytest.approx(9, abs=0.2)
        assert kept["launches"] > slots["launches"]
    says(prose, "and still it is further away")
    for c in (1, 4, 16):
        first, last = (record.need(r, c)["fraction_of_floor"] for r in (FIRST, SEPTEMBER))
        assert first < last


def test_equal_steps_are_not_equally_long(
    record: RankRecord, again: RankRecord, prose: str
) -> None:
    says(prose, "times that lie several percent apart: some 3 % within the first run, up to 9 %")
    assert all(len(run.alike(c)) == 4 for run in (record, again) for c in (1, 4, 16))
    noise = [[run.noise(c) for c in (1, 4, 16)] for run in (record, again)]
    assert min(noise[0]) > 0.02 and max(noise[0]) < 0.035
    assert 0.085 < max(noise[1]) < 0.095
    says(prose, "a rung's tokens a second lie up to 10 % apart")
    stalled = record.stalls()
    assert set(stalled) == {(CACHING, 16), (RECORDS, 1)}
    says(prose, f"{stalled[CACHING, 16][0] / 1e3:.1f} s with {CACHING}")
    says(prose, f"{stalled[RECORDS, 1][1] / 1e3:.1f} s with {RECORDS}")
    apart = {c: record.apart(c) for c in (1, 4, 16)}
    rest = [
        abs(share)
        for c, found in apart.items()
        for rung, share in found.items()
        if rung != FIRST and (rung, c) not in stalled
    ]
    assert f"{max(rest):.0%}" == "10%"
    assert apart[4][FIRST] < -0.11 and apart[16][FIRST] < -0.11
    says(
        prose, f"two runs of one rung up to a tenth; the first rung {-100 * apart[4][FIRST]:.0f} %"
    )
    assert min(abs(apart[c][rung]) for rung, c in stalled) > 0.3
    says(prose, "and two stalls far more")


def test_the_first_rungs_chunks_are_what_differs_between_the_runs(
    record: RankRecord, again: RankRecord, prose: str
) -> None:
    says(prose, "on every rung, within 4 percent (once 7), except on the first")
    further = []
    for c in (1, 4, 16):
        prompts = record.apart(c, "prompt_step_ms")
        first = prompts.pop(FIRST)
        further += [abs(share) for share in prompts.values() if abs(share) > 0.04]
        assert (first > 0.15) is (c > 1)
    assert [f"{share:.0%}" for share in further] == ["7%"]
    chunk = {
        c: [f"{run.need(FIRST, c)['prompt_step_ms']:.0f}" for run in (record, again)]
        for c in (1, 4, 16)
    }
    says(
        prose,
        f"took {chunk[4][0]} ms and then {chunk[4][1]} with four requests, {chunk[16][0]} and "
        f"then {chunk[16][1]} with sixteen",
    )
    says(
        prose, "a lone request's chunks are launched in the same way and took equally long in both"
    )
    assert abs(record.apart(1, "prompt_step_ms")[FIRST]) < 0.04
    ends = [f"{run.gain(c):.2f}" for c in (4, 16) for run in (record, again)]
    says(
        prose,
        f"the whole difference between {ends[0]} and {ends[1]}, and seven tenths of that between "
        f"{ends[2]} and {ends[3]}",
    )
    explained = {}
    for c in (4, 16):  # the recorded run with nothing changed but the second run's chunks
        longer = again.prompt_seconds(FIRST, c) - record.prompt_seconds(FIRST, c)
        ran = [record.need(rung, c)["elapsed_s"] for rung in (FIRST, SEPTEMBER)]
        would = (ran[0] + longer) / ran[1]
        explained[c] = (would - record.gain(c)) / (again.gain(c) - record.gain(c))
    assert explained == pytest.approx({4: 1.0, 16: 0.7}, abs=0.05)
    says(prose, "the second run rehearsed more than the first, not less")
    longest = [again.need(FIRST, c)["longest_step_ms"] for c in (4, 16)]
    says(prose, f"no single step stands out ({longest[0]:.0f} and {longest[1]:.0f} ms at most)")
    for c, step in zip((4, 16), longest, strict=True):
        assert step < 1.7 * again.need(FIRST, c)["prompt_step_ms"]
    says(prose, "It is not excluded, and only a third run would tell")
    most = max(max(record.apart(c, "decode_step_ms").values()) for c in (1, 4, 16))
    says(prose, f"verifications, too, take up to {most:.0%} longer".replace("%", " %"))
    says(prose, "changed from one run to the other by as much as half")
    assert 0.45 < record.apart(4, "prompt_step_ms")[FIRST] < 0.55


def test_where_the_saved_seconds_were(record: RankRecord, prose: str) -> None:
    ran = {(r, c): record.need(r, c)["elapsed_s"] for r in (FIRST, SEPTEMBER) for c in (1, 4, 16)}
    inside = {key: record.prompt_seconds(*key) for key in ran}
    steps = {r: inside[r, 16] / record.need(r, 16)["prompt_step_ms"] * 1e3 for r, _ in ran}
    says(
        prose,
        f"the first rung spends more than half of its {ran[FIRST, 16]:.1f} s in at least "
        f"{steps[FIRST]:.0f} steps with a chunk; September needs {steps[SEPTEMBER]:.0f} steps with "
        f"a prompt, and less than a third of {ran[SEPTEMBER, 16]:.1f} s",
    )
    assert inside[FIRST, 16] > ran[FIRST, 16] / 2
    assert inside[SEPTEMBER, 16] < ran[SEPTEMBER, 16] / 3
    saved = {
        c: (inside[FIRST, c] - inside[SEPTEMBER, c]) / (ran[FIRST, c] - ran[SEPTEMBER, c])
        for c in (1, 4, 16)
    }
    says(prose, "Nine tenths of the saved time are those steps")
    says(prose, "At four requests they are all of it, and for one request three fifths")
    says(prose, "At 4 and 16 requests nearly all of it is passes over the model that need not")
    says(prose, "need not happen; for one, three fifths")
    assert saved == pytest.approx({1: 0.6, 4: 1.0, 16: 0.9}, abs=0.02)
    says(prose, "sixteen times the tokens in less than six times the time")
    ends = [record.need(rung, 16)["prompt_step_ms"] for rung in (FIRST, SEPTEMBER)]
    assert 5 < ends[1] / ends[0] < 6
    says(prose, "1,024 rows already choose every expert")
    assert record.body["distinct_experts"][-1] == pytest.approx(
        {"rows": 1024, "measured": 896, "expected": 896}, abs=0.01
    )


def test_the_goals(record: RankRecord, again: RankRecord, prose: str) -> None:
    says(prose, "All goals about kernels are reached, on the device, and none about the gain")
    says(prose, "a lone request's plain step at 45 % of its floor, sixteen requests with eight")
    assert all(
        run.gain(c) < g for run in (record, again) for c, g in ((1, 2.2), (4, 2.5), (16, 2.8))
    )
    plain, host = record.body["plain_decode"][0], record.step_parts(1)["host and the rest"]
    assert plain["requests"] == 1 and plain["fraction_of_floor"] > 0.45
    says(prose, f"with the host's {host:.1f} ms of a speculated one it would be some 40 %")
    assert plain["floor_ms"] / (plain["ms"] + host) == pytest.approx(0.4, abs=0.01)
    parts = record.step_parts(16)
    assert (parts["model, floor"] + parts["drafter, floor"]) / sum(parts.values()) > 0.6
    fresh = {r["tokens"]: r for r in record.body["curves"]["prefill"] if r["start"] == 0}
    assert fresh[8000]["fraction_of_floor"] > 0.5


def test_the_floor_is_experts(record: RankRecord, prose: str) -> None:
    config = K3Config.rank_slice(layers=24)
    chosen = {int(row["rows"]): row for row in record.body["distinct_experts"]}
    says(prose, "a formula gives the same number within about two percent")
    for row in chosen.values():
        assert row["measured"] == pytest.approx(row["expected"], rel=0.0225)
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
    counted = round(chosen[144]["measured"])
    says(
        prose,
        f"nine rows choose {nine} of 896 experts in a layer, 144 rows choose {many} (by the "
        f"formula; {counted} were counted)",
    )
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
        assert parts["host and the rest"] < whole / 8
        drafter = parts["drafter, floor"] + parts["drafter, above its floor"]
        assert drafter > 2.5 * parts["drafter, floor"]
    says(prose, "What lies above the floor is the larger part of the rest")
    says(prose, "What is left for the host and all else is an eighth or less")
    says(prose, f"The bars are of the last rung, {record.body['curves']['rung']}")
    assert record.rungs[-1].name == record.body["curves"]["rung"]
    says(prose, "it needs several times its floor")
    says(prose, "A verification of nine rows takes about twice its floor")


def test_other_peoples_prompts(record: RankRecord, prose: str) -> None:
    says(prose, "the steps themselves are nearly as long on the September rung as on the first")
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert any("the steps after it became 6 % shorter" in "".join(c["source"]) for c in cells)
    steps = [record.need(rung, 1)["decode_step_ms"] for rung in (FIRST, SEPTEMBER)]
    assert 1 - steps[1] / steps[0] == pytest.approx(0.06, abs=0.005)
    for c in (1, 4, 16):
        assert 0.85 < record.own_ms(SEPTEMBER, c) / record.own_ms(FIRST, c) < 1.08
    says(prose, "some three tenths of a token's time go into steps that carry somebody's prompt")
    says(prose, "on the September rung it is a sixth")
    waits = [1 - record.own_ms(r, 16) / record.need(r, 16)["tpot_ms"] for r in (FIRST, SEPTEMBER)]
    assert waits == pytest.approx([0.3, 1 / 6], abs=0.01)


def test_context_and_company(record: RankRecord, prose: str) -> None:
    curves = record.body["curves"]
    ms = {(r["requests"], r["context"]): r["target_ms"] for r in curves["decode"]}
    ratios = [ms[64, context] / ms[1, context] for context in (1000, 8000)]
    says(prose, f"64 requests take {ratios[0]:.1f} to {ratios[1]:.1f} times as long as one")
    says(prose, "whole waves stop at 16 requests", "no 64 requests at 64,000 tokens")
    assert [c for n, c in ms if n == 64] == [1000, 8000] and (16, 64000) in ms
    assert max(record.concurrencies) == 16
    says(prose, "a tenth longer for one request and a third longer for sixteen")
    assert 1.05 < ms[1, 64000] / ms[1, 1000] < 1.16
    assert 1.25 < ms[16, 64000] / ms[16, 1000] < 1.42
    fresh = {r["tokens"]: r for r in curves["prefill"] if r["start"] == 0}
    says(prose, "twice the tokens cost less than a third more time up to 2,048")
    assert 1.2 < fresh[2048]["ms"] / fresh[1024]["ms"] < 1.33
    says(prose, "the shortest chunk is the furthest from its floor")
    assert min(fresh, key=lambda n: fresh[n]["fraction_of_floor"]) == 1024
    assert sorted({r["requests"] for r in curves["decode"]}) == [1, 4, 16, 64]
    says(prose, "more than half of their time is floor")
    assert min(fresh[8000]["fraction_of_floor"], fresh[16000]["fraction_of_floor"]) > 0.5


def test_one_request_gains_what_the_scheduler_gives(
    record: RankRecord, again: RankRecord, points: dict[int, Comparison], prose: str
) -> None:
    one = points[1]
    only_first = one.before.latency_s - (one.before.ttft_ms - one.after.ttft_ms) / 1e3
    there = one.before.latency_s / only_first
    parts: dict[str, list[float]] = {}
    for name, run in (("recorded", record), ("again", again)):
        first, last = (run.need(rung, 1) for rung in (FIRST, SEPTEMBER))
        sooner = (first["ttft_ms"] - last["ttft_ms"]) / 1e3
        rest = 0.999 * (first["tpot_ms"] - last["tpot_ms"])  # of 999 tokens, in seconds
        parts[name] = [first["latency_s"] / (first["latency_s"] - s) for s in (sooner, rest)]
        parts[name].append(run.gain(1, "latency_s"))
        assert math.log(parts[name][0]) / math.log(there) == pytest.approx(2 / 3, abs=0.05)
    told = [f"{value:.2f}" for value in parts["recorded"]]
    says(
        prose,
        f"{there:.2f} is left. Here first tokens alone bring {told[0]} and the others {told[1]}, "
        f"both {told[2]}",
        "about two thirds of what first tokens gave there (in logarithms)",
    )
    says(prose, "on the B300s a token came in half the time, here in nearly the same")
    assert max(record.gain(1, "tpot_ms"), again.gain(1, "tpot_ms")) < 1.09
    says(prose, "with 4 and 16 requests the others came somewhat sooner here, too")
    assert min(record.gain(c, "tpot_ms") for c in (4, 16)) > 1.1
    halves = {}
    for name, run in (("recorded", record), ("again", again)):
        for c in (4, 16):
            first, last = (run.need(rung, c) for rung in (FIRST, SEPTEMBER))
            sooner = (first["ttft_ms"] - last["ttft_ms"]) / 1e3
            rest = first["latency_s"] - last["latency_s"] - sooner
            halves[name, c] = first["latency_s"] / (first["latency_s"] - rest)
            before, after = points[c].before, points[c].after
            alone = (before.ttft_ms - after.ttft_ms) / 1e3
            published = before.latency_s / (before.latency_s - alone)
            assert first["latency_s"] / (first["latency_s"] - sooner) > published
    says(prose, "At 4 and 16 requests first tokens bring more here than there")
    assert f"{halves['recorded', 4]:.2f}" == f"{halves['recorded', 16]:.2f}" == "1.13"
    others = [f"{halves['again', c]:.2f}" for c in (4, 16)]
    says(prose, f"1.13 with both here, and {others[0]} and {others[1]} the second time")
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
    says(prose, "a step of the published first version took longer a layer than ours")
    steps = [3.4 * end.ms_per_token / 93 for end in (one.before, one.after)]
    ours = [record.need(rung, 1)["decode_step_ms"] / 24 for rung in (FIRST, SEPTEMBER)]
    assert steps[0] > 1.05 * ours[0]
    says(prose, "together shorten a lone request's step by 6 %, all of it by the last")
    mine = {r: record.need(r, 1)["decode_step_ms"] for r in (PREFILL, FINALIZE, OTHER)}
    assert 1 - mine[OTHER] / mine[PREFILL] == pytest.approx(0.06, abs=0.005)
    assert mine[FINALIZE] >= mine[PREFILL]
    says(prose, "the September version takes clearly less than ours")
    assert steps[1] < 0.85 * ours[1]

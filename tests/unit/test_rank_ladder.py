"""The whole ladder with the smallest model on the reference backend: same tokens, whole rows."""

from __future__ import annotations

import dataclasses
import gc
import json
from pathlib import Path

import pytest
import torch

from kimik3_lab.drafter_config import DSparkConfig
from kimik3_lab.rank import curves, ladder, results
from kimik3_lab.rank.__main__ import micro_plan
from kimik3_lab.rank.build import rank_presets
from kimik3_lab.rank.ladder import Bench
from kimik3_lab.rank.rehearsal import rehearse
from kimik3_lab.rank.step_times import StepTimer
from kimik3_lab.rank.weights import micro_rank
from kimik3_lab.rank.workload import RequestTimes
from kimik3_lab.reference.state import SequenceMixer
from kimik3_lab.serving.executors.rejection_sampler import verify_batch
from kimik3_lab.serving.presets import MAIN_2026_09_13
from kimik3_lab.serving.sampling_params import SamplingParams

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def bench() -> Bench:
    config = micro_rank()
    drafter = DSparkConfig.for_target(config)
    return Bench(
        micro_plan(), config, drafter, device="cpu", dtype=torch.float64, backend="reference"
    )


@pytest.fixture(scope="module")
def rows(bench: Bench) -> list[dict]:
    return list(ladder.climb(bench, lambda _: None))


def test_every_rung_at_every_concurrency_has_a_whole_row(bench: Bench, rows: list[dict]) -> None:
    names = [preset.name for preset in rank_presets()]
    assert [(r["rung"], r["concurrency"]) for r in rows] == [(n, c) for n in names for c in (1, 2)]
    results.check_rows(rows)
    for row in rows:
        assert row["output_tokens"] == 8 * row["requests"]
        assert row["latency_s"] * 1e3 > row["ttft_ms"] > 0
        assert row["forwards"] > 0 and row["bytes"] > 0
    broken = [{**rows[0], "bytes": None}]
    with pytest.raises(ValueError, match=r"lacks \['bytes'\]"):
        results.check_rows(broken)


def test_the_first_rung_pays_for_what_the_last_one_saves(rows: list[dict]) -> None:
    """Forwards of a prompt, gathers and states: counted, the same on any machine."""
    by_rung = {r["rung"]: r for r in rows if r["concurrency"] == 2}
    first, september = by_rung["v0.27.1"], by_rung[MAIN_2026_09_13.name]
    assert first["forwards"] > september["forwards"]
    assert by_rung["v0.27.1"]["gather_bytes"] > 0 == september["gather_bytes"]
    assert by_rung["recovery records"]["kda_state_writes"] < september["kda_state_writes"]
    assert {r["output_tokens"] for r in by_rung.values()} == {16}


def test_all_rungs_say_the_same(bench: Bench) -> None:
    """With the real rule of verification, so that the tokens are the model's."""
    said = {}
    for preset in bench.plan.presets:
        rung = bench.rung(preset)
        executor = rung.executor
        executor.verifier = verify_batch
        executor.proposer = executor.proposer.proposer  # the drafts are the drafter's
        prompts = [rung.script.tokens(r, 0, 30 + 9 * r) for r in range(3)]
        params = SamplingParams(max_tokens=8, ignore_eos=True)
        found = rung.engine.generate(prompts, params, progress=False)
        said[preset.name] = [result.token_ids for result in found]
        assert all(len(tokens) == 8 for tokens in said[preset.name])
    first, *others = said.values()
    assert all(tokens == first for tokens in others)


@pytest.mark.parametrize("name", [MAIN_2026_09_13.name, "recovery records"])
def test_made_up_requests_compute_what_the_model_says(bench: Bench, name: str) -> None:
    """A prompt, and a verification behind it: each layer finds its own state, whatever its group.

    Three groups share the memory of their layers. With the same rows for all three a correct
    backend is wrong by 30 per cent in the prompt and by 100 behind it.
    """
    rung = bench.rung(next(p for p in bench.plan.presets if p.name == name))
    timer, tokens = StepTimer(rung), rung.script.tokens(3, 0, 40)
    with torch.inference_mode():
        ids = torch.tensor(tokens)
        truth = bench.model(ids, SequenceMixer(bench.model.new_state()))
    (_, whole) = timer.segments(2, 0, 40, 0)
    rows = [row for states in whole.states for row in states.rows]
    assert len(set(rows)) == len(rows) and len(whole.states) == 3
    taps = rung.executor.proposer.new_taps()
    begin = dataclasses.replace(whole, count=37)
    logits = timer._eager([begin], tokens[:37], list(range(37)), taps)()
    torch.testing.assert_close(logits, truth[:37])
    step = dataclasses.replace(whole, start=37, count=3, num_drafts=2)
    logits = timer._eager([step], tokens[37:], [0, 1, 2], taps)()
    torch.testing.assert_close(logits, truth[37:])


def test_a_rehearsal_leaves_the_rung_idle_and_its_memory_out_of_collections(bench: Bench) -> None:
    rung = bench.rung(MAIN_2026_09_13)
    rehearse(bench, rung)
    assert not rung.engine.has_unfinished_requests()
    assert rung.script.num_tokens > 0 and gc.get_freeze_count() > 0
    row = ladder.measure_cell(bench, rung, 2, 2)
    assert row["output_tokens"] == 16 and row["longest_step_ms"] >= row["prompt_step_ms"] > 0
    ladder.collect(bench.device)
    assert gc.get_freeze_count() == 0


def test_curves_and_plain_steps_have_their_floors(bench: Bench) -> None:
    last = bench.plan.presets[-1]
    found = curves.cost_curves(bench, last, bench.rung(last))
    assert [(r["requests"], r["context"]) for r in found["decode"]] == [(1, 40), (2, 20)]
    assert all(0 < r["fraction_of_floor"] < 1 for r in [*found["decode"], *found["prefill"]])
    (plain,) = curves.plain_decode(bench, last, (1,))
    assert plain["bytes"] > 0 and plain["floor_ms"] < plain["ms"]


def test_gains_and_operators(rows: list[dict]) -> None:
    gains = results.gains(rows, MAIN_2026_09_13.name)
    assert set(gains) == {"1", "2"}
    kernels = {
        "rows": [
            {"operator": "router", "case": "T=1", "ours_us": 3.0, "ratio": 2.0, "best_peer": "x"},
            {"operator": "kda_prefill", "case": "H=12,1x8192", "ours_us": 5.0, "ratio": 0.8,
             "best_peer": "y"},
            {"operator": "router", "case": "T=1024", "ours_us": 3.0, "ratio": 2.0,
             "best_peer": "x"},
        ]
    }  # fmt: skip
    first, second = results.operators(kernels)
    assert (first["best_peer_us"], first["slower_than_1.1x"]) == (6.0, False)
    assert (second["ours_over_peer"], second["slower_than_1.1x"]) == (1.25, True)


def test_the_file_is_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "new" / "ladder.json"
    results.save({"rows": [1]}, path)
    assert json.loads(path.read_text(encoding="utf-8")) == {"rows": [1]}
    assert [p.name for p in path.parent.iterdir()] == ["ladder.json"]


def test_times_are_those_of_the_lab_s_client() -> None:
    from kimik3_lab.benchmark.records import RequestRecord

    ours = RequestTimes(start=1.0, first=1.5, end=4.0, tokens=6)
    theirs = RequestRecord(0, start=1.0, token_times=[1.5, 2.0, 4.0], end=4.0, output_tokens=6)
    assert (ours.ttft, ours.tpot, ours.e2e) == (theirs.ttft, theirs.tpot, theirs.e2e)


def test_context_parallelism_is_left_out() -> None:
    assert all("dcp_world_size" not in p.cache for p in rank_presets())
    assert dataclasses.asdict(micro_plan().sizes)["block_size"] == 16

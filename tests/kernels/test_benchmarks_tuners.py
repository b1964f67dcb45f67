"""The tuners' command lines, and how winners join a stored table."""

from __future__ import annotations

import doctest
import json
import sys
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import buckets, tune_attn_res, tune_kda, tune_moe, tuner_options, tuning
from benchmarks.moe_candidates import CASES
from benchmarks.timing import Timing
from k3_kernels import tuned

DEVICE = "ACME G-1"
MOE = "mxfp4,E=896,I=384,H=3584"
SIZES = [tokens for kind, rank, tokens in CASES if (kind, rank) == ("mxfp4", "tp8")]


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with one imaginary GPU, and the file of its table, which is not there yet."""
    monkeypatch.setenv("K3_KERNELS_TUNED", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: DEVICE)
    made = dict.fromkeys(("torch", "triton", "driver", "date_utc", "sources_sha256"), "x")
    monkeypatch.setattr(
        tuner_options, "provenance", lambda peers, seed: {**made, "command": " ".join(sys.argv)}
    )
    return tmp_path / "acme_g_1.json"


def _entry(path: Path, operator: str, shape: str) -> dict[str, Any]:
    entry: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["operators"][operator]
    return entry[shape]


def _moe(tokens: int, name: str) -> dict[str, Any]:
    return {"case": ["mxfp4", "tp8", tokens], "key": MOE, "us": 2.0, "config": {"name": name}}


def _constants(found: list[dict[str, Any]]) -> list[tuple[int | None, str, int | None]]:
    return [(b["up_to"], b["config"]["name"], b.get("measured_at")) for b in found]


def test_one_token_count_leaves_the_others(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["first"])
    tune_moe.store([_moe(tokens, "first") for tokens in SIZES])
    first = _entry(table, "moe", MOE)
    bounds = [2, 8, 32, 128, 512, 1448, 4096, None]
    assert _constants(first["buckets"]) == [
        (bound, "first", size) for bound, size in zip(bounds, SIZES, strict=True)
    ]
    assert first["provenance"]["command"] == "first"
    assert not any("provenance" in bucket for bucket in first["buckets"])
    monkeypatch.setattr(sys, "argv", ["second"])
    tune_moe.store([_moe(16, "second")])
    entry = _entry(table, "moe", MOE)
    assert entry["provenance"]["command"] == "second"
    for bucket, before in zip(entry["buckets"], first["buckets"], strict=True):
        if bucket["measured_at"] == 16:
            assert _constants([bucket]) == [(32, "second", 16)] and "provenance" not in bucket
        else:
            assert bucket == {**before, "provenance": first["provenance"]}
    tune_moe.store([_moe(tokens, "third") for tokens in SIZES])
    assert [b for b in _entry(table, "moe", MOE)["buckets"] if "provenance" in b] == []


def test_a_size_between_two_gets_its_own_bucket(table: Path) -> None:
    tune_moe.store([_moe(tokens, "first") for tokens in SIZES])
    tune_moe.store([_moe(32, "new")])
    tune_moe.store([_moe(16, "again")])  # knows by measured_at that 32 has a bucket
    found = _constants(_entry(table, "moe", MOE)["buckets"])
    assert found[2:5] == [(22, "again", 16), (45, "new", 32), (128, "first", 64)]
    tune_moe.store([_moe(tokens, "all") for tokens in SIZES])
    assert len(_entry(table, "moe", MOE)["buckets"]) == len(SIZES)


def test_without_a_table_a_size_serves_its_own_calls(
    table: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tune_moe.store([_moe(1, "first")])
    assert _constants(_entry(table, "moe", MOE)["buckets"]) == [(2, "first", 1)]
    assert "beyond 2 nothing is stored, so calls run by rule; measure 8192" in (
        capsys.readouterr().out
    )


def test_a_shipped_table_survives_one_size(table: Path) -> None:
    """Also one of a time when buckets did not say where they were measured."""
    shipped = json.loads(
        (Path(tuned.__file__).parent / "tuned" / "nvidia_h200.json").read_text(encoding="utf-8")
    )["operators"]["moe"][MOE]
    for bucket in shipped["buckets"]:
        bucket.pop("measured_at", None)
    tuned.store(DEVICE, "moe", MOE, shipped["buckets"], shipped["provenance"])
    tune_moe.store([_moe(1, "new")])
    after = _entry(table, "moe", MOE)["buckets"]
    assert tuned.pick(after, 1) == tuned.pick(after, 2) == {"name": "new"}
    for tokens in range(3, 10_000):
        assert tuned.pick(after, tokens) == tuned.pick(shipped["buckets"], tokens)


@pytest.mark.parametrize("operator", ["kda_decode", "kda_recover", "attn_res"])
def test_what_is_shipped_is_tried_again(operator: str) -> None:
    """At the size that it was measured at, which it serves, as the tuner would store it."""
    text = (Path(tuned.__file__).parent / "tuned" / "nvidia_h200.json").read_text(encoding="utf-8")
    (entry,) = json.loads(text)["operators"][operator].values()
    if operator == "attn_res":
        bounds = dict(tune_attn_res.SIZES)
        tried = {size: tune_attn_res.candidates(size) for size in bounds}
    else:
        kind = operator.removeprefix("kda_")
        bounds = buckets.middles(tune_kda.case_sizes(kind))
        tried = dict.fromkeys(bounds, tune_kda.VARIANTS[kind])
    shipped = {bucket["measured_at"]: bucket for bucket in entry["buckets"]}
    assert {size: bucket["up_to"] for size, bucket in shipped.items()} == bounds
    for size, bucket in shipped.items():
        assert bucket["config"] in [asdict(config) for config in tried[size]], size


def test_what_has_no_right_variant_keeps_what_is_stored(table: Path) -> None:
    old = [{"up_to": 96, "config": {"name": "a"}}, {"up_to": None, "config": {"name": "b"}}]
    tuned.store(DEVICE, "kda_verify", "D=128", old, {"made": "before"})

    def result(size: int, error: float) -> dict[str, Any]:
        rows = [{"config": {"name": "new"}, "us": 3.0, "error": error}]
        return {"kind": "verify", "size": size, "tolerance": 1e-3, "rows": rows}

    tune_kda.store([result(12, 0.0), result(192, 0.1), result(768, float("nan"))])
    found = _entry(table, "kda_verify", "D=128")["buckets"]
    assert _constants(found) == [(12, "new", 12), (96, "a", None), (None, "b", None)]
    assert found[1]["provenance"] == {"made": "before"}
    tune_kda.store([result(192, 0.1)])
    assert _entry(table, "kda_verify", "D=128")["buckets"] == found


def test_the_small_tuners_keep_a_case_that_failed(table: Path) -> None:
    bounds: dict[str, dict[int, int | None]] = {"E=4": {1: 8, 16: 32, 64: None}}

    def rows(*sizes: int) -> list[dict[str, Any]]:
        return [
            {"shape": "E=4", "size": size, "config": {"name": name}, "median_us": us}
            for size in sizes
            for name, us in (("best", 1.0), ("other", 2.0))
        ]

    tuning.store("routing", rows(1, 16, 64), bounds)
    before = _entry(table, "routing", "E=4")["buckets"]
    assert _constants(before) == [(8, "best", 1), (32, "best", 16), (None, "best", 64)]
    tuning.store("routing", rows(1, 64), bounds)
    after = _entry(table, "routing", "E=4")["buckets"]
    assert _constants(after) == _constants(before) and "provenance" in after[1]


@pytest.fixture
def gpu(table: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The imaginary GPU as far as the command lines need it; a call takes as long as its result."""

    def clock(calls: dict[str, Any], sets: int, *, seconds: float) -> dict[str, Timing]:
        return {name: Timing(us := call(0), us, us, 1, 7) for name, call in calls.items()}

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(tuning, "time_side_by_side", clock)
    monkeypatch.setattr(tuning, "provenance", tuner_options.provenance)
    return table


@dataclass(frozen=True)
class Config:
    name: str
    us: float
    error: float


def test_a_small_tuner_from_its_command_to_the_table(
    gpu: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def case(size: int, bound: int | None, best: Config, most_sets: int | None) -> tuning.Case:
        found = [Config("slow", 9.0, 0.0), best, Config("wrong", 0.1, 1.0)]
        return tuning.Case("E=4", size, bound, 1, found, lambda config, index: config.us,
                           lambda config: config.error, 1e-3, 0.5)  # fmt: skip

    good, bad = Config("good", 2.0, 0.0), Config("bad", 2.0, 1.0)
    cases = [partial(case, 1, 8, good), partial(case, 16, None, bad)]
    words = ["tune_routing", "--write", "--output", str(tmp_path / "deep" / "all.json")]
    monkeypatch.setattr(sys, "argv", words)
    assert tuning.tune("routing", cases) == 0
    entry = _entry(gpu, "routing", "E=4")
    assert _constants(entry["buckets"]) == [(8, "good", 1), (None, "slow", 16)]
    assert entry["provenance"]["command"].startswith("tune_routing --write")
    rows = json.loads((tmp_path / "deep" / "all.json").read_text(encoding="utf-8"))["rows"]
    assert [row["config"]["name"] for row in rows] == ["good", "slow", "slow"]


def test_the_expert_tuner_from_its_command_to_the_table(
    gpu: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tune(case: Any, experts: Any, seconds: float) -> dict[str, Any]:
        return {"case": list(case), "us": float(case[2]), "config": {"name": f"for {case[2]}"}}

    monkeypatch.setattr(tune_moe, "tune", tune)
    monkeypatch.setattr(tune_moe, "_jobs", lambda cases: [])
    monkeypatch.setattr(tune_moe, "make_experts", lambda *_: None)
    monkeypatch.setattr(tune_moe, "shape_key", lambda _: MOE)
    tune_moe.main(["--cases", "mxfp4:tp8:16,mxfp4:tp8:64", "--output", str(tmp_path / "all.json")])
    assert not gpu.exists() and len(json.loads((tmp_path / "all.json").read_text())) == 2
    tune_moe.main(["--cases", "mxfp4:tp8:16,mxfp4:tp8:64", "--write"])
    found = _entry(gpu, "moe", MOE)["buckets"]
    assert _constants(found) == [(32, "for 16", 16), (128, "for 64", 64)]
    assert [bucket["us"] for bucket in found] == [16.0, 64.0]


def test_a_winner_without_a_bound_is_refused() -> None:
    for winners in ({}, {3: {"config": {}}}):
        with pytest.raises(ValueError, match=r"winners of sizes among \[1, 4\] expected"):
            buckets.merged(None, winners, buckets.middles([1, 4]))


@pytest.mark.parametrize(
    ("main", "words", "message"),
    [
        (tune_moe.main, ["--cases", "nope"], "no case 'nope'; write format:rank:tokens"),
        (tune_moe.main, ["--cases", "mxfp4:tp8:0"], "no case 'mxfp4:tp8:0'"),
        (tune_moe.main, ["--cases", "mxfp4:tp9:1"], "the ranks tp8, ep8"),
        (tune_kda.main, ["--kinds", "decode,nope"], "no kind 'nope'; there are decode, recover"),
        (tune_kda.main, ["--warm", "4/4"], "expected I/N with I < N"),
    ],
)
def test_a_wrong_choice_is_refused(
    main: Any, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("main", [tune_moe.main, tune_kda.main])
def test_without_a_gpu_a_tuner_says_so(main: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for words in (["--write"], ["--warm", "1/4"], ["--store", "--report", "x", "--compile-only"]):
        with pytest.raises(SystemExit, match="Tuning needs a CUDA device"):
            main(words)


def test_all_tuners_have_the_same_options() -> None:
    for module in ("tune_moe", "tune_kda"):
        parser = tuner_options.parser(module, None, seconds=0.1)
        tuner_options.old_names(parser)
        new = parser.parse_args(["--warm", "--write", "--output", "x"])
        assert new == parser.parse_args(["--compile-only", "--store", "--report", "x"])
        nothing = parser.parse_args([])
        assert (nothing.warm, nothing.write, nothing.output) == (None, False, None)
        assert "--store" not in parser.format_help()
    assert parser.parse_args(["--warm", "3/16"]).warm == (3, 16)


@pytest.mark.parametrize("module", [buckets, tuner_options, tune_moe])
def test_examples(module: Any) -> None:
    result = doctest.testmod(module)
    assert result.attempted and not result.failed

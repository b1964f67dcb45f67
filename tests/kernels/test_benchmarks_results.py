"""Rows, goals, merging and writing of the benchmark's results."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from benchmarks import report
from benchmarks.cases import CASES, Case, find_case
from benchmarks.provenance import SESSION, same_session, source_hash
from benchmarks.registry import OURS, PEERS
from benchmarks.rows import NOT_MEASURED, complete, make_row
from benchmarks.timing import Timing

from kimik3_lab.paths import data_dir, repository_dir

RECORDED = data_dir() / "results" / "h200" / "kernels.json"


def _timing(us: float) -> Timing:
    return Timing(us, 0.98 * us, 1.03 * us, 20, 50)


def _case(operator: str, name: str) -> Case:
    case = find_case(operator, name)
    assert case is not None
    return case


def _row(operator: str, name: str, times: dict[str, float], **more: Any) -> dict[str, Any]:
    timings = {implementation: _timing(us) for implementation, us in times.items()}
    return make_row(_case(operator, name), timings=timings, **more)


def test_the_quickest_peer_over_ours() -> None:
    times = {"ours": 50.0, "humming": 64.0, "marlin": 62.5, "triton_kernels": 130.0}
    row = _row("moe_mxfp4_tp8", "T=16", times, floor_us=40.0, errors={"ours": 3e-3})
    assert row["best_peer"] == "marlin" and row["ratio"] == 1.25 and row["goal_met"] is True
    assert row["peers"] == {"humming": 64.0, "marlin": 62.5, "triton_kernels": 130.0}
    assert row["fraction_of_floor"] == 0.8 and row["max_rel_err"] == 3e-3
    assert row["ratios"]["triton_kernels"] == 2.6
    times["ours"] = 50.1
    assert _row("moe_mxfp4_tp8", "T=16", times)["goal_met"] is False


def test_a_goal_over_named_peers_states_the_others() -> None:
    times = {"ours": 200.0, "flash_kda": 133.0, "vllm_triton": 383.0, "fla": 340.0}
    row = _row("kda_prefill", "H=12,8x1024", times)
    assert row["best_peer"] == "fla" and row["ratio"] == 1.7 and row["goal_met"]
    assert row["ratios"]["flash_kda"] == pytest.approx(0.665)
    times.pop("flash_kda")
    alone = _row("kda_prefill", "H=12,1x8192", times)  # its goal counts FlashKDA only
    assert alone["best_peer"] is None and alone["ratio"] is None and alone["goal_met"] is None


@pytest.mark.parametrize(
    ("ours", "floor", "met"), [(5.9, 0.4, True), (6.1, 0.4, False), (30.0, 21.0, True)]
)
def test_recovery_is_held_to_its_floor_or_the_launch(ours: float, floor: float, met: bool) -> None:
    row = _row("kda_recover", "K=8,B=16", {"ours": ours}, floor_us=floor)
    assert row["goal_met"] is met and row["ratio"] is None and row["peers"] == {}


def test_what_was_not_measured_says_why() -> None:
    missing = _row(
        "router", "T=1", {"vllm_grouped_topk": 5.3},
        reasons={"ours": "k3_kernels has no route yet", "torch": "wrong: relative error 1"},
        errors={"torch": float("inf")},
    )  # fmt: skip
    assert missing["ours_us"] is None and missing["reason"] == "k3_kernels has no route yet"
    assert missing["best_peer"] == "vllm_grouped_topk" and missing["ratio"] is None
    assert missing["not_timed"] == {"torch": "wrong: relative error 1"}
    assert missing["rel_err"] == {"torch": None}, "infinity is no JSON"
    assert missing["goal_met"] is None
    lonely = _row("router", "T=1", {"ours": 3.0})
    assert lonely["ratio"] is None and "reason" not in lonely


def test_every_cell_has_a_row_none_left_out() -> None:
    row = _row("router", "T=16", {"ours": 3.0})
    rows = complete([row])
    assert [(r["operator"], r["case"]) for r in rows] == [(c.operator, c.name) for c in CASES]
    assert rows.count(row) == 1
    rest = [r for r in rows if r is not row]
    assert all(r["reason"] == NOT_MEASURED and r["floor_us"] > 0 for r in rest)


def _result(rows: list[dict[str, Any]], **made: Any) -> dict[str, Any]:
    session = dict.fromkeys(SESSION, "same")
    provenance = {**session, "peers": {"fla": "0.6"}, "command": "a", "date_utc": "now", **made}
    return {"schema_version": report.SCHEMA_VERSION, "provenance": provenance, "rows": rows}


def test_runs_of_one_session_merge() -> None:
    old = _result([_row("router", "T=1", {"ours": 9.0}), _row("router", "T=16", {"ours": 4.0})])
    new = _result([_row("router", "T=1", {"ours": 3.0})], peers={"marlin": "0.33"}, command="b")
    both = report.merge(old, new)
    assert {r["case"]: r["ours_us"] for r in both["rows"]} == {"T=1": 3.0, "T=16": 4.0}
    assert both["provenance"]["peers"] == {"fla": "0.6", "marlin": "0.33"}
    assert both["provenance"]["commands"] == ["a", "b"]
    third = report.merge(both, _result([], command="c"))
    assert third["provenance"]["commands"] == ["a", "b", "c"]


@pytest.mark.parametrize("key", SESSION)
def test_another_machine_or_software_does_not_merge(key: str) -> None:
    with pytest.raises(ValueError, match=rf"another session \({key} differ\)"):
        report.merge(_result([]), _result([], **{key: "other"}))
    assert same_session({}, {key: "x"}) == [key]


def test_an_older_schema_does_not_merge() -> None:
    with pytest.raises(ValueError, match="schema_version"):
        report.merge({**_result([]), "schema_version": 1}, _result([]))


def test_a_write_is_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "kernels.json"
    report.save(path, _result([_row("router", "T=1", {"ours": 3.0})]))
    before = path.read_text(encoding="utf-8")
    assert len(json.loads(before)["rows"]) == len(CASES)
    with pytest.raises(ValueError, match="JSON compliant"):
        report.save(path, _result([], seed=float("nan")))
    assert path.read_text(encoding="utf-8") == before
    assert [file.name for file in path.parent.iterdir()] == ["kernels.json"]


def test_the_table_shows_what_the_row_holds() -> None:
    row = _row("attnres8", "T=64", {"ours": 5.0, "vllm_triton": 9.5}, floor_us=2.56)
    text = report.line(row)
    for part in ("T=64", "5.00", "vllm_triton 9.5", "1.90", "1.50", "2.56", "51%", "  met"):
        assert part in text
    assert len(report.header()) < 100
    missing = report.line(_row("attnres8", "T=1", {}, reasons={"ours": "broken"}))
    assert missing.endswith("(broken)")


def test_the_summary_counts_every_row() -> None:
    """Those without a goal as well, and a goal whose peer was not there."""
    rows = [
        _row("attnres8", "T=64", {"ours": 5.0, "vllm_triton": 9.5}),
        _row("attnres8", "T=1", {"ours": 5.0, "vllm_triton": 7.0}),
        _row("router", "T=1", {}),
        _row("mla_decode", "B=1,T=1,L=8192", {}),
    ]
    expected = "1 of 3 goals met, 1 missed; 2 of 4 cases not measured"
    assert report.summary(rows) == expected
    lonely = _row("router", "T=16", {"ours": 3.0})
    assert report.summary([*rows, lonely]) == (
        "1 of 4 goals met, 1 missed; 2 of 5 cases not measured, 1 without the peer of the goal"
    )


def test_a_peer_quicker_than_those_of_the_goal_is_named() -> None:
    times = {"ours": 200.0, "vllm_triton": 340.0, "fla": 330.0}
    row = _row("kda_prefill", "H=12,8x1024", {**times, "flash_kda": 118.0})
    assert row["goal_met"] and report.line(row).endswith("  met  quicker: flash_kda 0.59")
    slower = _row("kda_prefill", "H=12,8x1024", {**times, "flash_kda": 335.0})
    assert report.line(slower).endswith("  met")
    # The peer of this goal is not there: what is slower than ours is no news, what is quicker is.
    alone = _row("kda_prefill", "H=12,1x8192", {**times, "fla": 100.0})
    assert report.line(alone).endswith("  quicker: fla 0.50")
    assert "quicker" not in report.line(_row("kda_prefill", "H=12,1x8192", {"fla": 100.0}))


def test_the_source_hash_follows_the_sources(tmp_path: Path, monkeypatch: Any) -> None:
    from benchmarks import provenance

    folder = tmp_path / "k3_kernels"
    folder.mkdir()
    (folder / "a.py").write_text("x = 1")
    monkeypatch.setattr(provenance, "_KERNELS", tmp_path)
    first = source_hash()
    (folder / "a.py").write_text("x = 2")
    second = source_hash()
    (folder / "a.py").rename(folder / "b.py")
    assert len({first, second, source_hash()}) == 3


def test_a_command_is_the_real_one_without_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.machinery import ModuleSpec

    from benchmarks import provenance

    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    words = ["--cases", "mxfp4:tp8:1", "--output", "/home/me/out/a b.json", "--warm=/x/y", "../z"]
    monkeypatch.setattr(sys, "argv", ["/home/me/benchmarks/tune_moe.py", *words])
    options = "--cases mxfp4:tp8:1 --output 'a b.json' --warm=y ../z"
    main.__spec__ = ModuleSpec("benchmarks.tune_moe", None)
    assert provenance.command() == f"python -m benchmarks.tune_moe {options}"
    main.__spec__ = ModuleSpec("benchmarks.__main__", None)
    assert provenance.command() == f"python -m benchmarks {options}"
    main.__spec__ = None  # a program that imports the benchmark
    assert provenance.command() == f"python tune_moe.py {options}"


def test_recorded_results_have_a_row_for_every_cell() -> None:
    result = json.loads(RECORDED.read_text(encoding="utf-8"))
    made = result["provenance"]
    for key in (
        "device",
        "driver",
        "torch",
        "triton",
        "peers",
        "git_commit",
        "date_utc",
        "command",
    ):
        assert made[key], f"the recorded results do not say their {key}"
    assert result["schema_version"] == report.SCHEMA_VERSION
    rows = {(row["operator"], row["case"]): row for row in result["rows"]}
    assert set(rows) == {(case.operator, case.name) for case in CASES}
    for case in CASES:
        _hold_together(rows[case.operator, case.name], case)


def test_the_readme_names_the_peers_that_the_record_lacks() -> None:
    result = json.loads(RECORDED.read_text(encoding="utf-8"))
    known = {name for names in PEERS.values() for name in names}
    missing = sorted(known - set(result["provenance"]["peers"]))
    readme = (repository_dir() / "kernels" / "README.md").read_text(encoding="utf-8")
    told = " and ".join(f"`{name}`" for name in missing)
    assert f"had all of these but {told}.\n" in readme, f"the record has no {told}"


def test_the_readme_names_a_tuner_of_every_stored_operator() -> None:
    readme = (repository_dir() / "kernels" / "README.md").read_text(encoding="utf-8")
    table = readme.split("### Tune")[1]
    programs = {path.stem for path in Path(report.__file__).parent.glob("tune_*.py")}
    assert programs == set(re.findall(r"`(tune_\w+)`", table))


def _hold_together(row: dict[str, Any], case: Case) -> None:
    """Recompute what a row derives."""
    assert row["goal"] == (case.goal.value if case.goal else None)
    assert set(row["peers"]) <= set(PEERS[case.operator])
    assert set(row["peers"]).isdisjoint(row["not_timed"])
    if row["ours_us"] is None:
        assert row["reason"] and row["ratio"] is None
        return
    assert row["fraction_of_floor"] == pytest.approx(row["floor_us"] / row["ours_us"])
    assert row["max_rel_err"] <= row["tolerance"]
    assert all(row["rel_err"][name] <= row["tolerance"] for name in (OURS, *row["peers"]))
    against = case.goal.against if case.goal else ()
    rivals = {n: us for n, us in row["peers"].items() if not against or n in against}
    if rivals:
        assert row["ratio"] == pytest.approx(min(rivals.values()) / row["ours_us"])
        assert row["peers"][row["best_peer"]] == min(rivals.values())

"""Checking before timing, absent and broken peers, the command line; no GPU needed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import __main__ as command
from benchmarks import measure as measuring
from benchmarks import registry, report
from benchmarks.adapter import Adapter
from benchmarks.cases import OPERATORS, Case, find_case
from benchmarks.inputs import attn_res
from benchmarks.registry import PEERS, Found
from benchmarks.rows import make_row
from benchmarks.timing import Timing, relative_error

CASE = find_case("router", "T=16")
assert CASE is not None


class Doubling:
    """A problem whose right answer is twice the input."""

    sets, bytes_moved, floor_us, tolerance = 2, 8.0, 1.0, 1e-3

    def __init__(self) -> None:
        self.x = torch.arange(1.0, 5.0)
        self.resets = 0

    def reset(self) -> None:
        self.resets += 1
        self.x = torch.arange(1.0, 5.0)

    def error(self, call: Callable[[int], Any]) -> float:
        return relative_error(call(1), 2 * torch.arange(1.0, 5.0))

    def facts(self) -> dict[str, Any]:
        return {"input_sets": 2}


def _found(name: str, function: Callable[[torch.Tensor], torch.Tensor]) -> Found:
    def prepare(problem: Doubling) -> Callable[[int], torch.Tensor]:
        return lambda _: function(problem.x)

    return Found(Adapter(name, ("router",), lambda: "1.0", prepare), "1.0")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Timings that depend on the name alone; returns which names were timed together."""
    timed: list[list[str]] = []
    microseconds = {"ours": 4.0, "vllm_grouped_topk": 6.0, "torch": 20.0}

    def fake(calls: dict[str, Any], sets: int, *, seconds: float) -> dict[str, Timing]:
        timed.append(list(calls))
        for call in calls.values():
            call(0)
        return {name: Timing(microseconds[name], 1.0, 9.0, sets, 7) for name in calls}

    monkeypatch.setattr(measuring, "time_side_by_side", fake)
    return timed


def test_all_that_are_right_are_timed_side_by_side(clock: list[list[str]]) -> None:
    problem = Doubling()

    def in_place(x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2)  # spoils the input of whoever comes next, were it not restored

    implementations = [
        _found("ours", lambda x: x + x), _found("vllm_grouped_topk", in_place),
        _found("torch", lambda x: 2.0 * x),
    ]  # fmt: skip
    row = measuring.measure(CASE, problem, implementations)
    assert clock == [["ours", "vllm_grouped_topk", "torch"]]
    assert row["ours_us"] == 4.0 and row["best_peer"] == "vllm_grouped_topk"
    assert row["ratio"] == 1.5 and row["goal_met"] is True and row["floor_us"] == 1.0
    assert problem.resets == 3


def test_a_wrong_implementation_is_not_timed(clock: list[list[str]]) -> None:
    row = measuring.measure(
        CASE, Doubling(), [_found("ours", lambda x: 2 * x), _found("torch", lambda x: 2.01 * x)]
    )
    assert clock == [["ours"]]
    assert row["peers"] == {} and "relative error 5.00e-03" in row["not_timed"]["torch"]
    ours_wrong = measuring.measure(CASE, Doubling(), [_found("ours", lambda x: x * torch.nan)])
    assert ours_wrong["ours_us"] is None and ours_wrong["reason"].startswith("wrong")


def test_absent_and_failing_peers_leave_the_others(clock: list[list[str]]) -> None:
    def fail(_: torch.Tensor) -> torch.Tensor:
        raise TypeError("unexpected keyword")

    gone = Adapter("vllm_grouped_topk", ("router",), lambda: "", lambda _: lambda i: i)
    absent = Found(gone, None, "vllm is not here")
    implementations = [absent, _found("torch", fail), _found("ours", lambda x: 2 * x)]
    row = measuring.measure(CASE, Doubling(), implementations)
    assert clock == [["ours"]] and row["ours_us"] == 4.0
    assert row["not_timed"]["vllm_grouped_topk"] == "vllm is not here"
    assert row["not_timed"]["torch"] == "TypeError: unexpected keyword"


def test_a_run_without_ours_is_a_measurement(clock: list[list[str]]) -> None:
    row = measuring.measure(CASE, Doubling(), [_found("torch", lambda x: 2 * x)])
    assert row["peers"] == {"torch": 20.0} and row["ours_us"] is None
    assert row["reason"] == "left out of this run", "not NOT_MEASURED, which a later run drops"
    assert row["not_timed"] == {
        "vllm_grouped_topk": "left out of this run", "vllm_topk_sigmoid": "left out of this run",
    }  # fmt: skip


def test_a_lost_gpu_ends_the_run() -> None:
    def crash(_: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(measuring.DeviceLost, match="router T=16 torch"):
        measuring.measure(CASE, Doubling(), [_found("torch", crash)])


def test_one_that_cannot_be_timed_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(calls: dict[str, Any], sets: int, *, seconds: float) -> dict[str, Timing]:
        if "torch" in calls:
            raise RuntimeError("out of memory")
        return dict.fromkeys(calls, Timing(4.0, 4.0, 4.0, sets, 7))

    monkeypatch.setattr(measuring, "time_side_by_side", fake)
    both = [_found("ours", lambda x: 2 * x), _found("torch", lambda x: 2 * x)]
    row = measuring.measure(CASE, Doubling(), both)
    assert row["ours_us"] == 4.0 and row["not_timed"]["torch"] == "timing failed: out of memory"


def test_every_named_peer_has_an_adapter_and_the_other_way_round() -> None:
    known = {(adapter.name, operator) for adapter in registry.adapters()
             for operator in adapter.operators}  # fmt: skip
    named = {(name, operator) for operator, names in PEERS.items() for name in names}
    assert known == named | {("ours", operator) for operator in OPERATORS}


def test_peers_that_are_not_here_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.split(".")[0] in ("vllm", "fla", "humming")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if "vllm" not in p])
    found = registry.look_for(("fla", "flash_kda", "torch"))
    reasons = {one.adapter.name: one.reason for one in found["kda_prefill"]}
    assert set(reasons) == {"ours", "flash_kda", "fla"}, "the choice keeps ours"
    assert "_flashkda_C.abi3.so is in no folder of sys.path" in str(reasons["flash_kda"])
    assert reasons["fla"] == "does not import: No module named 'fla'"
    here = {one.adapter.name: one.version for one in found["router"]}
    assert here["torch"] == torch.__version__ and "vllm_grouped_topk" not in here


_RIGHT = """
import torch
def attn_res(prefix, delta, blocks, norm_weight, qk_weight, out_norm, count, write, eps, out_eps):
    assert count == blocks.shape[1] and write == -1
    prefix.add_(delta)
    s = torch.cat([blocks, prefix[:, None]], 1).double()
    logit = (s * (norm_weight.double() * qk_weight.double())).sum(-1)
    logit = logit * torch.rsqrt(s.square().mean(-1) + eps)
    mix = (torch.softmax(logit, -1)[..., None] * s).sum(1)
    return mix * torch.rsqrt(mix.square().mean(-1, keepdim=True) + out_eps) * out_norm.double()
"""


@pytest.mark.parametrize("right", [True, False])
def test_a_peer_from_a_folder_on_the_path(
    right: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "vllm" / "models" / "kimi_k3" / "nvidia" / "ops"
    folder.mkdir(parents=True)
    source = _RIGHT if right else _RIGHT.replace("torch.softmax(logit, -1)", "torch.sigmoid(logit)")
    (folder / "attn_res.py").write_text(source, encoding="utf-8")
    for name in [n for n in sys.modules if n.split(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(attn_res, "input_sets", lambda *_: 2)
    problem = attn_res.AttnResProblem(Case("attnres8", "T=2", {"tokens": 2}), torch.Generator())
    try:
        (found,) = [
            one for one in registry.look_for(("vllm_triton",))["attnres8"]
            if one.adapter.name == "vllm_triton"
        ]  # fmt: skip
        assert found.version is not None
        error = problem.error(found.adapter.prepare(problem))
    finally:
        for name in [n for n in sys.modules if n.split(".")[0] == "vllm"]:
            del sys.modules[name]
    assert (error <= problem.tolerance) is right


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--list", "--operators", "kda_prefill,kda_recover"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8
    assert "H=12,1x8192" in lines[0] and "ratio >= 1.5 over flash_kda" in lines[0]
    assert "fraction of floor >= 0.7 or below 6.0 us" in lines[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--operators", "moe"], "no operator moe"),
        (["--cases", "T=3"], "no case T=3"),
        (["--peers", "torch,nope"], "--peers: no implementation nope; there are humming,"),
        (["--peers", "ours"], "no implementation ours"),
        (["--without", "nope"], "--without: no implementation nope; there are ours, humming,"),
        (["--load", "/nope.json"], "--load: no file /nope.json"),
        (["--resume"], "name it with --output FILE"),
    ],
)
def test_a_wrong_choice_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        command.main(arguments)
    assert stopped.value.code == 2 and message in capsys.readouterr().err


def test_without_a_gpu_the_record_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main(["--operators", "attnres8"]) == 0
    out = capsys.readouterr().out
    assert "needs a CUDA device" in out and "Recorded on NVIDIA H200" in out
    assert out.count("T=8192") == 1 and "pip install vllm fla-core humming-kernels" in out


def test_blanks_between_names_do_not_matter(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--list", "--operators", "router, attnres8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines} == {"attnres8", "router"}


@pytest.mark.parametrize(
    "asked",
    [["--output", "FILE"], ["--peers", "torch"], ["--without", "ours"], ["--warm"], ["--quick"],
     ["--seed", "0"], ["--load", __file__], ["--output", "FILE", "--resume"]],
)  # fmt: skip
def test_without_a_gpu_nothing_is_pretended(
    asked: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path = tmp_path / "kernels.json"
    assert command.main([str(path) if word == "FILE" else word for word in asked]) == 1
    out = capsys.readouterr().out
    options = ", ".join(word for word in asked if word.startswith("--"))
    assert f"nothing was measured, and {options} had no effect" in out
    assert "Recorded" not in out and not path.exists()


@pytest.mark.parametrize("same", [True, False])
def test_the_record_says_if_its_kernels_were_others(
    same: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = next(report.recorded())
    then = result["provenance"]["sources_sha256"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(command, "source_hash", lambda: then if same else "0" * 64)
    assert command.main(["--operators", "router"]) == 0
    out = capsys.readouterr().out
    told = f"Recorded on other sources ({then[:8]}) than those here (00000000)"
    assert (told in out) is not same


def test_the_interpreter_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert command.main([]) == 1
    assert "unset it" in capsys.readouterr().out


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A GPU that measures 2 us for everything, and loses itself in the case T=256."""
    from benchmarks import provenance
    from benchmarks.inputs import problems

    measured: list[str] = []

    def fake(case: Case, problem: object, found: list[Found], *, seconds: float) -> dict[str, Any]:
        measured.append(case.name)
        if case.name == "T=256" and any(one.adapter.name == "ours" for one in found):
            raise measuring.DeviceLost("router T=256 ours")
        return make_row(case, timings={"ours": Timing(2.0, 2.0, 2.0, 20, 7)}, floor_us=1.0)

    made = {
        **dict.fromkeys(provenance.SESSION, "x"),
        "peers": {},
        "command": "python -m benchmarks",
    }
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(provenance, "provenance", lambda peers, seed: dict(made))
    monkeypatch.setattr(problems, "problems", lambda cases, **_: ((c, None) for c in cases))
    monkeypatch.setattr(measuring, "measure", fake)
    return measured


def test_a_run_is_kept_case_by_case_and_resumed(machine: list[str], tmp_path: Path) -> None:
    path = tmp_path / "kernels.json"
    arguments = ["--operators", "router", "--output", str(path)]
    assert command.main(arguments) == 3, "the GPU was lost"
    assert machine == ["T=1", "T=16", "T=64", "T=256"]

    def there() -> list[str]:
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        return [row["case"] for row in rows if row["ours_us"] and row["operator"] == "router"]

    assert there() == ["T=1", "T=16", "T=64"]
    assert command.main([*arguments, "--resume", "--without", "ours"]) == 0
    assert machine[4:] == ["T=256", "T=8192"]
    assert there() == ["T=1", "T=16", "T=64", "T=256", "T=8192"]
    result = json.loads(path.read_text(encoding="utf-8"))
    assert len(result["provenance"]["commands"]) == 2


def test_a_file_of_another_session_is_refused_before_measuring(tmp_path: Path) -> None:
    path = tmp_path / "kernels.json"
    report.save(path, {"schema_version": 1, "provenance": {}, "rows": []})
    with pytest.raises(SystemExit, match="another session"):
        command._earlier(path, {"peers": {}, "command": "python -m benchmarks"})

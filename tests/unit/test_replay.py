"""The command that replays recordings: what it prints and returns, and what it refuses."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kimik3_lab.serving import replay
from kimik3_lab.serving.replay_scenario import expand_prompt

SCENARIO = {
    "config": {"max_num_seqs": 2, "max_num_batched_tokens": 8, "num_blocks": 9, "block_size": 4},
    "arrivals": {
        "0": [{"id": "a", "prompt": [["range", 10, 10]], "max_tokens": 2}],
        "1": [{"id": "b", "prompt": [["const", 500, 3]], "max_tokens": 1}],
    },
}
TRACE = [
    {"step": 0, "scheduled": {"a": 8}, "free_blocks": 6, "finished": []},
    {"step": 1, "scheduled": {"a": 2, "b": 3}, "free_blocks": 5, "finished": ["b"]},
    {"step": 2, "scheduled": {"a": 1}, "free_blocks": 8, "finished": ["a"]},
]


def write(path: Path, **content: Any) -> Path:
    path.write_text(json.dumps({"vllm": "0.33.0", **content}), encoding="utf-8")
    return path


def recording(path: Path, trace: list[dict[str, Any]] = TRACE) -> Path:
    return write(path, scenarios=[{**SCENARIO, "trace": trace}])


def test_a_recording_that_matches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert replay.main([str(recording(tmp_path / "a.json"))]) == 0
    assert capsys.readouterr().out == "1/1 scenarios match vLLM 0.33.0 (3 steps)\n"


def test_the_first_difference_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = [TRACE[0], {**TRACE[1], "free_blocks": 4}, {**TRACE[2], "free_blocks": 7}]
    assert replay.main([str(recording(tmp_path / "a.json", trace))]) == 1
    out = capsys.readouterr().out
    assert "0/1 scenarios match" in out
    assert "first difference: scenario 0, step 1, free_blocks: vLLM 4, here 5" in out
    assert '"max_num_batched_tokens": 8' in out


def test_a_gzipped_recording_is_known_by_its_content(tmp_path: Path) -> None:
    plain = recording(tmp_path / "a.json").read_bytes()
    (tmp_path / "b.json.gz").write_bytes(gzip.compress(plain))
    (tmp_path / "c").write_bytes(gzip.compress(plain))
    assert replay.main([str(tmp_path / "b.json.gz"), str(tmp_path / "c")]) == 0


def test_a_version_with_a_build_tag(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", vllm="0.33.0+cpu", scenarios=[{**SCENARIO, "trace": TRACE}])
    assert replay.main([str(path)]) == 0


def test_scenarios_that_vllm_refused_are_not_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = {**SCENARIO, "error": "ValueError: no"}
    path = write(tmp_path / "a.json", scenarios=[refused, {**SCENARIO, "trace": TRACE}])
    assert replay.main([str(path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("1/1 scenarios match")
    assert "1 more were refused by vLLM" in out


def test_a_table_of_budgets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"method": "dspark", "running": 2, "prefill": 8183, "total": 8192}
    path = write(tmp_path / "a.json", budget=[row, {**row, "prefill": 8169}])
    assert replay.main([str(path)]) == 1
    out = capsys.readouterr().out
    assert "1/2 rows of the token budget table match" in out
    assert "dspark, 2 running, prefill: vLLM 8169, here 8183" in out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        (b"{", "cannot be read"),
        (b"\x1f\x8bnonsense", "cannot be read"),
        (b"\xff\xfe", "cannot be read"),
        (b"[1]", "no recording"),
        (b'{"scenarios": []}', "no recording"),
        (b'{"vllm": "0.11.0", "scenarios": []}', "no rules for vLLM 0.11.0.*0.27.1"),
        (b'{"vllm": "0.33.0"}', "neither 'scenarios' nor 'demos' nor 'budget'"),
        (b'{"vllm": "0.33.0", "demos": {"unheard of": []}}', "unheard of"),
        (b'{"vllm": "0.33.0", "scenarios": [{"config": {}}]}', "scenario 0 has no arrivals"),
        (b'{"vllm": "0.33.0", "scenarios": 5}', "'scenarios' is a int, expected a list"),
        (b'{"vllm": "0.33.0", "scenarios": [5]}', "scenario 0 is a int"),
        (b'{"vllm": "0.33.0", "demos": []}', "'demos' is a list, expected an object"),
        (b'{"vllm": "0.33.0", "budget": [{"method": "dspark"}]}', "has none of prefill"),
        (b'{"vllm": "0.33.0", "budget": [{"running": -1, "total": 1}]}', "-1 running"),
        (b'{"vllm": "0.33.0", "budget": [{"method": "moon", "total": 1}]}', "budget of moon"),
        (
            b'{"vllm": "0.33.0", "scenarios": [{"config": {"moon": 1}, "arrivals": {}, '
            b'"trace": []}]}',
            "unknown settings in the recording: moon",
        ),
        (
            b'{"vllm": "0.33.0", "scenarios": [{"config": {}, "arrivals": {}, "trace": []}]}',
            "max_num_seqs",
        ),
    ],
)
def test_what_is_no_recording_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, message: str
) -> None:
    path = tmp_path / "a.json"
    if content is not None:
        path.write_bytes(content)
    assert replay.main([str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert re.search(message, error)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config": []}, "config is a list"),
        ({"arrivals": None}, "arrivals is a NoneType"),
        ({"arrivals": {"x": []}}, "by step, got 'x'"),
        ({"arrivals": {"0": [{"id": "a"}]}}, "request 0 of step 0 has no prompt, max_tokens"),
        ({"arrivals": {"0": [{"id": "a", "prompt": [], "max_tokens": 1}]}}, "prompt is empty"),
        ({"arrivals": {"0": [{"id": "a", "prompt": [["range", 1]], "max_tokens": 1}]}}, "piece"),
        ({"accept": -1}, r"accepts \[-1\]"),
        ({"aborts": {"2": "a"}}, "aborts of step 2 is a str"),
        ({"trace": None}, "trace is a NoneType"),
        ({"trace": []}, "empty trace: there is nothing to compare with"),
        ({"trace": [{}]}, "row 0 of the trace has no 'scheduled'"),
        ({"trace": [*TRACE[:2], {"step": 2, "free_blocks": 8}]}, "row 2 of the trace"),
    ],
)
def test_a_damaged_scenario_is_no_match_and_no_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], message: str
) -> None:
    path = write(tmp_path / "a.json", scenarios=[{**SCENARIO, "trace": TRACE, **change}])
    assert replay.main([str(path)]) == 2
    written = capsys.readouterr()
    assert written.out == ""
    assert re.search(message, written.err)


def test_the_command_line_says_what_it_does() -> None:
    command = [sys.executable, "-m", "kimik3_lab.serving.replay", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "FILE.json[.gz]" in done.stdout
    assert "Exit status" in done.stdout


def test_prompts_are_spelled_out() -> None:
    assert expand_prompt([["const", 3, 2], ["range", 7, 2]]) == [3, 3, 7, 8]
    with pytest.raises(ValueError, match="repeat"):
        expand_prompt([["repeat", 3, 2]])

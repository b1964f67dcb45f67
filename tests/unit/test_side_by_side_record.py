"""What lesson 13 shows as recorded holds together, and belongs to the lesson as it stands."""

from __future__ import annotations

import ast
import json
from typing import Any

import pytest

from kimik3_lab.paths import data_dir, repository_dir
from kimik3_lab.reproduce.report import COLUMNS
from kimik3_lab.vllm_cpu import VLLM_CPU_VERSION
from kimik3_lab.vllm_cpu.side_by_side import TOLERANCE, Answer, SideBySide
from kimik3_lab.vllm_cpu.your_scheduler import digest

SECTIONS = ("servers", "scheduler", "experts", "reproduce")


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    path = data_dir() / "results" / "cpu" / "side_by_side.json"
    return json.loads(path.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


@pytest.mark.parametrize("section", SECTIONS)
def test_each_section_says_where_it_comes_from(recorded: dict[str, Any], section: str) -> None:
    made = recorded[section]["provenance"]
    assert made["command"] == f"python tools/record_side_by_side.py {section}"
    assert made["vllm"] == VLLM_CPU_VERSION and made["device"] == "cpu"


@pytest.mark.parametrize("concurrency", ["c1", "c4"])
def test_both_servers_wrote_the_same(recorded: dict[str, Any], concurrency: str) -> None:
    servers = recorded["servers"]
    answers = {
        name: tuple(
            Answer(**{k: tuple(v) if isinstance(v, list) else v for k, v in answer.items()})
            for answer in found
        )
        for name, found in servers["answers"][concurrency].items()
    }
    both = SideBySide(answers, servers["counters"][concurrency])
    assert set(answers) == {"k3lab", "vLLM"} and both.differences() == []
    assert [a.prompt for a in answers["vLLM"]] == servers["prompts"]
    # Equal tokens are no luck: the closest call was far beyond what float32 can do.
    assert servers["smallest_gap"] > 10 * TOLERANCE
    assert both.rows() == servers["rows"][concurrency]
    assert len({row["counted_output_tokens"] for row in both.rows()}) == 1


def test_both_dashboards_saw_the_same_work(recorded: dict[str, Any]) -> None:
    for samples in recorded["servers"]["dashboard"].values():
        assert samples[-1]["output_tokens"] - samples[0]["output_tokens"] == 12 * 40
        assert max(sample["running"] for sample in samples) == recorded["servers"]["seats"]
        assert max(sample["waiting"] for sample in samples) == 12 - recorded["servers"]["seats"]


def test_the_queue_is_the_lessons(recorded: dict[str, Any]) -> None:
    notebook = repository_dir() / "notebooks" / "13_deploy_on_vllm.ipynb"
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    source = next("".join(cell["source"]) for cell in cells if cell["id"] == "deploy-queue")
    (node,) = (part for part in ast.parse(source).body if isinstance(part, ast.ClassDef))
    queue = "\n".join(source.splitlines()[node.lineno - 1 : node.end_lineno]) + "\n"
    found = recorded["scheduler"]
    assert digest(queue) == found["queue"], "record again: tools/record_side_by_side.py scheduler"
    theirs, ours = found["runs"]
    assert theirs["tokens"] == ours["tokens"] and theirs["done"] != ours["done"]
    place = [length + 2000 * arrival for arrival, length in found["asked"]]
    assert ours["done"] == sorted(range(len(place)), key=lambda number: place[number])


def test_our_experts_computed_and_nothing_changed(recorded: dict[str, Any]) -> None:
    theirs, ours = recorded["experts"]["vLLM's"], recorded["experts"]["ours"]
    assert theirs["tokens"] == ours["tokens"]
    assert theirs["calls"] == 0 < ours["calls"]
    assert (theirs["layers"], ours["layers"]) == (["RoutedExperts"], ["LabRoutedExperts"])


def test_the_pack_that_was_run_may_be_quoted(recorded: dict[str, Any]) -> None:
    found = recorded["reproduce"]
    assert found["problems"] == []
    assert {row["arm"] for row in found["rows"]} == {"vllm-k0", "k3lab-k0", "k3lab-k4"}
    for row in found["rows"]:
        assert set(COLUMNS) <= set(row)
        assert row["cached_tokens"] == 0 and row["completed_in_window"] >= 12
        assert (row["tokens_a_step"] is not None) == bool(row["drafts"])

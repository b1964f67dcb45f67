"""The recordings of vLLM's scheduler: complete, drawn as they say, and about what they are for."""

from __future__ import annotations

import gzip
import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "data" / "golden" / "vllm_scheduler"
PROVENANCE = json.loads((FOLDER / "PROVENANCE.json").read_text(encoding="utf-8"))
VERSIONS = ("0.27.1", "0.32.0", "0.33.0")
NEWER = ("junction", "checkpoints", "context_parallel", "admission_new", "mixed")
FAMILIES = (
    "base", "hybrid", "priority", "partial_hits", "retention", "async", "endings", "admission",
    *NEWER,
)  # fmt: skip
FILES = [
    f"{family}_{version}.json.gz"
    for version in VERSIONS
    for family in FAMILIES
    if not (family in NEWER and version == "0.27.1")
]


def read(name: str) -> dict[str, Any]:
    return json.loads(gzip.decompress((FOLDER / name).read_bytes()))


@pytest.fixture(scope="module")
def scenarios() -> Iterator[Any]:
    folder = str(ROOT / "tools" / "record_vllm_scheduler")
    sys.path.insert(0, folder)
    try:
        import scenarios

        yield scenarios
    finally:
        sys.path.remove(folder)


def test_every_file_has_its_origin() -> None:
    files = {path.name for path in FOLDER.iterdir()} - {"PROVENANCE.json"}
    assert files == PROVENANCE.keys() >= set(FILES)
    for name, origin in PROVENANCE.items():
        assert hashlib.sha256((FOLDER / name).read_bytes()).hexdigest() == origin["sha256"], name
        assert origin["command"].startswith("python tools/record_vllm_scheduler"), name
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 3e6


@pytest.mark.parametrize("name", FILES)
def test_the_seed_draws_the_recorded_scenarios(name: str, scenarios: Any) -> None:
    content = read(name)
    family, seed = content["family"], content["seed"]
    assert name == f"{family}_{content['vllm']}.json.gz"
    assert len(content["scenarios"]) >= (60 if family == "base" else 40)
    if PROVENANCE[name]["refused"]:
        pytest.skip("scenarios were drawn between these that this version refuses")
    rng = Random(f"{family}-{seed}")
    for scenario in content["scenarios"]:
        drawn = json.loads(json.dumps(scenarios.FAMILIES[family](rng)))
        assert drawn == {key: value for key, value in scenario.items() if key != "trace"}


def rows(name: str) -> Iterator[dict[str, Any]]:
    for scenario in read(name)["scenarios"]:
        yield from scenario["trace"]


def configs(name: str) -> list[dict[str, Any]]:
    return [scenario["config"] for scenario in read(name)["scenarios"]]


#: What a family must show in every version, so that a match means something.
SHOWS: dict[str, Callable[[str], int]] = {
    "base": lambda name: sum(bool(row["preempted"]) for row in rows(name)),
    "hybrid": lambda name: sum(len(row["prefix_hit"]) for row in rows(name)),
    "priority": lambda name: sum(bool(row["preempted"]) for row in rows(name)),
    "partial_hits": lambda name: sum(
        hit % scenario["config"]["block_size"] > 0
        for scenario in read(name)["scenarios"]
        for row in scenario["trace"]
        for hit in row["prefix_hit"].values()
    ),
    "retention": lambda name: len({config["retention_interval"] for config in configs(name)}),
    "async": lambda name: sum(config["async_scheduling"] for config in configs(name)),
    "endings": lambda name: sum("aborts_in_flight" in s for s in read(name)["scenarios"]),
    "admission": lambda name: sum("watermark" in config for config in configs(name)),
    "junction": lambda name: sum(
        config["enable_mamba_shared_prefix_checkpoint"] for config in configs(name)
    ),
    "checkpoints": lambda name: sum(
        scheduled > scenario["config"]["block_size"]
        for scenario in read(name)["scenarios"]
        for row in scenario["trace"]
        for scheduled in row["scheduled"].values()
    ),
    "context_parallel": lambda name: sum(len(row["prefix_hit"]) for row in rows(name)),
    "admission_new": lambda name: sum("max_num_active_seqs" in config for config in configs(name)),
    "mixed": lambda name: sum(config["num_kda_groups"] > 1 for config in configs(name)),
}


@pytest.mark.parametrize("name", FILES)
def test_a_family_shows_its_feature(name: str) -> None:
    assert SHOWS[name.partition("_0")[0]](name) >= 4


def test_versions_decide_differently() -> None:
    """Otherwise one set of rules would do, and the replay would not have to know the version."""
    traces = {
        version: [scenario["trace"] for scenario in read(f"base_{version}.json.gz")["scenarios"]]
        for version in VERSIONS
    }
    for older, newer in (("0.27.1", "0.32.0"), ("0.32.0", "0.33.0")):
        pairs = zip(traces[older], traces[newer], strict=True)
        assert sum(a != b for a, b in pairs) >= 3


def test_the_draft_budget_has_changed_twice() -> None:
    tables = json.loads((FOLDER / "token_budget.json").read_text(encoding="utf-8"))

    def prefill(version: str, method: str | None, running: int) -> int:
        (row,) = (r for r in tables[version] if (r["method"], r["running"]) == (method, running))
        return int(row["prefill"])

    assert [prefill(v, "dspark", 1) for v in VERSIONS] == [1024, 8185, 8192]
    assert [prefill(v, "dspark", 128) for v in VERSIONS] == [0, 6153, 7049]
    assert [prefill(v, "ngram", 256) for v in VERSIONS] == [5897] * 3

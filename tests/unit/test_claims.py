"""Numbers in prose equal the numbers that code or a results file gives."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kimik3_lab import K3Config
from kimik3_lab.paths import data_dir, repository_dir
from kimik3_lab.performance.accounting import anatomy
from kimik3_lab.performance.published import compare, load_points

README = (repository_dir() / "README.md").read_text(encoding="utf-8")


def _rows(name: str) -> list[dict]:
    result = json.loads((data_dir() / "results" / "h200" / name).read_text(encoding="utf-8"))
    for key in ("device", "torch", "triton", "date_utc", "command"):
        assert result["provenance"][key], f"{name} does not say its {key}"
    return result["rows"]


def test_readme_counts_what_the_enumeration_counts() -> None:
    report = anatomy(K3Config.released())
    assert f"{report.total_parameters:,} parameters" in README
    assert f"{report.tensors:,} tensors" in README
    assert f"{report.checkpoint_bytes / 1e12:.2f} TB" in README
    assert f"{report.total_parameters / 1e12:.1f} trillion" in README


def test_readme_quotes_the_published_ratios() -> None:
    ratios = [c.throughput_ratio for c in compare(load_points())]
    quoted = re.search(r"to ([\d.]+)–([\d.]+) times its throughput", README)
    assert quoted, "the README names the published range"
    assert [f"{min(ratios):.1f}", f"{max(ratios):.1f}"] == list(quoted.groups())


def test_the_sweep_says_where_it_comes_from_and_is_right() -> None:
    rows = _rows("attn_res_sweep.json")
    assert rows
    for row in rows:
        assert row["relative_error"] < 4e-3
        assert row["fraction_of_floor"] == pytest.approx(row["floor_us"] / row["median_us"])


def test_attn_res_explains_its_constants_with_recorded_times() -> None:
    source = Path(repository_dir() / "kernels/k3_kernels/attn_res_config.py").read_text(
        encoding="utf-8"
    )

    def best(tokens: int, stages: int, **config: object) -> float:
        wanted = {"block_h": 1024, "stages": stages, **config}
        return min(
            row["median_us"]
            for row in _rows("attn_res_sweep.json")
            if row["tokens"] == tokens and wanted.items() <= row["config"].items()
        )

    lone = {"num_warps": 8, "preload": True}
    assert f"({best(1, 3, **lone):.1f} against {best(1, 9, **lone):.1f} us at T = 1)" in source
    many = {"num_warps": 4, "preload": False}
    assert best(8192, 3, **many) == pytest.approx(best(8192, 5, **many), rel=0.01)
    assert f"T = 8192 ({best(8192, 5, **many):.0f} us either way)" in source

"""The tuner's candidates: what the package ships can be found again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the benchmarks need Triton")

from benchmarks.moe_candidates import CASES, SHAPES, Case, families
from k3_kernels import tuned
from k3_kernels.moe_config import MoEConfig

TABLE = json.loads(
    (Path(tuned.__file__).parent / "tuned" / "nvidia_h200.json").read_text(encoding="utf-8")
)["operators"]["moe"]


def shipped(case: Case) -> MoEConfig:
    kind, shape, tokens = case
    experts, inner, _ = SHAPES[shape]
    buckets = TABLE[f"{kind},E={experts},I={inner},H=3584"]["buckets"]
    found = tuned.pick(buckets, tokens)
    assert found is not None
    return MoEConfig.from_dict(found)


def part(config: MoEConfig, which: str) -> dict[str, int | bool]:
    """The fields that gate-up or down is compiled with."""
    other = "down" if which == "gate" else "gate"
    return {name: value for name, value in vars(config).items() if not name.startswith(other)}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_tuner_tries_what_is_shipped(case: Case) -> None:
    config = shipped(case)
    assert any(
        all(part(config, which) in [part(tried, which) for tried in family]
            for which in ("gate", "down"))
        for family in families(*case)
    )  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_families_differ_in_one_product_at_a_time(case: Case) -> None:
    """The tuner joins the best gate-up of a family with the best down of the same family."""
    for family in families(*case):
        shared = [
            {name: value for name, value in vars(config).items()
             if not name.startswith(("gate", "down"))}
            for config in family
        ]  # fmt: skip
        assert all(fields == shared[0] for fields in shared)

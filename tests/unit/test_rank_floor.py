"""Floors of a rank's steps against the accounting of lesson 01 and against one another."""

from __future__ import annotations

import pytest

from kimik3_lab.config import K3Config
from kimik3_lab.drafter_config import DSparkConfig
from kimik3_lab.performance.placement import Layout, rank_weights
from kimik3_lab.performance.step_bytes import distinct_experts, step_bytes
from kimik3_lab.rank.step_floor import BANDWIDTH, Rows, StepFloor, expected_distinct

CONFIG = K3Config.rank_slice()
EVEN = [1 / CONFIG.num_experts] * CONFIG.num_experts


def even(rows: int) -> float:
    return expected_distinct(EVEN, CONFIG.num_experts_per_token, rows)


def floor(**options: object) -> StepFloor:
    return StepFloor(CONFIG, even, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("batch", [1, 16])
def test_a_decode_step_moves_what_the_accounting_says(batch: int) -> None:
    """Without the residual stream and the logits, which the accounting leaves out."""
    parts = {part.name: part.bytes for part in floor().target([Rows(7999, 1)] * batch)}
    known = step_bytes(CONFIG, batch, 8000)
    assert even(batch) == pytest.approx(distinct_experts(CONFIG, batch))
    head = 2 * CONFIG.vocab_size * CONFIG.hidden_size
    # But for the zeros behind the last A_log, which no step reads.
    assert parts["dense products"] == pytest.approx(known.trunk - head, rel=1e-5)
    assert parts["experts"] == pytest.approx(known.experts, rel=0.01)
    assert parts["MLA"] == pytest.approx(known.rows, rel=0.01)
    assert parts["KDA"] == pytest.approx(known.state, rel=0.06)
    assert parts["output head"] == pytest.approx(head, rel=0.01)


def test_weights_are_read_once_and_prompts_are_bound_by_products() -> None:
    one = {p.name: p for p in floor().target([Rows(0, 8000)])}
    weights = rank_weights(CONFIG, Layout(1))
    dense = one["dense products"]
    head = 2 * CONFIG.vocab_size * CONFIG.hidden_size
    assert dense.bytes + head == pytest.approx(weights.trunk, rel=1e-5)
    assert dense.seconds > dense.bytes / BANDWIDTH
    assert one["experts"].flops > 1e13


def test_records_are_smaller_than_states() -> None:
    rows = [Rows(8000, 9, 8)] * 16
    states, records = (
        next(p for p in floor(records=r).target(rows) if p.name == "KDA") for r in (False, True)
    )
    assert records.bytes < 0.45 * states.bytes


def test_skew_means_fewer_experts() -> None:
    uneven = [1.5 / 896] * 448 + [0.5 / 896] * 448
    assert expected_distinct(uneven, 16, 64) < even(64)
    assert expected_distinct(EVEN, 16, 1) == pytest.approx(16)


def test_the_drafter_has_its_own_parts() -> None:
    assert floor().draft([Rows(8000, 9, 8)]) == []
    drafting = floor(drafter=DSparkConfig.rank_slice(CONFIG))
    parts = {p.name: p for p in drafting.draft([Rows(8000, 9, 8)])}
    assert parts["drafter, context"].bytes == 2 * 5 * 7168 * 7168
    assert parts["drafter, Markov head"].bytes == 8 * 2 * CONFIG.vocab_size * 256
    assert sum(p.seconds for p in parts.values()) == pytest.approx(0.37e-3, rel=0.05)


def test_a_chunk_is_a_prompt_and_a_verification_is_none() -> None:
    assert Rows(0, 9).is_prompt and not Rows(8000, 9, 8).is_prompt and not Rows(5, 1).is_prompt

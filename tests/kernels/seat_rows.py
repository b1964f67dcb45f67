"""Rows of the compile test for the seat tables of asynchronous steps."""

from __future__ import annotations

import aot

__all__ = ["seat_rows"]

CAPABILITIES = (90, 103)  # H200, B300


def seat_rows() -> list[aot.Row]:
    """Steps that verify eight drafts, and steps of one token."""
    return [row for capability in CAPABILITIES for row in _rows(capability)]


def _rows(capability: int) -> list[aot.Row]:
    tables = dict.fromkeys(
        ("num_computed_ptr", "num_accepted_ptr", "last_token_ptr", "drafts_ptr", "slots_ptr"),
        "*i64",
    )
    step = dict.fromkeys(("token_ids_ptr", "positions_ptr", "starts_ptr", "accepted_ptr"), "*i64")
    sampled = dict.fromkeys(
        ("out_ptr", "best_ptr", "firsts_ptr", "verified_ptr", "counts_ptr", "enabled_ptr"), "*i64"
    )
    rows = [
        aot.Row(
            name=f"fill_in_seats-T{block}",
            module="k3_kernels.seat_tables_kernel",
            kernel="fill_in_kernel",
            capability=capability,
            signature={**tables, **step, "num_tokens": "i32", "num_drafts": "i32"},
            constants={"BLOCK": block},
            num_warps=1,
        )
        for block in (1, 16)
    ]
    rows += [
        aot.Row(
            name=f"settle_seats-{name}",
            module="k3_kernels.seat_tables_kernel",
            kernel="settle_kernel",
            capability=capability,
            signature={**tables, **sampled,
                       **dict.fromkeys(("num_slots", "num_drafts", "most"), "i32")},
            constants={"KEEPS_STATES": keeps, "HAS_ENABLED": True, "BLOCK": block},
            num_warps=1,
        )
        for name, keeps, block in (("T1", False, 1), ("T16", False, 16), ("T16-states", True, 16))
    ]  # fmt: skip
    return rows

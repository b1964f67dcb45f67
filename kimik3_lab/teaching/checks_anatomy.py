"""Answer check of lesson 01. Needs the standard library only."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from kimik3_lab.config import K3Config
from kimik3_lab.performance.accounting import anatomy

__all__ = ["check_1"]


def check_1(bf16_bytes: Callable[[K3Config], int]) -> None:
    """Check exercise 1 on three shapes against a checkpoint that is enumerated in BF16.

    Raises
    ------
    AssertionError
        Naming the shape, what came back and what was expected.
    """
    odd = dataclasses.replace(
        K3Config.micro(), expert_dtype="mxfp4", num_experts=5, routed_expert_hidden_size=64
    )
    shapes = {
        "tiny": K3Config.tiny(),
        "micro with 5 experts in MXFP4": odd,
        "tiny in MXFP4": dataclasses.replace(K3Config.tiny(), expert_dtype="mxfp4"),
    }
    for name, config in shapes.items():
        want = anatomy(dataclasses.replace(config, expert_dtype="bf16")).checkpoint_bytes
        got = bf16_bytes(config)
        assert got == want, f"{name}: got {got:,} bytes, expected {want:,}"
    print(f"exercise 1: right on {len(shapes)} shapes")

"""Answer checks of lesson 01. Needs torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from kimik3_lab.config import K3Config
from kimik3_lab.performance.accounting import anatomy
from kimik3_lab.performance.placement import Layout, rank_weights
from kimik3_lab.reference.state import SequenceState

__all__ = ["check_1", "check_2"]


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
        "tiny in BF16": dataclasses.replace(K3Config.tiny(), expert_dtype="bf16"),
    }
    for name, config in shapes.items():
        want = anatomy(dataclasses.replace(config, expert_dtype="bf16")).checkpoint_bytes
        got = bf16_bytes(config)
        assert got == want, f"{name}: got {got:,} bytes, expected {want:,}"
    print(f"exercise 1: right on {len(shapes)} shapes")


def check_2(sequences_that_fit: Callable[[K3Config, float, int, int], int]) -> None:
    """Check exercise 2 on four cases, filling a GPU's memory sequence by sequence.

    What a sequence takes is read off the tensors that the reference model allocates for it, not off
    the formula that the exercise asks for.

    Raises
    ------
    AssertionError
        Naming the case, what came back and what was expected.
    """
    release, tiny = K3Config.released(), K3Config.tiny()
    cases = (
        ("the release, 288 GB, TP8, 100,000 tokens", release, 288e9, 8, 100_000),
        ("the release, 288 GB, TP16, 5,000 tokens", release, 288e9, 16, 5_000),
        ("the release, 180 GB, TP8, where the weights alone are too much", release, 180e9, 8, 8192),
        ("the tiny K3, 40 MB, TP1, 300 tokens", tiny, 40e6, 1, 300),
    )
    for name, config, memory_bytes, ranks, context in cases:
        want = _fill(config, memory_bytes, ranks, context)
        got = sequences_that_fit(config, memory_bytes, ranks, context)
        assert got == want, f"{name}: got {got} sequences, expected {want}"
    print(f"exercise 2: right on {len(cases)} cases")


def _fill(config: K3Config, memory_bytes: float, ranks: int, context: int) -> int:
    import torch

    state = SequenceState.empty(config, dtype=torch.bfloat16, device="meta")
    split = [*state.recurrent.values(), *state.conv.values()]
    row = sum(rows.shape[1] * rows.element_size() for rows in state.latent.values())
    one = sum(tensor.nbytes for tensor in split) // ranks + context * row
    used, count = rank_weights(config, Layout(ranks)).total, 0
    while used + one <= 0.9 * memory_bytes:
        used, count = used + one, count + 1
    return count

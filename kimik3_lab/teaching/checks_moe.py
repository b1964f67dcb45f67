"""Answer checks of lesson 03. Needs torch.

Each takes the reader's function, tries it on small inputs with known answers, and names the case
and the expert or the byte that is wrong.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["check_1", "check_2"]


def check_1(dispatch: Callable[[Tensor, int, int], tuple[Tensor, Tensor]]) -> None:
    """Check exercise 1: pairs sorted by expert, each expert's run filled up to whole blocks.

    Raises
    ------
    AssertionError
        Naming the case, the expert, what came back and what was expected.
    """
    cases = _dispatch_cases()
    for name, (expert_ids, num_experts, block) in cases.items():
        before = expert_ids.clone()
        rows, block_experts = (_flat(name, t) for t in dispatch(expert_ids, num_experts, block))
        assert torch.equal(expert_ids, before), f"{name}: expert_ids was changed in place"
        _check_blocks(name, expert_ids.flatten().tolist(), block, rows, block_experts)
    print(f"exercise 1: right on {len(cases)} routings")


def _dispatch_cases() -> dict[str, tuple[Tensor, int, int]]:
    generator = torch.Generator().manual_seed(3)

    def routing(tokens: int, top_k: int, num_experts: int) -> Tensor:
        return torch.rand(tokens, num_experts, generator=generator).topk(top_k).indices

    idle = torch.tensor([[0, 1], [3, 5], [4, 0], [5, 3], [1, 4], [0, 5], [3, 1]])
    return {
        "7 tokens, 2 of 6 experts, expert 2 idle": (idle, 6, 4),
        "every token to expert 2": (torch.full((9, 1), 2), 4, 4),
        "runs of exactly one block": (torch.tensor([[0, 3]] * 4), 4, 4),
        "no tokens": (torch.empty(0, 3, dtype=torch.int64), 5, 4),
        "40 tokens, 6 of 16 experts": (routing(40, 6, 16), 16, 16),
        "int32, not contiguous": (routing(8, 3, 7).mT.contiguous().mT.int(), 7, 2),
    }


def _flat(name: str, value: Tensor) -> list[int]:
    assert isinstance(value, Tensor) and value.ndim == 1, (
        f"{name}: expected two flat tensors, got {getattr(value, 'shape', type(value).__name__)}"
    )
    assert not value.is_floating_point(), f"{name}: expected integers, got {value.dtype}"
    return value.tolist()


def _check_blocks(
    name: str, flat: list[int], block: int, rows: list[int], block_experts: list[int]
) -> None:
    """Compare with runs that are collected in plain Python."""
    pairs: dict[int, list[int]] = {}
    for pair, expert in enumerate(flat):
        pairs.setdefault(expert, []).append(pair)
    blocks = {expert: -(-len(run) // block) for expert, run in sorted(pairs.items())}
    want = [expert for expert, count in blocks.items() for _ in range(count)]
    assert block_experts == want, (
        f"{name}: the blocks of {block} rows belong to experts {want}, got {block_experts}"
    )
    assert len(rows) == block * len(want), (
        f"{name}: {len(want)} blocks of {block} are {block * len(want)} rows, got {len(rows)}"
    )
    start = 0
    for expert, count in blocks.items():
        got = rows[start : start + block * count]
        filled = pairs[expert] + [len(flat)] * (block * count - len(pairs[expert]))
        assert got == filled, f"{name}: expert {expert} should get rows {filled}, got {got}"
        start += block * count


def check_2(unpack_group: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Check exercise 2: the values of one MXFP4 group.

    Raises
    ------
    AssertionError
        Naming the case, the first wrong column, what came back and what was expected.
    """
    everything = torch.arange(256, dtype=torch.uint8).reshape(16, 16)
    cases = {f"bytes {16 * i} to {16 * i + 15}": (row, 127) for i, row in enumerate(everything)}
    for scale in (10, 120, 128, 200):
        cases[f"scale byte {scale}"] = (everything[9], scale)
    cases["a tail of 3 bytes"] = (everything[11, 5:8], 126)
    cases["every second byte of a row"] = (everything[4, ::2], 130)
    for name, (packed, scale) in cases.items():
        values = unpack_group(packed, torch.tensor(scale, dtype=torch.uint8))
        shape = (2 * len(packed),)
        assert tuple(values.shape) == shape, f"{name}: got {tuple(values.shape)}, expected {shape}"
        assert values.dtype is torch.float32, f"{name}: got {values.dtype}, expected float32"
        for column, got in enumerate(values.tolist()):
            want = _value(packed[column // 2].item(), column % 2, scale)
            assert got == want, f"{name}: column {column} is {want}, got {got}"
    print(f"exercise 2: right on {len(cases)} groups")


def _value(byte: int, high: int, scale: int) -> float:
    """Decode from the bits of e2m1 instead of a table: sign, two of exponent, one of mantissa."""
    nibble = byte >> 4 if high else byte & 15
    exponent, mantissa = nibble >> 1 & 3, nibble & 1
    magnitude = (1 + mantissa / 2) * 2.0 ** (exponent - 1) if exponent else mantissa / 2
    return (-magnitude if nibble & 8 else magnitude) * 2.0 ** (scale - 127)

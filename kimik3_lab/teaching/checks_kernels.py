"""Answer checks of lesson 04. Needs torch.

Each takes the reader's function, tries it on small inputs with known answers, and names the case
and what is wrong with it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["check_1", "check_2"]

_BANDWIDTH, _FLOP_RATE, _LATENT = 4.3e12, 790e12, 3584


def check_1(floor: Callable[[int, float, int, int, float], tuple[float, str]]) -> None:
    """Check exercise 1: the least time of an expert layer, and what it is bound by.

    Raises
    ------
    AssertionError
        Naming the case, what came back and what was expected.
    """
    mxfp4 = 17 / 32
    cases = {
        "one token, MXFP4": (1, 16.0, 16, 384, mxfp4),
        "one token, bfloat16": (1, 16.0, 16, 384, 2.0),
        "16 tokens, 225 experts": (16, 225.0, 16, 384, mxfp4),
        "wide experts, 2 for a token": (64, 76.0, 2, 3072, mxfp4),
        "8192 tokens, MXFP4": (8192, 896.0, 16, 384, mxfp4),
        "8192 tokens, bfloat16": (8192, 896.0, 16, 384, 2.0),
        "12000 tokens, bfloat16": (12000, 896.0, 16, 384, 2.0),
        "many tokens, one expert": (100_000, 1.0, 1, 384, mxfp4),
        "no token": (0, 0.0, 16, 384, mxfp4),
    }
    for name, case in cases.items():
        answer = floor(*case)
        assert isinstance(answer, tuple) and len(answer) == 2, (
            f"{name}: expected a pair (microseconds, bound), got {answer!r}"
        )
        want, bound = _least_time(*case)
        got = float(answer[0])
        assert abs(got - want) <= 1e-6 * want, (
            f"{name}: expected {want:.4g} microseconds, got {got:.4g}"
        )
        if name != "no token":
            assert answer[1] == bound, f"{name}: it is bound by {bound!r}, got {answer[1]!r}"
    print(f"exercise 1: right on {len(cases)} shapes")


def _least_time(
    tokens: int, distinct: float, top_k: int, inner: int, weight_bytes: float
) -> tuple[float, str]:
    weights = 3 * _LATENT * inner
    moved = distinct * weights * weight_bytes + 4 * tokens * _LATENT
    seconds = {"bytes": moved / _BANDWIDTH, "flops": 2 * tokens * top_k * weights / _FLOP_RATE}
    bound = max(seconds, key=seconds.__getitem__)
    return 1e6 * seconds[bound], bound


@dataclass(frozen=True)
class _Grouped:
    """A routing cut into blocks as :func:`k3_kernels.dispatch.dispatch` does it."""

    tokens: int
    top_k: int
    sorted_token_ids: Tensor
    block_expert_ids: Tensor


def check_2(program: Callable[..., None]) -> None:
    """Check exercise 2: one program of a grouped product, called for every block in any order.

    Around the output lies a guard, and elements that no block owns must stay as they were.

    Raises
    ------
    AssertionError
        Naming the case, the block and the row.
    """
    cases = _grouped_cases()
    for name, case in cases.items():
        _check_program(name, case, program)
    print(f"exercise 2: right on {len(cases)} routings, and nothing else was touched")


def _check_program(name: str, case: _Grouped, program: Callable[..., None]) -> None:
    generator = torch.Generator().manual_seed(4)
    experts, columns, rows, guard = 5, 6, 3, 4
    pairs = case.tokens * case.top_k
    wide = torch.randn(max(case.tokens, 1), columns + 2, generator=generator, dtype=torch.float64)
    x = wide[: case.tokens, :columns]  # rows are not side by side in memory
    weights = torch.randn(experts, rows, columns, generator=generator, dtype=torch.float64)
    blocks = len(case.block_expert_ids)
    block_m = len(case.sorted_token_ids) // max(blocks, 1)
    buffer = torch.full((guard + pairs + guard, rows), -77.0, dtype=torch.float64)
    inputs = (x, weights, case.sorted_token_ids, case.block_expert_ids)
    kept = [tensor.clone() for tensor in inputs]
    want = buffer.clone()
    for block in torch.randperm(blocks, generator=generator).tolist():
        before = buffer.clone()
        expert = int(case.block_expert_ids[block])
        mine = case.sorted_token_ids[block * block_m : (block + 1) * block_m].tolist()
        for pair in mine:
            if expert >= 0 and pair < pairs:
                want[guard + pair] = weights[expert] @ x[pair // case.top_k]
                before[guard + pair] = want[guard + pair]
        program(block, buffer[guard : guard + pairs], *inputs, case.top_k)
        wrong = ~torch.isclose(buffer, before, rtol=1e-9, atol=1e-9).all(1)
        if wrong.any():
            _complain(name, block, expert, int(wrong.nonzero()[0, 0]) - guard, mine, pairs)
    for label, tensor, copy in zip(("x", "weights", "ids", "blocks"), inputs, kept, strict=True):
        assert torch.equal(tensor, copy), f"{name}: {label} was changed in place"


def _complain(name: str, block: int, expert: int, row: int, mine: list[int], pairs: int) -> None:
    where = f"{name}: block {block} of expert {expert}"
    if expert < 0:
        raise AssertionError(f"{where} has nothing to do, but row {row} of out was written")
    if not 0 <= row < pairs:
        raise AssertionError(f"{where}: wrote outside of out, at row {row} of {pairs}")
    if row in mine:
        raise AssertionError(f"{where}: row {row} of out is wrong or was not written")
    raise AssertionError(f"{where}: wrote row {row} of out, which is not in the block: {mine}")


def _grouped_cases() -> dict[str, _Grouped]:
    generator = torch.Generator().manual_seed(5)
    mixed = torch.rand(7, 5, generator=generator).topk(3).indices
    return {
        "7 tokens, 3 of 5 experts, blocks of 4": _cut(mixed, 4),
        "the same, with 2 blocks left over": _cut(mixed, 4, spare=2),
        "expert 2 on another rank, padding of all sizes": _cut(mixed, 4, 1, elsewhere=2, steps=3),
        "every token to expert 4": _cut(torch.full((9, 1), 4), 4, spare=1),
        "runs of exactly one block": _cut(torch.tensor([[0, 3]] * 4), 4),
        "one token": _cut(torch.tensor([[2, 0]]), 8, spare=1),
        "no tokens": _cut(torch.empty(0, 2, dtype=torch.int64), 4, spare=1),
    }


def _cut(
    expert_ids: Tensor, block_m: int, spare: int = 0, elsewhere: int | None = None, steps: int = 0
) -> _Grouped:
    """Sort pairs by expert, fill up with the number of pairs, add ``spare`` blocks of expert -1.

    Blocks of the expert ``elsewhere`` keep their pairs and are called -1, as vLLM's dispatch calls
    those of another rank. Every next padding is larger by ``steps``.
    """
    flat = expert_ids.flatten().tolist()
    slots: list[int] = []
    experts: list[int] = []
    for expert in sorted(set(flat)):
        run = [pair for pair, chosen in enumerate(flat) if chosen == expert]
        run += [len(flat)] * (-len(run) % block_m)
        slots += run
        experts += [-1 if expert == elsewhere else expert] * (len(run) // block_m)
    slots += [len(flat)] * (spare * block_m)
    experts += [-1] * spare
    padding = itertools.count(len(flat), steps) if steps else itertools.repeat(len(flat))
    slots = [next(padding) if slot == len(flat) else slot for slot in slots]
    as_ids = torch.tensor(slots, dtype=torch.int32), torch.tensor(experts, dtype=torch.int32)
    return _Grouped(*expert_ids.shape, *as_ids)

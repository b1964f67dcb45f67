"""The checks of lesson 03 accept right answers, written in more than one way, and no wrong one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kimik3_lab.reference import mxfp4
from kimik3_lab.teaching import checks_moe

torch.set_num_threads(1)
Parts = tuple[Tensor, Tensor]

# -- exercise 1 ------------------------------------------------------------------------------------


def by_loops(expert_ids: Tensor, num_experts: int, block: int, **wrong: object) -> Parts:
    """Dispatch in plain Python, with switches that each make one mistake."""
    flat = expert_ids.flatten().tolist()
    if "choice_major" in wrong:
        flat = expert_ids.T.flatten().tolist()
    if "storage_order" in wrong:
        flat = expert_ids.as_strided((expert_ids.numel(),), (1,)).tolist()
    rows: list[int] = []
    block_experts: list[int] = []
    experts = range(num_experts)
    for expert in reversed(experts) if "descending" in wrong else experts:
        run = [pair for pair, chosen in enumerate(flat) if chosen == expert]
        if "backwards" in wrong:
            run.reverse()
        if "tokens" in wrong:
            run = [pair // expert_ids.shape[1] for pair in run]
        blocks = -(-len(run) // block)
        if "floor" in wrong:
            blocks = len(run) // block
        if "one_more" in wrong and run:
            blocks = len(run) // block + 1
        if "idle_too" in wrong:
            blocks = max(blocks, 1)
        fill = [wrong.get("fill", len(flat))] * (blocks * block - len(run))
        rows += fill + run if "fill_first" in wrong else (run + fill)[: blocks * block]
        block_experts += [expert] * blocks
    if "unpadded" in wrong:
        rows = [row for row in rows if row < len(flat)]
    if "fill_last" in wrong:
        rows.sort(key=lambda row: row == len(flat))
    if "blocks_by_count" in wrong:
        block_experts = sorted(set(block_experts))
    return torch.tensor(rows, dtype=torch.int64), torch.tensor(block_experts, dtype=torch.int64)


def in_place(expert_ids: Tensor, num_experts: int, block: int) -> Parts:
    answer = by_loops(expert_ids, num_experts, block)
    expert_ids += 1
    return answer


def needs_tokens(expert_ids: Tensor, num_experts: int, block: int) -> Parts:
    expert_ids.max()
    return by_loops(expert_ids, num_experts, block)


def needs_int64(expert_ids: Tensor, num_experts: int, block: int) -> Parts:
    if expert_ids.dtype is not torch.int64:
        raise RuntimeError("index must be int64")
    return by_loops(expert_ids, num_experts, block)


def with_mistake(name: str, value: object = True) -> Callable[[Tensor, int, int], Parts]:
    return lambda ids, num_experts, block: by_loops(ids, num_experts, block, **{name: value})


WRONG_DISPATCH = {
    name: with_mistake(name)
    for name in (
        "choice_major", "storage_order", "descending", "backwards", "tokens", "floor", "one_more",
        "idle_too", "fill_first", "unpadded", "fill_last", "blocks_by_count",
    )
} | {
    "filled with 0": with_mistake("fill", 0),
    "filled with -1": with_mistake("fill", -1),
    "changes its input": in_place,
    "fails without tokens": needs_tokens,
    "fails on int32": needs_int64,
    "one tensor only": lambda *a: by_loops(*a)[:1],
    "lists": lambda *a: tuple(part.tolist() for part in by_loops(*a)),
    "floats": lambda *a: tuple(part.float() for part in by_loops(*a)),
    "two dimensions": lambda ids, n, block: (
        by_loops(ids, n, block)[0].reshape(-1, block), by_loops(ids, n, block)[1]
    ),
}  # fmt: skip


def test_a_right_dispatch_passes(capsys: pytest.CaptureFixture[str]) -> None:
    checks_moe.check_1(by_loops)
    assert capsys.readouterr().out == "exercise 1: right on 6 routings\n"


@pytest.mark.parametrize("mistake", WRONG_DISPATCH)
def test_a_wrong_dispatch_fails(mistake: str) -> None:
    with pytest.raises((AssertionError, RuntimeError, ValueError, IndexError)):
        checks_moe.check_1(WRONG_DISPATCH[mistake])


def test_the_message_names_case_expert_and_rows() -> None:
    with pytest.raises(AssertionError, match=r"every token to expert 2: expert 2 should get rows"):
        checks_moe.check_1(
            lambda ids, n, block: by_loops(ids, n, block, **({"fill": 0} if n == 4 else {}))
        )
    with pytest.raises(AssertionError, match=r"2 idle: the blocks of 4 rows belong to experts"):
        checks_moe.check_1(with_mistake("idle_too"))


def test_cases_hold_what_the_lesson_promises() -> None:
    cases = checks_moe._dispatch_cases()
    ids, num_experts, _ = cases["7 tokens, 2 of 6 experts, expert 2 idle"]
    assert set(range(num_experts)) - set(ids.flatten().tolist()) == {2}
    strange = cases["int32, not contiguous"][0]
    assert strange.dtype is torch.int32 and not strange.is_contiguous()
    assert any(ids.numel() == 0 for ids, _, _ in cases.values())


# -- exercise 2 ------------------------------------------------------------------------------------

GRID = torch.tensor(mxfp4.MAGNITUDES)


def unpack(packed: Tensor, scale: Tensor) -> Tensor:
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten().long()
    return torch.where(codes > 7, -GRID[codes & 7], GRID[codes & 7]) * 2.0 ** (int(scale) - 127)


def linear_codes(packed: Tensor, scale: Tensor) -> Tensor:
    """Codes taken for integers instead of looked up."""
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten().float()
    return torch.where(codes > 7, 8 - codes, codes) / 2 * 2.0 ** (int(scale) - 127)


WRONG_UNPACK = {
    "high half first": lambda p, s: unpack((p << 4) | (p >> 4), s),
    "all low halves first": lambda p, s: torch.cat((unpack(p, s)[0::2], unpack(p, s)[1::2])),
    "sign ignored": lambda p, s: unpack(p & 0x77, s),
    "scale bias 126": lambda p, s: 2 * unpack(p, s),
    "offset twice": lambda p, s: unpack(p, s) / 4,
    "scale ignored": lambda p, s: unpack(p, torch.tensor(127)),
    "scale wraps around": lambda p, s: unpack(p, torch.tensor(127)) * 2.0 ** (s - 127),
    "scale as a factor": lambda p, s: unpack(p, torch.tensor(127)) * (int(s) - 127),
    "codes as integers": linear_codes,
    "5 for 6": lambda p, s: unpack(p, s) * torch.where(unpack(p, 127).abs() == 6, 5 / 6, 1.0),
    "always 32 values": lambda p, s: torch.nn.functional.pad(unpack(p, s), (0, 32 - 2 * len(p))),
    "float64": lambda p, s: unpack(p, s).double(),
    "strides ignored": lambda p, s: unpack(
        p.as_strided((len(p),), (1,), p.storage_offset()), s
    ),
    "one value a byte": lambda p, s: unpack(p, s)[0::2],
}  # fmt: skip


def test_a_right_unpack_passes(capsys: pytest.CaptureFixture[str]) -> None:
    checks_moe.check_2(unpack)
    assert capsys.readouterr().out == "exercise 2: right on 22 groups\n"
    checks_moe.check_2(lambda p, s: mxfp4.dequantize(p[None].contiguous(), s.reshape(1, 1))[0])


@pytest.mark.parametrize("mistake", WRONG_UNPACK)
def test_a_wrong_unpack_fails(mistake: str) -> None:
    with pytest.raises(AssertionError):
        checks_moe.check_2(WRONG_UNPACK[mistake])


def test_the_message_names_group_and_column() -> None:
    with pytest.raises(AssertionError, match=r"bytes 0 to 15: column 2 is 0\.5, got 0\.0"):
        checks_moe.check_2(WRONG_UNPACK["high half first"])
    with pytest.raises(AssertionError, match=r"scale byte 10: column"):
        checks_moe.check_2(WRONG_UNPACK["scale wraps around"])

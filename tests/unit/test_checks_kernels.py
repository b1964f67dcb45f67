"""The checks of lesson 04 accept right answers, written in more than one way, and no wrong one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kimik3_lab.teaching import checks_kernels

torch.set_num_threads(1)

# -- exercise 1 ------------------------------------------------------------------------------------


def least_time(
    tokens: int, distinct: float, top_k: int, inner: int, weight_bytes: float, **wrong: Any
) -> tuple[float, str]:
    """Roofline with switches that each make one mistake."""
    latent = wrong.get("latent", 3584)
    each = wrong.get("matrices", 3) * latent * (384 if "narrow" in wrong else inner)
    read = tokens * top_k if "pairs_read" in wrong else distinct
    rows = wrong.get("rows", 4) * tokens * latent
    moved = read * each * weight_bytes + rows
    done = wrong.get("madd", 2) * (distinct if "flops_by_expert" in wrong else tokens * top_k)
    if "no_top_k" in wrong:
        done = 2 * tokens
    times = moved / wrong.get("bandwidth", 4.3e12), done * each / wrong.get("rate", 790e12)
    seconds = sum(times) if "sum" in wrong else min(times) if "min" in wrong else max(times)
    bound = "bytes" if (times[0] >= times[1]) != ("swapped" in wrong) else "flops"
    if "bytes_only" in wrong:
        seconds, bound = times[0], "bytes"
    return seconds * wrong.get("unit", 1e6), bound


def mistaken(**wrong: Any) -> Callable[..., Any]:
    return lambda *case: least_time(*case, **wrong)


WRONG_TIMES = {
    "datasheet bandwidth": mistaken(bandwidth=4.8e12),
    "datasheet operations": mistaken(rate=989e12),
    "two matrices": mistaken(matrices=2),
    "hidden width": mistaken(latent=7168),
    "inner ignored": mistaken(narrow=True),
    "weights read for every pair": mistaken(pairs_read=True),
    "operations for every expert": mistaken(flops_by_expert=True),
    "operations for every token": mistaken(no_top_k=True),
    "a multiply-add is one": mistaken(madd=1),
    "tokens not read": mistaken(rows=2),
    "tokens left out": mistaken(rows=0),
    "one after the other": mistaken(sum=True),
    "the smaller": mistaken(min=True),
    "bytes only": mistaken(bytes_only=True),
    "names swapped": mistaken(swapped=True),
    "milliseconds": mistaken(unit=1e3),
    "no bound": lambda *case: least_time(*case)[0],
    "half bytes": lambda t, d, k, i, size: least_time(t, d, k, i, 0.5 if size < 1 else size),
}


def test_a_right_time_passes(capsys: pytest.CaptureFixture[str]) -> None:
    checks_kernels.check_1(least_time)
    assert capsys.readouterr().out == "exercise 1: right on 9 shapes\n"


@pytest.mark.parametrize("mistake", WRONG_TIMES)
def test_a_wrong_time_fails(mistake: str) -> None:
    with pytest.raises(AssertionError):
        checks_kernels.check_1(WRONG_TIMES[mistake])


def test_the_message_names_the_shape() -> None:
    with pytest.raises(AssertionError, match=r"^one token, MXFP4: expected 8\.165 micro"):
        checks_kernels.check_1(mistaken(matrices=2))
    with pytest.raises(AssertionError, match=r"it is bound by 'bytes', got 'flops'"):
        checks_kernels.check_1(mistaken(swapped=True))


def test_floor_is_that_of_the_benchmark() -> None:
    from benchmarks.floors import floor_us, moe_bytes, moe_flops

    mxfp4 = 17 / 32
    cases = (16, 225.0, 16, 384, mxfp4), (9000, 896.0, 16, 384, 2.0), (64, 76.0, 2, 3072, mxfp4)
    for tokens, distinct, top_k, inner, size in cases:
        want = floor_us(moe_bytes(tokens, distinct, inner, size), moe_flops(tokens * top_k, inner))
        got, _ = checks_kernels._least_time(tokens, distinct, top_k, inner, size)
        assert got == pytest.approx(want, rel=1e-12)


# -- exercise 2 ------------------------------------------------------------------------------------


def by_rows(
    block: int, out: Any, x: Any, weights: Any, ids: Any, block_experts: Any, top_k: int,
    **wrong: Any,
) -> None:  # fmt: skip
    """One program in plain loops, with switches that each make one mistake."""
    expert = int(block_experts[block])
    if expert < 0 and "minus_one" not in wrong:
        return
    size = wrong.get("size") or len(ids) // len(block_experts)
    start = (block + wrong.get("shift", 0)) * size
    for slot in range(start, min(start + size - wrong.get("short", 0), len(ids))):
        pair = int(ids[slot])
        if pair == len(out) or (pair > len(out) and "one_padding" not in wrong):
            if "pad_to_last" in wrong and len(out):
                out[-1] = 0.0
            if "pad_behind" in wrong:
                out.as_strided((1,), (1,), out.storage_offset() + len(out) * out.shape[1])[0] = 1.0
            continue
        token = pair if "pair_is_token" in wrong else pair // top_k
        row = x[min(token, len(x) - 1)]
        if "dense" in wrong:
            row = x.as_strided((x.shape[1],), (1,), token * x.shape[1])
        chosen = weights[block % len(weights)] if "block_is_expert" in wrong else weights[expert]
        value = chosen @ row
        if "adds" in wrong:
            value = value + out[pair]
        out[slot % len(out) if "slot" in wrong else token if "by_token" in wrong else pair] = value
    if "clears" in wrong and block == 0 and len(out):
        out.zero_()
    if "changes_x" in wrong and len(x):
        x[0] = 0.0


def by_matrix(
    block: int, out: Any, x: Any, weights: Any, ids: Any, block_experts: Any, top_k: int
) -> None:
    size = len(ids) // len(block_experts)
    pairs = ids.view(-1, size)[block].long()
    pairs = pairs[pairs < len(out)]
    if block_experts[block] >= 0:
        out[pairs] = torch.einsum("nd,pd->pn", weights[block_experts[block]], x[pairs // top_k])


def minus_one_and_padding(block: int, out: Any, x: Any, w: Any, ids: Any, be: Any, k: int) -> None:
    size = len(ids) // len(be)
    pairs = ids[block * size : (block + 1) * size].long().clamp(max=max(len(out) - 1, 0))
    if len(out):
        out[pairs] = x[pairs // k] @ w[int(be[block])].mT


def wrong_program(**wrong: Any) -> Callable[..., None]:
    return lambda *arguments: by_rows(*arguments, **wrong)


WRONG_PROGRAMS = {
    "padding clamped to the last pair": minus_one_and_padding,
    "padding written to the last row": wrong_program(pad_to_last=True),
    "padding written behind the end": wrong_program(pad_behind=True),
    "padding of one number only": wrong_program(one_padding=True),
    "expert -1 taken for the last": wrong_program(minus_one=True),
    "pair taken for the token": wrong_program(pair_is_token=True),
    "written by token": wrong_program(by_token=True),
    "written by slot": wrong_program(slot=True),
    "block taken for the expert": wrong_program(block_is_expert=True),
    "next block": wrong_program(shift=1),
    "block size built in": wrong_program(size=4),
    "last slot left out": wrong_program(short=1),
    "adds to what is there": wrong_program(adds=True),
    "clears out first": wrong_program(clears=True),
    "changes x": wrong_program(changes_x=True),
    "stride ignored": wrong_program(dense=True),
    "does nothing": lambda *_: None,
    "weights transposed": lambda b, out, x, w, *rest: by_rows(
        b, out, x, w.flip(1), *rest
    ),
}  # fmt: skip


@pytest.mark.parametrize("right", [by_rows, by_matrix])
def test_a_right_program_passes(right: Any, capsys: pytest.CaptureFixture[str]) -> None:
    checks_kernels.check_2(right)
    want = "exercise 2: right on 7 routings, and nothing else was touched\n"
    assert capsys.readouterr().out == want


@pytest.mark.parametrize("mistake", WRONG_PROGRAMS)
def test_a_wrong_program_fails(mistake: str) -> None:
    with pytest.raises((AssertionError, IndexError, RuntimeError)):
        checks_kernels.check_2(WRONG_PROGRAMS[mistake])


def test_the_message_names_block_and_row() -> None:
    with pytest.raises(AssertionError, match=r"block \d of expert \d: row \d+ of out is wrong"):
        checks_kernels.check_2(wrong_program(adds=True))
    with pytest.raises(AssertionError, match=r"wrote row \d+ of out, which is not in the block"):
        checks_kernels.check_2(wrong_program(pad_to_last=True))
    with pytest.raises(AssertionError, match=r"wrote outside of out, at row \d+ of \d+"):
        checks_kernels.check_2(wrong_program(pad_behind=True))


def test_an_empty_block_must_write_nothing() -> None:
    def writes_for_nobody(block: int, out: Any, *rest: Any) -> None:
        if int(rest[3][block]) < 0 and len(out):
            out[0] = 1.0
        by_rows(block, out, *rest)

    with pytest.raises(
        AssertionError, match=r"of expert -1 has nothing to do, but row 0 of out was"
    ):
        checks_kernels.check_2(writes_for_nobody)


def test_blocks_are_those_of_the_kernel() -> None:
    dispatch = pytest.importorskip("k3_kernels.dispatch")
    ids = torch.tensor([[2, 0], [2, 1], [0, 2]])
    cut = checks_kernels._cut(ids, 2)
    assert cut.sorted_token_ids.tolist() == [1, 4, 3, 6, 0, 2, 5, 6]  # as dispatch documents
    assert cut.block_expert_ids.tolist() == [0, 1, 2, 2]
    assert "1 4 | 3 6 | 0 2 | 5 6" in dispatch.__doc__

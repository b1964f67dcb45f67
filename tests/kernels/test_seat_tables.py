"""What a step ahead needs of the one before: filled in and settled as plain Python does it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from seat_cases import CASES, Case, check_fill_in, check_settle, draw, settled

pytest.importorskip("triton", reason="running kernels needs Triton")

from k3_kernels import Seats, fill_in_seats, settle_seats

from kimik3_lab.serving.executors.async_sampler import SampledRows
from kimik3_lab.serving.executors.async_tables import SeatTables
from kimik3_lab.serving.executors.step_parts import Decodes, Prefill


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gaps_are_filled_in(case: Case, device: str) -> None:
    check_fill_in(case, device)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_drafts_are_verified_and_seats_move_on(case: Case, device: str) -> None:
    check_settle(case, device)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="many programs need a CUDA device")
@pytest.mark.parametrize("requests", [64, 300])
def test_many_seats_on_the_gpu(requests: int, device: str) -> None:
    """Fresh numbers in every run, in a graph and out of it."""
    seed = int(torch.randint(2**31, ()))
    for case in (Case(requests, 7, 7, seed=seed), Case(requests, 0, 7, seed=seed)):
        check_fill_in(case, device)
        check_settle(case, device)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("case", [c for c in CASES if c.dtype == torch.int64], ids=str)
def test_tables_of_the_executor_settle_the_same(case: Case, fused: bool, device: str) -> None:
    """Both ways of the tables, so that the backends agree."""
    numbers = draw(case)
    if not case.requests:
        return  # the executor settles no empty step
    where = torch.device(device)
    tables = SeatTables(
        numbers.num_slots, case.width, where, keeps_states=case.keeps_states, fused=fused
    )
    for name, tensor in tables.seats._asdict().items():
        tensor.copy_(torch.tensor(getattr(numbers, name)).view(tensor.shape))
    columns = [
        torch.tensor(column, device=where)
        for column in (numbers.firsts, numbers.num_drafts, numbers.counts, numbers.slots)
    ]
    best = torch.tensor(numbers.best, dtype=torch.int64, device=where)
    enabled = None if case.enabled is None else torch.tensor([int(case.enabled)], device=where)
    out = tables.settle(SampledRows(*columns, most=case.most), best, enabled)
    assert out.tolist() == settled(case, numbers)
    for name, tensor in tables.seats._asdict().items():
        assert tensor.tolist() == getattr(numbers, name), name


@pytest.mark.parametrize("most", [0, 1, 3])
def test_tables_of_the_executor_fill_in_the_same(most: int, device: str) -> None:
    """A step with decoding requests behind those that verify drafts, and a prompt behind both."""
    where, case = torch.device(device), Case(5, most, 4, seed=most)
    numbers = draw(case)
    results = []
    for fused in (False, True):
        tables = SeatTables(numbers.num_slots, case.width, where, fused=fused)
        for name, tensor in tables.seats._asdict().items():
            tensor.copy_(torch.tensor(getattr(numbers, name)))
        verifying, decoding = 3 * (1 + most), 2
        token_ids = torch.full((verifying + decoding + 4,), -1, device=where)
        token_ids[[1, -1]] = 9  # known to the host
        token_ids[-4:-1] = 8
        positions = torch.zeros_like(token_ids)
        parts: list[Any] = []
        for rows, slots in (
            (slice(0, verifying), numbers.slots[:3]),
            (slice(verifying, verifying + decoding), numbers.slots[3:]),
        ):
            index = torch.tensor(slots, device=where)
            starts, accepted = torch.zeros_like(index), torch.zeros_like(index)
            count = (rows.stop - rows.start) // len(slots)
            parts.append(Decodes(None, rows, count, (), accepted, index, starts, ()))
        parts.append(Prefill(None, slice(verifying + decoding, None), (), (), 0, 0, 0))
        tables.fill_in(SimpleNamespace(parts=parts, positions=positions), token_ids)
        seen = [token_ids, positions]
        seen += [t for part in parts[:2] for t in (part.starts, part.num_accepted)]
        results.append([tensor.tolist() for tensor in seen])
    assert results[0] == results[1]
    assert results[0][0][-4:] == [8, 8, 8, 9] and min(results[0][0]) >= 0


# -- refusals ----------------------------------------------------------------------------------


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64)


SEATS = Seats(ints(3), ints(3), ints(3), ints(3, 2))
FILL = {
    "seats": SEATS, "slots": ints(2), "token_ids": ints(4), "positions": ints(4),
    "starts": ints(2), "num_accepted": ints(2),
}  # fmt: skip
SETTLE = {
    "seats": SEATS, "slots": ints(2), "best": ints(4), "firsts": ints(2), "num_drafts": ints(2),
    "counts": ints(2), "most": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"slots": ints(2, 1)}, ValueError, r"slots must be a tensor \[n\], got \[2, 1\]"),
        ({"slots": ints(2).float()}, TypeError, "slots is torch.float32, expected int32 or int64"),
        ({"token_ids": ints(5)}, ValueError, "5 token_ids for 2 requests with up to 2 drafts"),
        ({"token_ids": ints(8)}, ValueError, "expected the same number of rows, 1 to 3, of each"),
        ({"token_ids": ints(0)}, ValueError, "0 token_ids for 2 requests"),
        ({"positions": ints(3)}, ValueError, r"positions has shape \[3\], expected \[4\]"),
        ({"starts": ints(4)[::2]}, ValueError, "starts has strides"),
        ({"num_accepted": [1, 1]}, TypeError, "num_accepted must be a torch.Tensor, got list"),
        ({"seats": SEATS._replace(drafts=ints(3))}, ValueError, r"drafts must be a tensor \[S"),
        ({"seats": SEATS._replace(drafts=ints(0, 2))}, ValueError, "drafts has no row"),
        ({"seats": SEATS._replace(last_token=ints(2))}, ValueError, r"last_token has shape \[2\]"),
    ],
)
def test_filling_in_refuses(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        fill_in_seats(**{**FILL, **changes})


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"best": ints(4, 1)}, ValueError, r"best must be a tensor \[M\], got \[4, 1\]"),
        ({"best": ints(4).double()}, TypeError, "best is torch.float64"),
        ({"firsts": ints(3)}, ValueError, r"firsts has shape \[3\], expected \[2\]"),
        ({"num_drafts": ints(1)}, ValueError, "num_drafts has shape"),
        ({"counts": ints(4)[::2]}, ValueError, "counts has strides"),
        ({"most": 3}, ValueError, "most must be from 0 to K=2, got 3"),
        ({"most": -1}, ValueError, "most must be from 0 to K=2, got -1"),
        ({"enabled": ints(2)}, ValueError, r"enabled has shape \[2\], expected \[1\]"),
        ({"seats": SEATS._replace(num_computed=ints(4))}, ValueError, "num_computed has shape"),
    ],
)
def test_settling_refuses(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        settle_seats(**{**SETTLE, **changes})

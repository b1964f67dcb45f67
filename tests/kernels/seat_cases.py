"""What a step needs of the one before, worked out in plain Python, and the checks built on it.

Shared by the tests of the kernels and by the tests of these tests (the mutants).
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from redzone import RedZone

__all__ = ["CASES", "Case", "Numbers", "check", "check_fill_in", "check_settle", "draw", "settled"]

I64, I32 = torch.int64, torch.int32
VOCABULARY = 3  # few tokens, so that many drafts are right


@dataclass(frozen=True)
class Case:
    """Requests of a step. ``enabled``: None, or whether the tables are to be moved on."""

    requests: int
    most: int
    width: int
    dtype: torch.dtype = I64
    keeps_states: bool = True
    enabled: bool | None = None
    seed: int = 0

    def __str__(self) -> str:
        text = f"n{self.requests}-most{self.most}-K{self.width}-{str(self.dtype)[6:]}"
        text += "-states" * self.keeps_states + f"-seed{self.seed}"
        return text + ("" if self.enabled is None else f"-enabled{int(self.enabled)}")


CASES = [
    *(Case(n, most, 4, seed=n) for n in (0, 1, 2, 13) for most in (0, 1, 2, 3, 4)),
    *(Case(9, most, 7, seed=most) for most in (5, 6, 7)),
    *(Case(3, 0, 0, seed=seed) for seed in (1, 2)),
    *(Case(9, 3, 3, I32, seed=seed) for seed in (3, 4)),
    *(Case(9, 3, 3, keeps_states=False, seed=seed) for seed in (5, 6)),
    *(Case(9, 3, 3, enabled=enabled, seed=7) for enabled in (False, True)),
]


@dataclass
class Numbers:
    """Tables with a row for each seat and one for nobody, and the requests of a step."""

    num_computed: list[int]
    num_accepted: list[int]
    last_token: list[int]
    drafts: list[list[int]]
    slots: list[int]
    firsts: list[int]
    num_drafts: list[int]
    counts: list[int]
    best: list[int]

    @property
    def num_slots(self) -> int:
        """Seats."""
        return len(self.num_computed) - 1


def draw(case: Case) -> Numbers:
    """Draw tables and requests; some have no seat, and some are sampled nothing from."""
    rng = Random(case.seed)
    seats = case.requests + 2

    def tokens(count: int, missing: float) -> list[int]:
        return [-1 if rng.random() < missing else rng.randrange(VOCABULARY) for _ in range(count)]

    slots = rng.sample(range(seats), case.requests)
    slots = [seats if i > 2 and rng.random() < 0.3 else slot for i, slot in enumerate(slots)]
    firsts, num_drafts, counts, best = [], [], [], []
    for _ in slots:
        drafts = rng.choice([case.most, rng.randint(0, case.most)])
        is_sampled = drafts > 0 or rng.random() < 0.7
        firsts.append(len(best) if is_sampled else -1)
        num_drafts.append(drafts)
        counts.append(1 + drafts if drafts else rng.choice([1, 5]))
        best += tokens((1 + drafts) * is_sampled, missing=0.15)
    return Numbers(
        [rng.randrange(40) for _ in range(seats + 1)],
        [rng.randint(1, 1 + case.width) for _ in range(seats + 1)],
        tokens(seats + 1, missing=0),
        [tokens(case.width, missing=0.2) for _ in range(seats + 1)],
        slots, firsts, num_drafts, counts, best,
    )  # fmt: skip


def seats_of(zone: RedZone, numbers: Numbers, dtype: torch.dtype) -> Any:
    """Tables in guarded tensors."""
    from k3_kernels import Seats

    return Seats(*(guarded(zone, numbers, name, dtype) for name in Seats._fields))


def guarded(zone: RedZone, numbers: Numbers, name: str, dtype: torch.dtype) -> torch.Tensor:
    """One of the lists in a guarded tensor."""
    values = getattr(numbers, name)
    width = len(values[0]) if values and isinstance(values[0], list) else None
    shape = (len(values),) if width is None else (len(values), width)
    return zone.copy(name, torch.tensor(values, dtype=dtype, device=zone.device).view(shape))


def check_fill_in(case: Case, device: str) -> None:
    """Fill in a step of ``most + 1`` rows for each request; AssertionError if it is another."""
    from k3_kernels import fill_in_seats

    numbers, rng, zone = draw(case), Random(case.seed), RedZone(device)
    rows = case.most + 1
    planned = [rng.choice([-1, -1, -1, 7]) for _ in range(rows * case.requests)]
    tokens, positions = [], []
    for i, slot in enumerate(numbers.slots):
        own = [numbers.last_token[slot], *numbers.drafts[slot]][:rows]
        known = planned[i * rows : (i + 1) * rows]
        tokens += [max(b if a < 0 else a, 0) for a, b in zip(known, own, strict=True)]
        positions += range(numbers.num_computed[slot], numbers.num_computed[slot] + rows)
    seats = seats_of(zone, numbers, case.dtype)
    slots = guarded(zone, numbers, "slots", case.dtype)
    token_ids = zone.copy("token_ids", torch.tensor(planned, dtype=case.dtype, device=device))
    outputs = [
        zone.empty("positions", (len(planned),), case.dtype),
        zone.empty("starts", (case.requests,), case.dtype),
        zone.empty("num_accepted", (case.requests,), case.dtype),
    ]
    fill_in_seats(seats, slots, token_ids, *outputs)
    zone.check()
    expected = [
        positions,
        [numbers.num_computed[slot] for slot in numbers.slots],
        [numbers.num_accepted[slot] for slot in numbers.slots],
    ]
    assert [token_ids.tolist(), *(out.tolist() for out in outputs)] == [tokens, *expected]
    _assert_tables(seats, numbers)


def settled(case: Case, numbers: Numbers) -> list[list[int]]:
    """Settle in plain Python: change the tables, return the rows of the result."""
    result = []
    moves = case.enabled is not False
    for i, slot in enumerate(numbers.slots):
        first, verified = numbers.firsts[i], numbers.num_drafts[i]
        said, is_broken = [], False
        if first >= 0:
            matters = True
            for j, choice in enumerate(numbers.best[first : first + verified + 1]):
                draft = numbers.drafts[slot][j] if j < verified else -1
                if matters and choice < 0:
                    is_broken = True
                matters &= draft >= 0
                if j == len(said) and (not said or said[-1] == numbers.drafts[slot][j - 1] >= 0):
                    said.append(choice)
        count = len(said)
        result.append([*said, *[-1] * (case.most + 1 - count), count, int(is_broken)])
        if slot == numbers.num_slots or not moves:
            continue
        numbers.num_computed[slot] += count if verified else numbers.counts[i]
        numbers.num_accepted[slot] = count if verified and case.keeps_states else 1
        if said:
            numbers.last_token[slot] = max(said[-1], 0)
    return result


def check_settle(case: Case, device: str) -> None:
    """Settle a step; AssertionError if a token or a table is another."""
    from k3_kernels import settle_seats

    numbers, zone = draw(case), RedZone(device)
    seats = seats_of(zone, numbers, case.dtype)
    enabled = None
    if case.enabled is not None:
        enabled = zone.copy("enabled", torch.tensor([case.enabled], dtype=case.dtype))
    rows = {
        name: guarded(zone, numbers, name, case.dtype)
        for name in ("slots", "best", "firsts", "num_drafts", "counts")
    }
    out = settle_seats(
        seats, *rows.values(), case.most, keeps_states=case.keeps_states, enabled=enabled
    )
    zone.check()
    assert out.dtype == I64 and out.shape == (case.requests, case.most + 3)
    before = {name: list(getattr(numbers, name)) for name in rows}
    expected = settled(case, numbers)
    assert out.tolist() == expected
    assert {name: tensor.tolist() for name, tensor in rows.items()} == before
    _assert_tables(seats, numbers)


def _assert_tables(seats: Any, numbers: Numbers) -> None:
    for name, tensor in seats._asdict().items():
        assert tensor.tolist() == getattr(numbers, name), name


def check(case: Case, device: str) -> None:
    """Check both."""
    check_fill_in(case, device)
    check_settle(case, device)

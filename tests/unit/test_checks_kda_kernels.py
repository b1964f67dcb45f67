"""The checks of lesson 06 accept right answers, written in more than one way, and no wrong one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import pytest
import torch
from torch import Tensor

from kimik3_lab.teaching import checks_kda_kernels as checks

torch.set_num_threads(1)

# -- exercise 1 ------------------------------------------------------------------------------------


def traffic(way: str, drafts: int, accepted: int, heads: int, dim: int, **wrong: Any) -> int:
    """Count bytes, with switches that each make one mistake."""
    state = wrong.get("size", 4) * wrong.get("width", dim) * dim
    record = wrong.get("record", 8) * dim
    tokens = drafts + wrong.get("first", 1)
    heads = 1 if "one_head" in wrong else heads
    if way == "snapshots":
        return heads * state * (wrong.get("read", 1) + tokens)
    committed = wrong.get("all_committed", accepted) or 0
    if committed is True:
        committed = tokens
    moved = state * wrong.get("verify_state", 1) + tokens * record
    if accepted or "always" in wrong:
        moved += wrong.get("commit_states", 2) * state
    if "records_unread" not in wrong:
        moved += committed * record
    return heads * moved


WRONG_TRAFFIC: dict[str, dict[str, Any]] = {
    "bfloat16 state": {"size": 2},
    "width built in": {"width": 128},
    "heads forgotten": {"one_head": True},
    "u in bfloat16": {"record": 6},
    "all in float32": {"record": 12},
    "the token before the drafts forgotten": {"first": 0},
    "the start not read": {"read": 0},
    "the verified state written too": {"verify_state": 2},
    "the state only written by a commit": {"commit_states": 1},
    "no commit": {"commit_states": 0},
    "records not read": {"records_unread": True},
    "all records committed": {"all_committed": True},
    "nothing accepted, and committed": {"always": True},
}


def test_a_right_count_passes(capsys: pytest.CaptureFixture[str]) -> None:
    checks.check_1(traffic)
    assert capsys.readouterr().out == "exercise 1: right on 8 cases\n"


@pytest.mark.parametrize("mistake", WRONG_TRAFFIC)
def test_a_wrong_count_fails(mistake: str) -> None:
    with pytest.raises(AssertionError, match=r"^(snapshots|records), \d drafts"):
        checks.check_1(lambda *case: traffic(*case, **WRONG_TRAFFIC[mistake]))


def test_bytes_are_those_of_the_kernels() -> None:
    records = pytest.importorskip("k3_kernels.kda_records")
    floors = pytest.importorskip("benchmarks.floors")
    one = records.KDARecords.empty(1, 9, 12, 128)
    moved = checks._moved("records", 8, 4, 12, 128)
    commit = floors.kda_recover_bytes(12, 1, 4)
    assert moved == 12 * 128 * 128 * 4 + one.nbytes + commit


# -- exercise 2 ------------------------------------------------------------------------------------

Slices = dict[str, tuple[int, int]] | None


def by_runs(kinds: Sequence[str], lengths: Sequence[int], **wrong: Any) -> Slices:
    """Join neighbours of a class, with switches that each make one mistake."""
    rows = [
        (kind, n) for kind, n in zip(kinds, lengths, strict=True) if n or "count_empty" in wrong
    ]
    if "sorts" in wrong:
        rows.sort(key=lambda row: row[0])
    if "changes" in wrong and isinstance(lengths, list):
        lengths.append(0)
    found: dict[str, tuple[int, int]] = {}
    at = wrong.get("origin", 0)
    for kind, run in groupby(rows, key=lambda row: row[0]):
        size = sum(n for _, n in run)
        if kind in found and "keeps_last" not in wrong:
            return {} if "empty_for_none" in wrong else None
        found[kind] = (at, at + size - wrong.get("short", 0))
        at += size
    if "all_classes" in wrong:
        found |= {kind: (0, 0) for kind in kinds if kind not in found}
    if "as_length" in wrong:
        return {kind: (first, last - first) for kind, (first, last) in found.items()}
    if "two_only" in wrong and len(found) > 2:
        return None
    return found


def by_rows(kinds: Sequence[str], lengths: Sequence[int]) -> Slices:
    rows = [kind for kind, n in zip(kinds, lengths, strict=True) for _ in range(n)]
    at = {kind: [i for i, row in enumerate(rows) if row == kind] for kind in set(rows)}
    spans = {kind: (min(places), max(places) + 1) for kind, places in at.items()}
    together = all(last - first == len(at[kind]) for kind, (first, last) in spans.items())
    return spans if together else None


WRONG_SLICES: dict[str, Callable[..., Slices]] = {
    name: (lambda wrong: lambda *batch: by_runs(*batch, **wrong))({switch: value})
    for name, switch, value in (
        ("empty requests count", "count_empty", True),
        ("sorted first", "sorts", True),
        ("the batch is changed", "changes", True),
        ("counted from 1", "origin", 1),
        ("the last run wins", "keeps_last", True),
        ("last row left out", "short", 1),
        ("length instead of end", "as_length", True),
        ("nothing instead of None", "empty_for_none", True),
        ("classes without rows", "all_classes", True),
        ("at most two classes", "two_only", True),
    )
} | {"always views": lambda k, n: by_rows(k, n) or {}, "always copies": lambda k, n: None}


@pytest.mark.parametrize("right", [by_runs, by_rows])
def test_right_slices_pass(right: Any, capsys: pytest.CaptureFixture[str]) -> None:
    checks.check_2(right)
    assert capsys.readouterr().out == "exercise 2: right on 14 batches\n"


@pytest.mark.parametrize("mistake", WRONG_SLICES)
def test_wrong_slices_fail(mistake: str) -> None:
    with pytest.raises(AssertionError):
        checks.check_2(WRONG_SLICES[mistake])


def test_the_message_names_batch_and_class() -> None:
    with pytest.raises(AssertionError, match=r"^verify 9, verify 9, prefill 200: rows of 'verify'"):
        checks.check_2(WRONG_SLICES["last row left out"])
    with pytest.raises(AssertionError, match=r"rows of 'verify' do not lie together"):
        checks.check_2(WRONG_SLICES["the last run wins"])


# -- exercise 3 ------------------------------------------------------------------------------------


def in_turn(state: Tensor, maps: Tensor, ends: Tensor, **wrong: Any) -> Tensor:
    """Lead the state through the segments, with switches that each make one mistake."""
    found = [torch.zeros_like(state) if "from_nothing" in wrong else state]
    for s in range(len(maps) - 1):
        at = s + 1 if "next_map" in wrong else s
        before = state if "from_the_first" in wrong else found[-1]
        mapped = before if "unmapped" in wrong else maps[at] @ before
        if "transposed" in wrong:
            mapped = maps[at].mT @ before
        found.append(mapped if "no_end" in wrong else mapped + ends[s])
    if "in_place" in wrong and len(maps) > 1:
        ends[0] = found[1]
    if "shifted" in wrong:
        found = [*found[1:], maps[-1] @ found[-1] + ends[-1]]
    if "all_ends" in wrong:
        found.append(maps[-1] @ found[-1] + ends[-1])
    return torch.stack(found)


def by_powers(state: Tensor, maps: Tensor, ends: Tensor) -> Tensor:
    found = []
    for s in range(len(maps)):
        now = state.clone()
        for before in range(s):
            now = torch.addmm(ends[before], maps[before], now)
        found.append(now)
    return torch.stack(found)


WRONG_STARTS = ("from_nothing", "next_map", "from_the_first", "unmapped", "transposed", "no_end",
                "in_place", "shifted", "all_ends")  # fmt: skip


@pytest.mark.parametrize("right", [in_turn, by_powers])
def test_right_starts_pass(right: Any, capsys: pytest.CaptureFixture[str]) -> None:
    checks.check_3(right)
    assert capsys.readouterr().out == "exercise 3: right for 1, 2, 3, 5 segments\n"


@pytest.mark.parametrize("mistake", WRONG_STARTS)
def test_wrong_starts_fail(mistake: str) -> None:
    with pytest.raises(AssertionError, match=r"^\d segments: "):
        checks.check_3(lambda *case: in_turn(*case, **{mistake: True}))


def test_starts_must_be_a_tensor() -> None:
    with pytest.raises(AssertionError, match=r"1 segments: expected a tensor \[1, 5, 3\], got \["):
        checks.check_3(lambda state, maps, ends: [state])  # type: ignore[arg-type, return-value]

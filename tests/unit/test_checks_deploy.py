"""The checks of lesson 13 accept right answers and no wrong one."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from kimik3_lab.reproduce.pins import Moved, moved_defaults
from kimik3_lab.teaching import checks_deploy


def left_open(
    moved: Sequence[Moved],
    words: Sequence[str],
    environment: Mapping[str, str],
    mistake: str = "",
) -> list[str]:
    """Exercise 1 option by option, with switches for mistakes."""
    found = []
    for setting in moved:
        if mistake == "options only" and setting.kind == "variable":
            continue
        if setting.kind == "variable" and mistake != "no environment":
            settled = setting.name in environment
        else:
            settled = any(_settles(setting.name, word, mistake) for word in words)
        if mistake == "in the text":
            settled |= setting.name.removeprefix("--") in " ".join(words)
        if settled == (mistake == "the other way round"):
            found.append(setting.name)
    return found * 2 if mistake == "twice" else found


def _settles(name: str, word: str, mistake: str) -> bool:
    if mistake == "no underscores":
        said = word
    else:
        said = word.replace("_", "-") if word.startswith("--") else word
    if mistake != "no equals":
        said = said.partition("=")[0]
    if mistake == "beginning":
        return said.startswith(name)
    no = f"--no-{name.removeprefix('--')}"
    return said == name or (said == no and mistake != "no twin")


def test_check_1_accepts_one_option_after_the_other() -> None:
    checks_deploy.check_1(left_open)


@pytest.mark.parametrize(
    "mistake",
    [
        "options only", "no environment", "no underscores", "no equals", "beginning", "no twin",
        "in the text", "the other way round", "twice",
    ],
)  # fmt: skip
def test_check_1_refuses(mistake: str) -> None:
    with pytest.raises(AssertionError, match=r"left open|settled|named twice"):
        checks_deploy.check_1(lambda m, w, e: left_open(m, w, e, mistake))


def test_check_1_wants_names() -> None:
    for answer in (None, "--max-num-seqs"):
        with pytest.raises(AssertionError, match="expected a list of names, got"):
            checks_deploy.check_1(lambda m, w, e, answer=answer: answer)  # type: ignore[misc]


def test_there_is_something_to_leave_open() -> None:
    assert len(moved_defaults("0.27.1", "0.33.0")) >= 8


def late_share(
    before: Mapping[float, float], after: Mapping[float, float], limit: float, mistake: str = ""
) -> float | None:
    """Exercise 2 from the other end, with switches for mistakes."""
    restarted = any(after[bound] < before[bound] for bound in after)
    if mistake == "no restart":
        restarted = False
    if mistake == "always from zero":
        restarted = True
    new = {bound: after[bound] - (0 if restarted else before[bound]) for bound in after}
    ended = new[math.inf]
    if mistake == "sum of all buckets":
        ended = sum(new.values())
    if not ended:
        return 0.0 if mistake == "nobody is nobody late" else None
    in_time = new[limit]
    if mistake == "a bucket alone":
        lower = [bound for bound in new if bound < limit]
        in_time -= new[max(lower)] if lower else 0
    if mistake == "bucket below":
        lower = [bound for bound in new if bound < limit]
        in_time = new[max(lower)] if lower else 0
    late = ended - in_time
    if mistake == "in time":
        late = in_time
    return (100 if mistake == "percent" else 1) * late / ended


def test_check_2_accepts_a_difference_of_buckets() -> None:
    checks_deploy.check_2(late_share)


@pytest.mark.parametrize(
    "mistake",
    [
        "no restart", "always from zero", "sum of all buckets", "nobody is nobody late",
        "a bucket alone", "bucket below", "in time", "percent",
    ],
)  # fmt: skip
def test_check_2_refuses(mistake: str) -> None:
    with pytest.raises(AssertionError, match="limit"):
        checks_deploy.check_2(lambda b, a, limit: late_share(b, a, limit, mistake))


def test_check_2_wants_a_number() -> None:
    with pytest.raises(AssertionError, match="expected a share, got '5 %'"):
        checks_deploy.check_2(lambda b, a, limit: "5 %" if a[math.inf] > b[math.inf] else None)  # type: ignore[arg-type,return-value]


class TurnQueue:
    """Exercise 3 with a list of tenants, with switches for mistakes."""

    def __init__(self, mistake: str = "") -> None:
        self.mistake = mistake
        self.turns: list[str | None] = []
        self.waiting: dict[str | None, deque[Any]] = {}

    def _tenant(self, request: Any) -> str | None:
        if self.mistake == "one tenant":
            return None
        return request.cache_salt  # type: ignore[no-any-return]

    def _place(self, request: Any) -> deque[Any]:
        tenant = self._tenant(request)
        if tenant not in self.waiting:
            self.waiting[tenant] = deque()
            self.turns.append(tenant)
        return self.waiting[tenant]

    def add_request(self, request: Any) -> None:
        place = self._place(request)
        if self.mistake == "last first":
            place.appendleft(request)
        else:
            place.append(request)

    def prepend_request(self, request: Any) -> None:
        place = self._place(request)
        if self.mistake == "put back at the end":
            place.append(request)
        else:
            place.appendleft(request)

    def peek_request(self) -> Any:
        tenant = self.turns[-1 if self.mistake == "peeks at another" else 0]
        return self.waiting[tenant][0]

    def pop_request(self) -> Any:
        tenant = self.turns.pop(0)
        request = self.waiting[tenant].popleft()
        if not self.waiting[tenant]:
            del self.waiting[tenant]
        elif self.mistake == "keeps the turn":
            self.turns.insert(0, tenant)
        elif self.mistake == "second in line":
            self.turns.insert(1, tenant)
        else:
            self.turns.append(tenant)
        return request

    def remove_request(self, request: Any) -> bool:
        tenant = self._tenant(request)
        place = self.waiting.get(tenant, deque())
        if request not in place or self.mistake == "removes nothing":
            return False
        place.remove(request)
        if not place and self.mistake != "empty tenants stay":
            del self.waiting[tenant]
            self.turns.remove(tenant)
        return True

    def __len__(self) -> int:
        if self.mistake == "counts tenants":
            return len(self.turns)
        return sum(map(len, self.waiting.values()))

    def __iter__(self) -> Iterator[Any]:
        if self.mistake == "shows one tenant":
            return iter(self.waiting[self.turns[0]] if self.turns else ())
        return iter([request for place in self.waiting.values() for request in place])


class RequestsOnly(TurnQueue):
    """Leaves out who has no salt."""

    def add_request(self, request: Any) -> None:
        if request.cache_salt is not None:
            super().add_request(request)


def test_check_3_accepts_a_list_of_turns() -> None:
    checks_deploy.check_3(TurnQueue)


@pytest.mark.parametrize(
    "mistake",
    [
        "one tenant", "last first", "put back at the end", "peeks at another", "keeps the turn",
        "second in line", "removes nothing", "empty tenants stay", "counts tenants",
        "shows one tenant",
    ],
)  # fmt: skip
def test_check_3_refuses(mistake: str) -> None:
    with pytest.raises((AssertionError, LookupError)):
        checks_deploy.check_3(lambda: TurnQueue(mistake))


def test_check_3_knows_that_none_is_a_tenant() -> None:
    with pytest.raises(AssertionError, match="the queue says 0, 1 are in it"):
        checks_deploy.check_3(RequestsOnly)


def test_check_3_refuses_first_come_first_served() -> None:
    with pytest.raises(AssertionError, match=r"tenant|first six turns"):
        checks_deploy.check_3(lambda: TurnQueue("one tenant"))

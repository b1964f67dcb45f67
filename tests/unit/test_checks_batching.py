"""The checks of lesson 08 accept right answers and no wrong one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kimik3_lab.teaching import checks_batching


def plan(
    running: Sequence[int],
    waiting: Sequence[int],
    budget: int,
    seats: int,
    threshold: int,
    **wrong: object,
) -> list[int]:
    """Exercise 1, with switches for mistakes."""
    taken = len(running)
    wants = [*waiting, *running] if "waiting_first" in wrong else [*running, *waiting]
    given = []
    for place, want in enumerate(wants):
        is_new = place >= len(running)
        if is_new and "no_seats" not in wrong:
            if taken >= seats + ("one_seat_more" in wrong):
                break
            taken += 1
        chunk = want
        if threshold and not ("threshold_waiting_only" in wrong and not is_new):
            chunk = chunk if "no_threshold" in wrong else min(chunk, threshold)
        if "whole_prompts" in wrong and chunk > budget:
            chunk = 0
        if "overtakes" not in wrong and chunk == 0:
            break
        count = min(chunk, budget)
        given.append(count)
        budget -= 0 if "decodes_free" in wrong and want == 1 else count
    if "waiting_first" in wrong:
        given += [0] * (len(wants) - len(given))
        return given[len(waiting) :] + given[: len(waiting)]
    return given + [0] * (len(wants) - len(given))


def test_check_1_accepts_the_loop(capsys: pytest.CaptureFixture[str]) -> None:
    checks_batching.check_1(plan)
    said = capsys.readouterr().out
    assert "60 random runs" in said
    steps = int(said.split(" and in ")[1].split()[0])
    assert steps > 500, "hardly any recorded step was judged"


@pytest.mark.parametrize(
    "mistake",
    [
        "waiting_first", "no_seats", "one_seat_more", "threshold_waiting_only", "no_threshold",
        "whole_prompts", "decodes_free",
    ],
)  # fmt: skip
def test_check_1_refuses(mistake: str) -> None:
    with pytest.raises(AssertionError, match=r"budget \d+, \d+ seats.* got"):
        checks_batching.check_1(lambda r, w, b, s, t: plan(r, w, b, s, t, **{mistake: True}))


def test_check_1_wants_a_number_for_each() -> None:
    with pytest.raises(AssertionError, match="expected 1 numbers, got 0"):
        checks_batching.check_1(lambda r, w, b, s, t: plan(r, w, b, s, t)[:-1])


def test_check_1_says_when_nothing_comes_back() -> None:
    with pytest.raises(AssertionError, match="expected 1 numbers, got None"):
        checks_batching.check_1(lambda *state: None)


def test_check_1_takes_any_sequence(capsys: pytest.CaptureFixture[str]) -> None:
    checks_batching.check_1(lambda *state: iter(plan(*state)))
    assert "exercise 1: right" in capsys.readouterr().out


def test_vllm_is_a_judge_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks_batching, "_RANDOM_RUNS", 0)
    with pytest.raises(AssertionError, match=r"vLLM 0.33.0 gives"):
        checks_batching.check_1(lambda r, w, b, s, t: plan(r, w, b, s, t, no_threshold=True))


def largest_threshold(
    bound: int, fixed: int, per_token: int, decoders: int, prompts: int, **wrong: object
) -> int:
    """Exercise 2, with switches for mistakes."""
    tokens = (bound - (0 if "fixed_free" in wrong else fixed)) // per_token
    tokens -= 0 if "decoders_free" in wrong else decoders
    if "ceil" in wrong:
        tokens += prompts - 1
    answer = tokens if "one_prompt" in wrong else tokens // prompts
    answer += ("one_more" in wrong) - ("one_less" in wrong)
    return answer if "negative" in wrong else max(answer, 0)


def test_check_2_accepts_the_formula() -> None:
    checks_batching.check_2(largest_threshold)


@pytest.mark.parametrize(
    "mistake",
    [
        "fixed_free", "decoders_free", "ceil", "one_prompt", "one_more", "one_less", "negative",
    ],
)  # fmt: skip
def test_check_2_refuses(mistake: str) -> None:
    with pytest.raises(AssertionError, match=r"waits|keeps the bound|expected|take longer"):
        checks_batching.check_2(lambda *case: largest_threshold(*case, **{mistake: True}))

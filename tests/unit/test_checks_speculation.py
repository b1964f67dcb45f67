"""The checks and figures of lesson 09 accept right answers and no wrong one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from kimik3_lab.teaching import checks_speculation, plots_speculation


def largest_k(budget: int, running: int, chunk: int, **wrong: object) -> int:
    """Exercise 1, solved for K instead of counting up, with switches for mistakes."""
    everyone = running + ("prompt_free" not in wrong)
    tokens = running if "no_token" not in wrong else 0
    k = (budget - chunk - tokens + ("slots_k" not in wrong) * everyone) // (running + everyone)
    if "drafts_free" in wrong:
        k = (budget - chunk) // running - 1
    return max(k + ("one_more" in wrong) - ("one_less" in wrong), 0)


def test_check_1_accepts_the_closed_form() -> None:
    checks_speculation.check_1(largest_k)


@pytest.mark.parametrize(
    "mistake", ["prompt_free", "no_token", "slots_k", "drafts_free", "one_more", "one_less"]
)
def test_check_1_refuses(mistake: str) -> None:
    with pytest.raises(AssertionError, match=r"rows|fits too"):
        checks_speculation.check_1(lambda b, r, c: largest_k(b, r, c, **{mistake: True}))


def hand_out(wants: Sequence[int], budget: int, slots: int, **wrong: object) -> list[int]:
    """Exercise 2, with switches for mistakes."""
    given = [0] * len(wants)
    if "static" in wrong:
        budget, slots = budget - slots * 1024, 0
    if "all_first" in wrong:
        budget, slots = budget - slots * len(wants), 0
    for place, want in enumerate(wants):
        room = budget if "own_drafts_free" in wrong else budget - slots
        if "whole_or_nothing" in wrong and want > room:
            break
        if room <= 0:
            break
        given[place] = min(want, room)
        budget -= given[place] + (0 if "slots_free" in wrong else slots)
    return given


def test_check_2_accepts_the_rule(capsys: pytest.CaptureFixture[str]) -> None:
    checks_speculation.check_2(hand_out)
    assert "30 decisions of vLLM 0.32.0" in capsys.readouterr().out


@pytest.mark.parametrize(
    "mistake", ["static", "all_first", "own_drafts_free", "whole_or_nothing", "slots_free"]
)
def test_check_2_refuses(mistake: str) -> None:
    with pytest.raises(AssertionError, match=r"vLLM 0.32.0|expected"):
        checks_speculation.check_2(lambda w, b, s: hand_out(w, b, s, **{mistake: True}))


def test_check_2_wants_a_number_for_each() -> None:
    short: Callable[[Sequence[int], int, int], list[int]] = lambda w, b, s: hand_out(w, b, s)[:-1]  # noqa: E731
    with pytest.raises(AssertionError, match="expected 1 numbers, got 0"):
        checks_speculation.check_2(short)


def test_check_2_says_when_nothing_comes_back() -> None:
    with pytest.raises(AssertionError, match="expected 1 numbers, got None"):
        checks_speculation.check_2(lambda wants, budget, slots: None)


def test_check_2_takes_its_contract_by_the_letter(capsys: pytest.CaptureFixture[str]) -> None:
    """Once a request gets nothing, all after it get nothing: also if it wanted nothing."""

    def by_the_letter(wants: Sequence[int], budget: int, slots: int) -> list[int]:
        given: list[int] = []
        for want in wants:
            nothing = given and not given[-1]
            given.append(0 if nothing else max(min(want, budget - slots), 0))
            budget -= given[-1] + slots
        return given

    checks_speculation.check_2(by_the_letter)
    assert "exercise 2: right" in capsys.readouterr().out


def test_accepted_lengths_are_shares_and_must_fit() -> None:
    figure = plots_speculation.accepted_lengths([2, 1, 1], [0.5, 0.25])
    assert list(figure.data[0].y) == [50, 25, 25] and list(figure.data[1].x) == [1, 2]
    with pytest.raises(ValueError, match="got 2 counts for 2 places"):
        plots_speculation.accepted_lengths([1, 1], [0.5, 0.5])


def test_speed_by_k_rings_the_best_of_each() -> None:
    figure = plots_speculation.speed_by_k([0, 1, 2], {"a": [1, 2, 3], "b": [1, 1.2, 1.1]})
    rings = [(trace.x[0], trace.y[0]) for trace in figure.data if trace.mode == "markers"]
    assert rings == [(2, 3), (1, 1.2)]

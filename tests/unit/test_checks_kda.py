"""Checks of lesson 05: right answers pass, each known wrong answer is refused with its case."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from kimik3_lab.teaching import checks_kda

torch.set_num_threads(1)


def conv_step(u: Tensor, weight: Tensor, window: Tensor) -> tuple[Tensor, Tensor]:
    inputs = torch.cat((window, u[:, None]), 1)
    return silu((inputs * weight).sum(1)), inputs[:, 1:]


def by_taps(u: Tensor, weight: Tensor, window: Tensor) -> tuple[Tensor, Tensor]:
    y = weight[:, -1] * u
    for j in range(window.shape[1]):
        y = y + weight[:, j] * window[:, j]
    new = window.roll(-1, 1)
    new[:, -1] = u
    return y * torch.sigmoid(y), new


def taps_reversed(u, weight, window):
    return conv_step(u, weight.flip(1), window)


def no_silu(u, weight, window):
    inputs = torch.cat((window, u[:, None]), 1)
    return (inputs * weight).sum(1), inputs[:, 1:]


def window_after_silu(u, weight, window):
    y, _ = conv_step(u, weight, window)
    return y, torch.cat((window, silu(u)[:, None]), 1)[:, 1:]


def window_holds_outputs(u, weight, window):
    y, _ = conv_step(u, weight, window)
    return y, torch.cat((window, y[:, None]), 1)[:, 1:]


def window_stands_still(u, weight, window):
    return conv_step(u, weight, window)[0], window


def newest_first(u, weight, window):
    return conv_step(u, weight, window)[0], torch.cat((u[:, None], window), 1)[:, :-1]


def too_wide(u, weight, window):
    inputs = torch.cat((window, u[:, None]), 1)
    return silu((inputs * weight).sum(1)), inputs


def current_token_left_out(u, weight, window):
    return silu((window * weight[:, :-1]).sum(1)), conv_step(u, weight, window)[1]


def in_place(u, weight, window):
    y, new = conv_step(u, weight, window)
    window.copy_(new)
    return y, window


def silu_first(u, weight, window):
    y, _ = conv_step(silu(u), weight, silu(window))
    return y, torch.cat((window, u[:, None]), 1)[:, 1:]


def only_y(u, weight, window):
    return conv_step(u, weight, window)[0]


WRONG_CONV = {
    taps_reversed: "three channels, four taps, token 0, y",
    no_silu: "token 0, y: off by",
    silu_first: "token 0, y: off by",
    current_token_left_out: "token 0, y: off by",
    window_after_silu: r"token 0, window \(the last inputs before SiLU, oldest first\)",
    window_holds_outputs: "token 0, window",
    window_stands_still: "token 0, window",
    newest_first: "token 0, window",
    too_wide: r"window .*expected the shape \(3, 3\), got \(3, 4\)",
    in_place: "token 0: the given window was changed in place",
    only_y: "expected two tensors, y and the new window, got Tensor",
}


@pytest.mark.parametrize("answer", [conv_step, by_taps])
def test_check_1_accepts(answer, capsys: pytest.CaptureFixture[str]) -> None:
    checks_kda.check_1(answer)
    assert capsys.readouterr().out == "exercise 1: right on 3 cases\n"


@pytest.mark.parametrize("answer", WRONG_CONV, ids=lambda f: f.__name__)
def test_check_1_refuses(answer) -> None:
    with pytest.raises(AssertionError, match=WRONG_CONV[answer]):
        checks_kda.check_1(answer)


def test_check_1_passes_the_stub_through() -> None:
    def stub(u, weight, window):
        raise NotImplementedError

    with pytest.raises(NotImplementedError):
        checks_kda.check_1(stub)


def state_after(S: Tensor, k: Tensor, G: Tensor, R: Tensor, rows: int) -> Tensor:
    now = G[rows - 1]
    return now.exp()[:, None] * S + (k[:rows] * (now - G[:rows]).exp()).mT @ R[:rows]


def one_row_at_a_time(S, k, G, R, rows):
    before = torch.cat((torch.zeros_like(G[:1]), G))
    for t in range(rows):
        S = (before[t + 1] - before[t]).exp()[:, None] * S + torch.outer(k[t], R[t])
    return S


def end_of_chunk(S, k, G, R, rows):
    return state_after(S, k, G, R, len(k))


def decayed_to_the_end(S, k, G, R, rows):
    return G[rows - 1].exp()[:, None] * S + (k * (G[-1] - G).exp())[:rows].mT @ R[:rows]


def old_state_to_the_end(S, k, G, R, rows):
    right = state_after(S, k, G, R, rows)
    return right - G[rows - 1].exp()[:, None] * S + G[-1].exp()[:, None] * S


def all_rows(S, k, G, R, rows):
    now = G[rows - 1]
    return now.exp()[:, None] * S + (k * (now - G).clamp(max=0).exp()).mT @ R


def one_row_short(S, k, G, R, rows):
    return state_after(S, k, G, R, rows - 1) if rows > 1 else S


def index_one_too_far(S, k, G, R, rows):
    now = G[min(rows, len(G) - 1)]
    return now.exp()[:, None] * S + (k[:rows] * (now - G[:rows]).exp()).mT @ R[:rows]


def old_state_not_decayed(S, k, G, R, rows):
    return S + (k[:rows] * (G[rows - 1] - G[:rows]).exp()).mT @ R[:rows]


def writes_not_decayed(S, k, G, R, rows):
    return G[rows - 1].exp()[:, None] * S + k[:rows].mT @ R[:rows]


def old_state_dropped(S, k, G, R, rows):
    return (k[:rows] * (G[rows - 1] - G[:rows]).exp()).mT @ R[:rows]


def factored(S, k, G, R, rows):
    now = G[rows - 1].exp()[:, None]
    return now * S + now * ((k[:rows] * (-G[:rows]).exp()).mT @ R[:rows])


def sign_turned(S, k, G, R, rows):
    now = G[rows - 1]
    return now.exp()[:, None] * S + (k[:rows] * (G[:rows] - now).exp()).mT @ R[:rows]


def transposed(S, k, G, R, rows):
    return state_after(S, k, G, R, rows).mT


def adds_in_place(S, k, G, R, rows):
    S.copy_(state_after(S, k, G, R, rows))
    return S


WRONG_STATE = {
    end_of_chunk: "mixed gates, after 1 of 24 rows: off by",
    decayed_to_the_end: "mixed gates, after 1 of 24",
    old_state_to_the_end: "mixed gates, after 1 of 24",
    all_rows: "mixed gates, after 1 of 24",
    one_row_short: "mixed gates, after 1 of 24",
    index_one_too_far: "mixed gates, after 1 of 24",
    old_state_not_decayed: "mixed gates, after 1 of 24",
    writes_not_decayed: "mixed gates, after 2 of 24",
    old_state_dropped: "mixed gates, after 1 of 24",
    sign_turned: "mixed gates, after 2 of 24",
    factored: "saturated gates in float32, after 63 of 64 rows: .* infinite or not a number",
    transposed: r"expected the shape \(8, 5\), got \(5, 8\)",
    adds_in_place: "the given state was changed in place",
}


@pytest.mark.parametrize("answer", [state_after, one_row_at_a_time])
def test_check_2_accepts(answer, capsys: pytest.CaptureFixture[str]) -> None:
    checks_kda.check_2(answer)
    assert capsys.readouterr().out == "exercise 2: right on 3 cases\n"


@pytest.mark.parametrize("answer", WRONG_STATE, ids=lambda f: f.__name__)
def test_check_2_refuses(answer) -> None:
    with pytest.raises(AssertionError, match=WRONG_STATE[answer]):
        checks_kda.check_2(answer)


def test_check_2_wants_a_tensor() -> None:
    with pytest.raises(AssertionError, match="after 1 of 24 rows: expected a tensor, got NoneType"):
        checks_kda.check_2(lambda *args: None)


def test_the_answers_of_the_reference_pass_as_well() -> None:
    """The lab's own functions do what the exercises ask for."""
    from kimik3_lab.reference import kda

    def conv(u, weight, window):
        y, new = kda.short_conv(u[None], weight, window)
        return y[0], new

    checks_kda.check_1(conv)


def test_outcome_reports_the_message_and_lets_other_errors_out() -> None:
    def fails(text: str) -> None:
        raise AssertionError(text)

    assert checks_kda.outcome(fails, "head 0 moved") == "FAILS: head 0 moved"
    assert checks_kda.outcome(len, "abc") == "passes"
    with pytest.raises(ZeroDivisionError):
        checks_kda.outcome(lambda: 1 / 0)

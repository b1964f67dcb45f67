"""Answer checks of lesson 05, and the verdict of a test in one line. Needs torch.

Both checks compare with the recurrence or with the convolution over a whole sequence, never with
the piece of code that the exercise asks for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kimik3_lab.reference import kda

__all__ = ["check_1", "check_2", "outcome"]

ConvStep = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
StateAfter = Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]


def outcome(test: Callable[..., object], *args: Any) -> str:
    """Run a test and say in one line how it went, so that a lesson can show a test that fails.

    Examples
    --------
    >>> def test_is_even(number):
    ...     assert number % 2 == 0, f"{number} is odd"
    >>> outcome(test_is_even, 4), outcome(test_is_even, 5)
    ('passes', 'FAILS: 5 is odd')
    """
    try:
        test(*args)
    except AssertionError as error:
        return f"FAILS: {error}"
    return "passes"


def check_1(conv_step: ConvStep) -> None:
    """Check exercise 1: streaming token by token must equal the convolution of the whole.

    Raises
    ------
    AssertionError
        Naming the case, the token, and what was got and expected.
    """
    cases = {
        "three channels, four taps": (3, 4, 7, torch.float64),
        "one channel, two taps": (1, 2, 5, torch.float64),
        "many channels in float32": (130, 4, 6, torch.float32),
    }
    for name, (channels, kernel, length, dtype) in cases.items():
        generator = torch.Generator().manual_seed(channels)
        u = torch.randn(length, channels, generator=generator, dtype=dtype)
        weight = torch.randn(channels, kernel, generator=generator, dtype=dtype)
        # As a cache may hand it out: not contiguous, and not empty.
        window = torch.randn(kernel - 1, channels, generator=generator, dtype=dtype).mT
        want, _ = kda.short_conv(u, weight, window)
        for t in range(length):
            kept = window.clone()
            where = f"{name}, token {t}"
            y, new = _pair(conv_step(u[t], weight, window), where)
            assert torch.equal(window, kept), f"{where}: the given window was changed in place"
            _same(y, want[t], f"{where}, y")
            window = torch.cat((kept, u[t, :, None]), 1)[:, 1:]
            _same(new, window, f"{where}, window (the last inputs before SiLU, oldest first)")
    print(f"exercise 1: right on {len(cases)} cases")


def check_2(state_after: StateAfter) -> None:
    """Check exercise 2: the state after any number of rows must be that of the recurrence.

    Raises
    ------
    AssertionError
        Naming the case, the number of rows, and what was got and expected.
    """
    cases = {
        "mixed gates": (24, torch.float64, None),
        "open gates": (16, torch.float64, -1e-3),
        "saturated gates in float32": (64, torch.float32, -5.0),
    }
    for name, (length, dtype, fixed) in cases.items():
        generator = torch.Generator().manual_seed(length)

        def normal(*shape: int, generator=generator, dtype=dtype) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=dtype)

        k, v = kda.l2norm(normal(length, 8)), normal(length, 5)
        g = -5 * torch.sigmoid(normal(length, 8)) if fixed is None else torch.full_like(k, fixed)
        beta, before = torch.sigmoid(normal(length)), normal(8, 5)
        states, R = _states_and_errors(k, v, g, beta, before)
        for rows in sorted({1, 2, 17, length - 1, length} & set(range(1, length + 1))):
            where = f"{name}, after {rows} of {length} rows"
            kept = before.clone()
            got = state_after(before, k, g.cumsum(0), R, rows)
            assert torch.equal(before, kept), f"{where}: the given state was changed in place"
            _same(got, states[rows], where)
    print(f"exercise 2: right on {len(cases)} cases")


def _states_and_errors(
    k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[list[Tensor], Tensor]:
    """States after 0, 1, 2 ... rows, and what each row writes under its key, row by row."""
    states, written = [state], []
    for t in range(len(k)):
        decayed = g[t].exp()[:, None] * states[-1]
        written.append(beta[t] * (v[t] - decayed.mT @ k[t]))
        states.append(decayed + torch.outer(k[t], written[-1]))
    return states, torch.stack(written)


def _pair(got: object, where: str) -> tuple[Tensor, Tensor]:
    assert isinstance(got, tuple) and len(got) == 2, (
        f"{where}: expected two tensors, y and the new window, got {type(got).__name__}"
    )
    return got


def _same(got: object, want: Tensor, where: str) -> None:
    assert isinstance(got, Tensor), f"{where}: expected a tensor, got {type(got).__name__}"
    assert got.shape == want.shape, (
        f"{where}: expected the shape {tuple(want.shape)}, got {tuple(got.shape)}"
    )
    bad = int((~torch.isfinite(got)).sum())
    assert not bad, f"{where}: {bad} of {got.numel()} values are infinite or not a number"
    error = (got - want).abs().max().item() / max(want.abs().max().item(), 1e-6)
    tolerance = 1e-12 if want.dtype is torch.float64 else 1e-5
    assert error < tolerance, (
        f"{where}: off by {error:.1e} of the largest value, at most {tolerance:.0e} allowed"
    )

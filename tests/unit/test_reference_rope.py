"""Rotary positions and YaRN: against scalars, what rotation keeps, and refusals."""

from __future__ import annotations

import cmath
import math

import pytest
import torch

from kimik3_lab.reference.rope import rotate, yarn_attention_factor, yarn_frequencies

F64 = torch.float64
RELEASED = (64, 50_000.0, 32.0, 32_768)


def test_plain_speeds_are_a_geometric_series() -> None:
    got = yarn_frequencies(8, 10_000.0, 1.0, 4096)
    torch.testing.assert_close(got, torch.tensor([1.0, 0.1, 0.01, 0.001], dtype=F64))
    assert got.dtype is F64


def test_released_speeds_against_scalars() -> None:
    width, theta, factor, context = RELEASED
    low = math.floor(width * math.log(context / (32 * 2 * math.pi)) / (2 * math.log(theta)))
    high = math.ceil(width * math.log(context / (1 * 2 * math.pi)) / (2 * math.log(theta)))
    assert (low, high) == (15, 26)
    for i, got in enumerate(yarn_frequencies(*RELEASED).tolist()):
        speed = theta ** (-2 * i / width)
        slowed = min(max((i - low) / (high - low), 0.0), 1.0)
        assert got == pytest.approx(speed * (1 - slowed) + speed / factor * slowed, rel=1e-14)


def test_fast_pairs_stay_and_slow_pairs_turn_factor_times_slower() -> None:
    ratio = yarn_frequencies(*RELEASED) / yarn_frequencies(64, 50_000.0, 1.0, 32_768)
    assert (ratio[:16] == 1).all()
    torch.testing.assert_close(ratio[26:], torch.full((6,), 1 / 32, dtype=F64))
    assert (ratio.diff() <= 1e-15).all()


def test_beta_moves_the_ramp() -> None:
    width, theta, factor, context = RELEASED
    plain = yarn_frequencies(width, theta, 1.0, context)
    steep = yarn_frequencies(*RELEASED, beta_fast=1.0, beta_slow=1.0)
    # Floor and ceiling are a pair apart: nothing lies between.
    ratio = (steep / plain * factor).round(decimals=9)
    assert set(ratio.tolist()) == {1.0, factor}


def test_attention_factor() -> None:
    assert yarn_attention_factor(1.0) == yarn_attention_factor(0.5) == 1.0
    assert yarn_attention_factor(32.0) == pytest.approx(0.1 * math.log(32) + 1)
    assert yarn_attention_factor(8.0, mscale=0.5) == pytest.approx(0.05 * math.log(8) + 1)


@pytest.mark.parametrize("shape", [(3, 6), (3, 2, 6), (3, 2, 2, 6)])
def test_rotate_is_complex_multiplication_of_neighbours(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, positions = torch.randn(shape, dtype=F64), torch.tensor([0, 5, 1000])
    frequencies = torch.tensor([1.0, 0.25, 1e-3], dtype=F64)
    got = rotate(x, positions, frequencies).reshape(3, -1, 6)
    for n in range(3):
        for row, turned in zip(x.reshape(3, -1, 6)[n], got[n], strict=True):
            for pair in range(3):
                z = complex(row[2 * pair], row[2 * pair + 1])
                z *= cmath.exp(1j * int(positions[n]) * float(frequencies[pair]))
                assert turned[2 * pair].item() == pytest.approx(z.real, abs=1e-12)
                assert turned[2 * pair + 1].item() == pytest.approx(z.imag, abs=1e-12)


def test_scores_depend_on_the_distance_only() -> None:
    torch.manual_seed(1)
    q, k = torch.randn(2, 1, 64, dtype=F64)
    frequencies = yarn_frequencies(*RELEASED)

    def score(m: int, n: int) -> float:
        at = [rotate(x, torch.tensor([p]), frequencies) for x, p in ((q, m), (k, n))]
        return (at[0] * at[1]).sum().item()

    assert score(9, 2) == pytest.approx(score(1_000_009, 1_000_002), rel=1e-8)
    assert abs(score(9, 2) - score(9, 3)) > 1e-3


def test_length_is_kept_and_position_0_is_left_alone() -> None:
    torch.manual_seed(2)
    x = torch.randn(4, 8, dtype=F64)
    frequencies = yarn_frequencies(8, 100.0, 1.0, 64)
    turned = rotate(x, torch.arange(4), frequencies)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(turned[0], x[0]) and not torch.equal(turned[1], x[1])


def test_angles_of_bfloat16_are_exact_and_the_result_is_rounded_once() -> None:
    torch.manual_seed(3)
    x = torch.randn(2, 64).bfloat16()
    positions, frequencies = torch.tensor([999_999, 1_048_575]), yarn_frequencies(*RELEASED)
    got = rotate(x, positions, frequencies)
    assert got.dtype is torch.bfloat16
    exact = rotate(x.double(), positions, frequencies)
    torch.testing.assert_close(got.double(), exact, rtol=2**-8, atol=2**-9)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((7, 100.0, 1.0, 64), "width must be even, got 7"),
        ((8, 100.0, 0.5, 64), r"factor must be at least 1, got 0\.5"),
        ((8, 10.0, 2.0, 10**9), "trained context of 1000000000 tokens"),
        ((8, 100.0, 2.0, 1), "trained context of 1 tokens"),
    ],
)
def test_frequencies_refuse_what_has_no_ramp(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        yarn_frequencies(*arguments)


@pytest.mark.parametrize(("rows", "pairs"), [(2, 4), (3, 1), (3, 8), (1, 4)])
def test_rotate_refuses_positions_or_speeds_of_something_else(rows: int, pairs: int) -> None:
    with pytest.raises(ValueError, match="needs 3 positions and 4 frequencies"):
        rotate(torch.zeros(3, 8), torch.arange(rows), torch.ones(pairs, dtype=F64))

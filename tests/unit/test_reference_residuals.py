"""Attention residuals: the mixture, and when blocks close."""

from __future__ import annotations

import math

import pytest
import torch

from kimik3_lab.reference.residuals import ResidualStream, mix


def test_mix_normalises_keys_but_not_values() -> None:
    a, b = [3.0, -4.0], [0.1, 0.2]
    gamma, query, eps = [0.5, 2.0], [1.0, -0.3], 1e-2
    scores = []
    for source in (a, b):
        root = math.sqrt((source[0] ** 2 + source[1] ** 2) / 2 + eps)
        scores.append(sum(g * q * s / root for g, q, s in zip(gamma, query, source, strict=True)))
    share = 1 / (1 + math.exp(scores[1] - scores[0]))
    expected = [share * x + (1 - share) * y for x, y in zip(a, b, strict=True)]

    def f64(values):
        return torch.tensor(values, dtype=torch.float64)

    got = mix([f64(a), f64(b)], f64([query]), f64(gamma), eps)
    torch.testing.assert_close(got, f64(expected), rtol=1e-14, atol=0)


def test_mix_is_per_token_and_takes_a_stacked_tensor() -> None:
    torch.manual_seed(0)
    sources, query, gamma = torch.randn(3, 5, 8), torch.randn(1, 8), torch.randn(8)
    whole = mix(sources, query, gamma)
    assert torch.equal(whole, mix(list(sources), query[0], gamma))
    one = mix([source[3] for source in sources], query, gamma)
    torch.testing.assert_close(whole[3], one, rtol=1e-5, atol=1e-6)


def test_mix_of_bfloat16_is_rounded_once() -> None:
    torch.manual_seed(1)
    sources, query, gamma = (torch.randn(s).bfloat16() for s in ((4, 6, 64), (1, 64), (64,)))
    exact = mix(sources.double(), query.double(), gamma.double())
    got = mix(sources, query, gamma)
    assert got.dtype is torch.bfloat16
    assert (got != exact.float().bfloat16()).float().mean() < 0.01  # float32 may tip a tie


def test_mix_refuses_no_source() -> None:
    with pytest.raises(ValueError, match="at least one source"):
        mix([], torch.ones(2), torch.ones(2))


def test_stream_alone_ignores_the_query() -> None:
    embedding = torch.randn(2, 4)
    assert ResidualStream(embedding).read(torch.full((4,), torch.nan), torch.ones(4)) is embedding


def test_stream_resets_at_a_block_and_keeps_the_block() -> None:
    embedding, first, second = torch.randn(3, 1, 4, dtype=torch.float64)
    query, gamma = torch.randn(4, dtype=torch.float64), torch.rand(4, dtype=torch.float64)
    stream = ResidualStream(embedding, eps=0.5)
    stream.start_block()
    stream.add(first)
    stream.add(second)
    expected = mix([embedding, first + second], query, gamma, 0.5)
    assert torch.equal(stream.read(query, gamma), expected)
    stream.start_block()
    stream.add(embedding)
    expected = mix([embedding, first + second, embedding], query, gamma, 0.5)
    assert torch.equal(stream.read(query, gamma), expected)


def test_stream_refuses_to_read_or_close_an_empty_block() -> None:
    stream = ResidualStream(torch.ones(1, 2))
    stream.start_block()
    with pytest.raises(RuntimeError, match="just started"):
        stream.read(torch.ones(2), torch.ones(2))
    with pytest.raises(RuntimeError, match="still empty"):
        stream.start_block()

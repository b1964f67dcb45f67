"""The random inputs on which :mod:`vllm_dspark` runs vLLM's parts of the DSpark drafter."""

from __future__ import annotations

from typing import Any

import torch
from fixtures import Case
from torch import Generator, Tensor

__all__ = ["BLOCK", "CONTEXT", "HIDDEN", "RANK", "RELEASED", "SMALL", "VOCAB", "make_cases"]

#: Released: 64 channels, theta 50000, factor 32 over a trained context of 32768 tokens.
RELEASED = {"width": 64, "theta": 50_000.0, "factor": 32.0, "original": 32_768}
SMALL = {"width": 12, "theta": 100.0, "factor": 8.0, "original": 128}
BLOCK, VOCAB, HIDDEN, RANK = 7, 40, 24, 6
CONTEXT = {"layers": 2, "taps": 3, "latent": 16, "eps": 1e-5}


def _rope_case(rng: Generator, shape: dict[str, Any], positions: list[int]) -> Case:
    at = torch.tensor(positions)
    inputs = {
        "positions": at,
        "q": torch.randn(len(at), 3, shape["width"], generator=rng),
        "k": torch.randn(len(at), 1, shape["width"], generator=rng),
    }
    return Case(inputs, shape)


def _context_case(rng: Generator) -> Case:
    """Taps of 9 tokens that follow 11 others, and what projects them."""
    layers, width = CONTEXT["layers"], CONTEXT["latent"] + SMALL["width"]
    joined = CONTEXT["taps"] * HIDDEN

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng)

    inputs = {
        "taps": normal(9, joined),
        "positions": torch.arange(11, 20),
        "context_proj": normal(HIDDEN, joined) / joined**0.5,
        "context_norm": 1 + 0.2 * normal(HIDDEN),
        "kv_a_proj": normal(layers, width, HIDDEN) / HIDDEN**0.5,
        "kv_a_layernorm": 1 + 0.2 * normal(layers, CONTEXT["latent"]),
    }
    return Case(inputs, CONTEXT | SMALL)


def _loop_case(rng: Generator) -> Case:
    inputs = {
        "anchor": torch.tensor([5, 31]),
        "hidden": torch.randn(2 * BLOCK, HIDDEN, generator=rng),
        "lm_head": torch.randn(VOCAB, HIDDEN, generator=rng) / HIDDEN**0.5,
        "markov_w1": torch.randn(VOCAB, RANK, generator=rng),
        "markov_w2": torch.randn(VOCAB, RANK, generator=rng),
        "confidence_weight": torch.randn(1, HIDDEN + RANK, generator=rng) / HIDDEN**0.5,
        "confidence_bias": torch.randn(1, generator=rng),
    }
    return Case(inputs, {"block": BLOCK})


def make_cases(rng: Generator) -> dict[str, Case]:
    # Of the released shape: at a million tokens vLLM's float32 angles are off by 0.03 radians.
    near, far = [0, 1, 2, 7, 63, 500, 2047], [40_000, 300_000, 1_048_575]
    return {
        "rope_released": _rope_case(rng, RELEASED, near),
        "rope_released_far": _rope_case(rng, RELEASED, far),
        "rope_small": _rope_case(rng, SMALL, [0, 1, 5, 40, 127, 900]),
        "context": _context_case(rng),
        "loop": _loop_case(rng),
    }

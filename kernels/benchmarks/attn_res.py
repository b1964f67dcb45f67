"""Benchmark of :func:`k3_kernels.attn_res` at K3's hidden size in bfloat16.

Needs a CUDA device. Every shape is checked against float64 on fresh inputs before it is timed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
from k3_kernels import attn_res
from k3_kernels.attn_res import AttnResConfig, choose_config

from benchmarks.timing import BANDWIDTH, input_sets, relative_error, time_calls

__all__ = ["HIDDEN", "bytes_moved", "measure", "run"]

HIDDEN = 7168
TOKENS = (1, 16, 64, 256, 1024, 8192)
BLOCKS = (8, 4)
#: Largest accepted ||out - reference|| / ||reference||; one rounding to bfloat16 gives 1.7e-3.
TOLERANCE = 4e-3


def bytes_moved(tokens: int, n_blocks: int, itemsize: int = 2) -> int:
    """Return the fewest bytes of one call: sources and delta read, prefix and mix written.

    Examples
    --------
    >>> bytes_moved(1, 8)  # ten rows in, two rows out
    172032
    """
    return tokens * HIDDEN * itemsize * (n_blocks + 1 + 1 + 1 + 1)


def run(*, sweep: bool = False) -> Iterator[dict[str, Any]]:
    """Measure every shape; with ``sweep`` other constants too, and the full bank only."""
    for n_blocks in BLOCKS[:1] if sweep else BLOCKS:
        for tokens in TOKENS:
            chosen = choose_config(tokens, n_blocks, HIDDEN)
            for config in _candidates(chosen) if sweep else [chosen]:
                yield measure(tokens, n_blocks, config, chosen=config == chosen)


def measure(
    tokens: int, n_blocks: int, config: AttnResConfig, *, chosen: bool = True
) -> dict[str, Any]:
    """Check and time one shape; return one row of the result file."""
    moved = bytes_moved(tokens, n_blocks)
    sets = input_sets(moved)
    generator = torch.Generator(device="cuda").manual_seed(tokens * 16 + n_blocks)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=generator, dtype=torch.bfloat16)

    bank = normal(n_blocks, sets * tokens, HIDDEN)
    prefix, delta = normal(sets * tokens, HIDDEN), normal(sets * tokens, HIDDEN)
    query = normal(HIDDEN) * 0.05
    key_norm, norm = 1 + 0.1 * normal(HIDDEN), 1 + 0.1 * normal(HIDDEN)
    out = torch.full_like(prefix, torch.nan)
    prefix_out = torch.full_like(prefix, torch.nan)

    def call(index: int) -> None:
        rows = slice(index * tokens, (index + 1) * tokens)
        attn_res(
            bank[:, rows], prefix[rows], delta[rows], query, key_norm, norm,
            out=out[rows], prefix_out=prefix_out[rows], config=config,
        )  # fmt: skip

    last = sets - 1
    call(last)
    shown = slice(last * tokens, last * tokens + min(tokens, 512))
    expected, expected_prefix = _reference(
        bank[:, shown], prefix[shown], delta[shown], query, key_norm, norm
    )
    error = relative_error(out[shown], expected)
    rows = slice(last * tokens, None)
    if not (
        error <= TOLERANCE
        and torch.equal(prefix_out[shown], expected_prefix)
        and bool(out[rows].isfinite().all())
        and bool(prefix_out[rows].isfinite().all())
    ):
        raise AssertionError(f"attn_res is wrong at T={tokens}, n={n_blocks}, {config}: {error}")
    timing = time_calls([lambda index=index: call(index) for index in range(sets)])
    floor_us = moved / BANDWIDTH * 1e6
    return {
        "operator": "attn_res",
        "tokens": tokens,
        "n_blocks": n_blocks,
        "hidden_size": HIDDEN,
        "dtype": "bfloat16",
        **asdict(timing),
        "bytes": moved,
        "floor_us": floor_us,
        "fraction_of_floor": floor_us / timing.median_us,
        "relative_error": error,
        "input_sets": sets,
        "config": asdict(config),
        "chosen": chosen,
    }


def _reference(
    blocks: torch.Tensor,
    prefix: torch.Tensor,
    delta: torch.Tensor,
    query: torch.Tensor,
    key_norm: torch.Tensor,
    norm: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    new_prefix = (prefix.float() + delta.float()).to(prefix.dtype)
    sources = torch.cat([blocks, new_prefix[None]]).double()
    inverse_rms = torch.rsqrt(sources.square().mean(-1) + 1e-5)
    weights = torch.softmax((sources @ (key_norm.double() * query.double())) * inverse_rms, 0)
    mix = (weights[..., None] * sources).sum(0)
    scale = torch.rsqrt(mix.square().mean(-1, keepdim=True) + 1e-5)
    return norm.double() * mix * scale, new_prefix


def _candidates(chosen: AttnResConfig) -> list[AttnResConfig]:
    """List the alternatives that the compiler's reports leave open at H = 7168."""
    others = [
        AttnResConfig(block_h, num_warps, stages, preload)
        for block_h, num_warps in ((1024, 4), (1024, 8), (512, 8), (2048, 8), (8192, 8), (8192, 16))
        for stages in (1, 3, 5, 9)
        for preload in (False, True)
        if (stages - 1) * -(-HIDDEN // block_h) * block_h * 2 <= 228_000  # shared memory
    ]
    return [chosen, *(config for config in others if config != chosen)]

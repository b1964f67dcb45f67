"""Measure the launch constants of :func:`k3_kernels.attn_res` with K3's full bank.

``python -m benchmarks.tune_attn_res``; see :mod:`benchmarks.tuning`.
"""

from __future__ import annotations

import sys
from functools import partial

import torch
from k3_kernels.attn_res import AttnResConfig, attn_res

from benchmarks.timing import input_sets, relative_error
from benchmarks.tuning import Case, tune

HIDDEN, BLOCKS = 7168, 8
EPS = 1e-5
#: Tokens of a case, and the largest number of tokens its constants serve.
SIZES = (
    (1, 2), (8, 11), (16, 22), (32, 45), (64, 90), (128, 132), (256, 512), (1024, 2048),
    (8192, None),
)  # fmt: skip


def candidates(tokens: int) -> list[AttnResConfig]:
    """List what the compiler's reports leave open."""
    if tokens <= 132:
        two = [
            AttnResConfig(block_h, warps, 1, True, 1, pdl, slice_h, slice_warps, prefetch)
            for block_h, warps, slice_h, slice_warps in (
                (1024, 8, 512, 4), (1024, 8, 512, 2), (1024, 8, 256, 2), (1024, 8, 1024, 4),
                (1024, 16, 512, 4),
            )
            for pdl, prefetch in ((True, False), (True, True), (False, False))
            if pdl or (slice_h == 512 and slice_warps == 4)
        ]  # fmt: skip
        # Both launches in slices: preload lets the launch after them start early.
        two += [
            AttnResConfig(0, warps, 1, early, 1, True, slice_h, slice_warps, True, mix_h)
            for slice_h, slice_warps, mix_h, warps in (
                (512, 4, 512, 4), (1024, 4, 1024, 4), (1024, 2, 1024, 2), (512, 2, 512, 2),
            )
            for early in (True, False)
        ]  # fmt: skip
        one = [
            (1024, 8, 0, False, 2), (1024, 8, 0, False, 3), (1024, 8, 0, False, 4),
            (1024, 8, 0, True, 2), (1024, 8, 0, True, 4),
            (2048, 8, 0, True, 2), (2048, 8, 3, True, 2), (2048, 8, 5, True, 2),
            (1024, 8, 5, True, 2), (1024, 4, 4, False, 2), (1024, 4, 5, False, 2),
        ]  # fmt: skip
    else:
        two = []
        one = [(1024, 4, 3, False, 1), (1024, 4, 3, False, 2), (1024, 4, 4, False, 1)]
    early = ((True, True), (True, False), (False, False)) if tokens <= 132 else ((True, False),)
    return two + [
        AttnResConfig(*fields, pdl, prefetch=prefetch) for fields in one for pdl, prefetch in early
    ]


def case(tokens: int, bound: int | None, most_sets: int | None) -> Case:
    """Make the inputs of one case."""
    moved = tokens * HIDDEN * 2 * (BLOCKS + 4)
    sets = most_sets or input_sets(moved)
    generator = torch.Generator(device="cuda").manual_seed(tokens)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=generator, dtype=torch.bfloat16)

    bank = normal(sets, BLOCKS, tokens, HIDDEN)
    prefix, delta = normal(sets, tokens, HIDDEN), normal(sets, tokens, HIDDEN)
    weights = (normal(HIDDEN) * 0.05, 1 + 0.1 * normal(HIDDEN), 1 + 0.1 * normal(HIDDEN))
    out, prefix_out = (torch.empty_like(prefix[0]) for _ in range(2))

    def call(config: AttnResConfig, index: int) -> None:
        attn_res(
            bank[index], prefix[index], delta[index], *weights, key_eps=EPS, norm_eps=EPS,
            out=out, prefix_out=prefix_out, config=config,
        )  # fmt: skip

    def error(config: AttnResConfig) -> float:
        out.fill_(torch.nan)
        prefix_out.fill_(torch.nan)
        call(config, sets - 1)
        shown = slice(-256, None)
        new = (prefix[-1][shown].float() + delta[-1][shown].float()).to(prefix.dtype)
        sources = torch.cat([bank[-1][:, shown], new[None]]).double()
        inverse_rms = (sources.square().mean(-1) + EPS).rsqrt()
        query, key_norm, norm = (weight.double() for weight in weights)
        share = ((sources @ (key_norm * query)) * inverse_rms).softmax(0)
        mix = (share[..., None] * sources).sum(0)
        expected = norm * mix * (mix.square().mean(-1, keepdim=True) + EPS).rsqrt()
        whole = bool(out.isfinite().all()) and bool(prefix_out.isfinite().all())
        if not whole or not torch.equal(prefix_out[shown], new):
            return float("inf")
        return relative_error(out[shown], expected)

    shape = f"H={HIDDEN}"
    floor = moved / 4.3e12 * 1e6
    return Case(shape, tokens, bound, sets, candidates(tokens), call, error, 4e-3, floor)


if __name__ == "__main__":
    sys.exit(tune("attn_res", [partial(case, *size) for size in SIZES]))

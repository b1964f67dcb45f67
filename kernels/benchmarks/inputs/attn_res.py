"""Inputs of AttnRes with eight stored blocks, in bfloat16, and the float64 result.

Needs PyTorch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import Case
from benchmarks.floors import HIDDEN, attn_res_bytes, floor_us
from benchmarks.timing import input_sets, relative_error

__all__ = ["BLOCKS", "EPS", "AttnResProblem"]

BLOCKS = 8
EPS = 1e-5
#: Rows compared of a long input: float64 copies of all of them would take 4 GB.
_ROWS = 512


class AttnResProblem:
    """One case: ``prefix[i]``, ``delta[i]`` ``[T, H]``, blocks in two layouts, weights ``[H]``.

    ``blocks[i]`` is ``[n, T, H]`` and ``blocks_by_token[i]`` ``[T, n, H]``: an implementation gets
    the layout that it asks of its engine. The new prefix takes the place of the old one.
    """

    tolerance = 4e-3  # one rounding to bfloat16 gives 1.7e-3

    def __init__(self, case: Case, generator: torch.Generator) -> None:
        self.tokens = tokens = case.sizes["tokens"]
        self.bytes_moved = attn_res_bytes(tokens, BLOCKS)
        self.floor_us = floor_us(self.bytes_moved)
        self.sets = sets = input_sets(self.bytes_moved)

        def normal(*shape: int) -> Tensor:
            return torch.randn(
                *shape, device=generator.device, generator=generator, dtype=torch.bfloat16
            )

        bank = normal(sets, BLOCKS, tokens, HIDDEN)
        self.blocks = list(bank)
        self.blocks_by_token = list(bank.transpose(1, 2).contiguous())
        self._pristine = normal(sets, tokens, HIDDEN)
        self._live = self._pristine.clone()
        self.prefix = list(self._live)
        self.delta = list(normal(sets, tokens, HIDDEN))
        self.query = normal(HIDDEN) * 0.05
        self.key_norm, self.norm = 1 + 0.1 * normal(HIDDEN), 1 + 0.1 * normal(HIDDEN)

    def reset(self) -> None:
        """Undo the additions to the prefix."""
        self._live.copy_(self._pristine)

    def error(self, call: Any) -> float:
        """Compare mix and new prefix of the last set with the equations in float64."""
        self.reset()
        last = self.sets - 1
        out, prefix = call(last)
        if not bool(out.isfinite().all()):
            return float("inf")
        expected, expected_prefix = self._reference(last)
        errors = (
            relative_error(out[-_ROWS:], expected),
            relative_error(prefix[-_ROWS:], expected_prefix),
        )
        self.reset()
        return max(errors)

    def facts(self) -> dict[str, Any]:
        """Return the number of input sets."""
        return {"input_sets": self.sets}

    def _reference(self, index: int) -> tuple[Tensor, Tensor]:
        rows = slice(-_ROWS, None)
        sum_ = self._pristine[index][rows].float() + self.delta[index][rows].float()
        prefix = sum_.to(torch.bfloat16)
        sources = torch.cat([self.blocks[index][:, rows], prefix[None]]).double()
        inverse_rms = (sources.square().mean(-1) + EPS).rsqrt()
        logits = sources @ (self.key_norm.double() * self.query.double()) * inverse_rms
        mix = (logits.softmax(0)[..., None] * sources).sum(0)
        scale = (mix.square().mean(-1, keepdim=True) + EPS).rsqrt()
        return self.norm.double() * mix * scale, prefix

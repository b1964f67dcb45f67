"""Inputs of attention over the latent cache: pages scattered over one pool, full contexts.

Needs PyTorch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import Case
from benchmarks.floors import LATENT_RANK, ROPE, floor_us, mla_decode_bytes, mla_decode_flops
from benchmarks.timing import input_sets, relative_error

__all__ = ["PAGE", "SCALE", "MlaDecodeProblem"]

#: Rows of a block, and what K3 multiplies scores with.
PAGE, SCALE = 64, 192**-0.5


class MlaDecodeProblem:
    """One case. Token t of a request's T sees all but its last ``T - 1 - t`` rows.

    ``q_latent[i]`` is ``[B * T, H, 512]`` as a product by head leaves it (heads outermost in
    memory), ``q_pe[i]`` ``[B * T, H, 64]``, ``pool`` ``[blocks, 64, 576]``, ``tables[i]`` int32
    ``[B, blocks]``, ``lengths`` int32 ``[B]``. A result is ``[B * T, H, 512]``.
    """

    tolerance = 8e-3  # probabilities are rounded to bfloat16 before they are multiplied

    def __init__(self, case: Case, generator: torch.Generator, sets: int | None = None) -> None:
        sizes = case.sizes
        self.heads, self.batch = sizes["heads"], sizes["batch"]
        self.tokens, self.length = sizes["tokens"], sizes["length"]
        self.bytes_moved = mla_decode_bytes(**sizes)
        self.floor_us = floor_us(self.bytes_moved, mla_decode_flops(**sizes))
        self.sets = sets or input_sets(self.bytes_moved)
        device = generator.device

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device, generator=generator, dtype=torch.bfloat16)

        blocks = -(-self.length // PAGE)
        count = self.sets * self.batch * blocks
        self.pool = normal(count, PAGE, LATENT_RANK + ROPE)
        order = torch.randperm(count, device=device, generator=generator).to(torch.int32)
        self.tables = list(order.view(self.sets, self.batch, blocks))
        self.lengths = torch.full((self.batch,), self.length, dtype=torch.int32, device=device)
        rows = self.batch * self.tokens
        self.q_latent = list(normal(self.sets, self.heads, rows, LATENT_RANK).transpose(1, 2))
        self.q_pe = list(normal(self.sets, rows, self.heads, ROPE))

    def reset(self) -> None:
        """Nothing is changed in place."""

    def error(self, call: Any) -> float:
        """Compare the first and the last request of the last set with float64."""
        result = call(self.sets - 1).unflatten(0, (self.batch, self.tokens))
        if not bool(result.isfinite().all()):
            return float("inf")
        chosen = sorted({0, self.batch - 1})
        return relative_error(result[chosen], torch.stack([self._reference(i) for i in chosen]))

    def facts(self) -> dict[str, Any]:
        """Return the number of input sets and the rows of a block."""
        return {"input_sets": self.sets, "page": PAGE}

    def hidden(self) -> Tensor:
        """Return where a token must not look, ``[T, L]``."""
        future = torch.ones(self.tokens, self.length, dtype=torch.bool, device=self.pool.device)
        return future.triu(self.length - self.tokens + 1)

    def _reference(self, request: int) -> Tensor:
        rows = self.pool[self.tables[-1][request].long()].flatten(0, 1)[: self.length].double()
        own = slice(request * self.tokens, (request + 1) * self.tokens)
        q = torch.cat((self.q_latent[-1][own], self.q_pe[-1][own]), -1).double()
        scores = (q @ rows.mT * SCALE).masked_fill(self.hidden()[:, None], -torch.inf)
        return scores.softmax(-1) @ rows[:, :LATENT_RANK]

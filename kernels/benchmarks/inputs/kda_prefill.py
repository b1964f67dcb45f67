"""Inputs of a KDA prefill: one or several whole sequences of a layer, and the float64 result.

Needs PyTorch.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import Case
from benchmarks.floors import HEAD_DIM, floor_us, kda_prefill_bytes, kda_prefill_flops
from benchmarks.inputs.kda import decay, recurrence
from benchmarks.timing import input_sets, relative_error

__all__ = ["KdaPrefillProblem"]


class KdaPrefillProblem:
    """One case; q, k, v, g are lists over the sets, bfloat16 ``[1, T, H, D]``, beta ``[1, T, H]``.

    Q and k are behind the convolution and not yet normalised, g and beta are raw. ``state`` is
    float32 ``[N, H, V, K]``, ``cu_seqlens`` int32 ``[N + 1]``: sequence n is
    ``[cu_seqlens[n], cu_seqlens[n + 1])``.
    """

    tolerance = 2e-2  # bfloat16 products inside a chunk: the peers reach 4e-3 to 6e-3

    def __init__(self, case: Case, generator: torch.Generator) -> None:
        self.heads, self.lengths = case.sizes["heads"], case.lengths
        self.tokens, self.sequences = sum(case.lengths), len(case.lengths)
        self.bytes_moved = kda_prefill_bytes(self.heads, self.tokens, self.sequences)
        self.floor_us = floor_us(self.bytes_moved, kda_prefill_flops(self.heads, self.tokens))
        self.sets = input_sets(self.bytes_moved, most=8)
        device = generator.device

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device, generator=generator)

        rows = (1, self.tokens, self.heads)
        self.q, self.k, self.v, self.g = (
            [normal(*rows, HEAD_DIM).to(torch.bfloat16) for _ in range(self.sets)] for _ in range(4)
        )
        self.beta = [normal(*rows).to(torch.bfloat16) for _ in range(self.sets)]
        self.A_log, self.dt_bias = 0.3 * normal(self.heads), 0.3 * normal(self.heads * HEAD_DIM)
        self.state = 0.1 * normal(self.sequences, self.heads, HEAD_DIM, HEAD_DIM)
        ends = [0, *accumulate(case.lengths)]
        self.cu_seqlens = torch.tensor(ends, dtype=torch.int32, device=device)
        self._pristine = [t[-1].clone() for t in (self.q, self.k, self.v, self.g)]
        self._state = self.state.clone()
        self._expected: tuple[Tensor, Tensor] | None = None

    def reset(self) -> None:
        """Restore the compared set: vLLM's chunked kernels write into v."""
        for live, pristine in zip((self.q, self.k, self.v, self.g), self._pristine, strict=True):
            live[-1].copy_(pristine)
        self.state.copy_(self._state)

    def error(self, call: Any) -> float:
        """Compare outputs and final states of the last set with the recurrence in float64."""
        self.reset()
        if self._expected is None:
            self._expected = self._reference()
        out, state = call(self.sets - 1)
        expected, final = self._expected
        errors = (
            relative_error(out.reshape(expected.shape), expected),
            relative_error(state.reshape(final.shape), final),
        )
        self.reset()
        return max(errors)

    def facts(self) -> dict[str, Any]:
        """Return the number of input sets."""
        return {"input_sets": self.sets}

    def _reference(self) -> tuple[Tensor, Tensor]:
        # Every case has sequences of one length, so that they advance together.
        shape = (self.sequences, self.lengths[0], self.heads)
        q, k, v, g = (part.view(*shape, HEAD_DIM) for part in self._pristine)
        decays = decay(g, self.A_log, self.dt_bias)
        out, state = recurrence(q, k, v, decays, self.beta[-1].view(shape), self._state)
        return out.view(1, self.tokens, self.heads, HEAD_DIM), state

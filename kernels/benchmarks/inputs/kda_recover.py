"""Inputs of KDA's state recovery: records of drafted tokens, all of them accepted.

Needs PyTorch.

A verify step leaves the state as it was and records, for each drafted token, its update u (float32)
and its key and raw gate (bfloat16, the key before its normalisation). Committing a token is then
``S = S decay(gate) + u key^T``. Here every recorded token is accepted, the most work there can be;
the convolution's window is not moved.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import Case
from benchmarks.floors import HEAD_DIM, floor_us, kda_recover_bytes
from benchmarks.inputs.kda import decay, normalized
from benchmarks.timing import input_sets, relative_error

__all__ = ["KdaRecoverProblem"]


class KdaRecoverProblem:
    """One case; every input set owns other slots of ``state`` ``[slots, H, V, K]``, float32.

    ``u[i]``, ``key[i]`` and ``gate[i]`` are ``[B, K, H, D]``, ``slots[i]`` int32 ``[B]``.
    """

    tolerance = 1e-3  # float32 throughout

    def __init__(self, case: Case, generator: torch.Generator) -> None:
        sizes = case.sizes
        self.heads, self.batch, self.accepted = sizes["heads"], sizes["batch"], sizes["accepted"]
        self.bytes_moved = kda_recover_bytes(self.heads, self.batch, self.accepted)
        self.floor_us = floor_us(self.bytes_moved)
        self.sets = sets = input_sets(self.bytes_moved)
        device = generator.device

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device, generator=generator)

        rows = (sets, self.batch, self.accepted, self.heads, HEAD_DIM)
        self.u = list(normal(*rows))
        self.key, self.gate = (list(normal(*rows).to(torch.bfloat16)) for _ in range(2))
        self.A_log, self.dt_bias = 0.3 * normal(self.heads), 0.3 * normal(self.heads * HEAD_DIM)
        count = sets * self.batch
        order = 1 + torch.randperm(count, device=device, generator=generator).to(torch.int32)
        self.slots = list(order.view(sets, self.batch))
        self.state = 0.1 * normal(count + 1, self.heads, HEAD_DIM, HEAD_DIM)
        self._checked = self.slots[-1].long()
        self._state = self.state[self._checked].clone()

    def reset(self) -> None:
        """Restore the slots that are compared."""
        self.state[self._checked] = self._state

    def error(self, call: Any) -> float:
        """Compare the committed states of the last set with float64."""
        self.reset()
        call(self.sets - 1)
        error = relative_error(self.state[self._checked], self._reference())
        self.reset()
        return error

    def facts(self) -> dict[str, Any]:
        """Return the number of input sets."""
        return {"input_sets": self.sets, "accepted": self.accepted}

    def _reference(self) -> Tensor:
        state = self._state.double()
        u, key = self.u[-1].double(), normalized(self.key[-1].double())
        decays = decay(self.gate[-1], self.A_log, self.dt_bias)
        for t in range(self.accepted):
            state = state * decays[:, t, :, None, :] + u[:, t, ..., None] * key[:, t, :, None, :]
        return state

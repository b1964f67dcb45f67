"""Inputs of a KDA decode step: projections of one token a sequence, states in a pool of slots.

Needs PyTorch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import Case
from benchmarks.floors import HEAD_DIM, floor_us, kda_decode_bytes
from benchmarks.inputs.kda import NORM_EPS, decay, recurrence
from benchmarks.timing import input_sets, relative_error

__all__ = ["KdaDecodeProblem"]


class KdaDecodeProblem:
    """One case; every input set owns other slots of ``state`` and ``conv_state``.

    Attributes
    ----------
    qkv, output_gate, raw_gate, beta
        A list each over the sets: bfloat16 ``[B, 3HD]``, ``[B, H, D]`` (views of one projection
        ``[B, 4HD]``), ``[1, B, H, D]`` and ``[1, B, H]``.
    slots
        int32 ``[B]`` a set, in random order; slot 0 belongs to nobody.
    state, conv_state
        float32 ``[slots, H, V, K]``; bfloat16 ``[slots, 3, 3HD]``, oldest token first.
    conv_weight, A_log, dt_bias, norm_weight
        float32 ``[3HD, 4]``, ``[H]``, ``[HD]`` and ``[D]``.
    """

    tolerance = 1e-2

    def __init__(self, case: Case, generator: torch.Generator) -> None:
        self.heads, self.batch = heads, batch = case.sizes["heads"], case.sizes["batch"]
        self.bytes_moved = kda_decode_bytes(heads, batch)
        self.floor_us = floor_us(self.bytes_moved)
        self.sets = sets = input_sets(self.bytes_moved)
        width = heads * HEAD_DIM
        device = generator.device

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device, generator=generator)

        projected = normal(sets, batch, 4 * width).to(torch.bfloat16)
        self.qkv = [rows[:, : 3 * width] for rows in projected]
        self.output_gate = [rows[:, 3 * width :].view(batch, heads, HEAD_DIM) for rows in projected]
        self.raw_gate = list(normal(sets, 1, batch, heads, HEAD_DIM).to(torch.bfloat16))
        self.beta = list(normal(sets, 1, batch, heads).to(torch.bfloat16))
        count = sets * batch
        order = 1 + torch.randperm(count, device=device, generator=generator).to(torch.int32)
        self.slots = list(order.view(sets, batch))
        self.state = 0.1 * normal(count + 1, heads, HEAD_DIM, HEAD_DIM)
        self.conv_state = normal(count + 1, 3, 3 * width).to(torch.bfloat16)
        self.conv_weight = 0.5 * normal(3 * width, 4)
        self.A_log, self.dt_bias = 0.3 * normal(heads), 0.3 * normal(width)
        self.norm_weight = 0.5 + torch.rand(HEAD_DIM, device=device, generator=generator)
        self._checked = self.slots[-1].long()
        self._state = self.state[self._checked].clone()
        self._conv_state = self.conv_state[self._checked].clone()
        self._expected: tuple[Tensor, Tensor, Tensor] | None = None

    def reset(self) -> None:
        """Restore the slots that are compared; the others may hold any state."""
        self.state[self._checked] = self._state
        self.conv_state[self._checked] = self._conv_state

    def error(self, call: Any) -> float:
        """Compare output, new state and new window of the last set with float64."""
        self.reset()
        if self._expected is None:
            self._expected = self._reference()
        out, state, window = self._expected
        result = call(self.sets - 1).view_as(out)
        errors = (
            relative_error(result, out),
            relative_error(self.state[self._checked], state),
            relative_error(self.conv_state[self._checked], window),
        )
        self.reset()
        return max(errors)

    def facts(self) -> dict[str, Any]:
        """Return the number of input sets."""
        return {"input_sets": self.sets}

    def _reference(self) -> tuple[Tensor, Tensor, Tensor]:
        last = self.sets - 1
        rows = torch.cat([self._conv_state, self.qkv[last][:, None]], 1)
        mixed = (rows.double() * self.conv_weight.double().T).sum(1)
        mixed = mixed * mixed.sigmoid()
        q, k, v = (part.view(self.batch, 1, self.heads, HEAD_DIM) for part in mixed.chunk(3, -1))
        decays = decay(self.raw_gate[last].transpose(0, 1), self.A_log, self.dt_bias)
        beta = self.beta[last].transpose(0, 1)
        out, state = recurrence(q, k, v, decays, beta, self._state)
        out = out[:, 0]
        scale = (out.square().mean(-1, keepdim=True) + NORM_EPS).rsqrt()
        gate = self.output_gate[last].double().sigmoid()
        return out * scale * self.norm_weight.double() * gate, state, rows[:, 1:]

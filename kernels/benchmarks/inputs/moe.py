"""Inputs of the expert layer: weights in MXFP4 or bfloat16, tokens, routing, reference.

Needs PyTorch.

The MXFP4 scales are powers of two from 2^-9 to 2^-6, the range of the released experts, and every
4-bit code is as likely as any other, so that an implementation cannot profit from an easy value.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import RANKS, Case
from benchmarks.floors import LATENT, floor_us, moe_bytes, moe_flops
from benchmarks.inputs.routings import draw_experts, popularity
from benchmarks.timing import input_sets, relative_error

__all__ = ["BETA", "LINEAR_BETA", "SCALE_BYTES", "MoeProblem", "MoeWeights", "dequantize", "situ"]

#: SiTU's two bounds in K3.
BETA, LINEAR_BETA = 4.0, 25.0
#: Scale bytes drawn, last one not included: 118 stands for 2^-9, 121 for 2^-6.
SCALE_BYTES = (118, 122)
#: Magnitudes of the eight codes; bit 3 of a code is the sign.
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def dequantize(packed: Tensor, scale: Tensor) -> Tensor:
    """Decode MXFP4: ``packed`` ``[..., K/2]``, low half first, ``scale`` ``[..., K/32]``; float32.

    Examples
    --------
    >>> packed = torch.zeros(16, dtype=torch.uint8)
    >>> packed[0] = 0x9F  # low half 15: -6; high half 9: -0.5
    >>> dequantize(packed, torch.tensor([126], dtype=torch.uint8))[:3].tolist()
    [-3.0, -0.25, 0.0]
    """
    codes = torch.tensor([*_MAGNITUDES, *(-m for m in _MAGNITUDES)], device=packed.device)
    halves = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)
    groups = codes[halves.int()].unflatten(-1, (-1, 32))
    return (groups * torch.exp2(scale.float() - 127)[..., None]).flatten(-2)


def situ(gate_up: Tensor) -> Tensor:
    """Return ``beta tanh(g/beta) sigmoid(g) * linear_beta tanh(u/linear_beta)`` of ``[g | u]``."""
    gate, up = gate_up.chunk(2, -1)
    bounded = BETA * torch.tanh(gate / BETA) * torch.sigmoid(gate)
    return bounded * LINEAR_BETA * torch.tanh(up / LINEAR_BETA)


class MoeWeights:
    """The experts of one rank, shared by all cases, and each implementation's form of them.

    ``w13`` holds gate rows, then up rows, ``[E, 2I, H]``; ``w2`` is ``[E, H, I]``. In MXFP4 they
    are uint8 with half the columns, beside ``s13`` and ``s2`` with one scale for 32 columns.
    """

    def __init__(self, operator: str, generator: torch.Generator) -> None:
        _, self.format, rank = operator.split("_")
        self.rank = RANKS[rank]
        self.rank_name = rank
        experts, inner, hidden = self.rank.experts, self.rank.intermediate, LATENT
        self.s13 = self.s2 = None
        if self.format == "mxfp4":
            self.w13 = _bytes((experts, 2 * inner, hidden // 2), (0, 256), generator)
            self.s13 = _bytes((experts, 2 * inner, hidden // 32), SCALE_BYTES, generator)
            self.w2 = _bytes((experts, hidden, inner // 2), (0, 256), generator)
            self.s2 = _bytes((experts, hidden, inner // 32), SCALE_BYTES, generator)
        else:
            self.w13 = _normal((experts, 2 * inner, hidden), generator)
            self.w2 = _normal((experts, hidden, inner), generator)
        self.prepared: dict[str, Any] = {}

    @property
    def weight_bytes(self) -> float:
        """Bytes of one weight with its share of a scale."""
        return 17 / 32 if self.format == "mxfp4" else 2

    def expert(self, index: int) -> tuple[Tensor, Tensor]:
        """Return one expert's two matrices in float32."""
        if self.s13 is not None and self.s2 is not None:
            return (
                dequantize(self.w13[index], self.s13[index]),
                dequantize(self.w2[index], self.s2[index]),
            )
        return self.w13[index].float(), self.w2[index].float()


class MoeProblem:
    """One case of the expert layer: ``x[i]`` ``[T, H]``, ``expert_ids[i]`` and ``weights[i]``.

    Ids are int32 and weights float32 with sum 1, both ``[T, k]``.
    """

    tolerance = 1e-2

    def __init__(
        self,
        case: Case,
        weights: MoeWeights,
        generator: torch.Generator,
        load_file: Path | None = None,
    ) -> None:
        self.shared, self.case = weights, case
        self.tokens = tokens = case.sizes["tokens"]
        rank = weights.rank
        share = popularity(rank.experts, case.load, generator, load_file)
        per_expert = 3 * LATENT * rank.intermediate * weights.weight_bytes
        least = min(tokens * rank.top_k, rank.experts) * per_expert
        # Eight is plenty: the rotation only has to outlast the cache, and T = 1 moves 35 MB.
        self.sets = input_sets(least, most=8)
        device = generator.device
        self.x, self.expert_ids, self.weights = [], [], []
        for _ in range(self.sets):
            x = torch.randn(tokens, LATENT, device=device, generator=generator)
            self.x.append(x.to(torch.bfloat16))
            self.expert_ids.append(draw_experts(tokens, rank.top_k, share, generator))
            score = 0.1 + torch.rand(tokens, rank.top_k, device=device, generator=generator)
            self.weights.append(score / score.sum(-1, keepdim=True))
        self.distinct = statistics.mean(len(ids.unique()) for ids in self.expert_ids)
        self.bytes_moved = moe_bytes(tokens, self.distinct, rank.intermediate, weights.weight_bytes)
        self.flops = moe_flops(tokens * rank.top_k, rank.intermediate)
        self.floor_us = floor_us(self.bytes_moved, self.flops)
        self._expected: Tensor | None = None

    def reset(self) -> None:
        """Nothing is changed in place."""

    def error(self, call: Any) -> float:
        """Compare the last set's output with the experts applied one by one in float32."""
        last = self.sets - 1
        if self._expected is None:
            self._expected = self._reference(last)
        return relative_error(call(last), self._expected)

    def facts(self) -> dict[str, Any]:
        """Return the load that was drawn."""
        busiest = statistics.mean(
            int(ids.flatten().bincount(minlength=1).max()) for ids in self.expert_ids
        )
        return {
            "load": self.case.load, "distinct_experts": self.distinct,
            "busiest_expert_tokens": busiest, "input_sets": self.sets,
        }  # fmt: skip

    def _reference(self, index: int) -> Tensor:
        x, ids, weights = self.x[index].float(), self.expert_ids[index], self.weights[index]
        out = torch.zeros_like(x)
        for expert, pairs in _pairs_of_each_expert(ids):
            w13, w2 = self.shared.expert(expert)
            token = pairs // ids.shape[1]
            y = situ(x[token] @ w13.T) @ w2.T
            out.index_add_(0, token, y * weights.flatten()[pairs, None])
        return out


def _pairs_of_each_expert(ids: Tensor) -> Iterator[tuple[int, Tensor]]:
    flat = ids.flatten().long()
    order = flat.argsort(stable=True)
    for expert, pairs in enumerate(order.split(flat.bincount().tolist())):
        if len(pairs):
            yield expert, pairs


def _bytes(shape: tuple[int, ...], span: tuple[int, int], generator: torch.Generator) -> Tensor:
    return torch.randint(
        *span, shape, dtype=torch.uint8, device=generator.device, generator=generator
    )


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    empty = torch.empty(shape, dtype=torch.bfloat16, device=generator.device)
    return empty.normal_(std=0.02, generator=generator)

"""Inputs of the router, top 16 of 896 with a selection bias, and the float64 result.

Needs PyTorch.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.cases import Case
from benchmarks.floors import floor_us, router_bytes
from benchmarks.timing import input_sets

__all__ = ["EXPERTS", "TOP_K", "RouterProblem"]

EXPERTS, TOP_K = 896, 16


class RouterProblem:
    """One case: ``logits[i]`` float32 ``[T, E]`` and ``bias`` ``[E]``."""

    tolerance = 1e-5

    def __init__(self, case: Case, generator: torch.Generator) -> None:
        self.tokens = tokens = case.sizes["tokens"]
        self.bytes_moved = router_bytes(tokens, EXPERTS, TOP_K)
        self.floor_us = floor_us(self.bytes_moved)
        self.sets = input_sets(self.bytes_moved)
        device = generator.device
        logits = torch.randn(self.sets, tokens, EXPERTS, device=device, generator=generator)
        self.logits = list(logits)
        self.bias = 0.1 * torch.randn(EXPERTS, device=device, generator=generator)

    def reset(self) -> None:
        """Nothing is changed in place."""

    def error(self, call: Any) -> float:
        """Compare weights and ids of the last set: each is spread out over the experts first.

        An expert whose biased score differs from the sixteenth best by less than float32 can tell
        apart (one part in a million) may be chosen or not.
        """
        last = self.sets - 1
        weights, ids = call(last)
        ids, weights = ids.long(), weights.double()
        scores = self.logits[last].double().sigmoid()
        biased = scores + self.bias.double()
        in_range = bool(((ids >= 0) & (ids < EXPERTS)).all())
        if not in_range or bool((ids.sort(-1).values.diff(dim=-1) == 0).any()):
            return float("inf")
        threshold = biased.topk(TOP_K, -1).values[:, -1:]
        if bool((biased.gather(1, ids) < threshold - 1e-6).any()):
            return float("inf")
        expected = scores.gather(1, ids)
        expected /= expected.sum(-1, keepdim=True)
        error = (weights - expected).norm() / expected.norm()
        return float(error.nan_to_num(nan=float("inf")))

    def facts(self) -> dict[str, Any]:
        """Return the number of input sets."""
        return {"input_sets": self.sets}

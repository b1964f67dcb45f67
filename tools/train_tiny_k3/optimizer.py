"""Muon for the matrices, AdamW for the rest, and the learning rate over time.

Needs torch. Kimi K2 and its successors were trained with Muon: momentum, made orthogonal by a few
Newton-Schulz steps, so that no direction of a matrix is learned much faster than another. Scaled as
there, it shares learning rate and weight decay with AdamW. Matrices of one shape are handled
together, since a small model has hundreds of them.

Sources: K. Jordan, "Muon", https://kellerjordan.github.io/posts/muon/ (coefficients of the
iteration); J. Liu et al., "Muon is Scalable for LLM Training", arXiv 2502.16982 (scale 0.2
sqrt(max(rows, columns)), weight decay).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["Optimizer", "learning_rate", "orthogonalize"]

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
#: Matrices that AdamW takes: rows of these are looked up or compared one by one.
_NOT_MUON = ("embed_tokens", "lm_head", "gate.weight", "res_proj", "conv1d")


def learning_rate(step: int, steps: int, peak: float, *, warmup: int, final: float = 0.02) -> float:
    """Linear warm-up to ``peak``, then a cosine down to ``final * peak`` at the last step.

    Examples
    --------
    >>> [round(learning_rate(step, 11, 1.0, warmup=2), 2) for step in (0, 1, 2, 10)]
    [0.33, 0.67, 1.0, 0.02]
    """
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    progress = (step - warmup) / max(steps - 1 - warmup, 1)
    return peak * (final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress)))


def orthogonalize(matrices: Tensor, steps: int = 5) -> Tensor:
    """Bring all singular values of ``[..., rows, columns]`` near 1.

    Examples
    --------
    >>> values = torch.linalg.svdvals(orthogonalize(torch.randn(3, 8, 20)))
    >>> bool((values > 0.5).all() and (values < 1.5).all())
    True
    """
    a, b, c = _COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Optimizer:
    """Muon and AdamW over named float32 weights.

    Parameters
    ----------
    weights
        Changed in place by :meth:`step`.
    weight_decay
        Of matrices, decoupled from the gradient and times the learning rate.
    clip
        Largest norm of all gradients together.
    """

    def __init__(
        self, weights: Mapping[str, Tensor], *, weight_decay: float = 0.1, clip: float = 1.0
    ) -> None:
        self.weights, self.weight_decay, self.clip = dict(weights), weight_decay, clip
        self.state: dict[str, dict[str, Tensor]] = {"momentum": {}, "first": {}, "second": {}}
        self._groups: dict[tuple[int, int], list[str]] = {}
        self._adam: list[str] = []
        for name, weight in self.weights.items():
            if weight.ndim < 2 or any(part in name for part in _NOT_MUON):
                self._adam.append(name)
                self.state["first"][name] = torch.zeros_like(weight)
                self.state["second"][name] = torch.zeros_like(weight)
            else:
                self._groups.setdefault(tuple(weight.shape[-2:]), []).append(name)
                self.state["momentum"][name] = torch.zeros_like(weight)

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor], lr: float, count: int) -> Tensor:
        """Take step number ``count`` (from 0) and return the norm of all gradients, unclipped.

        A weight without a gradient stays as it is.
        """
        names = list(gradients)
        grads = [gradients[name] for name in names]
        norm = torch.stack(torch._foreach_norm(grads)).norm()
        torch._foreach_mul_(grads, (self.clip / (norm + 1e-6)).clamp(max=1.0))
        present = set(names)
        self._adamw([n for n in self._adam if n in present], gradients, lr, count + 1)
        for group in self._groups.values():
            self._muon([n for n in group if n in present], gradients, lr)
        return norm

    def _adamw(
        self, names: list[str], gradients: Mapping[str, Tensor], lr: float, count: int
    ) -> None:
        if not names:
            return
        beta1, beta2 = 0.9, 0.95
        first = [self.state["first"][name] for name in names]
        second = [self.state["second"][name] for name in names]
        grads = [gradients[name] for name in names]
        weights = [self.weights[name] for name in names]
        torch._foreach_lerp_(first, grads, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, grads, grads, 1 - beta2)
        scale = torch._foreach_sqrt(torch._foreach_div(second, 1 - beta2**count))
        torch._foreach_add_(scale, 1e-8)
        decayed = [w for name, w in zip(names, weights, strict=True) if "lm_head" in name]
        if decayed:
            torch._foreach_mul_(decayed, 1 - lr * self.weight_decay)
        torch._foreach_addcdiv_(weights, first, scale, -lr / (1 - beta1**count))

    def _muon(self, names: list[str], gradients: Mapping[str, Tensor], lr: float) -> None:
        if not names:
            return
        momentum = [self.state["momentum"][name] for name in names]
        grads = [gradients[name] for name in names]
        torch._foreach_mul_(momentum, 0.95)
        torch._foreach_add_(momentum, grads)
        rows, columns = momentum[0].shape[-2:]
        ahead = torch._foreach_add(grads, momentum, alpha=0.95)  # Nesterov
        stacked = torch.cat([x.reshape(-1, rows, columns) for x in ahead])
        kind = torch.bfloat16 if stacked.is_cuda else stacked.dtype
        update = orthogonalize(stacked.to(kind)).to(stacked.dtype)
        pieces = update.split([x.numel() // (rows * columns) for x in ahead])
        weights = [self.weights[name] for name in names]
        torch._foreach_mul_(weights, 1 - lr * self.weight_decay)
        updates = [piece.view_as(w) for piece, w in zip(pieces, weights, strict=True)]
        torch._foreach_add_(weights, updates, alpha=-lr * 0.2 * math.sqrt(max(rows, columns)))

    def state_dict(self) -> dict[str, Any]:
        """Everything but the weights."""
        return {kind: dict(tensors) for kind, tensors in self.state.items()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Go on from :meth:`state_dict`."""
        for kind, tensors in self.state.items():
            for name, tensor in tensors.items():
                tensor.copy_(state[kind][name])

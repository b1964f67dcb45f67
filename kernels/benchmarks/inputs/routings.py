"""Which experts the tokens of a benchmark go to: even load, or a load like real traffic's.

Needs PyTorch.

*Uniform* routing draws a token's experts without repetition, every expert alike. *Skewed* routing
draws them without repetition too, but expert number r of a random order is r to the power of -0.6
as popular as the first (a Zipf law): of 896 experts the busiest then gets about twenty times the
mean load. A measured load can take the place of the law: ``--load FILE``, a JSON list of one number
an expert.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch

__all__ = ["ZIPF_EXPONENT", "draw_experts", "popularity"]

ZIPF_EXPONENT = 0.6


def popularity(
    experts: int, load: str, generator: torch.Generator, file: Path | None = None
) -> torch.Tensor:
    """Return how popular each expert is, float32 ``[E]`` with sum 1.

    Raises
    ------
    ValueError
        If the load file has another number of experts, or a number that is not positive.
    """
    device = generator.device
    if load == "uniform":
        return torch.full((experts,), 1.0 / experts, device=device)
    if file is None:
        ranks = 1 + torch.randperm(experts, device=device, generator=generator)
        share = ranks.float() ** -ZIPF_EXPONENT
    else:
        numbers = json.loads(file.read_text(encoding="utf-8"))
        if len(numbers) % experts or not all(
            isinstance(n, int | float) and math.isfinite(n) and n > 0 for n in numbers
        ):
            raise ValueError(
                f"{file} must list one positive number for each of {experts} experts (or a "
                f"multiple: the first {experts} are used), got {len(numbers)} numbers"
            )
        share = torch.tensor(numbers[:experts], device=device, dtype=torch.float32)
    return share / share.sum()


def draw_experts(
    tokens: int, top_k: int, popularity: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    """Draw ``top_k`` different experts for each token; int32 ``[T, k]``.

    Adding Gumbel noise to log-probabilities and taking the largest draws without repetition
    (https://arxiv.org/abs/1903.06059).

    Examples
    --------
    >>> generator = torch.Generator().manual_seed(0)
    >>> ids = draw_experts(5, 3, torch.full((8,), 1 / 8), generator)
    >>> ids.shape, ids.dtype, bool((ids.sort(-1).values.diff(dim=-1) > 0).all())
    (torch.Size([5, 3]), torch.int32, True)
    """
    uniform = torch.rand(
        tokens, len(popularity), device=popularity.device, generator=generator
    ).clamp_(1e-20, 1 - 1e-7)
    keys = popularity.log() - (-uniform.log()).log()
    return keys.topk(top_k, -1).indices.to(torch.int32)

"""Root-mean-square normalisation, and the rule for the type that sums are taken in.

Needs torch. Used by every other file of the reference; lesson 01 meets it first.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["RMSNorm", "compute_dtype", "rms_norm"]


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Type to accumulate in: float32, or float64 if the data already are float64.

    K3 stores most weights in bfloat16, which has 8 significant bits: a mean of 7168 squares, a
    router logit or a decay taken in it is wrong in the second digit.

    Examples
    --------
    >>> compute_dtype(torch.bfloat16), compute_dtype(torch.float64)
    (torch.float32, torch.float64)
    """
    return torch.promote_types(dtype, torch.float32)


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    """Divide each row by its root mean square, then scale each channel.

    Parameters
    ----------
    x
        ``[..., D]``, any float type.
    weight
        ``[D]``.
    eps
        Added to the mean square, inside the root.

    Returns
    -------
    Tensor
        ``[..., D]`` in the type of ``x``; computed in :func:`compute_dtype`.

    Examples
    --------
    >>> rms_norm(torch.tensor([3.0, 4.0]), torch.ones(2), eps=0.0).square().mean().item()
    1.0
    """
    wide = x.to(compute_dtype(x.dtype))
    inverse_rms = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * inverse_rms * weight).to(x.dtype)


class RMSNorm(nn.Module):
    """:func:`rms_norm` with its weight."""

    def __init__(
        self,
        width: int,
        eps: float,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width, dtype=dtype, device=device))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x [..., width]``."""
        return rms_norm(x, self.weight, self.eps)

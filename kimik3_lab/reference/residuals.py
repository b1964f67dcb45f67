"""Attention residuals: a sublayer reads a learned mixture of earlier blocks, not one running sum.

Needs torch. Lesson 01 counts its reads; lesson 11 prices them.

An ordinary transformer adds every sublayer output to one stream. K3 closes that stream every
``attn_res_block_size`` layers, keeps it as a *block*, and starts a new one. Before each sublayer,
and once before the final norm, a learned query decides per token how much of each closed block and
of the running sum to read. Nothing of this outlives a forward pass.

Source: vLLM 0.33.0, ``vllm/models/kimi_k3/nvidia/{model,ops/attn_res}.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kimik3_lab.reference.norms import compute_dtype

__all__ = ["ResidualStream", "mix"]


def mix(
    sources: Tensor | Sequence[Tensor], query: Tensor, norm_weight: Tensor, eps: float = 1e-5
) -> Tensor:
    """Softmax mixture of ``sources``; only the scores see normalised sources, the values do not.

    Parameters
    ----------
    sources
        ``[S, ..., H]``, or S tensors ``[..., H]``: the closed blocks, then the running sum.
    query
        ``[H]`` or ``[1, H]``: the learned pseudo-query (``*_res_proj.weight``).
    norm_weight
        ``[H]``: weight of the norm on the keys (``*_res_norm.weight``).
    eps
        Of that norm.

    Returns
    -------
    Tensor
        ``[..., H]`` in the type of the sources; scores and sum are taken in float32 or wider.

    Raises
    ------
    ValueError
        If there is no source.

    Examples
    --------
    A query of zero scores all sources alike, which gives their mean:

    >>> mix([torch.tensor([2.0]), torch.tensor([4.0])], torch.zeros(1), torch.ones(1))
    tensor([3.])
    """
    if len(sources) == 0:
        raise ValueError("mix needs at least one source: pass the running sum, even if alone")
    stacked = sources if isinstance(sources, Tensor) else torch.stack(tuple(sources))
    values = stacked.to(compute_dtype(stacked.dtype))
    # The norm is a scalar per row, so it can wait until after the dot product with query * weight.
    inverse_rms = torch.rsqrt(values.square().mean(-1) + eps)
    key_query = query.reshape(-1).to(values.dtype) * norm_weight
    scores = (values @ key_query) * inverse_rms
    share = scores.softmax(0)
    return (share.unsqueeze(-1) * values).sum(0).to(stacked.dtype)


class ResidualStream:
    """The running sum and the closed blocks of one forward pass.

    Parameters
    ----------
    embedding
        ``[N, H]``: the first running sum.
    eps
        Of the norm inside :func:`mix`.

    Examples
    --------
    >>> stream = ResidualStream(torch.ones(1, 2))
    >>> stream.start_block()
    >>> stream.add(torch.full((1, 2), 3.0))  # the new block holds this output, not 1 + 3
    >>> stream.read(torch.zeros(2), torch.ones(2))  # the mean of both blocks
    tensor([[2., 2.]])
    """

    def __init__(self, embedding: Tensor, eps: float = 1e-5) -> None:
        self.blocks: list[Tensor] = []
        self.prefix: Tensor | None = embedding
        self.eps = eps

    def read(self, query: Tensor, norm_weight: Tensor) -> Tensor:
        """Input of the next sublayer, ``[N, H]``, before that sublayer's own norm."""
        if self.prefix is None:
            raise RuntimeError("a block was just started: add a sublayer output before reading")
        if not self.blocks:
            return self.prefix  # one source: its softmax share is 1 whatever the query says
        return mix([*self.blocks, self.prefix], query, norm_weight, self.eps)

    def start_block(self) -> None:
        """Close the running sum as a block; the next :meth:`add` begins a new one."""
        if self.prefix is None:
            raise RuntimeError("a block was just started and is still empty: add to it first")
        self.blocks.append(self.prefix)
        self.prefix = None

    def add(self, output: Tensor) -> None:
        """Add a sublayer output ``[N, H]`` to the running sum."""
        self.prefix = output if self.prefix is None else self.prefix + output

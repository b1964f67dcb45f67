"""Which blocks of the residual stream each sublayer reads, from the configuration alone.

Needs the standard library only. Lesson 01 derives it and counts the same on a running model; the
arithmetic of the mixtures follows from it. What a read computes is in
:mod:`kimik3_lab.reference.residuals`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from kimik3_lab.config import K3Config

__all__ = ["ResidualRead", "residual_reads"]


class ResidualRead(NamedTuple):
    """One read: by which sublayer, and from how many closed blocks besides the running sum."""

    layer_id: int | None
    sublayer: Literal["attention", "feed-forward", "output"]
    blocks: int

    @property
    def sources(self) -> int:
        """Closed blocks and the running sum."""
        return self.blocks + 1

    @property
    def is_mixture(self) -> bool:
        """Whether there is anything to weigh: the first read has the embedding alone."""
        return self.blocks > 0


def residual_reads(config: K3Config) -> Iterator[ResidualRead]:
    """Yield every read of the residual stream in the order of the forward pass.

    A layer whose number is a multiple of ``attn_res_block_size`` closes the running sum as a block,
    between its attention's read and its feed-forward's.

    Examples
    --------
    >>> reads = [read for read in residual_reads(K3Config.released()) if read.is_mixture]
    >>> len(reads), sum(read.sources for read in reads), max(read.sources for read in reads)
    (186, 1002, 9)
    """
    blocks = 0
    for layer_id in range(config.num_hidden_layers):
        yield ResidualRead(layer_id, "attention", blocks)
        blocks += layer_id % config.attn_res_block_size == 0
        yield ResidualRead(layer_id, "feed-forward", blocks)
    yield ResidualRead(None, "output", blocks)

"""Time of the lab's expert kernel from the tiles it computes, not from the tokens it was given.

Needs numpy. Lesson 11 halves with it what a first prediction of prompts on two H200s had missed.
The kernel works in *tiles*: so many rows of one expert, whose weights it reads once for all of
them. Two things follow that a count of experts and pairs does not see. An expert with more tokens
than a tile holds is read again for each further tile. And a tile that is half empty is multiplied
as if it were full.

The rule of :func:`k3_kernels.moe_config.choose_config` says how large a tile is. A table of tuned
constants may say something else for a shape that it has, which is none of those on two GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["TILED", "TileCount", "TileShape", "TiledExperts", "draw_counts"]

Load = Literal["uniform", "skewed"]


class TileCount(NamedTuple):
    """What a call computes.

    Attributes
    ----------
    experts, pairs
        Experts that somebody picked, and pairs of a token and one of its experts.
    tiles, rows
        Tiles that they make, and the rows that are multiplied, empty ones included.
    """

    experts: float
    pairs: float
    tiles: float
    rows: float


@dataclass(frozen=True, slots=True)
class TileShape:
    """Rows that a program of the kernel holds.

    Attributes
    ----------
    rows
        A power of two.
    extra
        So many more rows, or 0. Tokens then come in blocks of this size: a single block is
        multiplied alone, up to ``rows`` as ``rows``, and only a full tile with the extra ones.
    fit
        With extra rows: a tile that is at most half full is multiplied at half its size.

    Examples
    --------
    >>> TileShape(8).count([3, 0, 9])
    TileCount(experts=2, pairs=12, tiles=3, rows=24)
    >>> TileShape(128, 32).count([73])
    TileCount(experts=1, pairs=73, tiles=1, rows=128)
    """

    rows: int
    extra: int = 0
    fit: bool = False

    @classmethod
    def by_rule(cls, pairs: int, experts: int) -> TileShape:
        """Choose by rule, as the kernel does for MXFP4 where nobody has tuned it.

        Parameters
        ----------
        pairs
            Of the call: with expert parallelism those of other ranks count as well, because nobody
            has looked at them yet.
        experts
            On this rank.
        """
        load = pairs / max(1, experts)
        if load > 48:
            return cls(128, 32)
        return cls(8 if load <= 12 else 32 if load <= 24 else 64)

    def count(self, tokens: npt.ArrayLike) -> TileCount:
        """Count the tiles of a call.

        Parameters
        ----------
        tokens
            int ``[E]``: tokens of each expert of this rank.
        """
        counts = np.asarray(tokens)
        counts = counts[counts > 0]
        picked, pairs = len(counts), int(counts.sum())
        if not self.extra:
            tiles = int((-(-counts // self.rows)).sum())
            return TileCount(picked, pairs, tiles, tiles * self.rows)
        blocks = -(-counts // self.extra)
        full, rest = np.divmod(blocks, (self.rows + self.extra) // self.extra)
        last = np.where(rest == 1, self.extra, self.rows)
        if self.fit:
            half = (rest > 1) & (rest * self.extra <= self.rows // 2)
            last = np.where(half, self.rows // 2, last)
        last = np.where(rest == 0, 0, last)
        return TileCount(
            picked,
            pairs,
            int((full + (rest > 0)).sum()),
            int((full * (self.rows + self.extra) + last).sum()),
        )


@dataclass(frozen=True, slots=True)
class TiledExperts:
    """Reading and computing overlap, but neither hides the other fully: the root of two squares.

    ``start + rows of pairs / bandwidth + hypot(tiles' weights / bandwidth, tiles' rows / rate)``;
    a pair's row is written by one kernel and read by the next that adds them up.

    Attributes
    ----------
    start_s, bandwidth, rate
        Seconds, bytes a second, operations a second.
    within
        Largest relative distance of the measured cases.
    evidence
        Which cases.
    """

    start_s: float
    bandwidth: float
    rate: float
    within: float
    evidence: str

    def us(self, count: TileCount, *, latent: int, width: float) -> float:
        """Microseconds of a call on experts of ``width`` columns here.

        Examples
        --------
        >>> one = TileShape(8).count([1] * 16)
        >>> round(TILED.us(one, latent=3584, width=384))  # one token on one of eight ranks
        23
        """
        read = count.tiles * 3 * latent * width * 17 / 32 / self.bandwidth
        computed = count.rows * 6 * latent * width / self.rate
        summed = count.pairs * 2 * 2 * latent / self.bandwidth
        return 1e6 * float(self.start_s + summed + np.hypot(read, computed))


#: Least squares of relative errors over the same rows of one GPU that the line of experts and pairs
#: was laid through (:data:`kimik3_lab.performance.layer_cost.KERNELS`). The form was chosen after
#: two GPUs had shown where that line misses; no time of two GPUs is in the numbers.
TILED = TiledExperts(
    13.7e-6, 3.94e12, 0.519e15, 0.14,
    "data/results/h200x2/one_gpu.json, moe_mxfp4_tp8 and moe_mxfp4_ep8, T = 1 to 8192, even and "
    "skewed; 5 % rms",
)  # fmt: skip


def draw_counts(
    experts: int, top_k: int, tokens: int, load: Load, generator: np.random.Generator
) -> npt.NDArray[np.int64]:
    """Draw how many tokens pick each expert; ``[E]``.

    Uniform: every expert alike. Skewed: expert e is ``(e + 1) ** -0.6`` as popular as the first.
    A token picks without repetition. This is the distribution of the benchmarks and of the
    measurement on two GPUs, whose own draws come from a GPU's generator.

    Raises
    ------
    ValueError
        If the load is unknown, or a token cannot pick so many experts.

    Examples
    --------
    >>> counts = draw_counts(896, 16, 64, "skewed", np.random.default_rng(0))
    >>> int(counts.sum()), bool(counts[:448].sum() > counts[448:].sum())
    (1024, True)
    """
    if load not in ("uniform", "skewed"):
        raise ValueError(f"load must be 'uniform' or 'skewed', got {load!r}")
    if not 1 <= top_k <= experts:
        raise ValueError(f"a token picks 1 to {experts} of {experts} experts, got top_k {top_k}")
    favour = np.zeros(experts)
    if load == "skewed":
        favour = -0.6 * np.log(np.arange(1, experts + 1))
    # The largest of logarithms with Gumbel noise: a draw without repetition (arXiv:1903.06059).
    keys = favour + generator.gumbel(size=(tokens, experts))
    picks = np.argpartition(keys, experts - top_k, axis=1)[:, experts - top_k :]
    return np.bincount(picks.ravel(), minlength=experts)

"""Ranks, and the exchanges that K3 needs between them.

Needs torch. NCCL carries tensors between GPUs, gloo between CPU processes; the code above does not
see which. A group of one rank exchanges nothing and needs no process group, so that one rank runs
the same code as many.

Shares may be uneven and even empty, because a small model has fewer heads than ranks: 3 heads on 2
ranks are 2 and 1. :func:`share` says who holds what, everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Ranks", "share", "sizes"]

# PyTorch 2.13 renamed both and warns of the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def share(total: int, size: int, rank: int) -> range:
    """Which of ``total`` things a rank holds: runs in order, the first ranks one longer.

    Raises
    ------
    ValueError
        If there is no such rank.

    Examples
    --------
    >>> [list(share(3, 2, rank)) for rank in range(2)]
    [[0, 1], [2]]
    >>> len(share(2, 4, 3))
    0
    """
    if not 0 <= rank < size:
        raise ValueError(f"rank must be from 0 to {size - 1}, got {rank}")
    each, longer = divmod(total, size)
    start = rank * each + min(rank, longer)
    return range(start, start + each + (rank < longer))


def sizes(total: int, size: int) -> list[int]:
    """How many of ``total`` things each rank holds.

    Examples
    --------
    >>> sizes(3, 4)
    [1, 1, 1, 0]
    """
    return [len(share(total, size, rank)) for rank in range(size)]


@dataclass(frozen=True)
class Ranks:
    """The ranks that work on one model, seen from one of them.

    Attributes
    ----------
    rank, size
        Which this one is, and how many there are.
    group
        ``torch.distributed``'s; None is its default group.
    sent
        Exchanges of this rank so far: name to how many there were, and the bytes that it put in.
        A captured graph counts when it is recorded, not when it runs.

    Examples
    --------
    >>> alone = Ranks()
    >>> alone.all_reduce(torch.ones(2)), alone.share(6)
    (tensor([1., 1.]), range(0, 6))
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    sent: dict[str, tuple[int, int]] = field(default_factory=dict, compare=False)

    @classmethod
    def here(cls) -> Ranks:
        """Return the default group of this process, or a single rank where there is none."""
        if not dist.is_initialized():
            return cls()
        return cls(dist.get_rank(), dist.get_world_size())

    def share(self, total: int) -> range:
        """Which of ``total`` things this rank holds; see :func:`share`."""
        return share(total, self.size, self.rank)

    def sizes(self, total: int) -> list[int]:
        """How many of ``total`` things each rank holds."""
        return sizes(total, self.size)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Add up ``x``, which all ranks have in one shape; in place, unless it has gaps.

        Use what is returned, and ``x`` no more.
        """
        if self.size == 1:
            return x
        self._note("all_reduce", x)
        total = x.contiguous()
        dist.all_reduce(total, group=self.group)
        return total

    def all_gather(self, x: Tensor, counts: Sequence[int], dim: int = 0) -> Tensor:
        """Put the ranks' parts of a tensor together, in their order.

        Parameters
        ----------
        x
            This rank's part: ``counts[rank]`` long in ``dim``, else of one shape everywhere.
        counts
            Length of every rank's part; some may be 0.

        Raises
        ------
        ValueError
            If there is not one length for each rank, or ``x`` is not as long as its own.
        """
        self._check(x, counts, dim)
        if self.size == 1:
            return x
        self._note("all_gather", x)
        longest = max(counts)
        if not longest:
            return x
        part = x.movedim(dim, 0).contiguous()
        if len(part) < longest:  # gloo wants parts of one length
            part = torch.cat((part, part.new_zeros(longest - len(part), *part.shape[1:])))
        every = part.new_empty(self.size, *part.shape)
        _all_gather(every.flatten(0, 1), part, group=self.group)
        if all(count == longest for count in counts):
            whole = every.flatten(0, 1)
        else:
            whole = torch.cat([every[rank, :count] for rank, count in enumerate(counts)])
        return whole.movedim(0, dim)

    def reduce_scatter(self, x: Tensor, counts: Sequence[int], dim: int = 0) -> Tensor:
        """Add up ``x`` over ranks and leave each rank its part in ``dim``.

        Parts of one length are one reduce-scatter. Others are an all-reduce, of which a rank keeps
        its part: that sends more, and only a model with fewer heads than ranks has them.

        Raises
        ------
        ValueError
            If there is not one part for each rank, or they are not the rows of ``x``.
        """
        if len(counts) != self.size or sum(counts) != x.shape[dim]:
            raise ValueError(
                f"parts of {list(counts)} for {self.size} ranks do not add up to {x.shape[dim]} "
                f"rows in dimension {dim}: give one length a rank"
            )
        if self.size == 1:
            return x
        if len(set(counts)) > 1 or not counts[0]:
            start = sum(counts[: self.rank])
            return self.all_reduce(x).narrow(dim, start, counts[self.rank])
        self._note("reduce_scatter", x)
        whole = x.movedim(dim, 0).contiguous()
        part = whole.new_empty(counts[0], *whole.shape[1:])
        _reduce_scatter(part, whole, group=self.group)
        return part.movedim(0, dim)

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Send rows ``x[:send[0]]`` to rank 0, the next ``send[1]`` to rank 1, and so on.

        Returns
        -------
        Tensor
            ``[sum(receive), ...]``: the rows from rank 0, then those from rank 1, and so on.

        Raises
        ------
        ValueError
            If the rows to send are not those of ``x``.
        """
        if len(send) != self.size or len(receive) != self.size or sum(send) != len(x):
            raise ValueError(
                f"{len(x)} rows for {self.size} ranks cannot be sent as {list(send)} and received "
                f"as {list(receive)}: give one count a rank, those to send adding up to the rows"
            )
        if self.size == 1:
            return x
        self._note("all_to_all", x)
        received = x.new_empty(sum(receive), *x.shape[1:])
        dist.all_to_all_single(
            received, x.contiguous(), list(receive), list(send), group=self.group
        )
        return received

    def exchange_counts(self, send: Sequence[int]) -> list[int]:
        """Tell every rank how many rows it will get; returns how many come from each rank."""
        device = "cuda" if self._on_gpu() else "cpu"
        counts = torch.tensor(list(send), dtype=torch.int64, device=device)
        return self.all_to_all(counts, [1] * self.size, [1] * self.size).tolist()

    def barrier(self) -> None:
        """Wait until every rank has come here."""
        if self.size > 1:
            dist.barrier(group=self.group)

    def _on_gpu(self) -> bool:
        return self.size > 1 and "nccl" in dist.get_backend(self.group)

    def _check(self, x: Tensor, counts: Sequence[int], dim: int) -> None:
        if len(counts) != self.size or x.shape[dim] != counts[self.rank]:
            raise ValueError(
                f"rank {self.rank} of {self.size} brought {x.shape[dim]} rows in dimension {dim}, "
                f"expected the {self.rank}-th of {list(counts)}"
            )

    def _note(self, name: str, x: Tensor) -> None:
        calls, size = self.sent.get(name, (0, 0))
        self.sent[name] = calls + 1, size + x.nbytes

"""Where whole experts should lie: in order, in turns, or by load, some of them more than once.

Needs numpy. Lesson 02 compares the placements on the tiny K3's real routing; the measurement on two
GPUs (:mod:`kimik3_lab.parallel`) shows what an uneven one costs.

With expert parallelism a step waits for the busiest rank. A placement changes who that is: not
which experts a token chooses, only where they are computed. Load is counted on earlier traffic, so
a placement is as good as the forecast. An expert that alone is more than a rank's share is beyond
any placement, unless it lies on several ranks and its tokens are shared out: *redundant experts*.

The method is that of EPLB (https://github.com/deepseek-ai/EPLB), which vLLM has as
``--enable-eplb`` with ``num_redundant_experts``; https://github.com/vllm-project/vllm/pull/50647
for K3. What a rank then keeps in memory is counted by :mod:`kimik3_lab.performance.placement`.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kimik3_lab.performance.expert_tiles import TILED, TileCount, TiledExperts, TileShape

__all__ = ["ExpertPlacement", "StepLoad", "by_load", "in_order", "in_turns", "step_load"]


@dataclass(frozen=True)
class ExpertPlacement:
    """The experts of each rank.

    Attributes
    ----------
    slots
        For each rank the experts that lie there. One that lies on several ranks is computed on one
        of them for each token: token n of a step takes copy n modulo copies, in the order of ranks.
    num_experts
        Experts of the layer.

    Raises
    ------
    ValueError
        If an expert lies nowhere, or twice on one rank.

    Examples
    --------
    >>> placement = ExpertPlacement(((0, 1), (2, 1)), num_experts=3)
    >>> placement.copies, placement.rank_loads([2, 4, 2])
    ((1, 2, 1), (4.0, 4.0))
    """

    slots: tuple[tuple[int, ...], ...]
    num_experts: int

    def __post_init__(self) -> None:
        held = Counter(expert for slots in self.slots for expert in slots)
        missing = [e for e in range(self.num_experts) if not held[e]]
        if missing:
            raise ValueError(f"expert {missing[0]} lies on no rank: every expert needs a place")
        if extra := sorted(set(held) - set(range(self.num_experts))):
            raise ValueError(f"there is no expert {extra[0]} among {self.num_experts}")
        for rank, slots in enumerate(self.slots):
            if len(set(slots)) != len(slots):
                raise ValueError(f"rank {rank} holds an expert twice, which helps nobody")

    @property
    def num_ranks(self) -> int:
        """Ranks."""
        return len(self.slots)

    @property
    def copies(self) -> tuple[int, ...]:
        """On how many ranks each expert lies."""
        held = Counter(expert for slots in self.slots for expert in slots)
        return tuple(held[expert] for expert in range(self.num_experts))

    def rank_loads(self, load: Sequence[float]) -> tuple[float, ...]:
        """Load of each rank, if copies share an expert's load evenly."""
        if len(load) != self.num_experts:
            raise ValueError(f"expected a load for each of {self.num_experts}, got {len(load)}")
        copies = self.copies
        return tuple(sum(load[e] / copies[e] for e in slots) for slots in self.slots)

    def imbalance(self, load: Sequence[float]) -> float:
        """Load of the busiest rank over the mean; 1 is perfect."""
        loads = self.rank_loads(load)
        total = sum(loads)
        return max(loads) * len(loads) / total if total else 1.0

    def ranks_of(self, expert_ids: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Rank that computes each pair of a step, ``expert_ids [T, k]``.

        Examples
        --------
        >>> placement = ExpertPlacement(((0, 1), (2, 1)), num_experts=3)
        >>> placement.ranks_of([[1, 0], [1, 2]]).tolist()
        [[0, 0], [1, 1]]
        """
        ids = np.asarray(expert_ids)
        if ids.ndim != 2:
            raise ValueError(f"expert_ids must be [T, k], got {list(ids.shape)}")
        if ids.size and not 0 <= ids.min() <= ids.max() < self.num_experts:
            raise ValueError(
                f"expert ids go from 0 to {self.num_experts - 1}, got {ids.min()} to {ids.max()}"
            )
        where: list[list[int]] = [[] for _ in range(self.num_experts)]
        for rank, slots in enumerate(self.slots):
            for expert in slots:
                where[expert].append(rank)
        counts = np.array([len(ranks) for ranks in where])
        most = int(counts.max())
        table = np.array([ranks + ranks[:1] * (most - len(ranks)) for ranks in where])
        copy = np.arange(len(ids))[:, None] % counts[ids]
        found: npt.NDArray[np.int64] = table[ids, copy]
        return found


def in_order(num_experts: int, ranks: int) -> ExpertPlacement:
    """Give the first experts to the first rank and so on; the default of every engine.

    Examples
    --------
    >>> in_order(5, 2).slots
    ((0, 1, 2), (3, 4))
    """
    _check(num_experts, ranks)
    each, longer = divmod(num_experts, ranks)
    starts = [rank * each + min(rank, longer) for rank in range(ranks + 1)]
    slots = tuple(tuple(range(a, b)) for a, b in itertools.pairwise(starts))
    return ExpertPlacement(slots, num_experts)


def in_turns(num_experts: int, ranks: int) -> ExpertPlacement:
    """Deal the experts out: expert e to rank e modulo ranks.

    Examples
    --------
    >>> in_turns(5, 2).slots
    ((0, 2, 4), (1, 3))
    """
    _check(num_experts, ranks)
    return ExpertPlacement(
        tuple(tuple(range(rank, num_experts, ranks)) for rank in range(ranks)), num_experts
    )


def by_load(load: Sequence[float], ranks: int, *, redundant: int = 0) -> ExpertPlacement:
    """Place experts so that ranks are evenly loaded, every rank with equally many.

    First the copies: one more of the expert whose copies carry most, ``redundant`` times. Then the
    places: the heaviest copy first, to the lightest rank that has room and not that expert.

    Parameters
    ----------
    load
        What each expert had to do so far; any unit.
    ranks
        Ranks.
    redundant
        Copies beyond one of each expert, over all ranks.

    Raises
    ------
    ValueError
        If experts and copies do not fill all ranks evenly, or an expert would need more copies than
        there are ranks.

    Examples
    --------
    >>> even = by_load([9, 1, 1, 1], ranks=2)
    >>> even.imbalance([9, 1, 1, 1])  # the heavy one alone is more than half
    1.6666666666666667
    >>> by_load([9, 1, 1, 1], ranks=2, redundant=2).imbalance([9, 1, 1, 1])
    1.0
    """
    experts = len(load)
    _check(experts, ranks)
    if redundant < 0 or (experts + redundant) % ranks:
        raise ValueError(
            f"{experts} experts and {redundant} copies do not fill {ranks} ranks evenly: take "
            f"{-experts % ranks} copies, or {ranks} more"
        )
    if wrong := [value for value in load if not 0 <= value < math.inf]:
        raise ValueError(f"a load is a number and at least 0, got {wrong[0]}")
    copies = _count_copies(load, ranks, redundant)
    placed = _place(load, copies, ranks, lambda loaded, held: (loaded, held))
    if placed is None:  # ranks with room ran out for an expert with many copies: fill evenly
        placed = _place(load, copies, ranks, lambda loaded, held: (held, loaded))
    assert placed is not None  # fullest experts first, emptiest ranks first: always fits
    return ExpertPlacement(placed, experts)


def _place(
    load: Sequence[float],
    copies: Sequence[int],
    ranks: int,
    preference: Callable[[float, int], tuple[float, float]],
) -> tuple[tuple[int, ...], ...] | None:
    """Place all copies, each on the ranks that are preferred; None if one finds no room."""
    each = [value / n for value, n in zip(load, copies, strict=True)]
    room = sum(copies) // ranks
    held: list[list[int]] = [[] for _ in range(ranks)]
    total = [0.0] * ranks
    # Those that lie on many ranks have to be placed while there still is choice.
    for expert in sorted(range(len(load)), key=lambda e: (-copies[e], -each[e], e)):
        free = [r for r in range(ranks) if len(held[r]) < room]
        if len(free) < copies[expert]:
            return None
        best = sorted(free, key=lambda r: (*preference(total[r], len(held[r])), r))
        for rank in best[: copies[expert]]:
            held[rank].append(expert)
            total[rank] += each[expert]
    return tuple(tuple(sorted(slots)) for slots in held)


def _count_copies(load: Sequence[float], ranks: int, redundant: int) -> list[int]:
    copies = [1] * len(load)
    heap = [(-float(value), expert) for expert, value in enumerate(load)]
    heapq.heapify(heap)
    for _ in range(redundant):
        if not heap:
            raise ValueError(
                f"{redundant} copies are more than {len(load)} experts can have on {ranks} ranks"
            )
        _, expert = heapq.heappop(heap)
        copies[expert] += 1
        if copies[expert] < ranks:
            heapq.heappush(heap, (-load[expert] / copies[expert], expert))
    return copies


def _check(num_experts: int, ranks: int) -> None:
    if not 1 <= ranks <= num_experts:
        raise ValueError(f"{num_experts} experts cannot lie on {ranks} ranks, at least one on each")


@dataclass(frozen=True)
class StepLoad:
    """What one step asks of the ranks.

    Attributes
    ----------
    tiles
        Of each rank: experts that it reads, pairs that it computes, and what the kernel makes of
        them.
    """

    tiles: tuple[TileCount, ...]

    @property
    def pairs(self) -> tuple[int, ...]:
        """Pairs that each rank computes."""
        return tuple(int(count.pairs) for count in self.tiles)

    @property
    def experts(self) -> tuple[int, ...]:
        """Experts that each rank reads."""
        return tuple(int(count.experts) for count in self.tiles)

    @property
    def imbalance(self) -> float:
        """Pairs of the busiest rank over the mean; 1 is perfect."""
        total = sum(self.pairs)
        return max(self.pairs) * len(self.tiles) / total if total else 1.0

    def seconds(self, latent: int = 3584, width: int = 3072, line: TiledExperts = TILED) -> float:
        """Time of the slowest rank's experts: what the step waits for.

        Parameters
        ----------
        latent, width
            Of an expert; K3's.
        line
            What the kernel was measured to need, on one GPU.

        Examples
        --------
        >>> even = step_load(in_order(2, 2), [[0], [1]] * 500)
        >>> round(1e6 * even.seconds())
        83
        >>> round(1e6 * step_load(in_order(2, 2), [[0]] * 1000).seconds())  # one waits
        159
        """
        return max(line.us(count, latent=latent, width=width) for count in self.tiles) / 1e6


def step_load(placement: ExpertPlacement, expert_ids: npt.ArrayLike) -> StepLoad:
    """Count what a step with the choices ``expert_ids [T, k]`` asks of each rank.

    Every rank has all tokens, as on the two GPUs that were measured: the kernel chooses its tile by
    the pairs of the whole step, then computes its own.

    Examples
    --------
    >>> step = step_load(in_order(4, 2), [[0, 1], [0, 3]])
    >>> step.pairs, step.experts, step.imbalance
    ((3, 1), (2, 1), 1.5)
    """
    ids = np.asarray(expert_ids)
    ranks = placement.ranks_of(ids)
    experts = placement.num_experts
    tokens = np.bincount(
        (ranks * experts + ids).ravel(), minlength=placement.num_ranks * experts
    ).reshape(placement.num_ranks, experts)
    return StepLoad(
        tuple(
            TileShape.by_rule(ids.size, len(slots)).count(counts)
            for slots, counts in zip(placement.slots, tokens, strict=True)
        )
    )

"""A layer's experts over ranks that share the tokens out: tokens travel to experts and back.

Needs torch. Lesson 02 asks what unevenness costs; lesson 13 chooses the way in vLLM.

Every rank routes its own tokens and sends each to the ranks where its experts lie, once per rank,
however many of its experts are there. The way back brings one partial sum from each; the token's
own rank adds them up, and only then normalises. Shared experts are whole on every rank and see its
own tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kimik3_lab.config import K3Config
from kimik3_lab.parallel.experts import (
    Copies,
    MoEParts,
    check_slots,
    in_order,
    reference_experts,
    token_numbers,
)
from kimik3_lab.parallel.groups import Ranks
from kimik3_lab.reference.moe import LatentMoE, Routing

__all__ = ["AllToAllMoE", "DispatchPlan", "all_to_all", "masked", "plan_dispatch"]


@dataclass(frozen=True)
class DispatchPlan:
    """Which tokens go to which rank.

    Attributes
    ----------
    tokens
        int64 ``[M]``: the token of each row that is sent, by destination.
    send
        Rows for each rank; they add up to M.
    """

    tokens: Tensor
    send: list[int]


def plan_dispatch(pair_ranks: Tensor, size: int) -> DispatchPlan:
    """Send each token once to each rank that one of its pairs goes to.

    Parameters
    ----------
    pair_ranks
        int64 ``[N, k]``: rank of the expert of each pair.
    size
        Number of ranks.

    Examples
    --------
    >>> plan = plan_dispatch(torch.tensor([[1, 1], [0, 1]]), size=2)
    >>> plan.tokens.tolist(), plan.send
    ([1, 0, 1], [1, 2])
    """
    wanted = torch.zeros(size, len(pair_ranks), dtype=torch.bool, device=pair_ranks.device)
    wanted.scatter_(0, pair_ranks.T, torch.ones_like(pair_ranks.T, dtype=torch.bool))
    return DispatchPlan(wanted.nonzero()[:, 1], wanted.sum(1).tolist())


def masked(weights: Tensor, pair_ranks: Tensor, there: Tensor) -> Tensor:
    """Keep the weights of those pairs ``[M, k]`` that are computed on the rank ``there [M]``.

    Examples
    --------
    >>> masked(torch.ones(1, 3), torch.tensor([[1, 0, 1]]), torch.tensor([1])).tolist()
    [[1.0, 0.0, 1.0]]
    """
    return weights * (pair_ranks == there.unsqueeze(-1))


@dataclass
class AllToAllMoE(MoEParts):
    """A MoE layer over ranks that each hold whole experts and route tokens of their own.

    ``shared`` is whole: each rank runs it on its tokens.

    Attributes
    ----------
    copies
        Where the experts lie.
    """

    copies: Copies

    def __call__(self, hidden: Tensor) -> Tensor:
        """Map ``[N, H]``, the same on all ranks, to ``[N, H]``, the same on all ranks.

        Each rank takes its share of the N tokens, as if they had never been elsewhere, and all
        gather the results.
        """
        counts = self.ranks.sizes(len(hidden))
        mine = self.ranks.share(len(hidden))
        out = self.own(hidden[mine.start : mine.stop], mine.start)
        return self.ranks.all_gather(out, counts)

    def own(self, hidden: Tensor, first: int = 0) -> Tensor:
        """Map this rank's own tokens ``[n, H]`` to ``[n, H]``; ``first`` numbers the tokens."""
        ranks, routing = self.ranks, self.route(hidden)
        numbers = first + token_numbers(routing)
        pair_ranks = self.copies.ranks_of(routing.expert_ids, numbers)
        plan = plan_dispatch(pair_ranks, ranks.size)
        receive = ranks.exchange_counts(plan.send)

        z = self.down(hidden)
        there = torch.repeat_interleave(
            torch.arange(ranks.size, device=z.device),
            torch.tensor(plan.send, device=z.device),
        )
        weights = masked(routing.weights[plan.tokens], pair_ranks[plan.tokens], there)
        arrived = [
            ranks.all_to_all(x, plan.send, receive)
            for x in (z[plan.tokens], routing.expert_ids[plan.tokens], weights)
        ]
        partial = self.experts(arrived[0], Routing(*arrived[1:]))
        back = ranks.all_to_all(partial, receive, plan.send)
        total = torch.zeros(z.shape, dtype=back.dtype, device=z.device)
        total.index_add_(0, plan.tokens, back)
        return self.up(self.norm(total.to(z.dtype))) + self.shared(hidden)


def all_to_all(
    moe: LatentMoE, config: K3Config, ranks: Ranks, slots: Sequence[Sequence[int]] | None = None
) -> AllToAllMoE:
    """Give every rank whole experts of a layer of the reference, and tokens of its own.

    Arguments and errors are those of :func:`kimik3_lab.parallel.moe.expert_parallel`.
    """
    slots = in_order(config, ranks) if slots is None else slots
    check_slots(slots, config.num_experts, ranks.size)
    ids = slots[ranks.rank]
    return AllToAllMoE(
        ranks,
        moe.gate,
        moe.routed_expert_down_proj,
        reference_experts([moe.experts[i] for i in ids], ids, config.num_experts),
        moe.routed_expert_norm,
        moe.routed_expert_up_proj,
        moe.shared_experts,
        Copies(slots, config.num_experts),
    )

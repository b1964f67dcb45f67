"""Which weights of a MoE layer a rank holds, and which rank computes which pair.

Needs torch. :mod:`kimik3_lab.parallel.moe` and :mod:`kimik3_lab.parallel.dispatch` build on it. The
placement itself, which expert should lie where, is :mod:`kimik3_lab.performance.expert_placement`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kimik3_lab.config import K3Config
from kimik3_lab.parallel.groups import Ranks
from kimik3_lab.reference.moe import MLP, Expert, Routing, routed_sum

__all__ = [
    "Copies",
    "LocalExperts",
    "MoEParts",
    "check_slots",
    "columns",
    "in_order",
    "reference_experts",
    "rows",
    "split_expert",
    "split_mlp",
    "token_numbers",
]

#: From latents ``[N, latent]`` and their routing, with global expert ids, to the weighted sum of
#: those experts that are here. Pairs of other experts contribute nothing.
LocalExperts = Callable[[Tensor, Routing], Tensor]


@dataclass
class MoEParts:
    """What a MoE layer over ranks is made of, whether its tokens travel or not.

    Attributes
    ----------
    ranks
        Those that share the layer out.
    route
        From ``hidden [N, H]`` to a :class:`~kimik3_lab.reference.moe.Routing`.
    down, norm, up
        Into the latent space, the norm of the complete sum, and back. Whole on every rank.
    experts
        This rank's routed experts, or its slices of all.
    shared
        The shared experts: this rank's slice, or all of them.
    """

    ranks: Ranks
    route: Callable[[Tensor], Routing]
    down: Callable[[Tensor], Tensor]
    experts: LocalExperts
    norm: Callable[[Tensor], Tensor]
    up: Callable[[Tensor], Tensor]
    shared: Callable[[Tensor], Tensor]


# -- weights ---------------------------------------------------------------------------------------


def rows(linear: nn.Linear, chosen: range) -> nn.Linear:
    """Make a linear layer of some of the outputs of another; the weights are copied."""
    return _linear(linear.weight[chosen.start : chosen.stop])


def columns(linear: nn.Linear, chosen: range) -> nn.Linear:
    """Make a linear layer that takes some of the inputs of another; the weights are copied."""
    return _linear(linear.weight[:, chosen.start : chosen.stop])


def _linear(weight: Tensor) -> nn.Linear:
    made = nn.Linear(1, 1, bias=False, device="meta")
    made.out_features, made.in_features = weight.shape
    made.weight = nn.Parameter(weight.detach().clone(), requires_grad=False)
    return made


def split_mlp(mlp: MLP, ranks: Ranks) -> MLP:
    """Take this rank's slice of a feed-forward's inner width; the ranks' outputs are to be added.

    Examples
    --------
    >>> mlp = MLP(K3Config.micro(), 8)
    >>> split_mlp(mlp, Ranks(rank=1, size=3)).gate_proj.weight.shape
    torch.Size([3, 64])
    """
    made = MLP.__new__(MLP)
    nn.Module.__init__(made)
    width = ranks.share(mlp.gate_proj.weight.shape[0])
    made.betas = mlp.betas
    made.gate_proj, made.up_proj = rows(mlp.gate_proj, width), rows(mlp.up_proj, width)
    made.down_proj = columns(mlp.down_proj, width)
    return made


def split_expert(expert: Expert, ranks: Ranks) -> Expert:
    """Take this rank's slice of an expert's inner width, as :func:`split_mlp` does."""
    made = Expert.__new__(Expert)
    nn.Module.__init__(made)
    width = ranks.share(expert.w1.weight.shape[0])
    made.betas = expert.betas
    made.w1, made.w3 = rows(expert.w1, width), rows(expert.w3, width)
    made.w2 = columns(expert.w2, width)
    return made


def reference_experts(
    experts: Sequence[Callable[[Tensor], Tensor]], ids: Sequence[int], num_experts: int
) -> LocalExperts:
    """Run some of a layer's experts in plain PyTorch.

    Parameters
    ----------
    experts
        Those of this rank.
    ids
        Which experts of the model they are.
    num_experts
        Of the model.

    Examples
    --------
    >>> here = reference_experts([lambda z: 10 * z], [2], num_experts=4)
    >>> here(torch.ones(1, 1), Routing(torch.tensor([[0, 2]]), torch.tensor([[0.75, 0.25]])))
    tensor([[2.5000]])
    """
    place = torch.full((num_experts,), len(ids))
    place[list(ids)] = torch.arange(len(ids))
    # One expert more, for the pairs of other ranks: it adds nothing.
    callables = [*experts, torch.zeros_like]

    def run(z: Tensor, routing: Routing) -> Tensor:
        local = place.to(z.device)[routing.expert_ids]
        return routed_sum(z, Routing(local, routing.weights), callables)

    return run


# -- places ----------------------------------------------------------------------------------------


def in_order(config: K3Config, ranks: Ranks) -> list[range]:
    """List the experts of each rank if they lie in their order."""
    counts = ranks.sizes(config.num_experts)
    return [range(sum(counts[:r]), sum(counts[: r + 1])) for r in range(ranks.size)]


def check_slots(slots: Sequence[Sequence[int]], num_experts: int, size: int) -> None:
    """Refuse a placement that does not fit.

    Examples
    --------
    >>> check_slots([[0, 1], [1]], num_experts=3, size=2)
    Traceback (most recent call last):
    ...
    ValueError: expert 2 lies on no rank: every one of the 3 experts needs a place
    """
    if len(slots) != size:
        raise ValueError(f"{size} ranks need a list of experts each, got {len(slots)} lists")
    found = {expert for held in slots for expert in held}
    if extra := sorted(found - set(range(num_experts))):
        raise ValueError(f"there is no expert {extra[0]}: expected ids from 0 to {num_experts - 1}")
    for rank, held in enumerate(slots):
        if len(set(held)) != len(held):
            raise ValueError(f"rank {rank} holds an expert twice, which helps nobody: {list(held)}")
    for expert in range(num_experts):
        if expert not in found:
            raise ValueError(
                f"expert {expert} lies on no rank: every one of the {num_experts} experts needs a "
                "place"
            )


class Copies:
    """On which ranks each expert lies, and which copy a token takes: its number modulo copies.

    Examples
    --------
    >>> copies = Copies([[0, 1], [1]], num_experts=2)
    >>> copies.ranks_of(torch.tensor([[0, 1], [0, 1]]), torch.arange(2)).tolist()
    [[0, 0], [0, 1]]
    """

    def __init__(self, slots: Sequence[Sequence[int]], num_experts: int) -> None:
        where = [[r for r, held in enumerate(slots) if e in set(held)] for e in range(num_experts)]
        self.counts = torch.tensor([len(ranks) for ranks in where])
        most = int(self.counts.max())
        self.table = torch.tensor([ranks + ranks[:1] * (most - len(ranks)) for ranks in where])

    def ranks_of(self, expert_ids: Tensor, tokens: Tensor) -> Tensor:
        """Rank of each pair ``[N, k]``; ``tokens [N]`` are the tokens' numbers in the step."""
        device = expert_ids.device
        counts, table = self.counts.to(device), self.table.to(device)
        copy = tokens.unsqueeze(-1) % counts[expert_ids]
        return table[expert_ids, copy]


def token_numbers(routing: Routing) -> Tensor:
    """Count the tokens of a step: 0, 1, 2 ..."""
    return torch.arange(len(routing.expert_ids), device=routing.expert_ids.device)

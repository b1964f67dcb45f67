"""A layer's experts over ranks that all have all tokens: slices of experts, or whole ones.

Needs torch. Lesson 02 asks what unevenness costs; lesson 11 prices the exchanges.

*Tensor parallel* (:func:`tensor_parallel`). Every rank has a slice of every expert's inner width.
Each computes a part of every sum, and an all-reduce adds the parts.

*Expert parallel* (:func:`expert_parallel`). Every rank has some whole experts, and leaves out the
pairs of experts that lie elsewhere. The same all-reduce adds up. Where tokens are shared out as
well, they travel: :mod:`kimik3_lab.parallel.dispatch`.

The norm behind the experts is not linear: it has to see the *complete* sum, so it comes after the
exchange (https://github.com/radixark/Megatron-LM/pull/94 had it before). Shared experts are split
like a dense feed-forward; their parts are added up, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kimik3_lab.config import K3Config
from kimik3_lab.parallel.experts import (
    Copies,
    LocalExperts,
    MoEParts,
    check_slots,
    in_order,
    reference_experts,
    split_expert,
    split_mlp,
    token_numbers,
)
from kimik3_lab.parallel.groups import Ranks
from kimik3_lab.reference.moe import LatentMoE, Routing

__all__ = ["SplitMoE", "expert_parallel", "tensor_parallel"]


@dataclass
class SplitMoE(MoEParts):
    """A MoE layer over ranks that all have all tokens.

    The results of ``experts`` and of ``shared``, both this rank's parts, are added over ranks.

    Attributes
    ----------
    side
        A stream of the rank's device on which the shared experts run while the latent sum travels;
        None runs everything in one stream. On the CPU ``torch.cpu.Stream()`` takes the same way,
        one thing after the other.

    Examples
    --------
    >>> moe = LatentMoE(K3Config.micro())
    >>> tensor_parallel(moe, moe.gate.config, Ranks())(torch.zeros(3, 64)).shape
    torch.Size([3, 64])
    """

    side: torch.cuda.Stream | torch.cpu.Stream | None = None

    def __call__(self, hidden: Tensor) -> Tensor:
        """Map ``[N, H]``, the same on all ranks, to ``[N, H]``, the same on all ranks."""
        z = self.down(hidden)
        partial = self.experts(z, self.route(hidden)).to(z.dtype)
        if self.side is None:
            routed = self.up(self.complete(partial))
            return routed + self.ranks.all_reduce(self.shared(hidden))
        device = torch.get_device_module(hidden.device)
        here = device.current_stream()
        self.side.wait_stream(here)
        with device.stream(self.side):
            shared = self.shared(hidden)
        routed = self.up(self.complete(partial))
        here.wait_stream(self.side)
        return routed + self.ranks.all_reduce(shared)

    def complete(self, partial: Tensor) -> Tensor:
        """Add up the ranks' parts of the latent sum, then normalise."""
        return self.norm(self.ranks.all_reduce(partial))


def tensor_parallel(moe: LatentMoE, config: K3Config, ranks: Ranks) -> SplitMoE:
    """Split every expert of a layer of the reference over ranks."""
    experts = [split_expert(expert, ranks) for expert in moe.experts]
    local = reference_experts(experts, range(config.num_experts), config.num_experts)
    return _split_moe(moe, ranks, local)


def expert_parallel(
    moe: LatentMoE, config: K3Config, ranks: Ranks, slots: Sequence[Sequence[int]] | None = None
) -> SplitMoE:
    """Give every rank whole experts of a layer of the reference.

    Parameters
    ----------
    slots
        The experts of each rank, for example
        :attr:`kimik3_lab.performance.expert_placement.ExpertPlacement.slots`; an expert that lies
        on several ranks is computed on one of them for each token. None: in order.

    Raises
    ------
    ValueError
        If an expert lies nowhere, or there is not one list for each rank.
    """
    slots = in_order(config, ranks) if slots is None else slots
    check_slots(slots, config.num_experts, ranks.size)
    ids = slots[ranks.rank]
    whole = reference_experts([moe.experts[i] for i in ids], ids, config.num_experts)
    copies = Copies(slots, config.num_experts)

    def local(z: Tensor, routing: Routing) -> Tensor:
        here = copies.ranks_of(routing.expert_ids, token_numbers(routing)) == ranks.rank
        # A pair of a rank that has a copy as well counts there: here its weight is zero.
        weights = torch.where(here, routing.weights, torch.zeros_like(routing.weights))
        return whole(z, Routing(routing.expert_ids, weights))

    return _split_moe(moe, ranks, local)


def _split_moe(moe: LatentMoE, ranks: Ranks, local: LocalExperts) -> SplitMoE:
    return SplitMoE(
        ranks,
        moe.gate,
        moe.routed_expert_down_proj,
        local,
        moe.routed_expert_norm,
        moe.routed_expert_up_proj,
        split_mlp(moe.shared_experts, ranks),
    )

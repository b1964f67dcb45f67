"""All experts of a layer as two stacked tensors, run with grouped matrix products.

Needs torch. The reference walks through its experts one by one, which takes a thousand launches a
step. Here the (token, choice) pairs are put in expert order and one product takes a group of rows
with each expert's matrix.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kimik3_lab.config import K3Config
from kimik3_lab.reference.model import K3ForCausalLM
from kimik3_lab.reference.moe import LatentMoE, situ
from kimik3_lab.reference.norms import compute_dtype

__all__ = ["BatchedMoE", "batch_experts", "grouped_product", "use_grouped_mm"]

#: torch's grouped product wants groups of 16 bytes along the rows, for the gradient of the weights.
ALIGNMENT = 8
_grouped_mm_works = True


def use_grouped_mm(works: bool) -> None:
    """Say whether ``torch._grouped_mm`` works on this machine; without, experts run in a loop."""
    global _grouped_mm_works
    _grouped_mm_works = works


def grouped_product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply groups of rows each with their own matrix.

    Parameters
    ----------
    x
        ``[M, in]``, the rows of group 0 first.
    weight
        ``[E, out, in]``.
    ends
        int32 ``[E]``: where each group ends; the last one at M.

    Returns
    -------
    Tensor
        ``[M, out]``.

    Examples
    --------
    >>> x, weight = torch.ones(3, 1), torch.tensor([[[2.0]], [[5.0]]])
    >>> grouped_product(x, weight, torch.tensor([1, 3])).flatten().tolist()
    [2.0, 5.0, 5.0]
    """
    if x.is_cuda and x.dtype == torch.bfloat16 and _grouped_mm_works:
        return torch._grouped_mm(x, weight.mT, offs=ends.int())
    pieces, start = [], 0
    for matrix, end in zip(weight.unbind(0), ends.tolist(), strict=True):
        pieces.append(x[start:end] @ matrix.mT)
        start = end
    return torch.cat(pieces)


class BatchedMoE(nn.Module):
    """A :class:`~kimik3_lab.reference.moe.LatentMoE` with stacked experts; same result.

    It also keeps what balancing needs of the last forward: ``scores [N, E]`` and the ids of the
    chosen experts ``[N, top_k]``, if ``observe`` is set.
    """

    def __init__(self, moe: LatentMoE, config: K3Config) -> None:
        super().__init__()
        self.config, self.betas = config, moe.shared_experts.betas
        self.gate = moe.gate
        self.routed_expert_down_proj = moe.routed_expert_down_proj
        self.routed_expert_norm = moe.routed_expert_norm
        self.routed_expert_up_proj = moe.routed_expert_up_proj
        self.shared_experts = moe.shared_experts
        gate_up = [torch.cat((e.w1.weight, e.w3.weight)) for e in moe.experts]
        self.w13 = nn.Parameter(torch.stack(gate_up).detach())
        self.w2 = nn.Parameter(torch.stack([e.w2.weight for e in moe.experts]).detach())
        self.observe = False
        self.scores: Tensor | None = None
        self.expert_ids: Tensor | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        """Map ``[N, H]`` to ``[N, H]``."""
        expert_ids, weights = self._route(hidden)
        z = self.routed_expert_down_proj(hidden)
        total = self._routed_sum(z, expert_ids, weights).to(z.dtype)
        routed = self.routed_expert_up_proj(self.routed_expert_norm(total))
        return routed + self.shared_experts(hidden)

    def _route(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """:func:`kimik3_lab.reference.moe.route`, which does not hand out its scores."""
        config, dtype = self.config, compute_dtype(hidden.dtype)
        scores = torch.sigmoid(hidden.to(dtype) @ self.gate.weight.to(dtype).mT)
        preference = scores.detach() + self.gate.e_score_correction_bias.to(dtype)
        order = preference.argsort(dim=-1, descending=True, stable=True)
        expert_ids = order[..., : config.num_experts_per_token]
        if self.observe:
            self.scores, self.expert_ids = scores.detach(), expert_ids
        weights = scores.gather(-1, expert_ids)
        if config.moe_renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return expert_ids, weights * config.routed_scaling_factor

    def _routed_sum(self, z: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        count, top_k = expert_ids.shape
        slots, ends = _slots(expert_ids.flatten(), len(self.w2))
        pairs = z.unsqueeze(1).expand(-1, top_k, -1).flatten(0, 1)
        room = -(-count * top_k // ALIGNMENT) * ALIGNMENT + ALIGNMENT * len(self.w2)
        ends[-1] = room  # rows that no pair fills are zeros, wherever they are
        x = z.new_zeros(room, z.shape[-1]).index_copy(0, slots, pairs)
        gate, up = grouped_product(x, self.w13, ends).chunk(2, -1)
        y = grouped_product(situ(gate, up, *self.betas), self.w2, ends)
        y = y.index_select(0, slots).unflatten(0, (count, top_k))
        return (weights.unsqueeze(-1) * y).sum(1)


def _slots(expert_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Row of each pair in expert order, groups rounded up to the alignment, and the groups' ends.

    Nothing here waits for the GPU, and nothing depends on the order of its threads.
    """
    order = expert_ids.argsort(stable=True)
    experts = torch.arange(num_experts, device=expert_ids.device)
    grouped = expert_ids[order]
    stop = torch.searchsorted(grouped, experts, right=True)
    start = torch.searchsorted(grouped, experts)
    # No group is empty: the gradient of a matrix that met no row might never be written.
    padded = (stop - start).clamp(min=1).add(ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    ends = padded.cumsum(0)
    shift = ends - padded - start  # how far padding moves each group
    position = torch.arange(len(expert_ids), device=expert_ids.device) + shift[grouped]
    slots = torch.empty_like(position)
    slots[order] = position
    return slots, ends


def batch_experts(model: K3ForCausalLM) -> None:
    """Replace every LatentMoE of ``model`` by a :class:`BatchedMoE`, in place."""
    for layer in model.model.layers:
        moe = getattr(layer, "block_sparse_moe", None)
        if isinstance(moe, LatentMoE):
            layer.block_sparse_moe = BatchedMoE(moe, model.config)

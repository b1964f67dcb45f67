"""What the drafter learns from: prompts from the training text, continued greedily by the target.

Needs torch. A draft is accepted when it is what the *target* says next, so the target's own
continuations are the text to learn, and its hidden states along them the input to learn from.
DSpark's authors regenerate their training answers with the target for the same reason
(arXiv 2607.05147). Generating is cheap here: thousands of sequences advance in one step.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from kimik3_lab.reference.batch import BatchMixer
from kimik3_lab.reference.model import K3ForCausalLM
from kimik3_lab.reference.moe import LatentMoE, situ

__all__ = ["AllExperts", "Rollouts", "roll_out", "run_all_experts"]

#: Tokens that go through all experts together; bounds the memory of a long prefill.
_ROWS = 65_536
#: Prompt tokens of all sequences in one forward pass, for the same reason.
_PREFILL = 262_144


class Rollouts(NamedTuple):
    """Sequences ``[S, T]`` and what the target made of them.

    Attributes
    ----------
    token_ids
        int64 ``[S, T]``: the prompts, then the target's greedy choices.
    taps
        ``[S, T, taps * hidden]``, bfloat16: tapped layers side by side, as the drafter reads them.
    hidden
        ``[S, T, hidden]``, bfloat16: after the final norm. Row t predicts token t + 1.
    prompt
        Tokens of a sequence that are text; from here on they are the target's.
    """

    token_ids: Tensor
    taps: Tensor
    hidden: Tensor
    prompt: int

    def rows(self, which: Tensor) -> Rollouts:
        """Sequences ``which`` (int64 indices)."""
        return Rollouts(self.token_ids[which], self.taps[which], self.hidden[which], self.prompt)


@torch.no_grad()
def roll_out(
    target: K3ForCausalLM,
    prompts: Tensor,
    new_tokens: int,
    tap_layers: tuple[int, ...],
    *,
    batch: int = 4096,
) -> Rollouts:
    """Continue ``prompts [S, P]`` by ``new_tokens`` greedy tokens each, recording as it goes.

    End-of-sequence tokens do not stop a sequence; what follows them is masked in training.

    Parameters
    ----------
    target
        Best after :func:`run_all_experts`: a decoding step is otherwise a loop over experts.
    tap_layers
        Layers whose running sums the drafter reads, ascending.
    batch
        Sequences that advance together.
    """
    parts = [_roll_out(target, part, new_tokens, tap_layers) for part in prompts.split(batch)]
    token_ids, taps, hidden = (torch.cat(group) for group in zip(*parts, strict=True))
    return Rollouts(token_ids, taps, hidden, prompts.shape[1])


def _roll_out(
    target: K3ForCausalLM, prompts: Tensor, new_tokens: int, tap_layers: tuple[int, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    count, length = prompts.shape
    total, width = length + new_tokens, target.config.hidden_size
    device, small = target.device, torch.bfloat16
    token_ids = torch.empty(count, total, dtype=torch.int64, device=device)
    token_ids[:, :length] = prompts
    taps = torch.empty(count, total, len(tap_layers) * width, dtype=small, device=device)
    hidden = torch.empty(count, total, width, dtype=small, device=device)
    mixer = BatchMixer(target.new_state(), count)
    head = target.lm_head.weight.mT
    piece = max(_PREFILL // count, 1)
    start, stop = 0, min(piece, length)
    while True:
        found: dict[int, Tensor | None] = dict.fromkeys(tap_layers)
        state = target.model(token_ids[:, start:stop].flatten(), mixer, found)
        joined = torch.cat([found[i] for i in tap_layers], -1)  # type: ignore[misc]
        taps[:, start:stop] = joined.view(count, stop - start, -1).to(small)
        state = state.view(count, stop - start, -1)
        hidden[:, start:stop] = state.to(small)
        if stop == total:
            return token_ids, taps, hidden
        if stop < length:
            start, stop = stop, min(stop + piece, length)
            continue
        token_ids[:, stop] = (state[:, -1].float() @ head.float()).argmax(-1)
        start, stop = stop, stop + 1


def run_all_experts(model: K3ForCausalLM) -> K3ForCausalLM:
    """Put :class:`AllExperts` in place of every mixture-of-experts module; returns ``model``."""
    for layer in model.model.layers:
        if hasattr(layer, "block_sparse_moe"):
            layer.block_sparse_moe = AllExperts(layer.block_sparse_moe)
    return model


class AllExperts(nn.Module):
    """A :class:`LatentMoE` that runs every expert on every token, and weighs most of them zero.

    The same function with other arithmetic: two matrix products instead of a loop over experts
    with a device synchronisation in each layer. With 32 experts of width 64 the wasted products
    cost less than the launches they save. For inference.
    """

    def __init__(self, moe: LatentMoE) -> None:
        super().__init__()
        self.moe = moe
        experts = list(moe.experts)
        self.betas = experts[0].betas  # type: ignore[union-attr]
        self.num_experts = len(experts)
        stack = [
            torch.cat([e.w1.weight for e in experts]),
            torch.cat([e.w3.weight for e in experts]),
        ]
        self.register_buffer("gate_up", torch.cat(stack).detach(), persistent=False)
        down = torch.cat([e.w2.weight for e in experts], 1)
        self.register_buffer("down", down.detach(), persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map ``[N, H]`` to ``[N, H]``."""
        return torch.cat([self._rows(rows) for rows in hidden.split(_ROWS)])

    def _rows(self, hidden: Tensor) -> Tensor:
        moe = self.moe
        z = moe.routed_expert_down_proj(hidden)
        routing = moe.gate(hidden)
        share = routing.weights.new_zeros(len(z), self.num_experts)
        share = share.scatter_(1, routing.expert_ids, routing.weights)
        gate, up = (z @ self.gate_up.mT).unflatten(-1, (2, self.num_experts, -1)).unbind(1)
        weighted = situ(gate, up, *self.betas) * share.unsqueeze(-1)
        total = (weighted.flatten(1) @ self.down.to(weighted.dtype).mT).to(z.dtype)
        routed = moe.routed_expert_up_proj(moe.routed_expert_norm(total))
        return routed + moe.shared_experts(hidden)

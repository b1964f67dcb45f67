"""How many drafts would be accepted, without decoding: a walk through texts that are known.

Needs torch. It watches training; :mod:`tools.train_tiny_k3.acceptance` really decodes.
"""

from __future__ import annotations

from typing import Any

import torch

from kimik3_lab.reference.drafter import DSparkDrafter
from kimik3_lab.reference.model import K3ForCausalLM
from tools.train_tiny_k3.drafter_blocks import counted, draft_blocks, leading_hits
from tools.train_tiny_k3.rollouts import Rollouts

__all__ = ["expected_acceptance"]


@torch.no_grad()
def expected_acceptance(
    drafter: DSparkDrafter, target: K3ForCausalLM, rollouts: Rollouts, *, batch: int = 64
) -> dict[str, Any]:
    """Walk through the target's continuations as greedy speculation does.

    From each anchor the accepted drafts are counted, and the next anchor is the bonus token. This
    needs no decoding, as the continuation is known; it stops where a block would overhang.

    Returns
    -------
    dict
        ``tokens_per_verify``, ``verifications``, and ``accepted``: how often 0, 1, ... K drafts
        were accepted.
    """
    block = drafter.config.block_size
    first, last = rollouts.prompt, rollouts.token_ids.shape[1] - 1 - block
    anchors = torch.arange(first, last + 1, device=target.device)
    embedding, head = target.model.embed_tokens.weight, target.lm_head.weight
    hits = []
    for part in torch.arange(len(rollouts.token_ids), device=target.device).split(batch):
        chosen = rollouts.rows(part)
        with torch.autocast(
            target.device.type, torch.bfloat16, enabled=target.device.type == "cuda"
        ):
            blocks = draft_blocks(drafter, embedding, head, chosen.token_ids, chosen.taps, anchors)
        hits.append(leading_hits(blocks.logits, chosen.token_ids, anchors))
    accepted = [0] * (block + 1)
    alive = counted(rollouts, target.config.eos_token_id)[:, first:].tolist()
    for row, living in zip(torch.cat(hits).tolist(), alive, strict=True):
        at = 0
        while at < len(row) and living[at + 1]:
            accepted[row[at]] += 1
            at += row[at] + 1
    verifications = sum(accepted)
    tokens = sum((kept + 1) * times for kept, times in enumerate(accepted))
    return {
        "tokens_per_verify": round(tokens / max(verifications, 1), 4),
        "verifications": verifications,
        "accepted": accepted,
    }

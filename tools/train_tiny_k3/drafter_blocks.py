"""Many draft blocks of many sequences in one pass, and the loss on them.

Needs torch. ``DSparkDrafter.draft`` guesses one block after one context. In training a block hangs
on every one of A *anchors* of every sequence at once: all of them read the same projected context,
each as far as the token before its anchor, and no block sees another. The modules are the
drafter's own; a test holds this pass equal to ``draft``.

The loss is DSpark's (arXiv 2607.05147): with ``p`` the drafter's and ``q`` the target's
distribution at position i of a block, ``TV = |p - q| / 2``, which is the chance that sampling turns
the draft down, and weights that fall with i, as a block ends at its first miss::

    sum_i exp(-i / gamma) (0.1 CE_i + 0.9 TV_i + BCE(confidence_i, 1 - TV_i))

The Markov head sees the true previous token, not a drafted one, as what follows a miss is thrown
away.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from kimik3_lab.reference.drafter import DSparkDrafter
from kimik3_lab.reference.drafter_layers import DraftLayer
from kimik3_lab.reference.rope import rotate
from tools.train_tiny_k3.rollouts import Rollouts

__all__ = [
    "Blocks",
    "LossWeights",
    "Losses",
    "block_loss",
    "counted",
    "draft_blocks",
    "leading_hits",
]


class Blocks(NamedTuple):
    """Blocks drafted at A anchors of S sequences, K positions each.

    Attributes
    ----------
    logits
        float32 or wider ``[S, A, K, V]``: the Markov head's correction included.
    confidence
        Logit of the chance of acceptance, ``[S, A, K]``, or ``None`` without that head.
    """

    logits: Tensor
    confidence: Tensor | None


@dataclass(frozen=True)
class LossWeights:
    """Weights of the three terms, and how fast positions lose weight."""

    cross_entropy: float = 0.1
    total_variation: float = 0.9
    confidence: float = 1.0
    gamma: float = 4.0


class Losses(NamedTuple):
    """The weighted sum to descend, and its terms (position-weighted means)."""

    total: Tensor
    cross_entropy: Tensor
    total_variation: Tensor
    confidence: Tensor


def draft_blocks(
    drafter: DSparkDrafter,
    embedding: Tensor,
    lm_head: Tensor,
    token_ids: Tensor,
    taps: Tensor,
    anchors: Tensor,
) -> Blocks:
    """Draft a block at each anchor, each position given the true token before it.

    Parameters
    ----------
    embedding, lm_head
        The target's ``[V, H]``; frozen.
    token_ids
        int64 ``[S, T]``.
    taps
        ``[S, T, taps * H]``.
    anchors
        int64 ``[A]``, ascending or not: positions of the last known token, from 1 to
        ``T - 1 - K``. Row i of a block predicts the token at ``anchor + 1 + i``.
    """
    count = drafter.config.block_size
    sequences, length = token_ids.shape
    offsets = torch.arange(count, device=anchors.device)
    positions = anchors.unsqueeze(1) + offsets  # [A, K]
    before = token_ids[:, positions]  # [S, A, K]: the token just before each guess
    ids = torch.full_like(before, drafter.config.mask_token_id)
    ids[..., 0] = before[..., 0]

    context = drafter.context_norm(drafter.context_proj(taps.to(drafter.context_proj.weight.dtype)))
    context_positions = torch.arange(length, device=anchors.device)
    unseen = context_positions >= anchors.unsqueeze(1)  # [A, T]: the anchor's own tap is not known
    x = F.embedding(ids, embedding).to(context.dtype)
    for layer in drafter.layers:
        rows = _latent(layer, context, context_positions.expand(sequences, -1))
        x = _layer(layer, x, positions, rows, unseen)
    # Logits, as in the drafter itself, are not left to bfloat16, where 15.3 and 15.4 are the same.
    with torch.autocast(x.device.type, enabled=False):
        hidden = drafter.final_norm(x)
        hidden = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
        markov = drafter.markov_head.markov_w1(before)
        logits = F.linear(hidden, lm_head.to(hidden.dtype)) + drafter.markov_head.bias(markov)
        confidence = None
        if drafter.confidence_head is not None:
            # Detached: the head learns to read the drafter, drafts are not bent to be readable.
            joined = torch.cat((hidden.detach(), markov.detach()), -1)
            proj = drafter.confidence_head.proj
            confidence = F.linear(joined.to(proj.weight.dtype), proj.weight, proj.bias).squeeze(-1)
    return Blocks(logits, confidence)


def _latent(layer: DraftLayer, x: Tensor, positions: Tensor) -> Tensor:
    """Compute the layer's cached rows for ``x [..., H]`` at ``positions [...]``."""
    rows = layer.self_attn.latent(x.flatten(0, -2), positions.flatten())
    return rows.unflatten(0, x.shape[:-1])


def _layer(layer: DraftLayer, x: Tensor, positions: Tensor, rows: Tensor, unseen: Tensor) -> Tensor:
    """One draft layer on ``x [S, A, K, H]`` with the context's ``rows [S, T, kv_lora + rope]``."""
    normed = layer.input_layernorm(x)
    x = x + _attention(layer, normed, positions.expand(len(x), -1, -1), rows, unseen)
    return x + layer.mlp(layer.post_attention_layernorm(x))


def _attention(
    layer: DraftLayer, x: Tensor, positions: Tensor, rows: Tensor, unseen: Tensor
) -> Tensor:
    attention = layer.self_attn
    config = attention.config
    heads, nope = config.num_attention_heads, config.qk_nope_head_dim
    queries = attention.q_b_proj(attention.q_a_layernorm(attention.q_a_proj(x)))
    queries = queries.unflatten(-1, (heads, -1))
    q_nope, q_pe = queries.split((nope, config.qk_rope_head_dim), -1)
    rotated = rotate(q_pe.flatten(0, -3), positions.flatten(), attention.frequencies)
    q_pe = rotated.view_as(q_pe)
    # Keys and values of every head rebuilt, for the context once and for each block on its own.
    context_key, context_value = _expand(layer, rows)
    block_key, block_value = _expand(layer, _latent(layer, x, positions))
    query = torch.cat((q_nope, q_pe), -1) * attention.scale  # [S, A, K, H, D]
    to_context = torch.einsum("sakhd,sthd->shakt", query, context_key)
    to_context = to_context.masked_fill(unseen.unsqueeze(1), -torch.inf)
    to_block = torch.einsum("sakhd,sajhd->shakj", query, block_key)
    scores = torch.cat((to_context, to_block), -1)
    wide = torch.promote_types(scores.dtype, torch.float32)
    shares = scores.softmax(-1, dtype=wide).to(context_value.dtype)
    length = rows.shape[1]
    out = torch.einsum("shakt,sthv->sakhv", shares[..., :length], context_value)
    out = out + torch.einsum("shakj,sajhv->sakhv", shares[..., length:], block_value)
    return attention.o_proj(out.flatten(-2))


def _expand(layer: DraftLayer, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Keys ``[..., H, nope + rope]`` and values ``[..., H, v]`` of cached rows."""
    config = layer.self_attn.config
    heads = config.num_attention_heads
    compressed, k_pe = rows.split((config.kv_lora_rank, config.qk_rope_head_dim), -1)
    both = layer.self_attn.kv_b_proj(compressed).unflatten(-1, (heads, -1))
    k_nope, value = both.split((config.qk_nope_head_dim, config.v_head_dim), -1)
    k_pe = k_pe.unsqueeze(-2).expand(*k_nope.shape[:-1], -1).to(k_nope.dtype)
    return torch.cat((k_nope, k_pe), -1), value


def block_loss(
    blocks: Blocks,
    rollouts: Rollouts,
    lm_head: Tensor,
    anchors: Tensor,
    eos_token_id: int,
    weights: LossWeights = LossWeights(),
) -> Losses:
    """DSpark's loss of drafted blocks against what the target said."""
    count = blocks.logits.shape[2]
    positions = anchors.unsqueeze(1) + torch.arange(count, device=anchors.device)
    labels = rollouts.token_ids[:, positions + 1]
    with torch.no_grad():
        hidden = rollouts.hidden[:, positions].to(blocks.logits.dtype)
        target = F.linear(hidden, lm_head.to(hidden.dtype)).softmax(-1)
    falling = torch.exp(-torch.arange(count, device=anchors.device) / weights.gamma)
    weight = falling * counted(rollouts, eos_token_id)[:, positions + 1]
    weight = weight / weight.sum().clamp(min=1e-9)

    log_draft = blocks.logits.log_softmax(-1)
    cross_entropy = F.nll_loss(log_draft.flatten(0, -2), labels.flatten(), reduction="none")
    cross_entropy = (cross_entropy.view_as(labels) * weight).sum()
    variation = (log_draft.exp() - target).abs().sum(-1) / 2
    total_variation = (variation * weight).sum()
    confidence = total_variation.new_zeros(())
    if blocks.confidence is not None:
        accepted = (1 - variation).detach().clamp(0, 1).to(blocks.confidence.dtype)
        loss = F.binary_cross_entropy_with_logits(blocks.confidence, accepted, reduction="none")
        confidence = (loss * weight).sum()
    total = (
        weights.cross_entropy * cross_entropy
        + weights.total_variation * total_variation
        + weights.confidence * confidence
    )
    return Losses(total, cross_entropy, total_variation, confidence)


def counted(rollouts: Rollouts, eos_token_id: int) -> Tensor:
    """Whether each token ``[S, T]`` is one to learn: not after the end of a generated text."""
    generated = rollouts.token_ids[:, rollouts.prompt :] == eos_token_id
    ended = generated.cumsum(1) - generated.to(torch.int64) > 0
    learn = torch.ones_like(rollouts.token_ids, dtype=torch.bool)
    learn[:, rollouts.prompt :] = ~ended
    return learn


@torch.no_grad()
def leading_hits(logits: Tensor, token_ids: Tensor, anchors: Tensor) -> Tensor:
    """Drafts of each block that are accepted greedily, ``[S, A]``: its leading right guesses."""
    count = logits.shape[2]
    positions = anchors.unsqueeze(1) + torch.arange(1, count + 1, device=anchors.device)
    return (logits.argmax(-1) == token_ids[:, positions]).long().cumprod(-1).sum(-1)

"""Gated multi-head latent attention: all heads share one small cached row per token.

Needs torch. Lesson 01 compares its cache with KDA's state; lesson 07 pages it.

A token caches ``latent | k_pe``: 512 values from which every head's key and value can be rebuilt by
``kv_b``, and 64 that join each head's key as they are. In older models those 64 carried a rotary
position. K3 rotates nothing, yet they are scored, scaled and cached like the other 128 of a key.

:func:`expanded` rebuilds keys and values, which is cheap when many queries share them (prefill).
:func:`absorbed` moves ``kv_b`` over to the query and the output instead, so that a query works on
the cached rows directly (decode). Both compute the same thing.

Source: vLLM 0.33.0, ``vllm/models/kimi_k3/nvidia/mla.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kimik3_lab.config import K3Config
from kimik3_lab.reference.mixer import Mixer
from kimik3_lab.reference.norms import RMSNorm, compute_dtype

__all__ = ["MultiHeadLatentAttention", "absorbed", "expanded"]


def expanded(
    q: Tensor, latent: Tensor, kv_b: Tensor, *, scale: float | None = None, causal: bool = True
) -> Tensor:
    """Attention with the keys and values of every head rebuilt from the cached rows.

    Parameters
    ----------
    q
        ``[N, H, nope + rope]``: the last N tokens of the sequence.
    latent
        ``[L, kv_lora + rope]``: the rows of all L >= N tokens, the newest N last.
    kv_b
        ``[H * (nope + v), kv_lora]``: for each head its key rows, then its value rows.
    scale
        Of the scores; ``None`` is ``(nope + rope) ** -0.5``, as K3 has it.
    causal
        Whether each of the N tokens sees only itself and what came before. A block drafter lets
        its N tokens see one another.

    Returns
    -------
    Tensor
        ``[N, H, v]`` in the type of ``q``; scores are taken in float32 or wider.

    Raises
    ------
    ValueError
        If there are fewer rows than queries, or the widths do not belong together.

    Examples
    --------
    A token that sees only itself gets its own value:

    >>> q, latent, kv_b = torch.randn(1, 2, 6), torch.randn(1, 5), torch.randn(2 * 7, 3)
    >>> value = (kv_b @ latent[0, :3]).view(2, 7)[:, 4:]
    >>> torch.allclose(expanded(q, latent, kv_b)[0], value)
    True
    """
    key_up, value_up, rank = _split_heads(q, latent, kv_b)
    q, rows = q.to(key_up.dtype), latent.to(key_up.dtype)
    compressed, k_pe = rows[:, :rank], rows[:, rank:]
    k_nope = torch.einsum("lr,hdr->lhd", compressed, key_up)
    value = torch.einsum("lr,hvr->lhv", compressed, value_up)
    k = torch.cat((k_nope, k_pe.unsqueeze(1).expand(-1, q.shape[1], -1)), -1)
    scores = torch.einsum("nhd,lhd->hnl", q, k)
    probabilities = _softmax(scores * _scale(q, scale), causal)
    return torch.einsum("hnl,lhv->nhv", probabilities, value).to(latent.dtype)


def absorbed(
    q: Tensor, latent: Tensor, kv_b: Tensor, *, scale: float | None = None, causal: bool = True
) -> Tensor:
    """Attention on the cached rows themselves: multi-query attention with one 576-wide key.

    Same arguments and result as :func:`expanded`. ``(W k_nope) . q == k_nope . (W^T q)`` lets
    the query absorb the key half of ``kv_b``; the value half is applied once to the weighted sum.

    Examples
    --------
    >>> q, latent, kv_b = torch.randn(2, 2, 6), torch.randn(4, 5), torch.randn(2 * 7, 3)
    >>> torch.allclose(absorbed(q, latent, kv_b), expanded(q, latent, kv_b), atol=1e-5)
    True
    """
    key_up, value_up, rank = _split_heads(q, latent, kv_b)
    q, rows = q.to(key_up.dtype), latent.to(key_up.dtype)
    nope = key_up.shape[1]
    q_latent = torch.einsum("nhd,hdr->nhr", q[..., :nope], key_up)
    query = torch.cat((q_latent, q[..., nope:]), -1)
    scores = torch.einsum("nhc,lc->hnl", query, rows)
    probabilities = _softmax(scores * _scale(q, scale), causal)
    attended = torch.einsum("hnl,lr->nhr", probabilities, rows[:, :rank])
    return torch.einsum("nhr,hvr->nhv", attended, value_up).to(latent.dtype)


def _split_heads(q: Tensor, latent: Tensor, kv_b: Tensor) -> tuple[Tensor, Tensor, int]:
    """``kv_b`` as ``[H, nope, kv_lora]`` and ``[H, v, kv_lora]``, and the rank; checks widths."""
    count, heads, width = q.shape
    rank = kv_b.shape[1]
    nope = width - (latent.shape[1] - rank)
    if kv_b.shape[0] % heads or not 0 < nope <= width or kv_b.shape[0] // heads <= nope:
        raise ValueError(
            f"q {tuple(q.shape)}, latent {tuple(latent.shape)} and kv_b {tuple(kv_b.shape)} do not "
            "fit: expected [N, H, nope + rope], [L, kv_lora + rope] and [H * (nope + v), kv_lora]"
        )
    if latent.shape[0] < count:
        raise ValueError(
            f"{count} queries need at least as many cached rows, got {latent.shape[0]}: "
            "append the rows of the new tokens before attending"
        )
    per_head = kv_b.to(compute_dtype(latent.dtype)).unflatten(0, (heads, -1))
    return per_head[:, :nope], per_head[:, nope:], rank


def _scale(q: Tensor, scale: float | None) -> float:
    """Default to the width of the head (192), which absorbing does not change to the row's 576."""
    return q.shape[-1] ** -0.5 if scale is None else scale


def _softmax(scores: Tensor, causal: bool) -> Tensor:
    """Softmax of ``[H, N, L]``; if causal, query n, at position L - N + n, sees no later row."""
    count, length = scores.shape[-2:]
    if causal and count > 1:
        future = torch.ones(count, length, dtype=torch.bool, device=scores.device)
        scores = scores.masked_fill(future.triu(length - count + 1), -torch.inf)
    return scores.softmax(-1)


class MultiHeadLatentAttention(nn.Module):
    """An MLA layer; attention over the cached rows goes through the mixer.

    The epsilon of its two norms is ``config.mla_norm_eps``, apart from ``rms_norm_eps`` because
    public implementations differ there.
    """

    def __init__(
        self,
        config: K3Config,
        layer_id: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.config, self.layer_id = config, layer_id
        hidden, heads = config.hidden_size, config.num_attention_heads
        value = heads * config.v_head_dim

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False, dtype=dtype, device=device)

        def norm(width: int) -> RMSNorm:
            return RMSNorm(width, config.mla_norm_eps, dtype=dtype, device=device)

        self.q_a_proj = linear(hidden, config.q_lora_rank)
        self.q_a_layernorm = norm(config.q_lora_rank)
        self.q_b_proj = linear(config.q_lora_rank, heads * config.qk_head_dim)
        self.kv_a_proj_with_mqa = linear(hidden, config.mla_cache_dim)
        self.kv_a_layernorm = norm(config.kv_lora_rank)
        self.kv_b_proj = linear(config.kv_lora_rank, heads * config.qk_nope_head_dim + value)
        self.g_proj = linear(hidden, value)
        self.o_proj = linear(value, hidden)

    def forward(self, x: Tensor, mixer: Mixer) -> Tensor:
        """Map normed inputs ``x [N, hidden]`` to outputs ``[N, hidden]``."""
        config = self.config
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q = q.unflatten(-1, (config.num_attention_heads, config.qk_head_dim))
        compressed, k_pe = self.kv_a_proj_with_mqa(x).split(
            (config.kv_lora_rank, config.qk_rope_head_dim), -1
        )
        latent = torch.cat((self.kv_a_layernorm(compressed), k_pe), -1)  # k_pe is not normed
        o = mixer.mla(self.layer_id, q, latent, self.kv_b_proj.weight, config)
        return self.o_proj(o.flatten(-2) * torch.sigmoid(self.g_proj(x)))

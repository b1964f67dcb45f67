"""The modules of a DSpark drafter: a plain dense layer with rotary MLA, and its two small heads.

Needs torch. :mod:`kimik3_lab.reference.drafter` puts them together; lesson 09 uses that.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kimik3_lab.drafter_config import DSparkConfig
from kimik3_lab.reference import meta, mla
from kimik3_lab.reference.norms import RMSNorm, compute_dtype
from kimik3_lab.reference.rope import rotate, yarn_attention_factor, yarn_frequencies

__all__ = ["ConfidenceHead", "DraftLayer", "MarkovHead"]


class DraftLayer(nn.Module):
    """Dense pre-norm layer: rotary MLA without an output gate, and a SiLU feed-forward."""

    def __init__(
        self, config: DSparkConfig, *, dtype: torch.dtype, device: torch.device | str | None
    ) -> None:
        super().__init__()
        to = {"dtype": dtype, "device": device}
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, **to)
        self.self_attn = _DraftAttention(config, **to)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, **to)
        self.mlp = _DraftMLP(config, **to)

    def forward(self, x: Tensor, positions: Tensor, context: Tensor) -> Tensor:
        """Map the block ``x [N, hidden]`` given the context's cached rows."""
        x = x + self.self_attn(self.input_layernorm(x), positions, context)
        return x + self.mlp(self.post_attention_layernorm(x))


class _DraftAttention(nn.Module):
    """Every row of the block sees the whole context and the whole block, later rows included."""

    def __init__(
        self, config: DSparkConfig, *, dtype: torch.dtype, device: torch.device | str | None
    ) -> None:
        super().__init__()
        self.config = config
        heads, nope, rope = (
            config.num_attention_heads,
            config.qk_nope_head_dim,
            config.qk_rope_head_dim,
        )

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False, dtype=dtype, device=device)

        def norm(width: int) -> RMSNorm:
            return RMSNorm(width, config.rms_norm_eps, dtype=dtype, device=device)

        self.q_a_proj = linear(config.hidden_size, config.q_lora_rank)
        self.q_a_layernorm = norm(config.q_lora_rank)
        self.q_b_proj = linear(config.q_lora_rank, heads * (nope + rope))
        self.kv_a_proj_with_mqa = linear(config.hidden_size, config.kv_lora_rank + rope)
        self.kv_a_layernorm = norm(config.kv_lora_rank)
        self.kv_b_proj = linear(config.kv_lora_rank, heads * (nope + config.v_head_dim))
        self.o_proj = linear(heads * config.v_head_dim, config.hidden_size)
        self.frequencies = yarn_frequencies(
            rope, config.rope_theta, config.rope_factor, config.original_max_position_embeddings
        )
        self.scale = (nope + rope) ** -0.5 * yarn_attention_factor(config.rope_factor) ** 2

    def latent(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rows to cache for ``x [T, hidden]``: the normed latent and the rotated shared key."""
        config = self.config
        compressed, k_pe = self.kv_a_proj_with_mqa(x).split(
            (config.kv_lora_rank, config.qk_rope_head_dim), -1
        )
        k_pe = rotate(k_pe, positions, self.frequencies)
        return torch.cat((self.kv_a_layernorm(compressed), k_pe), -1)

    def queries(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return queries ``[T, H, nope + rope]`` of ``x [T, hidden]``, their last part rotated."""
        config = self.config
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q = q.unflatten(-1, (config.num_attention_heads, -1))
        nope, pe = q.split((config.qk_nope_head_dim, config.qk_rope_head_dim), -1)
        return torch.cat((nope, rotate(pe, positions, self.frequencies)), -1)

    def forward(self, x: Tensor, positions: Tensor, context: Tensor) -> Tensor:
        q = self.queries(x, positions)
        rows = torch.cat((context, self.latent(x, positions)))
        o = mla.absorbed(q, rows, self.kv_b_proj.weight, scale=self.scale, causal=False)
        return self.o_proj(o.flatten(-2))


class _DraftMLP(nn.Module):
    def __init__(
        self, config: DSparkConfig, *, dtype: torch.dtype, device: torch.device | str | None
    ) -> None:
        super().__init__()
        hidden, width = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(hidden, width, bias=False, dtype=dtype, device=device)
        self.up_proj = nn.Linear(hidden, width, bias=False, dtype=dtype, device=device)
        self.down_proj = nn.Linear(width, hidden, bias=False, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        # SwiGLU, not SiTU: the drafter is a plain model.
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class MarkovHead(nn.Module):
    """Low-rank table of which token tends to follow which, added to the logits."""

    def __init__(
        self, config: DSparkConfig, *, dtype: torch.dtype, device: torch.device | str | None
    ) -> None:
        super().__init__()
        vocab, rank = config.vocab_size, config.markov_rank
        self.markov_w1 = meta.embedding(vocab, rank, dtype=dtype, device=device)
        self.markov_w2 = nn.Linear(rank, vocab, bias=False, dtype=dtype, device=device)

    def bias(self, embedding: Tensor) -> Tensor:
        """Correction to the logits ``[V]`` from the previous token's embedding ``[rank]``."""
        return self.markov_w2(embedding)


class ConfidenceHead(nn.Module):
    """Chance that a drafted token is accepted, from its hidden state and the token before it."""

    def __init__(
        self, config: DSparkConfig, *, dtype: torch.dtype, device: torch.device | str | None
    ) -> None:
        super().__init__()
        wide = compute_dtype(dtype)
        self.proj = nn.Linear(
            config.hidden_size + config.markov_rank, 1, bias=True, dtype=wide, device=device
        )

    def forward(self, hidden: Tensor, embedding: Tensor) -> Tensor:
        """Map a final hidden state and a Markov embedding to a probability."""
        joined = torch.cat((hidden, embedding), -1).to(self.proj.weight.dtype)
        return torch.sigmoid(self.proj(joined)).squeeze(-1)

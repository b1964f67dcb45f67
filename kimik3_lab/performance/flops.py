"""Floating-point operations of one token, from the shapes of the model.

Needs the standard library only. Lesson 01 derives every term; lesson 11 holds them against what a
GPU can do.

The rule: a multiplication and the addition that follows it are two operations, so a matrix with
``n`` weights costs a token ``2 n``. Norms, activations and the softmax are left out: they are below
a thousandth of the total, and no hardware runs them on its matrix units.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kimik3_lab.config import K3Config
from kimik3_lab.performance.census import census
from kimik3_lab.performance.wiring import residual_reads

__all__ = ["KDA_CHUNK", "TokenFlops", "flops_per_token"]

#: Rows of a chunk in the chunked KDA form, as vLLM's Triton kernels have it.
KDA_CHUNK = 64


@dataclass(frozen=True)
class TokenFlops:
    """Operations of one token: a part that is the same at every position, and MLA's that grows.

    Attributes
    ----------
    matmul
        Component to the operations of its weight matrices, for the experts that the token uses.
    kda_recurrence
        The delta rule, token by token, as in decoding.
    kda_chunked
        The same in chunks of :data:`KDA_CHUNK` tokens, as in prefill. Not part of :attr:`fixed`.
    short_convolution, residual_mix
        The short convolutions, and the mixtures of the residual stream.
    mla_per_cached_token
        Absorbed attention (decode): for each row in the cache, all layers together.
    mla_per_pair
        Expanded attention (prefill): for each pair of a query and a key that it sees.

    Examples
    --------
    >>> flops = flops_per_token(K3Config.released())
    >>> round(flops.matmul_total / 1e9, 2), flops.mla_per_cached_token, flops.mla_per_pair
    (208.35, 5013504, 1474560)
    >>> flops.decode_crossover
    41722
    """

    matmul: Mapping[str, int]
    kda_recurrence: int
    kda_chunked: int
    short_convolution: int
    residual_mix: int
    mla_per_cached_token: int
    mla_per_pair: int

    @property
    def matmul_total(self) -> int:
        """Operations of all weight matrices."""
        return sum(self.matmul.values())

    @property
    def fixed(self) -> int:
        """Everything that does not depend on the context, in decoding."""
        rest = self.kda_recurrence + self.short_convolution + self.residual_mix
        return self.matmul_total + rest

    def decode(self, cached_tokens: int) -> int:
        """Operations of one decoded token that attends to ``cached_tokens`` rows.

        Raises
        ------
        ValueError
            If ``cached_tokens`` is negative.
        """
        if cached_tokens < 0:
            raise ValueError(f"a cache holds 0 or more tokens, got {cached_tokens}")
        return self.fixed + cached_tokens * self.mla_per_cached_token

    def prefill(self, tokens: int) -> int:
        """Operations of a prompt of ``tokens`` tokens; token i attends to i rows, itself included.

        Raises
        ------
        ValueError
            If ``tokens`` is negative.
        """
        if tokens < 0:
            raise ValueError(f"a prompt has 0 or more tokens, got {tokens}")
        each = self.fixed - self.kda_recurrence + self.kda_chunked
        return tokens * each + tokens * (tokens + 1) // 2 * self.mla_per_pair

    @property
    def decode_crossover(self) -> int | None:
        """First cache length at which MLA's attention is at least half of a decoded token."""
        return -(-self.fixed // self.mla_per_cached_token) if self.mla_per_cached_token else None

    def to_dict(self) -> dict[str, Any]:
        """Plain content for JSON."""
        return {
            "matmul": self.matmul_total,
            "matmul_by_component": dict(self.matmul),
            "kda_recurrence": self.kda_recurrence,
            "kda_chunked": self.kda_chunked,
            "short_convolution": self.short_convolution,
            "residual_mix": self.residual_mix,
            "fixed": self.fixed,
            "mla_per_cached_token": self.mla_per_cached_token,
            "mla_per_pair": self.mla_per_pair,
            "decode_crossover_tokens": self.decode_crossover,
        }


def flops_per_token(config: K3Config) -> TokenFlops:
    """Count the operations of one token of ``config``'s model.

    Examples
    --------
    >>> flops = flops_per_token(K3Config.tiny())
    >>> flops.decode(1000) - flops.decode(0) == 1000 * flops.mla_per_cached_token
    True
    """
    kda = config.linear_attn_config
    kda_heads = len(kda.kda_layers) * kda.num_heads
    taps = len(kda.kda_layers) * 3 * kda.projection_size * kda.short_conv_kernel_size
    mla_heads = len(config.mla_layer_ids) * config.num_attention_heads
    # A source costs a product in the norm, one with the query, and one with its share.
    mixed = sum(read.sources for read in residual_reads(config) if read.is_mixture)
    return TokenFlops(
        matmul=_matmul(config),
        kda_recurrence=kda_heads * _recurrence(kda.head_dim),
        kda_chunked=kda_heads * _chunked(kda.head_dim, KDA_CHUNK),
        short_convolution=2 * taps,
        residual_mix=3 * 2 * config.hidden_size * mixed,
        # Absorbed: scores on the whole row, then a weighted sum of its latent part.
        mla_per_cached_token=2 * mla_heads * (config.mla_cache_dim + config.kv_lora_rank),
        # Expanded: scores of full keys, then a weighted sum of values.
        mla_per_pair=2 * mla_heads * (config.qk_head_dim + config.v_head_dim),
    )


def _matmul(config: K3Config) -> dict[str, int]:
    """Twice the active weights of every matrix, by component."""
    flops: Counter[str] = Counter()
    for spec, count in census(config):
        # The embedding is a look-up; a residual query is a vector, counted with the mixtures.
        if spec.component == "embedding" or len(spec.shape) != 2 or spec.shape[0] == 1:
            continue
        weights = count * spec.parameters
        if spec.component == "routed_experts":
            weights = weights * config.num_experts_per_token // config.num_experts
        flops[spec.component] += 2 * weights
    return dict(flops)


def _recurrence(width: int) -> int:
    """One head, one token: let the state decay (1), look up the key, write, read (2 each)."""
    return (1 + 2 + 2 + 2) * width * width


def _chunked(width: int, chunk: int) -> int:
    """One head, one token of a chunk, in matrix products over the whole chunk.

    Five products are ``chunk`` by ``chunk`` for a token's row (two of scores, two that apply the
    inverse, one that applies the scores), three meet the state. Masked halves are computed too.
    The triangular solve adds a few per cent and is left out.
    """
    return 5 * 2 * chunk * width + 3 * 2 * width * width

"""The fewest bytes and operations of each operator, and the time they take at the least.

Needs the standard library only. Lessons 04 and 06 use it.

A floor is the larger of two times: the bytes that have to cross the memory bus (each input read
once, each output written once, intermediates not at all) over the bandwidth of a copy, and the
floating-point operations over the rate of a large bfloat16 product. Both rates are what one H200
reached in our own measurement, not the datasheet's 4.8 TB/s and 989 TFLOP/s.
"""

from __future__ import annotations

__all__ = [
    "BANDWIDTH",
    "FLOP_RATE",
    "HEAD_DIM",
    "HIDDEN",
    "LATENT",
    "LATENT_RANK",
    "ROPE",
    "attn_res_bytes",
    "expected_distinct_experts",
    "floor_us",
    "kda_decode_bytes",
    "kda_prefill_bytes",
    "kda_prefill_flops",
    "kda_recover_bytes",
    "mla_decode_bytes",
    "mla_decode_flops",
    "moe_bytes",
    "moe_flops",
    "router_bytes",
]

#: Bytes a second, read plus written, of a device-to-device copy on an H200.
BANDWIDTH = 4.3e12
#: Operations a second of an 8192 x 8192 x 8192 bfloat16 product on an H200.
FLOP_RATE = 790e12

#: Width of the residual stream, of the experts' latent space, and of a KDA head's key and value.
HIDDEN, LATENT, HEAD_DIM = 7168, 3584, 128
#: Values of a cached row of MLA: those that are key and value, and those that are key alone.
LATENT_RANK, ROPE = 512, 64
#: Tokens that the short convolution of KDA looks back.
_CONV_WINDOW = 3
_STATE_BYTES = HEAD_DIM * HEAD_DIM * 4


def floor_us(moved_bytes: float, flops: float = 0.0) -> float:
    """Return the least time in microseconds for so many bytes and bfloat16 operations.

    Examples
    --------
    >>> round(floor_us(4.3e6), 3), round(floor_us(0.0, 790e6), 3)
    (1.0, 1.0)
    """
    return max(moved_bytes / BANDWIDTH, flops / FLOP_RATE) * 1e6


def expected_distinct_experts(tokens: int, top_k: int, experts: int) -> float:
    """Return how many experts uniform routing is expected to hit: ``E (1 - (1 - k/E)^T)``.

    Examples
    --------
    >>> [round(expected_distinct_experts(t, 16, 896), 1) for t in (1, 4, 16, 64, 256)]
    [16.0, 62.3, 224.4, 613.2, 887.1]
    """
    return experts * (1.0 - (1.0 - top_k / experts) ** tokens)


def moe_bytes(
    tokens: int, distinct_experts: float, intermediate: int, weight_bytes: float
) -> float:
    """Return the bytes of one expert call: the weights of the experts hit, x read, sum written.

    Parameters
    ----------
    tokens, distinct_experts
        T, and how many experts any of them goes to.
    intermediate
        Width I of an expert on this rank.
    weight_bytes
        Bytes of one weight: 2 for bfloat16, 17/32 for MXFP4 (half a byte and 1/32 scale byte).

    Examples
    --------
    >>> round(moe_bytes(1, 16, 384, 17 / 32) / 1e6), round(moe_bytes(1, 16, 384, 2) / 1e6)
    (35, 132)
    """
    return distinct_experts * 3 * LATENT * intermediate * weight_bytes + 2 * tokens * LATENT * 2


def moe_flops(pairs: int, intermediate: int) -> float:
    """Return the operations of gate, up and down for ``pairs`` token-expert pairs.

    Examples
    --------
    >>> round(floor_us(0.0, moe_flops(8192 * 16, 384)))
    1370
    """
    return 2.0 * pairs * 3 * LATENT * intermediate


def attn_res_bytes(tokens: int, blocks: int = 8) -> int:
    """Return the bytes of AttnRes: blocks, prefix and delta read, prefix and mix written.

    Examples
    --------
    >>> attn_res_bytes(1)  # ten rows of 7168 bfloat16 in, two out
    172032
    """
    return tokens * HIDDEN * 2 * (blocks + 4)


def router_bytes(tokens: int, experts: int = 896, top_k: int = 16) -> int:
    """Return the bytes of routing: float32 logits and bias read, ids and weights written.

    Examples
    --------
    >>> round(floor_us(router_bytes(8192)), 1)
    7.1
    """
    return tokens * (4 * experts + 8 * top_k) + 4 * experts


def kda_decode_bytes(heads: int, batch: int) -> int:
    """Return the bytes of a fused decode step of one KDA layer.

    A head and sequence moves its float32 state in and out, q, k, v, the raw gate and the output
    gate in, the output out (bfloat16), one beta, and the convolution's window of three tokens for
    q, k and v in and out; a layer adds its float32 convolution weights.

    Examples
    --------
    >>> round(floor_us(kda_decode_bytes(12, 256)), 1)
    98.0
    """
    rows = 6 * HEAD_DIM * 2 + 2
    window = 2 * _CONV_WINDOW * 3 * HEAD_DIM * 2
    weights = 3 * heads * HEAD_DIM * (_CONV_WINDOW + 1) * 4
    return batch * heads * (2 * _STATE_BYTES + rows + window) + weights


def kda_prefill_bytes(heads: int, tokens: int, sequences: int) -> int:
    """Return the bytes of a KDA prefill: q, k, v, g and beta in, o out, states in and out.

    Examples
    --------
    >>> round(floor_us(kda_prefill_bytes(12, 8192, 1)), 1)
    29.7
    """
    return tokens * heads * (5 * HEAD_DIM * 2 + 2) + 2 * sequences * heads * _STATE_BYTES


def kda_prefill_flops(heads: int, tokens: int, chunk_size: int = 16) -> float:
    """Return the operations of the chunked form: three state products and five within a chunk.

    The state products (read by k, read by q, updated) cost ``2 D^2`` a token each, the products
    within a chunk of C tokens ``2 C D`` each, causal halves not taken off.

    Examples
    --------
    >>> round(kda_prefill_flops(12, 8192, 64) / 1e9, 1)
    17.7
    """
    return tokens * heads * (6.0 * HEAD_DIM**2 + 10.0 * chunk_size * HEAD_DIM)


def kda_recover_bytes(heads: int, batch: int, accepted: int) -> int:
    """Return the bytes of committing ``accepted`` tokens from their records into the states.

    The float32 state moves in and out; each accepted token brings its update u in float32, and its
    key and raw gate in bfloat16.

    Examples
    --------
    >>> kda_recover_bytes(1, 1, 8)
    139264
    """
    return batch * heads * (2 * _STATE_BYTES + accepted * HEAD_DIM * (4 + 2 + 2))


def mla_decode_bytes(heads: int, batch: int, tokens: int, length: int) -> int:
    """Return the bytes of attention over the latent cache: rows and queries read, outputs written.

    All T tokens and all heads of a request share one read of its rows.

    Examples
    --------
    >>> round(floor_us(mla_decode_bytes(12, 16, 1, 8192)), 1)
    35.2
    """
    width = LATENT_RANK + ROPE
    return 2 * batch * (length * width + tokens * heads * (width + LATENT_RANK))


def mla_decode_flops(heads: int, batch: int, tokens: int, length: int) -> float:
    """Return its operations: a score over 576 columns and a sum over 512, for each pair.

    Examples
    --------
    >>> round(mla_decode_flops(12, 16, 9, 8192) / 1e9, 1)
    30.8
    """
    return 2.0 * batch * tokens * heads * length * (2 * LATENT_RANK + ROPE)

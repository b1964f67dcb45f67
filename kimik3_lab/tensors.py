"""Every tensor of a Kimi K3 checkpoint: name, shape and type, enumerated from a configuration.

Needs the standard library only. Accounting sums these, the checkpoint loader checks against them,
and lesson 01 counts them: 497,220 for the release.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Literal, NamedTuple

from kimik3_lab.config import K3Config

__all__ = ["DTYPE_BYTES", "MXFP4_GROUP", "RELEASED_PREFIX", "TensorSpec", "checkpoint_tensors"]

#: Bytes of one element, by safetensors type name.
DTYPE_BYTES = {"BF16": 2, "F32": 4, "U8": 1}
#: Weights that share one scale in MXFP4, along the input dimension.
MXFP4_GROUP = 32
#: The released checkpoint nests the text model; the flat KimiLinear layout has no prefix.
RELEASED_PREFIX = "language_model."

Component = Literal[
    "embedding", "lm_head", "kda", "mla", "norms", "attn_res", "dense_mlp", "router",
    "latent_moe", "shared_experts", "routed_experts", "final",
]  # fmt: skip


class TensorSpec(NamedTuple):
    """One tensor as it lies on disk.

    ``parameters`` differs from the product of ``shape`` for MXFP4 experts only: a packed byte holds
    two weights, and a scale is not a parameter.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    component: Component
    layer_id: int | None = None
    packing: Literal["plain", "mxfp4_packed", "mxfp4_scale"] = "plain"

    @property
    def bytes(self) -> int:
        """Size on disk."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def parameters(self) -> int:
        """Weights that the tensor holds."""
        factor = {"plain": 1, "mxfp4_packed": 2, "mxfp4_scale": 0}[self.packing]
        return prod(self.shape) * factor


def checkpoint_tensors(
    config: K3Config, *, prefix: str = RELEASED_PREFIX, num_experts: int | None = None
) -> Iterator[TensorSpec]:
    """Yield every tensor of the text model in checkpoint order.

    Parameters
    ----------
    config
        Any member of the family.
    prefix
        ``"language_model."`` for the released layout, ``""`` for the flat KimiLinear layout.
    num_experts
        List the tensors of so many routed experts of each layer only; they are all alike.

    Examples
    --------
    >>> first = next(checkpoint_tensors(K3Config.released()))
    >>> first.name, first.shape, first.dtype
    ('language_model.model.embed_tokens.weight', (163840, 7168), 'BF16')
    """
    hidden, model = config.hidden_size, prefix + "model."
    experts = config.num_experts if num_experts is None else num_experts
    vocab = (config.vocab_size, hidden)
    yield TensorSpec(model + "embed_tokens.weight", vocab, "BF16", "embedding")
    for layer_id in range(config.num_hidden_layers):
        yield from _layer(config, layer_id, f"{model}layers.{layer_id}.", experts)
    yield TensorSpec(model + "norm.weight", (hidden,), "BF16", "final")
    yield TensorSpec(model + "output_attn_res_norm.weight", (hidden,), "BF16", "final")
    yield TensorSpec(model + "output_attn_res_proj.weight", (1, hidden), "BF16", "final")
    yield TensorSpec(prefix + "lm_head.weight", vocab, "BF16", "lm_head")


def _layer(config: K3Config, layer_id: int, prefix: str, experts: int) -> Iterator[TensorSpec]:
    hidden = (config.hidden_size,)
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield TensorSpec(f"{prefix}{name}.weight", hidden, "BF16", "norms", layer_id)
    for name in ("self_attention_res", "mlp_res"):
        yield TensorSpec(f"{prefix}{name}_norm.weight", hidden, "BF16", "attn_res", layer_id)
        yield TensorSpec(f"{prefix}{name}_proj.weight", (1, *hidden), "BF16", "attn_res", layer_id)
    attention = _kda if config.is_kda_layer(layer_id) else _mla
    yield from attention(config, layer_id, prefix + "self_attn.")
    if config.is_moe_layer(layer_id):
        yield from _moe(config, layer_id, prefix + "block_sparse_moe.", experts)
    else:
        yield from _mlp(config, layer_id, prefix + "mlp.", config.intermediate_size, "dense_mlp")


def _kda(config: K3Config, layer_id: int, prefix: str) -> Iterator[TensorSpec]:
    kda, hidden = config.linear_attn_config, config.hidden_size
    width = kda.projection_size
    # A_log has one value per head, but the release pads 96 of them to the head width of 128.
    a_log = max(kda.num_heads, kda.head_dim)
    shapes: list[tuple[str, tuple[int, ...], str]] = [
        *((f"{x}_proj.weight", (width, hidden), "BF16") for x in "qkvg"),
        *((f"{x}_conv1d.weight", (width, 1, kda.short_conv_kernel_size), "F32") for x in "qkv"),
        ("f_a_proj.weight", (kda.head_dim, hidden), "BF16"),
        ("f_b_proj.weight", (width, kda.head_dim), "BF16"),
        ("b_proj.weight", (kda.num_heads, hidden), "BF16"),
        ("A_log", (a_log,), "F32"),
        ("dt_bias", (width,), "F32"),
        ("o_norm.weight", (kda.head_dim,), "F32"),
        ("o_proj.weight", (hidden, width), "BF16"),
    ]
    for name, shape, dtype in shapes:
        yield TensorSpec(prefix + name, shape, dtype, "kda", layer_id)


def _mla(config: K3Config, layer_id: int, prefix: str) -> Iterator[TensorSpec]:
    heads, hidden = config.num_attention_heads, config.hidden_size
    value = heads * config.v_head_dim
    shapes: list[tuple[str, tuple[int, ...]]] = [
        ("q_a_proj.weight", (config.q_lora_rank, hidden)),
        ("q_a_layernorm.weight", (config.q_lora_rank,)),
        ("q_b_proj.weight", (heads * config.qk_head_dim, config.q_lora_rank)),
        ("kv_a_proj_with_mqa.weight", (config.mla_cache_dim, hidden)),
        ("kv_a_layernorm.weight", (config.kv_lora_rank,)),
        ("kv_b_proj.weight", (heads * config.qk_nope_head_dim + value, config.kv_lora_rank)),
        ("g_proj.weight", (value, hidden)),
        ("o_proj.weight", (hidden, value)),
    ]
    for name, shape in shapes:
        yield TensorSpec(prefix + name, shape, "BF16", "mla", layer_id)


def _mlp(
    config: K3Config, layer_id: int, prefix: str, width: int, component: Component
) -> Iterator[TensorSpec]:
    for name, shape in (
        ("gate_proj", (width, config.hidden_size)),
        ("up_proj", (width, config.hidden_size)),
        ("down_proj", (config.hidden_size, width)),
    ):
        yield TensorSpec(f"{prefix}{name}.weight", shape, "BF16", component, layer_id)


def _moe(config: K3Config, layer_id: int, prefix: str, experts: int) -> Iterator[TensorSpec]:
    rows, hidden = config.num_experts, config.hidden_size
    latent = config.routed_expert_hidden_size
    yield TensorSpec(prefix + "gate.weight", (rows, hidden), "BF16", "router", layer_id)
    bias = prefix + "gate.e_score_correction_bias"
    yield TensorSpec(bias, (rows,), "F32", "router", layer_id)
    for name, shape in (
        ("down_proj", (latent, hidden)),
        ("norm", (latent,)),
        ("up_proj", (hidden, latent)),
    ):
        full = f"{prefix}routed_expert_{name}.weight"
        yield TensorSpec(full, shape, "BF16", "latent_moe", layer_id)
    shared = config.shared_intermediate_size
    yield from _mlp(config, layer_id, prefix + "shared_experts.", shared, "shared_experts")
    for expert in range(experts):
        yield from _expert(config, layer_id, f"{prefix}experts.{expert}.")


def _expert(config: K3Config, layer_id: int, prefix: str) -> Iterator[TensorSpec]:
    latent, width = config.routed_expert_hidden_size, config.moe_intermediate_size
    # w1 is the gate, w3 the linear half, w2 the way back to the latent width.
    for name, rows, columns in (
        ("w1", width, latent),
        ("w2", latent, width),
        ("w3", width, latent),
    ):
        full = f"{prefix}{name}.weight"
        if config.expert_dtype == "bf16":
            yield TensorSpec(full, (rows, columns), "BF16", "routed_experts", layer_id)
            continue
        groups = -(-columns // MXFP4_GROUP)
        yield TensorSpec(
            full + "_packed", (rows, columns // 2), "U8", "routed_experts", layer_id, "mxfp4_packed"
        )
        yield TensorSpec(
            full + "_scale", (rows, groups), "U8", "routed_experts", layer_id, "mxfp4_scale"
        )

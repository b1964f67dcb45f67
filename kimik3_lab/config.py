"""The shape of Kimi K3: every released value with its source, and smaller members of the family.

Needs the standard library only. Used by every lesson; lesson 01 walks through the fields.

The names are those of the released ``config.json`` (text part), which are also the names that vLLM
and transformers read, so a configuration written here loads there and the other way round.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kimik3_lab.config_checks import ConfigError, check_config, read_config, typed_fields

__all__ = ["ConfigError", "K3Config", "LinearAttentionConfig"]

_RELEASED = "moonshotai/Kimi-K3 config.json, text_config"
_QUANT = "moonshotai/Kimi-K3 config.json, quantization_config"


def _src(default: Any, note: str = "", *, source: str = _RELEASED) -> Any:
    """Declare a field with its released value, where it is released and what it means."""
    return field(default=default, metadata={"source": source, "note": note})


@dataclass(frozen=True)
class LinearAttentionConfig:
    """The Kimi Delta Attention part (``linear_attn_config``); layer lists are 1-based as released.

    Examples
    --------
    >>> LinearAttentionConfig().num_heads * LinearAttentionConfig().head_dim
    12288
    """

    num_heads: int = _src(96, "KDA heads")
    head_dim: int = _src(128, "key and value width of a head; the state is head_dim x head_dim")
    short_conv_kernel_size: int = _src(4, "taps of the causal depthwise convolution on q, k, v")
    gate_lower_bound: float | None = _src(
        -5.0, "log-decay lies in (lower_bound, 0); None means the older softplus gate"
    )
    use_full_rank_gate: bool = _src(True, "output gate is one full matrix, not a low-rank pair")
    kda_layers: tuple[int, ...] = _src(
        tuple(n for n in range(1, 94) if n % 4 and n != 93), "1-based numbers of the KDA layers"
    )
    full_attn_layers: tuple[int, ...] = _src(
        (*range(4, 93, 4), 93), "1-based numbers of the MLA layers; 92 and 93 are neighbours"
    )

    @property
    def projection_size(self) -> int:
        """Width of q, k, v and the output gate, all heads together."""
        return self.num_heads * self.head_dim


@dataclass(frozen=True)
class K3Config:
    """Shape of a Kimi K3 text model. The defaults are the released model.

    Every field carries the place it was read from in its metadata: see :meth:`sources`.

    Examples
    --------
    >>> config = K3Config.released()
    >>> config.num_hidden_layers, len(config.mla_layer_ids), config.num_experts
    (93, 24, 896)
    >>> config.is_kda_layer(91), config.is_kda_layer(92)
    (False, False)
    """

    vocab_size: int = _src(163_840)
    hidden_size: int = _src(7168, "width of the residual stream")
    num_hidden_layers: int = _src(93)
    intermediate_size: int = _src(33_792, "width of the dense feed-forward in layer 0")
    rms_norm_eps: float = _src(1e-5)
    max_position_embeddings: int = _src(1_048_576, "context length in tokens")
    tie_word_embeddings: bool = _src(False)
    dtype: str = _src("bfloat16", "everything but the routed experts and a few fp32 vectors")
    bos_token_id: int = _src(163_584)
    eos_token_id: int = _src(163_586)
    pad_token_id: int = _src(163_839)
    initializer_range: float = _src(0.02)

    linear_attn_config: LinearAttentionConfig = field(
        default_factory=LinearAttentionConfig, metadata={"source": _RELEASED, "note": "KDA"}
    )

    num_attention_heads: int = _src(96, "MLA query heads")
    q_lora_rank: int = _src(1536)
    kv_lora_rank: int = _src(512, "width of the cached latent")
    qk_nope_head_dim: int = _src(128)
    qk_rope_head_dim: int = _src(64, "cached and scored like the rest: nothing is rotated")
    v_head_dim: int = _src(128)
    mla_use_nope: bool = _src(True, "no rotary embedding anywhere in the model")
    mla_use_output_gate: bool = _src(True)
    mla_norm_eps: float = _src(
        1e-5,
        "epsilon of q_a_layernorm and kv_a_layernorm: vLLM uses rms_norm_eps, "
        "the Hugging Face class default is 1e-6",
        source="vLLM 0.33.0, vllm/models/kimi_k3/nvidia/mla.py (not a config.json field)",
    )

    attn_res_block_size: int = _src(12, "layers in one attention-residual block")

    hidden_act: str = _src("situ")
    activation_situ_beta: float = _src(4.0, "soft bound on the gate half")
    activation_situ_linear_beta: float = _src(25.0, "soft bound on the linear half")

    num_experts: int = _src(896, "routed experts in a MoE layer")
    num_experts_per_token: int = _src(16, "top-k")
    moe_intermediate_size: int = _src(3072)
    routed_expert_hidden_size: int = _src(3584, "latent width that the routed experts work in")
    latent_moe_use_norm: bool = _src(True)
    num_shared_experts: int = _src(2, "run as one feed-forward of twice the width")
    first_k_dense_replace: int = _src(1, "the first k layers have a dense feed-forward")
    moe_layer_freq: int = _src(1)
    moe_router_activation_func: str = _src("sigmoid")
    moe_renormalize: bool = _src(True)
    routed_scaling_factor: float = _src(1.0)
    num_expert_group: int = _src(1, "one group: grouped top-k does nothing")
    topk_group: int = _src(1)

    num_nextn_predict_layers: int = _src(0, "no MTP layer in the release")
    expert_dtype: str = _src(
        "mxfp4", "format of the routed experts on disk: mxfp4 or bf16", source=_QUANT
    )

    def __post_init__(self) -> None:
        check_config(self)

    # -- members of the family ---------------------------------------------------------------

    @classmethod
    def released(cls) -> K3Config:
        """Kimi K3 as released: 2.78 T parameters."""
        return cls()

    @classmethod
    def tiny(cls) -> K3Config:
        """Return a K3 for a laptop: every mechanism, small widths, 13.6 M parameters.

        ``data/tiny-k3`` has this shape. As in the release three of four layers are KDA, the first
        layer is dense, the last two layers are both MLA, and the last attention-residual block is
        a partial one. ``kv_lora_rank`` and ``qk_rope_head_dim`` keep their released values because
        vLLM's MLA kernels accept few others.
        """
        layers, full_attn = 13, (4, 8, 12, 13)
        return cls(
            vocab_size=2048,
            hidden_size=192,
            num_hidden_layers=layers,
            intermediate_size=512,
            max_position_embeddings=2048,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=2,
            linear_attn_config=LinearAttentionConfig(
                num_heads=3,
                head_dim=64,
                kda_layers=tuple(n for n in range(1, layers + 1) if n not in full_attn),
                full_attn_layers=full_attn,
            ),
            num_attention_heads=2,
            q_lora_rank=96,
            attn_res_block_size=3,
            num_experts=32,
            num_experts_per_token=4,
            moe_intermediate_size=64,
            routed_expert_hidden_size=96,
        )

    @classmethod
    def micro(cls) -> K3Config:
        """Return the smallest K3 with every mechanism, for the interpreter and fast tests."""
        return dataclasses.replace(
            cls.tiny(),
            vocab_size=64,
            hidden_size=64,
            num_hidden_layers=4,
            intermediate_size=64,
            max_position_embeddings=256,
            linear_attn_config=LinearAttentionConfig(
                num_heads=2, head_dim=16, kda_layers=(1, 2), full_attn_layers=(3, 4)
            ),
            q_lora_rank=32,
            kv_lora_rank=32,
            qk_nope_head_dim=16,
            qk_rope_head_dim=16,
            v_head_dim=16,
            num_experts=4,
            num_experts_per_token=2,
            moe_intermediate_size=32,
            routed_expert_hidden_size=32,
            expert_dtype="bf16",
        )

    @classmethod
    def rank_slice(cls, tp: int = 8, layers: int = 24) -> K3Config:
        """Return what one of ``tp`` tensor-parallel ranks computes of the first ``layers`` layers.

        Every width is that rank's own: heads, feed-forward widths and the vocabulary are divided as
        :mod:`kimik3_lab.performance.placement` divides them; the residual stream, the latent spaces
        and the number of experts stay whole. Sums over ranks are left out, so it says nothing; it
        costs what the rank's part costs. The first 24 layers hold 18 KDA and 6 MLA layers, 3 to 1
        as in the release, and two attention-residual blocks instead of eight.

        Parameters
        ----------
        tp
            Ranks.
        layers
            Layers from the bottom; the first one is dense.

        Raises
        ------
        ConfigError
            If a width cannot be divided, or the release has fewer layers.

        Examples
        --------
        >>> rank = K3Config.rank_slice()
        >>> rank.linear_attn_config.num_heads, rank.moe_intermediate_size, rank.num_experts
        (12, 384, 896)
        >>> len(rank.kda_layer_ids), len(rank.mla_layer_ids), rank.vocab_size
        (18, 6, 20480)
        """
        whole = cls.released()
        linear = whole.linear_attn_config
        if not 1 <= layers <= whole.num_hidden_layers:
            raise ConfigError(
                f"layers must be from 1 to {whole.num_hidden_layers}, the release's, got {layers}"
            )

        def part(size: int, what: str) -> int:
            if tp < 1 or size % tp:
                raise ConfigError(f"tp={tp} does not divide {size} {what}: K3 is served with tp=8")
            return size // tp

        vocab = part(whole.vocab_size, "rows of the vocabulary")
        return dataclasses.replace(
            whole,
            vocab_size=vocab,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=vocab - 1,
            num_hidden_layers=layers,
            intermediate_size=part(whole.intermediate_size, "columns of the dense feed-forward"),
            moe_intermediate_size=part(whole.moe_intermediate_size, "columns of an expert"),
            num_attention_heads=part(whole.num_attention_heads, "MLA heads"),
            linear_attn_config=dataclasses.replace(
                linear,
                num_heads=part(linear.num_heads, "KDA heads"),
                kda_layers=tuple(n for n in linear.kda_layers if n <= layers),
                full_attn_layers=tuple(n for n in linear.full_attn_layers if n <= layers),
            ),
        )

    # -- derived facts -----------------------------------------------------------------------

    def is_kda_layer(self, layer_id: int) -> bool:
        """Whether 0-based layer ``layer_id`` is a KDA layer (otherwise it is MLA)."""
        return layer_id + 1 in self.linear_attn_config.kda_layers

    def is_moe_layer(self, layer_id: int) -> bool:
        """Whether 0-based layer ``layer_id`` has routed experts (otherwise a dense MLP)."""
        return layer_id >= self.first_k_dense_replace and layer_id % self.moe_layer_freq == 0

    @property
    def kda_layer_ids(self) -> tuple[int, ...]:
        """0-based ids of the KDA layers."""
        return tuple(n - 1 for n in self.linear_attn_config.kda_layers)

    @property
    def mla_layer_ids(self) -> tuple[int, ...]:
        """0-based ids of the MLA layers."""
        return tuple(n - 1 for n in self.linear_attn_config.full_attn_layers)

    @property
    def moe_layer_ids(self) -> tuple[int, ...]:
        """0-based ids of the layers with routed experts."""
        return tuple(i for i in range(self.num_hidden_layers) if self.is_moe_layer(i))

    @property
    def qk_head_dim(self) -> int:
        """Width of an MLA query or key head, both parts; its root scales the scores."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def mla_cache_dim(self) -> int:
        """Values that an MLA layer caches for a token."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def shared_intermediate_size(self) -> int:
        """Width of the shared experts, run as one feed-forward."""
        return self.num_shared_experts * self.moe_intermediate_size

    def sources(self) -> dict[str, tuple[Any, str, str]]:
        """Map each field to its value, the place it was released in, and a note.

        Only meaningful for :meth:`released`; other members carry the same notes.
        """
        rows: dict[str, tuple[Any, str, str]] = {}
        for prefix, obj in (("", self), ("linear_attn_config.", self.linear_attn_config)):
            for f in dataclasses.fields(obj):
                value = getattr(obj, f.name)
                if not dataclasses.is_dataclass(value):
                    rows[prefix + f.name] = (value, f.metadata["source"], f.metadata["note"])
        return rows

    # -- config.json -------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Flat ``config.json`` content (``KimiLinearForCausalLM``), readable by vLLM."""
        body = dataclasses.asdict(self)
        linear = body["linear_attn_config"]
        linear["kda_layers"] = list(linear["kda_layers"])
        linear["full_attn_layers"] = list(linear["full_attn_layers"])
        return {
            "architectures": ["KimiLinearForCausalLM"],
            "model_type": "kimi_linear",
            "num_key_value_heads": self.num_attention_heads,
            "head_dim": self.linear_attn_config.head_dim,
            "use_grouped_topk": True,
            "rope_theta": 10000.0,
            "rope_scaling": None,
            **body,
        }

    @classmethod
    def from_dict(cls, body: dict[str, Any]) -> K3Config:
        """Read ``config.json`` content, flat or nested under ``text_config``.

        Raises
        ------
        ConfigError
            If a field is missing, has the wrong type, or does not fit the others.
        """
        if not isinstance(body, dict):
            raise ConfigError(f"expected a JSON object, got {type(body).__name__}")
        body = body.get("text_config", body)
        linear = body.get("linear_attn_config")
        if not isinstance(linear, dict):
            raise ConfigError(
                "linear_attn_config is missing: a Kimi K3 config.json has an object of that name "
                "with num_heads, head_dim and the 1-based layer lists"
            )
        values = typed_fields(cls, body, skip={"linear_attn_config"})
        kda = LinearAttentionConfig(
            **typed_fields(LinearAttentionConfig, linear, where="linear_attn_config.")
        )
        return cls(linear_attn_config=kda, **values)

    def save(self, path: str | Path) -> None:
        """Write ``config.json`` into the folder ``path``."""
        text = json.dumps(self.to_dict(), indent=2) + "\n"
        (Path(path) / "config.json").write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> K3Config:
        """Read ``config.json`` from the model folder ``path``.

        Raises
        ------
        ConfigError
            If the folder or file is missing, is not JSON, or does not describe a Kimi K3.
        """
        return read_config(path, cls.from_dict)

"""The shape of DSpark, the drafter that is released for Kimi K3, and its ``config.json``.

Needs the standard library only. Lesson 09 uses it; planning a deployment needs it without torch.

Source: Inferact/Kimi-K3-DSpark config.json, as vLLM 0.33.0 reads it
(``vllm/transformers_utils/configs/k3_dspark.py``). Other drafters of that name exist: RadixArk's
has ordinary grouped-query attention and is not of this form.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kimik3_lab.config import K3Config
from kimik3_lab.config_checks import ConfigError, read_config

__all__ = ["DSparkConfig"]


@dataclass(frozen=True)
class DSparkConfig:
    """Shape of a DSpark drafter; the defaults are the released one (Inferact/Kimi-K3-DSpark).

    Examples
    --------
    >>> DSparkConfig().block_size, DSparkConfig().target_layer_ids
    (7, (2, 23, 47, 71, 89))
    """

    hidden_size: int = 7168
    num_hidden_layers: int = 5
    intermediate_size: int = 14_336
    vocab_size: int = 163_840
    rms_norm_eps: float = 1e-5
    num_attention_heads: int = 64
    q_lora_rank: int = 1536
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    rope_theta: float = 50_000.0
    rope_factor: float = 32.0
    original_max_position_embeddings: int = 32_768
    target_hidden_size: int = 7168
    target_layer_ids: tuple[int, ...] = (2, 23, 47, 71, 89)
    mask_token_id: int = 163_837
    #: Not part of the released file: the length of a block is chosen when serving.
    block_size: int = 7
    markov_rank: int = 256
    confidence_head: bool = True
    target_num_hidden_layers: int = 93

    def __post_init__(self) -> None:
        for name, kind in _KINDS.items():
            value, least = getattr(self, name), 0 if name == "mask_token_id" else 1
            if kind is int and (type(value) is not int or value < least):
                raise ConfigError(f"{name} must be an integer of at least {least}, got {value!r}")
            if kind is float and (type(value) not in (int, float) or not value > 0):
                raise ConfigError(f"{name} must be a number above 0, got {value!r}")
        ids = self.target_layer_ids
        if not ids or list(ids) != sorted(set(ids)):
            raise ConfigError(
                f"target_layer_ids must name at least one layer, ascending and each once, got {ids}"
            )
        if not 0 <= ids[0] <= ids[-1] < self.target_num_hidden_layers:
            raise ConfigError(
                f"target_layer_ids are 0-based layers of a target of "
                f"target_num_hidden_layers={self.target_num_hidden_layers}, got {ids}"
            )
        if self.mask_token_id >= self.vocab_size:
            raise ConfigError(
                f"mask_token_id={self.mask_token_id} lies outside vocab_size={self.vocab_size}"
            )
        if self.hidden_size != self.target_hidden_size:
            raise ConfigError(
                f"hidden_size={self.hidden_size} must equal target_hidden_size="
                f"{self.target_hidden_size}: embedding and output head are the target's"
            )
        if self.qk_rope_head_dim % 2:
            raise ConfigError(
                f"qk_rope_head_dim must be even to be rotated in pairs, got {self.qk_rope_head_dim}"
            )
        if self.rope_factor < 1 or self.rope_theta <= 1:
            raise ConfigError(
                "rope_factor must be at least 1 and rope_theta above 1, got "
                f"{self.rope_factor} and {self.rope_theta}"
            )

    @classmethod
    def for_target(
        cls, target: K3Config, *, num_hidden_layers: int = 2, markov_rank: int = 64
    ) -> DSparkConfig:
        """Return a small drafter of DSpark's form for a small target.

        It taps an early, a middle and a late layer; fewer if the target has fewer than five.
        """
        last = target.num_hidden_layers - 1
        return cls(
            hidden_size=target.hidden_size,
            num_hidden_layers=num_hidden_layers,
            intermediate_size=2 * target.hidden_size,
            vocab_size=target.vocab_size,
            num_attention_heads=target.num_attention_heads,
            q_lora_rank=target.q_lora_rank,
            kv_lora_rank=target.kv_lora_rank,
            qk_nope_head_dim=target.qk_nope_head_dim,
            qk_rope_head_dim=target.qk_rope_head_dim,
            v_head_dim=target.v_head_dim,
            rope_factor=1.0,
            original_max_position_embeddings=target.max_position_embeddings,
            target_hidden_size=target.hidden_size,
            target_layer_ids=tuple(sorted({min(1, last), last // 2, max(last - 1, 0)})),
            mask_token_id=target.pad_token_id,
            markov_rank=markov_rank,
            target_num_hidden_layers=target.num_hidden_layers,
        )

    @classmethod
    def rank_slice(cls, target: K3Config, tp: int = 8) -> DSparkConfig:
        """Return what one of ``tp`` ranks computes of the released drafter, beside a rank's target.

        Heads, feed-forward width and vocabulary are divided, latent widths and the projection of
        the taps are whole on every rank. The tapped layers lie as deep in ``target`` as the
        released ones in 93 layers.

        Parameters
        ----------
        target
            :meth:`kimik3_lab.config.K3Config.rank_slice` with the same ``tp``.

        Raises
        ------
        ConfigError
            If ``tp`` divides heads or feed-forward not evenly, or the target has fewer layers than
            the drafter has taps.

        Examples
        --------
        >>> drafter = DSparkConfig.rank_slice(K3Config.rank_slice())
        >>> drafter.num_attention_heads, drafter.intermediate_size, drafter.target_layer_ids
        (8, 1792, (0, 6, 12, 18, 22))
        """
        whole, layers = cls(), target.num_hidden_layers
        if tp < 1 or whole.num_attention_heads % tp or whole.intermediate_size % tp:
            raise ConfigError(
                f"tp={tp} does not divide {whole.num_attention_heads} heads and "
                f"{whole.intermediate_size} columns: K3 is served with tp=8"
            )
        depth = (layers - 1) / (whole.target_num_hidden_layers - 1)
        return dataclasses.replace(
            whole,
            hidden_size=target.hidden_size,
            target_hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            intermediate_size=whole.intermediate_size // tp,
            num_attention_heads=whole.num_attention_heads // tp,
            target_layer_ids=tuple(round(i * depth) for i in whole.target_layer_ids),
            target_num_hidden_layers=layers,
            mask_token_id=target.pad_token_id,
        )

    # -- config.json -----------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """``config.json`` content under the released names."""
        body = dataclasses.asdict(self)
        confidence = body.pop("confidence_head")
        theta, factor = body.pop("rope_theta"), body.pop("rope_factor")
        original = body.pop("original_max_position_embeddings")
        return {
            "architectures": ["K3DSparkModel"],
            "model_type": "k3_dspark",
            **body,
            "target_layer_ids": list(body["target_layer_ids"]),
            "num_target_layers": len(self.target_layer_ids),
            "num_key_value_heads": self.num_attention_heads,
            "draft_vocab_size": self.vocab_size,
            "tie_word_embeddings": False,
            "enable_confidence_head": confidence,
            "max_position_embeddings": round(original * factor),
            "rope_theta": theta,
            "rope_parameters": {
                "rope_type": "yarn" if factor > 1 else "default",
                "rope_theta": theta,
                "factor": factor,
                "original_max_position_embeddings": original,
                **{name: value for name, (value, _) in _ROPE_CONSTANTS.items()},
            },
            **{name: value for name, (value, _) in _CONSTANTS.items()},
        }

    @classmethod
    def from_dict(cls, body: dict[str, Any]) -> DSparkConfig:
        """Read ``config.json`` content.

        Raises
        ------
        ConfigError
            If a field is missing or wrong, or asks for a drafter of another form.
        """
        if not isinstance(body, dict):
            raise ConfigError(f"expected a JSON object, got {type(body).__name__}")
        if body.get("model_type") != "k3_dspark":
            raise ConfigError(
                f"model_type is {body.get('model_type')!r}; a DSpark drafter of Kimi K3 has "
                "'k3_dspark'"
            )
        rope = body.get("rope_parameters")
        if not isinstance(rope, dict):
            raise ConfigError(
                "rope_parameters is missing: a drafter without positions is no DSpark"
            )
        for where, given, constants in (
            ("", body, _CONSTANTS),
            ("rope_parameters.", rope, _ROPE_CONSTANTS),
        ):
            for name, (value, why) in constants.items():
                if given.get(name, value) != value:
                    raise ConfigError(
                        f"{where}{name}={given[name]!r} is not supported, expected {value!r}: {why}"
                    )
        values: dict[str, Any] = {"rope_theta": rope.get("rope_theta", body.get("rope_theta"))}
        if rope.get("rope_type", "default") == "default":
            values["rope_factor"] = 1.0
            original = rope.get(
                "original_max_position_embeddings", body.get("max_position_embeddings")
            )
        elif rope["rope_type"] in ("yarn", "deepseek_yarn"):
            values["rope_factor"] = rope.get("factor")
            original = rope.get("original_max_position_embeddings")
        else:
            raise ConfigError(f"rope_type={rope['rope_type']!r} is neither 'yarn' nor 'default'")
        values["original_max_position_embeddings"] = original
        values["confidence_head"] = body.get("enable_confidence_head", False)
        for field in dataclasses.fields(cls):
            if field.name not in values and (field.name in body or field.name not in _OPTIONAL):
                values[field.name] = body.get(field.name)
        for name, value in values.items():
            if value is None:
                raise ConfigError(f"{name} is missing from the configuration")
        ids = values["target_layer_ids"]
        if not isinstance(ids, list | tuple) or not all(type(i) is int for i in ids):
            raise ConfigError(f"target_layer_ids must be a list of integers, got {ids!r}")
        config = cls(**(values | {"target_layer_ids": tuple(ids)}))
        for name, expected in (
            ("num_target_layers", len(ids)),
            ("draft_vocab_size", config.vocab_size),
            ("num_key_value_heads", config.num_attention_heads),
        ):
            if body.get(name, expected) not in (expected, None):
                raise ConfigError(f"{name} must be {expected} here, got {body[name]!r}")
        return config

    def save(self, path: str | Path) -> None:
        """Write ``config.json`` into the folder ``path``."""
        text = json.dumps(self.to_dict(), indent=2) + "\n"
        (Path(path) / "config.json").write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> DSparkConfig:
        """Read ``config.json`` from the folder ``path``.

        Raises
        ------
        ConfigError
            If the file is missing, is not JSON, or describes no DSpark drafter.
        """
        return read_config(path, cls.from_dict)


_KINDS = {field.name: type(field.default) for field in dataclasses.fields(DSparkConfig)}
#: Fields that a config.json may leave out.
_OPTIONAL = {"block_size", "target_num_hidden_layers", "rms_norm_eps"}
#: What the code here takes for granted; a file that says otherwise describes another drafter.
_CONSTANTS = {
    "hidden_act": ("silu", "the feed-forward is a SwiGLU"),
    "mla_use_nope": (False, "keys carry a rotary position"),
    "mla_use_output_gate": (False, "the attention has no gate weights"),
    "markov_head_type": ("vanilla", "the Markov head sees the previous token only"),
    "confidence_head_with_markov": (True, "the confidence head sees the previous token too"),
}
_ROPE_CONSTANTS = {
    "beta_fast": (32, "the ramp of YaRN starts at 32 turns"),
    "beta_slow": (1, "the ramp of YaRN ends at one turn"),
    "mscale": (1.0, "with mscale_all_dim it cancels, and cosines are not scaled"),
    "mscale_all_dim": (1.0, "scores are scaled by the square of the attention factor"),
}

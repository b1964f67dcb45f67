"""The shape of DSpark, the drafter that is released for Kimi K3.

Needs the standard library only. Lesson 09 uses it; planning a deployment needs it without torch.

Source: Inferact/Kimi-K3-DSpark config.json, as vLLM 0.33.0 reads it
(``vllm/transformers_utils/configs/k3_dspark.py``).
"""

from __future__ import annotations

from dataclasses import dataclass

from kimik3_lab.config import ConfigError, K3Config

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
    block_size: int = 7
    markov_rank: int = 256
    confidence_head: bool = True

    def __post_init__(self) -> None:
        if not self.target_layer_ids or list(self.target_layer_ids) != sorted(
            set(self.target_layer_ids)
        ):
            raise ConfigError(
                "target_layer_ids must name at least one layer, ascending and each once, got "
                f"{self.target_layer_ids}"
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ConfigError(
                f"mask_token_id={self.mask_token_id} lies outside vocab_size={self.vocab_size}"
            )
        if self.block_size < 1:
            raise ConfigError(f"block_size must be at least 1, got {self.block_size}")

    @classmethod
    def for_target(
        cls, target: K3Config, *, num_hidden_layers: int = 2, markov_rank: int = 64
    ) -> DSparkConfig:
        """Return a small drafter of DSpark's form for a small target.

        It taps three layers: an early, a middle and a late one.
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
            target_layer_ids=tuple(sorted({1, last // 2, last - 1})),
            mask_token_id=target.pad_token_id,
            markov_rank=markov_rank,
        )

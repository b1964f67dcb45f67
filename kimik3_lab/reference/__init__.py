"""Kimi K3 in plain PyTorch: the oracle that kernels, caches and the engine are checked against.

Needs torch. Import the part that you need, for example ``from kimik3_lab.reference import kda``.
Lessons 01 to 06 read one file each; the engine of lesson 10 runs all of it.

======================  ========================================================================
``kda``                 Kimi Delta Attention: gate, short convolution, recurrent form, the layer
``kda_chunked``         its chunked form, for prefill, with exported states
``mla``                 gated multi-head latent attention: expanded and absorbed forms
``moe``                 router, SiTU, latent experts, shared experts
``mxfp4``               the four-bit format of the routed experts
``residuals``           attention residuals: how a sublayer reads the blocks before it
``norms``               RMSNorm, and the rule for the type that sums are taken in
``mixer``               the seam between what is per token and what looks back in time
``model``               :class:`~kimik3_lab.reference.model.K3ForCausalLM`, all layers together
``state``               what one sequence keeps between steps, and the mixer over it
``batch``               the mixer of equally long sequences side by side
``balancing``           quantile balancing of the selection bias, and how evenly experts load
``checkpoint``          released tensor names to a model and back
``initialization``      random weights for small members of the family
``drafter``             DSpark, which drafts a block of tokens in one pass
``drafter_layers``      its modules
``drafter_checkpoint``  its tensors to a drafter and back
``rope``                rotary positions with YaRN, which only the drafter has
``speculative``         which drafted tokens to keep, without changing what comes out
``evaluation``          bits per byte of text, and decoding with drafts
======================  ========================================================================
"""

from __future__ import annotations

__all__ = [
    "balancing",
    "batch",
    "checkpoint",
    "drafter",
    "drafter_checkpoint",
    "drafter_layers",
    "evaluation",
    "initialization",
    "kda",
    "kda_chunked",
    "mixer",
    "mla",
    "model",
    "moe",
    "mxfp4",
    "norms",
    "residuals",
    "rope",
    "speculative",
    "state",
]
